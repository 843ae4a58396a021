"""Signs of life of a worker's step thread, in memory shared with its supervisor that outlives the worker.

    | marks passed | longest between two, seconds | length of the name | length of the runs | name | runs |
      8 bytes        8 bytes                        8 bytes              8 bytes              to 1,024

Marks count as steps advance. The name is that of the model whose step runs, `longest` is the longest time
between two marks of its steps so far, and the runs are those with a row in the step, as text. Nothing is sent
or answered: a step may be long, and the supervisor of a dead worker learns in whose step it died.
`policy/fleet/liveness.py` judges.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from hearth.core.types import ModelId

#: Room for the runs of a step of more than a thousand.
BEACON_BYTES = 16384
_NAME_AT, _RUNS_AT = 32, 1024
#: The length of runs that are not known, or have no room.
_UNKNOWN = 2**64 - 1


@dataclass(frozen=True, slots=True)
class StepSigns:
    num_marks: int
    model: ModelId | None  #: whose step runs; None: none
    longest_s: float | None  #: between two marks of its steps so far; None: nothing was measured yet
    runs: tuple[int, ...] | None = None  #: with a row in that step; None: no step runs, or unknown


class Beacon:
    """Written by one thread of the worker. A read during a write may mix the two."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        self._memory = mmap.mmap(-1, BEACON_BYTES) if memory is None else memory
        view = memoryview(self._memory)
        self._counts, self._seconds = view.cast("Q"), view.cast("d")

    @staticmethod
    def at(descriptor: int) -> Beacon:
        """Return the beacon in the file of a descriptor, which may then be closed."""
        return Beacon(mmap.mmap(descriptor, BEACON_BYTES))

    def mark(self) -> None:
        self._counts[0] += 1

    def show(self, model: ModelId | None, longest_s: float, runs: Sequence[str] | None = None) -> None:
        """`longest_s` 0: not measured. `runs`: those with a row in the step; None: not known."""
        self._counts[3] = _UNKNOWN  # in case the worker dies before the end
        name = b"" if model is None else model.encode()
        self._seconds[1] = longest_s
        self._memory[_NAME_AT : _NAME_AT + len(name)] = name
        self._counts[2] = len(name)
        if runs is None:
            return
        text = " ".join(runs).encode()
        if _RUNS_AT + len(text) <= BEACON_BYTES:
            self._memory[_RUNS_AT : _RUNS_AT + len(text)] = text
            self._counts[3] = len(text)

    def show_longest(self, longest_s: float) -> None:
        self._seconds[1] = longest_s

    def read(self) -> StepSigns:
        length = self._counts[2]
        name = self._memory[_NAME_AT : _NAME_AT + length].decode(errors="replace")
        model = ModelId(name) if name else None
        return StepSigns(self._counts[0], model, self._seconds[1] or None, self._runs() if model else None)

    def _runs(self) -> tuple[int, ...] | None:
        length = self._counts[3]
        if length == _UNKNOWN:
            return None
        words = self._memory[_RUNS_AT : _RUNS_AT + length].split()
        return tuple(int(word) for word in words) if all(word.isdigit() for word in words) else None


def new_beacon_file() -> int:
    """Return a descriptor of memory for a beacon. The caller closes it."""
    descriptor = os.memfd_create("hearth-beacon")
    os.truncate(descriptor, BEACON_BYTES)
    return descriptor
