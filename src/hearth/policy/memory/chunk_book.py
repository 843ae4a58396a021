"""The books of a tier of equal cells: which chunk is in which cell, and which are leased.

Touches no memory: a cell is a number here.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hearth.policy.memory.byte_eviction import ChunkEvictionOrder, Price


@dataclass(frozen=True, slots=True)
class Hit:
    """The chunk is resident, and leased to the caller."""

    cell: int


@dataclass(frozen=True, slots=True)
class Fill:
    """The chunk is absent; the caller fills the cell and then calls `filled` or `failed`."""

    cell: int
    evicted: str | None  #: the chunk that was in the cell until now


@dataclass(frozen=True, slots=True)
class Pending:
    """Another caller is filling a cell with this chunk."""


@dataclass(frozen=True, slots=True)
class Full:
    """The chunk is absent, and every cell is leased or being filled."""


class ChunkBook:
    """Which chunk is in which cell. Mutable; the tier that owns it holds its lock.

    Every cell is free or holds one chunk, and every chunk in a cell is exactly one of
        filling  being loaded by one caller
        leased   resident and in use, by one or several; never evicted
        idle     resident and unused; evicted when its cell is needed
    """

    def __init__(self, num_cells: int, *, keeps_idle: bool = True) -> None:
        """`keeps_idle`: chunks stay after their last lease; without it no chunk is ever idle."""
        assert num_cells >= 0, f"{num_cells=}"
        self._keeps_idle = keeps_idle
        self.capacity = num_cells
        self._free = list(range(num_cells))
        self._cell_by_chunk: dict[str, int] = {}
        self._filling: set[str] = set()
        self._leases: dict[str, int] = {}
        self._idle: set[str] = set()
        self._order = ChunkEvictionOrder()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_filling(self) -> int:
        return len(self._filling)

    @property
    def num_leased(self) -> int:
        return len(self._leases)

    @property
    def num_resident(self) -> int:
        return len(self._leases) + len(self._idle)

    def is_resident(self, chunk_id: str) -> bool:
        return chunk_id in self._cell_by_chunk and chunk_id not in self._filling

    def leases(self, chunk_id: str) -> int:
        return self._leases.get(chunk_id, 0)

    def take(
        self, chunk_id: str, price: Callable[[str], Price], *, num_spared: int = 0
    ) -> Hit | Fill | Pending | Full:
        """Lease a resident chunk, or find a cell for it.

        That is the lowest free cell, behind the first `num_spared` if possible, else that of the next idle
        chunk in the `ChunkEvictionOrder`.
        """
        if chunk_id in self._filling:
            return Pending()
        if chunk_id in self._cell_by_chunk:
            return Hit(self._lease(chunk_id))
        evicted = None if self._free else self._evict(price)
        if not self._free:
            return Full()
        cell = self._lowest_free(num_spared)
        self._cell_by_chunk[chunk_id] = cell
        self._filling.add(chunk_id)
        return Fill(cell, evicted)

    def lease(self, chunk_ids: Sequence[str]) -> list[int] | None:
        """Lease chunks, and return their cells; None: not all are resident, nothing changed."""
        return list(map(self._lease, chunk_ids)) if all(map(self.is_resident, chunk_ids)) else None

    def filled(self, chunk_id: str) -> None:
        assert chunk_id in self._filling, f"chunk `{chunk_id}` is not being filled"
        self._filling.remove(chunk_id)
        self._leases[chunk_id] = 1

    def failed(self, chunk_id: str) -> None:
        assert chunk_id in self._filling, f"chunk `{chunk_id}` is not being filled"
        self._filling.remove(chunk_id)
        self._vacate(chunk_id)

    def release(self, chunk_id: str) -> None:
        """Return a lease. After the last one the chunk is idle, or gone unless idle ones are kept."""
        assert chunk_id in self._leases, f"released more often than taken: chunk `{chunk_id}`"
        self._leases[chunk_id] -= 1
        if self._leases[chunk_id] == 0:
            del self._leases[chunk_id]
            if self._keeps_idle:
                self._idle.add(chunk_id)
            else:
                self._vacate(chunk_id)

    def drop(self, chunk_id: str) -> bool:
        """Forget an idle chunk. False if it is leased, filling or absent."""
        if chunk_id not in self._idle:
            return False
        self._leave_idle(chunk_id)
        self._vacate(chunk_id)
        return True

    def check(self) -> None:
        owned = sorted([*self._free, *self._cell_by_chunk.values()])
        assert owned == list(range(self.capacity)), (
            f"cells must be 0..{self.capacity - 1}, each once: {owned}"
        )
        states = sorted([*self._filling, *self._leases, *self._idle])
        assert states == sorted(self._cell_by_chunk), f"{states=} {sorted(self._cell_by_chunk)=}"
        wrong = {chunk_id: count for chunk_id, count in self._leases.items() if count < 1}
        assert not wrong, f"leased chunks without a lease: {wrong}"
        lost = [chunk_id for chunk_id in self._order if chunk_id not in self._idle]
        assert not lost, f"to be evicted, but not idle: {lost}"

    def _lease(self, chunk_id: str) -> int:
        self._leave_idle(chunk_id)
        self._leases[chunk_id] = self.leases(chunk_id) + 1
        return self._cell_by_chunk[chunk_id]

    def _lowest_free(self, num_spared: int) -> int:
        spared: list[int] = []
        while self._free and self._free[0] < num_spared:
            spared.append(heapq.heappop(self._free))
        if not self._free:
            self._free, spared = spared, []  # sorted, and so a heap
        cell = heapq.heappop(self._free)
        for one in spared:
            heapq.heappush(self._free, one)
        return cell

    def _evict(self, price: Callable[[str], Price]) -> str | None:
        chunk_id = self._order.pop(self._idle, price)
        if chunk_id is not None:
            self.drop(chunk_id)
        return chunk_id

    def _leave_idle(self, chunk_id: str) -> None:
        self._idle.discard(chunk_id)
        self._order.discard(chunk_id)

    def _vacate(self, chunk_id: str) -> None:
        heapq.heappush(self._free, self._cell_by_chunk.pop(chunk_id))
