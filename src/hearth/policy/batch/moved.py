"""Blocks that have moved under running sequences, until the device's tables say so. Copies nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hearth.policy.batch.blocks import BlockMove
from hearth.policy.batch.plan import TableWrite
from hearth.policy.batch.sequence import LiveSequence
from hearth.types import RequestId


class MovedBlocks:
    """Mutable; written only by the `Batcher` that owns it."""

    def __init__(self) -> None:
        #: Which of its blocks have moved, by running request.
        self._indices: dict[RequestId, set[int]] = {}

    def follow(self, moves: Sequence[BlockMove], running: Mapping[RequestId, LiveSequence]) -> None:
        """Have all holders of blocks that were moved name the new ones."""
        targets = {move.source: move.target for move in moves}
        if not targets:
            return
        for request_id, sequence in running.items():
            for index, block in enumerate(sequence.blocks):
                if block in targets:
                    sequence.blocks[index] = targets[block]
                    self._indices.setdefault(request_id, set()).add(index)

    def forget(self, request_id: RequestId) -> None:
        """It runs no more; one of which nothing has moved is unknown."""
        self._indices.pop(request_id, None)

    def take_writes(self, running: Mapping[RequestId, LiveSequence]) -> list[TableWrite]:
        """What the next plan has to write before all else."""
        writes = []
        for request_id, indices in self._indices.items():
            sequence = running[request_id]
            assert sequence.slot is not None, f"{sequence.arrival=}"
            writes += [TableWrite(sequence.slot, at, (sequence.blocks[at],)) for at in sorted(indices)]
        self._indices.clear()
        return writes

    def check(self, running: Mapping[RequestId, LiveSequence]) -> None:
        assert self._indices.keys() <= running.keys(), f"{self._indices.keys()=} {running.keys()=}"
