"""The loads that requests may wait for: those that run, and the last one of every hosted model.

A worker may evict part of an idle hosted model's weights, and load them again without an order when a request
comes. Whether it will is guessed when the request is dispatched: the model was whole once, and by the
worker's last report it no longer is. If the guess was wrong, no load follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hearth.core.messages import ModelLoaded, RungBytes
from hearth.core.types import ModelId, Rung, WorkerId

#: The tier of a load that read no bytes.
ON_DEVICE = "device"


def place_of(use: RungBytes) -> str:
    """Return where bytes came from, for people."""
    return f"{use.rung} {use.source}" if use.source else str(use.rung)


def slowest_tier(rungs: Iterable[Rung]) -> str:
    """Return the slowest rung that a load read from; without any, all bytes were on the device."""
    slowest = max(rungs, key=list(Rung).index, default=None)
    return ON_DEVICE if slowest is None else slowest


@dataclass(slots=True)
class LoadLog:
    """One load, shared by all requests that wait for it. Mutable; written by the observer."""

    worker: WorkerId
    began_s: float
    loaded: ModelLoaded | None = None
    ended_s: float | None = None
    first_layer_at_s: float | None = None
    layers: list[tuple[float, int]] = field(default_factory=list)  #: when so many of them could run
    failure: str | None = None
    whole_bytes: int = 0  #: the most of the model that the worker has had on its device
    is_again: bool = False  #: the model was ready before and had lost some of its weights
    is_void: bool = False  #: the load was expected and never happened: the model was whole
    awaits_turn: bool = False  #: the load begins with the turn of the model
    follows_turn: bool = False  #: it began so: the model had been found before

    @property
    def was_ready(self) -> bool:
        return self.is_again or self.loaded is not None

    @property
    def is_guessed(self) -> bool:
        """True while the load was neither ordered nor reported by a worker."""
        return self.is_again and self.ended_s is None and not self.layers

    def call_off(self) -> None:
        """End a guessed load: the model turned out to be whole."""
        self.ended_s, self.is_void = self.began_s, True

    def progressed(self, now_s: float, num_layers: int) -> None:
        """Note layers that can run, whenever their number has grown by half: some ten times for any model."""
        if num_layers and (not self.layers or num_layers >= 1.5 * self.layers[-1][1]):
            self.layers.append((now_s, num_layers))

    def succeed(self, now_s: float, loaded: ModelLoaded) -> None:
        """End the load. Its begin follows from the times that the worker measured."""
        self.loaded, self.ended_s, self.awaits_turn = loaded, now_s, False
        took_s = loaded.took_s - self._found_before_s
        # The begin of a load without an order was a guess.
        self.began_s = now_s - took_s if self.is_again else min(self.began_s, now_s - took_s)
        self.first_layer_at_s = self.found_s + loaded.place_s + loaded.first_layer_s

    @property
    def found_s(self) -> float:
        open_s = 0.0 if self.loaded is None else self.loaded.open_s
        return self.began_s + open_s - self._found_before_s

    @property
    def _found_before_s(self) -> float:
        return self.loaded.open_s if self.loaded is not None and self.follows_turn else 0.0

    def turn_began(self, now_s: float) -> None:
        if self.awaits_turn:
            self.awaits_turn, self.follows_turn, self.began_s = False, True, now_s

    def fail(self, now_s: float, reason: str) -> None:
        """End the load with a reason, unless it ended before and the model broke later."""
        if self.ended_s is None:
            self.ended_s, self.failure = now_s, reason


class LoadLogs:
    """The last load of every hosted model. Mutable; used on the event loop alone."""

    def __init__(self) -> None:
        self._logs: dict[tuple[WorkerId, ModelId], LoadLog] = {}
        #: Bytes of weights on each worker's device, as the worker reported last.
        self._bytes: dict[WorkerId, dict[ModelId, int]] = {}

    def get(self, worker: WorkerId, model: ModelId) -> LoadLog | None:
        return self._logs.get((worker, model))

    def begin(self, worker: WorkerId, model: ModelId, now_s: float, *, awaits_turn: bool = False) -> None:
        self._logs[worker, model] = LoadLog(worker, now_s, awaits_turn=awaits_turn)

    def begin_again(self, worker: WorkerId, model: ModelId, now_s: float) -> LoadLog:
        last = self._logs[worker, model]
        log = LoadLog(worker, now_s, whole_bytes=last.whole_bytes, is_again=True)
        self._logs[worker, model] = log
        return log

    def awaited(self, worker: WorkerId, model: ModelId, now_s: float) -> LoadLog | None:
        """Return the load that a request sent there now has to wait for; None: the model is whole."""
        log = self.get(worker, model)
        if log is None or log.ended_s is None:
            return log
        is_whole = self._on_device(worker, model) >= log.whole_bytes
        return None if is_whole else self.begin_again(worker, model, now_s)

    def reported(self, worker: WorkerId, bytes_by_model: Mapping[ModelId, int]) -> None:
        """Note the bytes on a worker's device; end a guessed load of a model that is whole."""
        self._bytes[worker] = dict(bytes_by_model)
        for model, num_bytes in bytes_by_model.items():
            log = self._measured(worker, model)
            if log is not None and log.is_guessed and num_bytes >= log.whole_bytes:
                log.call_off()

    def mark_whole(self, worker: WorkerId, model: ModelId) -> None:
        """Count a loaded model as whole, before the worker reports its bytes."""
        log = self._measured(worker, model)
        if log is not None:
            self._bytes.setdefault(worker, {})[model] = log.whole_bytes

    def end(self, worker: WorkerId, model: ModelId) -> LoadLog | None:
        return self._logs.pop((worker, model), None)

    def lose(self, worker: WorkerId) -> None:
        self._bytes.pop(worker, None)
        for key in [key for key in self._logs if key[0] == worker]:
            del self._logs[key]

    def _measured(self, worker: WorkerId, model: ModelId) -> LoadLog | None:
        """Update the model's size there: it may be stored in another format than it is served in."""
        log = self.get(worker, model)
        if log is not None:
            log.whole_bytes = max(log.whole_bytes, self._on_device(worker, model))
        return log

    def _on_device(self, worker: WorkerId, model: ModelId) -> int:
        return self._bytes.get(worker, {}).get(model, 0)
