"""The sampler's tables: penalty counts, and bias with the allowed-token mask. Samples nothing.

A table exists only while requests need it, with few rows at first. Counts live on the device, because the
host learns a sampled token only after the next step is planned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Generic, Protocol, Self, TypeVar

import torch

from hearth.core.sizes import bias_buffers, bytes_of, penalty_buffers, sampled_pieces, table_rows
from hearth.core.types import RequestId, SamplingParams, SamplingTable
from hearth.engine.upload import Uploads
from hearth.models.buffers import zeroed
from hearth.policy.batch.plan import Admission


class Table(Protocol):
    num_rows: int

    def admit(self, admissions: Sequence[Admission], rows: Sequence[int]) -> None: ...

    def copy(self, other: Self) -> None: ...


T = TypeVar("T", bound=Table)


class OptionalTable(Generic[T]):
    """A table that exists while requests need it. Mutable; the sampler's thread calls it.

    Steps in flight may still read a table at its old place.
    """

    def __init__(self, make: Callable[[int, torch.Tensor | None], T], row_bytes: int, num_slots: int) -> None:
        """`make(num_rows, memory)` returns an empty table, in `memory` (uint8) or allocated by torch."""
        self._make, self._row_bytes, self._num_slots = make, row_bytes, num_slots
        self._table: T | None = None
        self._rows = TableRows()

    @property
    def is_there(self) -> bool:
        return self._table is not None

    @property
    def table(self) -> T:
        assert self._table is not None, "no request that needs the table was admitted"
        return self._table

    def admit(self, admissions: Sequence[Admission]) -> None:
        if not admissions:
            return
        rows = [self._rows.take(admission.request_id, admission.slot) for admission in admissions]
        if self._table is None or self._table.num_rows <= max(rows):
            self._replace(table_rows(1 + max(rows), self._num_slots), None)
        self.table.admit(admissions, rows)

    def row(self, slot: int) -> int:
        return self._rows.row(slot)

    def free_row(self, request_id: RequestId) -> None:
        self._rows.free(request_id)

    def place(self, memory: torch.Tensor | None) -> None:
        if memory is not None:
            num_rows = len(memory) // self._row_bytes
        else:
            num_rows = table_rows(1, self._num_slots) if self._table is None else self._table.num_rows
        self._replace(num_rows, memory)

    def drop(self) -> None:
        self._table, self._rows = None, TableRows()

    def _replace(self, num_rows: int, memory: torch.Tensor | None) -> None:
        before, self._table = self._table, self._make(num_rows, memory)
        if before is not None:
            assert num_rows >= before.num_rows, f"{num_rows=} {before.num_rows=}"
            self._table.copy(before)


class TableRows:
    """Rows of a table by request. Mutable; written by the table alone.

    A request has a row from its admission until it ends, or until its slot goes to another request with a
    row.
    """

    def __init__(self) -> None:
        self._slot_by_request: dict[RequestId, int] = {}
        self._request_by_slot: dict[int, RequestId] = {}  #: the inverse of the one above
        self._row_by_slot: dict[int, int] = {}  #: of the same slots
        self._free_rows: list[int] = []  #: a heap; with the taken rows, all rows up to some number

    def take(self, request_id: RequestId, slot: int) -> int:
        self.free(request_id)
        if (before := self._request_by_slot.get(slot)) is not None:
            self.free(before)
        row = heappop(self._free_rows) if self._free_rows else len(self._row_by_slot)
        self._slot_by_request[request_id], self._request_by_slot[slot] = slot, request_id
        self._row_by_slot[slot] = row
        return row

    def free(self, request_id: RequestId) -> None:
        slot = self._slot_by_request.pop(request_id, None)
        if slot is not None:
            del self._request_by_slot[slot]
            heappush(self._free_rows, self._row_by_slot.pop(slot))

    def row(self, slot: int) -> int:
        return self._row_by_slot[slot]


def is_penalised(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


class Penalties:
    """Token counts of penalised requests, a row each. Mutable; used by its `OptionalTable`."""

    def __init__(
        self, num_rows: int, vocab_size: int, uploads: Uploads, memory: torch.Tensor | None = None
    ) -> None:
        self.num_rows = num_rows
        self._vocab_size = vocab_size
        self._uploads = uploads
        tensors = zeroed(penalty_buffers(num_rows, vocab_size), uploads.device, memory)
        self._in_prompt = tensors["in_prompt"]
        self._num_sampled = tensors["num_sampled"]
        self._weights = tensors["weights"]

    def copy(self, other: Penalties) -> None:
        self._in_prompt[: other.num_rows].copy_(other._in_prompt)
        self._num_sampled[: other.num_rows].copy_(other._num_sampled)
        self._weights[: other.num_rows].copy_(other._weights)

    def admit(self, admissions: Sequence[Admission], rows: Sequence[int]) -> None:
        prompts, outputs, weights = [], [], []
        for admission, row in zip(admissions, rows, strict=True):
            start, sampling = row * self._vocab_size, admission.sampling
            prompts += [start + token for token in set(admission.tokens[: admission.num_prompt_tokens])]
            outputs += [start + token for token in admission.tokens[admission.num_prompt_tokens :]]
            weights += [sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty]
        where, in_prompt, sampled = self._uploads.ints(rows, prompts, outputs)
        self._in_prompt.index_fill_(0, where, False).view(-1).index_fill_(0, in_prompt, True)
        self._count(self._num_sampled.index_fill_(0, where, 0), sampled)
        self._weights.index_copy_(0, where, self._uploads.floats(weights).view(-1, 3))

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, table_rows: torch.Tensor) -> None:
        for piece in sampled_pieces(len(rows), self._vocab_size):
            self._apply(logits, rows[piece], table_rows[piece])

    def _apply(self, logits: torch.Tensor, rows: torch.Tensor, table_rows: torch.Tensor) -> None:
        repetition, presence, frequency = self._weights[table_rows].unsqueeze(-1).unbind(1)
        num_sampled = self._num_sampled[table_rows]
        is_sampled = num_sampled > 0
        scores = logits[rows]
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(is_sampled | self._in_prompt[table_rows], repeated, scores)
        scores -= frequency * num_sampled + presence * is_sampled
        logits.index_copy_(0, rows, scores)

    def record(self, table_rows: torch.Tensor, tokens: torch.Tensor) -> None:
        self._count(self._num_sampled, table_rows * self._vocab_size + tokens)

    @staticmethod
    def _count(table: torch.Tensor, entries: torch.Tensor) -> None:
        table.view(-1).scatter_add_(0, entries, torch.ones_like(entries, dtype=torch.int32))


def is_biased(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias) or sampling.allowed_token_ids is not None


class LogitBias:
    """Logit bias of requests, a row each. Mutable; used by its `OptionalTable`."""

    def __init__(
        self, num_rows: int, vocab_size: int, uploads: Uploads, memory: torch.Tensor | None = None
    ) -> None:
        self.num_rows = num_rows
        self._uploads = uploads
        self._bias = zeroed(bias_buffers(num_rows, vocab_size), uploads.device, memory)["bias"]

    def copy(self, other: LogitBias) -> None:
        self._bias[: other.num_rows].copy_(other._bias)

    def admit(self, admissions: Sequence[Admission], rows: Sequence[int]) -> None:
        vocab_size = self._bias.shape[1]
        free, masked, entries = [], [], []
        values: list[float] = []
        for admission, row in zip(admissions, rows, strict=True):
            sampling = admission.sampling
            bias = sampling.bias_by_token
            if sampling.allowed_token_ids is None:
                free.append(row)
            else:
                masked.append(row)
                bias = {token: bias.get(token, 0.0) for token in sampling.allowed_token_ids}
            assert all(0 <= token < vocab_size for token in bias), f"{vocab_size=} {bias=}"
            entries += [row * vocab_size + token for token in bias]
            values += bias.values()
        free_rows, masked_rows, where = self._uploads.ints(free, masked, entries)
        self._bias.index_fill_(0, free_rows, 0.0).index_fill_(0, masked_rows, -math.inf)
        self._bias.view(-1).index_copy_(0, where, self._uploads.floats(values))

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, table_rows: torch.Tensor) -> None:
        for piece in sampled_pieces(len(rows), logits.shape[1]):
            logits.index_add_(0, rows[piece], self._bias[table_rows[piece]])


class SamplingTables:
    """All tables of a sampler, and the live requests that need each. Mutable; the step thread calls it."""

    def __init__(self, num_slots: int, vocab_size: int, uploads: Uploads) -> None:
        self._num_slots, self._vocab_size = num_slots, vocab_size
        self.penalties = OptionalTable(
            lambda num_rows, memory: Penalties(num_rows, vocab_size, uploads, memory),
            row_bytes=bytes_of(penalty_buffers(1, vocab_size)),
            num_slots=num_slots,
        )
        self.bias = OptionalTable(
            lambda num_rows, memory: LogitBias(num_rows, vocab_size, uploads, memory),
            row_bytes=bytes_of(bias_buffers(1, vocab_size)),
            num_slots=num_slots,
        )
        self._tables: dict[SamplingTable, OptionalTable[Penalties] | OptionalTable[LogitBias]] = {
            SamplingTable.PENALTIES: self.penalties,
            SamplingTable.BIAS: self.bias,
        }
        self._users: dict[SamplingTable, set[RequestId]] = {table: set() for table in SamplingTable}

    def expect(self, request_id: RequestId, sampling: SamplingParams) -> bool:
        """Count a request as a user of the tables that it needs; False: it needs none."""
        if is_penalised(sampling):
            self._users[SamplingTable.PENALTIES].add(request_id)
        if is_biased(sampling):
            self._users[SamplingTable.BIAS].add(request_id)
        return is_penalised(sampling) or is_biased(sampling)

    def forget(self, request_id: RequestId) -> None:
        """Free the rows of a request that no later step samples for, and tables without users.

        Steps in flight may still read them: new owners of the memory queue behind those steps.
        """
        for table, users in self._users.items():
            if request_id in users:
                users.remove(request_id)
                if users:
                    self._tables[table].free_row(request_id)
                else:
                    self._tables[table].drop()

    def needed_bytes(self) -> dict[SamplingTable, int]:
        """Return the bytes of each table that live requests need, running or waiting.

        If a table is not placed by then, or is too small, the step that admits a request has torch allocate
        it outside of any pool. It goes with its last user.
        """
        return {
            table: bytes_of(_BUFFERS[table](table_rows(len(users), self._num_slots), self._vocab_size))
            for table, users in self._users.items()
            if users
        }

    def has(self, table: SamplingTable) -> bool:
        return self._tables[table].is_there

    def place(self, table: SamplingTable, memory: torch.Tensor | None) -> None:
        """Move a table, with its content, to `memory` (uint8); None: torch allocates it.

        Steps in flight may still read the old place.
        """
        self._tables[table].place(memory)


_BUFFERS = {SamplingTable.PENALTIES: penalty_buffers, SamplingTable.BIAS: bias_buffers}
