"""How many requests have come for each model: six hours in steps of 10 s, fifteen days in steps of 10 min.

Steps are those of the system's clock. A step in which the service did not run all the time, or the clock
jumped, is not recorded. While the clock is behind the newest step, nothing is recorded; after an hour, steps
in its future are forgotten.

A model that is deployed again under its name continues its history. The file of the data directory is
replaced every minute, so a killed service loses its last minute. An unreadable file is replaced, too.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hearth.control.observe.metrics import Metrics
from hearth.core.atomic_file import write_file
from hearth.core.forecast_messages import LONG_STEP_S, NUM_STEPS
from hearth.core.types import ModelId
from hearth.policy.fleet.events import Action, Event, RequestArrived

STEP_S = 10.0
STEPS_PER_LONG = 60
#: A long step is recorded if so many of its steps are.
MIN_RECORDED = STEPS_PER_LONG // 2
#: Models beyond this replace the one that was asked for longest ago. Each takes 17 KB.
MAX_MODELS = 1000
#: A step that took so much more or less than `STEP_S` is not recorded.
TOLERANCE_S = STEP_S / 4
#: Steps that the clock may be behind before those in its future are forgotten.
MAX_BEHIND = 360
WRITE_S = 60.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Steps:
    """The newest `NUM_STEPS` steps of each model. Step `n` is at `n % NUM_STEPS`; NaN: not recorded."""

    newest: int = 0  #: number of the newest step since the epoch
    counts_by_model: dict[ModelId, array[float]] = field(default_factory=dict)

    def move(self, newest: int) -> None:
        """Make `newest` the newest step. Steps that come in or leave are not recorded."""
        low, high = sorted((self.newest, newest))
        for step in range(max(low, high - NUM_STEPS) + 1, high + 1):
            for counts in self.counts_by_model.values():
                counts[step % NUM_STEPS] = math.nan
        self.newest = newest

    def record(self, num_by_model: Mapping[ModelId, float]) -> None:
        """Record the newest step; models that are not in `num_by_model` had no requests."""
        for model in num_by_model.keys() - self.counts_by_model.keys():
            self.counts_by_model[model] = array("f", [math.nan]) * NUM_STEPS
        for model, counts in self.counts_by_model.items():
            counts[self.newest % NUM_STEPS] = num_by_model.get(model, 0.0)


class RequestHistory:
    """Mutable; used on the event loop alone. The file is written on another thread."""

    def __init__(self, path: Path, metrics: Metrics) -> None:
        self._path, self._count_fallback = path, metrics.fallbacks.labels
        self._counts: Counter[ModelId] = Counter()  #: in the step that is not over
        self._step: int | None = None  #: its number; None: the clock has not been read yet
        self._began_s = 0.0
        self._num_behind = 0  #: steps in a row for which the clock was behind
        self._fault: str | None = None  #: why the file was not written; None: it was
        try:
            self._short, self._long = _read(path)
        except (OSError, ValueError, zlib.error) as error:  # msgspec's errors are ValueErrors
            log.warning("request_history_begun_anew path=%s reason=%s", path, error)
            self._count_fallback("request_history_lost").inc()
            self._short, self._long = _Steps(), _Steps()

    @property
    def note(self) -> str | None:
        if self._fault is None:
            return None
        return f"the history of requests cannot be written, and is lost at the next restart: {self._fault}"

    @property
    def ended_at_s(self) -> float:
        """When the newest long step ended, since the epoch."""
        return (self._long.newest + 1) * LONG_STEP_S

    def counts(self, model: ModelId) -> list[float]:
        """Return the requests in each of the last steps, the newest last; empty: none was ever recorded."""
        return _in_order(self._short, model)

    def long_counts(self, model: ModelId) -> list[float]:
        return _in_order(self._long, model)

    def observe(self, event: Event, _: Sequence[Action]) -> None:
        """Count a request, also one that is refused: it is demand."""
        if isinstance(event, RequestArrived):
            self._counts[event.model] += 1

    async def run(self, on_long_step: Callable[[], None]) -> None:
        """Record for ever. `on_long_step` is called after each long step."""
        written_s = time.monotonic()
        while True:
            num_before = self._long.newest
            self.tick(time.time(), time.monotonic())
            if self._long.newest != num_before:
                on_long_step()
            if time.monotonic() - written_s >= WRITE_S:
                written_s = time.monotonic()
                await self.write()
            await asyncio.sleep(STEP_S - time.time() % STEP_S)

    def tick(self, at_s: float, now_s: float) -> None:
        """End the step that is over. `at_s`: since the epoch; `now_s`: on a clock that never jumps."""
        step = int(at_s // STEP_S)
        if step == self._step:
            return
        is_whole = step - 1 == self._step and abs(now_s - self._began_s - STEP_S) <= TOLERANCE_S
        counts, self._counts = self._counts, Counter()
        self._step, self._began_s = step, now_s
        if step - 1 <= self._short.newest:
            self._num_behind += 1
            if self._num_behind > MAX_BEHIND:
                self._short.move(step - 1)
                self._long.move(min(self._long.newest, step // STEPS_PER_LONG - 1))
            return
        self._num_behind = 0
        self._short.move(step - 1)
        if is_whole:
            self._record(counts)
        num_long = step // STEPS_PER_LONG
        oldest = num_long - NUM_STEPS // STEPS_PER_LONG + 1  # of which all short steps are kept
        for long_step in range(max(self._long.newest + 1, oldest), num_long):
            self._long.move(long_step)
            self._long.record(self._sums(long_step))

    def _record(self, counts: Mapping[ModelId, int]) -> None:
        self._short.record(counts)
        by_model = self._short.counts_by_model
        for model in counts:  # to the end: the first was asked for longest ago
            by_model[model] = by_model.pop(model)
        for model in list(by_model)[: max(0, len(by_model) - MAX_MODELS)]:
            del by_model[model]
            self._long.counts_by_model.pop(model, None)

    def _sums(self, long_step: int) -> dict[ModelId, float]:
        """Return the requests in a long step; NaN: not enough of it is recorded."""
        first = long_step * STEPS_PER_LONG % NUM_STEPS
        sums = {}
        for model, counts in self._short.counts_by_model.items():
            known = [count for count in counts[first : first + STEPS_PER_LONG] if not math.isnan(count)]
            is_enough = len(known) >= MIN_RECORDED
            sums[model] = sum(known) * STEPS_PER_LONG / len(known) if is_enough else math.nan
        return sums

    async def write(self) -> None:
        parts = [
            (steps.newest, {model: counts.tobytes() for model, counts in steps.counts_by_model.items()})
            for steps in (self._short, self._long)
        ]
        try:
            await asyncio.to_thread(_write, self._path, parts)
            self._fault = None
        except OSError as error:
            if self._fault is None:
                log.error("request_history_unwritten path=%s reason=%s", self._path, error)
                self._count_fallback("request_history_unwritten").inc()
            self._fault = str(error)


def _in_order(steps: _Steps, model: ModelId) -> list[float]:
    counts = steps.counts_by_model.get(model)
    if counts is None:
        return []
    begin = (steps.newest + 1) % NUM_STEPS
    return [*counts[begin:], *counts[:begin]]


def _write(path: Path, parts: object) -> None:
    write_file(path, [zlib.compress(msgspec.msgpack.encode(parts), level=1)])


def _read(path: Path) -> tuple[_Steps, _Steps]:
    """Return the short and the long steps; none if there is no file. Raises ValueError for other content."""
    try:
        content = zlib.decompress(path.read_bytes())
    except FileNotFoundError:
        return _Steps(), _Steps()
    short, long = msgspec.msgpack.decode(
        content, type=tuple[tuple[int, dict[str, bytes]], tuple[int, dict[str, bytes]]]
    )
    return _steps_of(*short), _steps_of(*long)


def _steps_of(newest: int, bytes_by_model: Mapping[str, bytes]) -> _Steps:
    counts_by_model = {ModelId(name): array("f", content) for name, content in bytes_by_model.items()}
    if any(len(counts) != NUM_STEPS for counts in counts_by_model.values()):
        raise ValueError(f"a model does not have {NUM_STEPS} steps")
    return _Steps(newest, counts_by_model)
