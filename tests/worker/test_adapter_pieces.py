"""The memory of adapters: what is known of the steps that read it, when it goes to others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.host_pages import Done
from hearth.core.types import AdapterId, ModelId
from hearth.engine.engine import Engine
from hearth.memory.pages import Mark
from hearth.memory.pool import PieceRun
from hearth.models.adapter import AdapterLayout, AdapterSlice, AdapterTarget, Projection
from hearth.policy.memory.adapter_residency import AdapterResidency
from hearth.worker.adapter_pieces import AdapterPieces
from tests.worker.stored_adapters import run_in

A, BASE = AdapterId("a"), ModelId("base")
LAYOUT = AdapterLayout.of([AdapterTarget(0, Projection.O, 8, (AdapterSlice(0, 8, 1),))], "float32")


class _NotedPool:
    """Pieces of a pool that notes by which mark they were given up. Mutable."""

    free_bytes = 0

    def __init__(self) -> None:
        self.pieces = self
        self.marks: list[Mark] = []
        self.last_reads: list[Mark | None] = []

    def place(self, owner: AdapterId, sizes: Sequence[int], spare_bytes: int) -> list[PieceRun]:
        return [run_in(torch.zeros(size, dtype=torch.uint8), size) for size in sizes]

    def mark(self) -> Mark:
        self.marks.append(Done())
        return self.marks[-1]

    def drop(self, owner: AdapterId, last_read: Mark | None) -> None:
        self.last_reads.append(last_read)


class _Knowing:
    """An engine, as far as it knows adapters."""

    def __init__(self) -> None:
        self.adapters: set[AdapterId] = set()

    def add_adapter(self, adapter: AdapterId, layout: AdapterLayout, layers: Sequence[torch.Tensor]) -> None:
        self.adapters.add(adapter)

    def remove_adapter(self, adapter: AdapterId) -> None:
        self.adapters.remove(adapter)


def test_an_adapter_gives_way_by_the_mark_of_its_last_request_unless_another_has_begun() -> None:
    pool, engine = _NotedPool(), _Knowing()
    residency = AdapterResidency(lambda adapter: 1.0, lambda base: True, lambda: False)
    engines: dict[ModelId, Engine] = {BASE: engine}  # type: ignore[dict-item] # what it needs of an engine
    pieces = AdapterPieces(pool, residency, lambda: engines)  # type: ignore[arg-type] # and of a pool

    def bring(num_requests: int, *, is_rested: bool = False) -> None:
        residency.asked(A, 0, BASE, 0.0, is_pinned=False)  # which keeps it known, and never starts
        assert pieces.place(A, [part.end - part.begin for _, part in LAYOUT.layers], 0)
        residency.placed(A, LAYOUT.num_bytes)
        if is_rested:
            pieces.rest(A)  # who had lacked it ends before it is back
        residency.loaded(A)
        pieces.filled(A, LAYOUT)
        for _ in range(num_requests):
            pieces.bind(A, BASE, engine)  # type: ignore[arg-type] # as above
            pieces.rest(A)

    bring(2)
    pieces.drop(A)
    assert pool.last_reads == [pool.marks[1]], "that of the last request"

    bring(1)
    pieces.bind(A, BASE, engine)  # type: ignore[arg-type] # as above
    pieces.drop(A)
    assert pool.last_reads[1:] == [None], "another reads it"

    bring(0)
    pieces.drop(A)
    assert pool.last_reads[2:] == [None], "nobody has asked since it came"
    pieces.rest(A)
    assert len(pool.marks) == 3, "it has no memory that others could get"

    bring(0, is_rested=True)
    pieces.drop(A)
    assert pool.last_reads[3:] == [None], "its last bytes may come behind that mark"
