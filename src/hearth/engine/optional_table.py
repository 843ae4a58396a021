"""A table of the sampler that is there while requests need it, with a row for each of them. Knows no rule of
sampling.

A row is as long as the vocabulary, so rows are shared out by need and not by slot: a table begins with few
and is copied to a larger one when there are more requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Generic, Protocol, Self, TypeVar

import torch

from hearth.core.sizes import table_rows
from hearth.core.types import RequestId
from hearth.policy.batch.plan import Admission


class Table(Protocol):
    """Rows of requests on the device: `Penalties` or `LogitBias`."""

    num_rows: int

    def admit(self, admissions: Sequence[Admission], rows: Sequence[int]) -> None:
        """Fill a row for each of the requests, whoever had it before."""

    def copy(self, other: Self) -> None:
        """Take over all that a table with no more rows holds."""


T = TypeVar("T", bound=Table)


class OptionalTable(Generic[T]):
    """Mutable; the thread of the sampler calls it. Steps in flight may still read a table where it was."""

    def __init__(self, make: Callable[[int, torch.Tensor | None], T], row_bytes: int, num_slots: int) -> None:
        """`make` makes an empty table of so many rows, in memory (uint8) that is given or torch finds."""
        self._make, self._row_bytes, self._num_slots = make, row_bytes, num_slots
        self._table: T | None = None
        self._rows = TableRows()

    @property
    def is_there(self) -> bool:
        """True if the table has memory."""
        return self._table is not None

    @property
    def table(self) -> T:
        """The table, which some request needs."""
        assert self._table is not None, "no request that needs the table was admitted"
        return self._table

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Give requests their rows, in a larger table where this one has too few."""
        if not admissions:
            return
        rows = [self._rows.take(admission.request_id, admission.slot) for admission in admissions]
        if self._table is None or self._table.num_rows <= max(rows):
            self._replace(table_rows(1 + max(rows), self._num_slots), None)
        self.table.admit(admissions, rows)

    def row(self, slot: int) -> int:
        """Return the row of the request in a slot, which needs the table."""
        return self._rows.row(slot)

    def free_row(self, request_id: RequestId) -> None:
        """Give the row of a request that has ended to whoever is admitted next."""
        self._rows.free(request_id)

    def place(self, memory: torch.Tensor | None) -> None:
        """Have the table lie in `memory`, with what it holds; None: where torch finds some."""
        if memory is not None:
            num_rows = len(memory) // self._row_bytes
        else:
            num_rows = table_rows(1, self._num_slots) if self._table is None else self._table.num_rows
        self._replace(num_rows, memory)

    def drop(self) -> None:
        """Let go of the table: no row of it will be read any more."""
        self._table, self._rows = None, TableRows()

    def _replace(self, num_rows: int, memory: torch.Tensor | None) -> None:
        before, self._table = self._table, self._make(num_rows, memory)
        if before is not None:
            assert num_rows >= before.num_rows, f"{num_rows=} {before.num_rows=}"
            self._table.copy(before)


class TableRows:
    """Which row of a table belongs to which request. Mutable; written by the table alone.

    A request has a row from its admission until it ends, or until its slot goes to another one that needs the
    table. So never are more rows taken than there are such requests, nor than there are slots, and the lowest
    free one is taken first.
    """

    def __init__(self) -> None:
        self._slot_by_request: dict[RequestId, int] = {}
        self._request_by_slot: dict[int, RequestId] = {}  #: the inverse of the one above
        self._row_by_slot: dict[int, int] = {}  #: of the same slots
        self._free_rows: list[int] = []  #: a heap; with the taken ones, all rows up to some number

    def take(self, request_id: RequestId, slot: int) -> int:
        """Return a row for a request that got a slot, which it has alone, also after it was preempted."""
        self.free(request_id)
        if (before := self._request_by_slot.get(slot)) is not None:
            self.free(before)
        row = heappop(self._free_rows) if self._free_rows else len(self._row_by_slot)
        self._slot_by_request[request_id], self._request_by_slot[slot] = slot, request_id
        self._row_by_slot[slot] = row
        return row

    def free(self, request_id: RequestId) -> None:
        """Take back the row of a request, if it has one."""
        slot = self._slot_by_request.pop(request_id, None)
        if slot is not None:
            del self._request_by_slot[slot]
            heappush(self._free_rows, self._row_by_slot.pop(slot))

    def row(self, slot: int) -> int:
        """Return the row of the request in a slot."""
        return self._row_by_slot[slot]
