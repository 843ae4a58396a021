"""Signs of life of a worker's step thread, in memory that its supervisor sees and that outlives the worker.

    | marks passed, 8 bytes | longest between two, seconds, 8 bytes | length of the name, 8 bytes | name |

Marks are counted as steps advance; the name is that of the model whose step is under way, and the longest is
that of its steps so far. Nothing is sent and nobody has to answer: so a step may take its time, and of a
worker that died its supervisor still learns in whose step. Judges nothing (`policy/fleet/liveness.py` does).
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from hearth.types import ModelId

#: One page, of which a name is a small part.
BEACON_BYTES = 4096
_NAME_AT = 24


@dataclass(frozen=True, slots=True)
class StepSigns:
    """Everything that a beacon says at a moment."""

    num_marks: int
    model: ModelId | None  #: whose step is under way; None: no step is
    longest_s: float | None  #: between two marks of its steps so far; None: nothing was measured yet


class Beacon:
    """One thread of the worker writes it; anybody may read. A read beside a write may mix the two."""

    def __init__(self, memory: mmap.mmap | None = None) -> None:
        """`memory` is shared with the supervisor; None: nobody looks."""
        self._memory = mmap.mmap(-1, BEACON_BYTES) if memory is None else memory
        view = memoryview(self._memory)
        self._counts, self._seconds = view.cast("Q"), view.cast("d")

    @staticmethod
    def at(descriptor: int) -> Beacon:
        """Return the beacon in the file of a descriptor, which may be closed then."""
        return Beacon(mmap.mmap(descriptor, BEACON_BYTES))

    def mark(self) -> None:
        """Count that a step has advanced."""
        self._counts[0] += 1

    def show(self, model: ModelId | None, longest_s: float) -> None:
        """Say whose step is under way, and the longest between two marks of it so far; 0: none measured."""
        name = b"" if model is None else model.encode()
        self._seconds[1] = longest_s
        self._memory[_NAME_AT : _NAME_AT + len(name)] = name
        self._counts[2] = len(name)

    def read(self) -> StepSigns:
        length = self._counts[2]
        name = self._memory[_NAME_AT : _NAME_AT + length].decode(errors="replace")
        return StepSigns(self._counts[0], ModelId(name) if name else None, self._seconds[1] or None)


def new_beacon_file() -> int:
    """Return a descriptor of memory for a beacon, to be handed to a worker; whoever called closes it."""
    descriptor = os.memfd_create("hearth-beacon")
    os.truncate(descriptor, BEACON_BYTES)
    return descriptor
