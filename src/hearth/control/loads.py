"""The loads that requests may have to wait for: those under way, and the last one of every hosted model.

Starts no load: that is ordered by the brain, or done by a worker on its own.

A worker that has given away part of a hosted model's weights while that was idle loads it again when a
request comes, without an order. Whether it will has to be guessed when the request is sent there: the model
was whole once, and by the worker's last word it is not now. Where the guess was wrong, no load follows.
"""

from __future__ import annotations

from collections.abc import Mapping

from hearth.control.timeline import LoadLog
from hearth.types import ModelId, WorkerId


class Loads:
    """Mutable; used on the event loop alone."""

    def __init__(self) -> None:
        self._logs: dict[tuple[WorkerId, ModelId], LoadLog] = {}
        #: Of weights on its device, as the worker told last.
        self._bytes: dict[WorkerId, dict[ModelId, int]] = {}

    def get(self, worker: WorkerId, model: ModelId) -> LoadLog | None:
        return self._logs.get((worker, model))

    def begin(self, worker: WorkerId, model: ModelId, hosting: int, now_s: float) -> None:
        """The model is hosted."""
        self._logs[worker, model] = LoadLog(hosting, worker, now_s)

    def begin_again(self, worker: WorkerId, model: ModelId, now_s: float) -> LoadLog:
        """It was loaded, and what it has lost since is loaded now."""
        last = self._logs[worker, model]
        log = LoadLog(last.hosting, worker, now_s, whole_bytes=last.whole_bytes, is_again=True)
        self._logs[worker, model] = log
        return log

    def awaited(self, worker: WorkerId, model: ModelId, now_s: float) -> LoadLog | None:
        """What a request that is sent there now has to wait for; None: the model is there."""
        log = self.get(worker, model)
        if log is None or log.ended_s is None:
            return log
        is_whole = self._on_device(worker, model) >= log.whole_bytes
        return None if is_whole else self.begin_again(worker, model, now_s)

    def told(self, worker: WorkerId, bytes_by_model: Mapping[ModelId, int]) -> None:
        self._bytes[worker] = dict(bytes_by_model)
        for model, num_bytes in bytes_by_model.items():
            log = self._measured(worker, model)
            if log is not None and log.is_guessed and num_bytes >= log.whole_bytes:
                log.call_off()

    def landed(self, worker: WorkerId, model: ModelId) -> None:
        """The model's load has ended: it is whole there, also before the worker tells of its bytes."""
        log = self._measured(worker, model)
        if log is not None:
            self._bytes.setdefault(worker, {})[model] = log.whole_bytes

    def _measured(self, worker: WorkerId, model: ModelId) -> LoadLog | None:
        """Note how large the model is there: it may be stored in other bytes than it is served in."""
        log = self.get(worker, model)
        if log is not None:
            log.whole_bytes = max(log.whole_bytes, self._on_device(worker, model))
        return log

    def end(self, worker: WorkerId, model: ModelId) -> bool:
        """The model is hosted no more. Returns whether it was."""
        return self._logs.pop((worker, model), None) is not None

    def lose(self, worker: WorkerId) -> None:
        self._bytes.pop(worker, None)
        for key in [key for key in self._logs if key[0] == worker]:
            del self._logs[key]

    def _on_device(self, worker: WorkerId, model: ModelId) -> int:
        return self._bytes.get(worker, {}).get(model, 0)
