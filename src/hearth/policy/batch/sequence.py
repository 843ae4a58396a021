"""Requests on their way through the batcher: their tokens and blocks, who runs in which slot, and who waits.

Decides nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from hearth.policy.batch.blocks import BlockMove
from hearth.policy.batch.plan import EngineRequest, TableWrite
from hearth.policy.batch.prefix import KnownPrefix
from hearth.types import RequestId


@dataclass(slots=True, eq=False)
class LiveSequence:
    """One request that has not ended. Mutable; written only by the `Batcher` and its `Sequences`."""

    request: EngineRequest
    arrival: int
    tokens: list[int]  #: prompt and committed output
    max_length: int  #: of prompt and output
    #: Digests of the full blocks of `tokens`, as far as needed so far.
    digests: list[bytes] = field(default_factory=list)
    prefix: KnownPrefix = field(default_factory=KnownPrefix)  #: of what it waits with
    #: Sampled on the device in a step that is not committed; they follow `tokens`.
    num_pending: int = 0
    #: Rows in steps that are not committed. Not admitted again before this is 0, so that every such row
    #: of a sequence with a slot belongs to its present stay in that slot.
    num_in_flight: int = 0
    is_ended: bool = False

    #: None while waiting; what follows is meaningful only while running.
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    num_prefill: int = 0  #: length of `tokens` on admission; what comes later is decoded
    num_planned: int = 0  #: tokens whose KV is computed by the steps planned so far
    num_published: int = 0  #: leading blocks that were offered to the prefix cache

    @property
    def num_output(self) -> int:
        """Tokens that were sampled and committed."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_unplanned(self) -> int:
        """Tokens that could be computed next; 0 if the last one that may be sampled is in flight."""
        if self.num_planned < self.num_prefill:
            return self.num_prefill - self.num_planned
        if self.request.guide is not None and self.num_pending:
            return 0  # what its guide allows is not known yet
        return 1 if len(self.tokens) + self.num_pending < self.max_length else 0


class Sequences:
    """All sequences that have not ended. Mutable; written only by the `Batcher` that owns it.

    Each either runs, in a slot and with blocks, or waits without. Every one that runs is older than every one
    that waits.
    """

    def __init__(self, max_seqs: int) -> None:
        self._max_seqs = max_seqs
        #: All of them; each is in one of the two below.
        self._live: dict[RequestId, LiveSequence] = {}
        self._running: dict[RequestId, LiveSequence] = {}  #: oldest first
        self._waiting: deque[LiveSequence] = deque()  #: oldest first
        self._free_slots = list(range(max_seqs))  #: a heap
        #: Since `take_preempted` was called last, in order.
        self._preempted: list[RequestId] = []
        #: By running request: which of its blocks have moved since its row of the block table was written.
        self._moved_indices: dict[RequestId, set[int]] = {}
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._live

    def __getitem__(self, request_id: RequestId) -> LiveSequence:
        return self._live[request_id]

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def running(self) -> list[LiveSequence]:
        """Return the running sequences, oldest first."""
        return list(self._running.values())

    def youngest(self) -> LiveSequence:
        """Return the running sequence that came last."""
        return next(reversed(self._running.values()))

    def next_in_line(self) -> Iterator[LiveSequence]:
        """Yield the waiting sequences that have a slot and could be admitted now, oldest first."""
        for sequence in islice(self._waiting, len(self._free_slots)):
            if sequence.num_in_flight:
                return
            yield sequence

    def add(self, request: EngineRequest, max_length: int) -> None:
        """Have a new request wait, behind all others."""
        tokens = [*request.prompt, *request.output]
        sequence = LiveSequence(request, self._num_arrivals, tokens, max_length)
        self._num_arrivals += 1
        self._live[request.request_id] = sequence
        self._waiting.append(sequence)

    def start(self, sequence: LiveSequence) -> int:
        """Have the oldest that waits run; return its slot."""
        oldest = self._waiting.popleft()
        assert oldest is sequence, f"{sequence.arrival=} starts before {oldest.arrival=}"
        self._running[sequence.request.request_id] = sequence
        sequence.slot = slot = heapq.heappop(self._free_slots)
        return slot

    def preempt(self, sequence: LiveSequence) -> list[int]:
        """Have the youngest that runs wait, as the oldest of those; return the blocks that it had."""
        blocks = self._stop(sequence)
        self._waiting.appendleft(sequence)
        self._preempted.append(sequence.request.request_id)
        return blocks

    def end(self, sequence: LiveSequence) -> list[int]:
        """End a sequence; return the blocks that it had."""
        sequence.is_ended = True
        request_id = sequence.request.request_id
        del self._live[request_id]
        self._preempted = [one for one in self._preempted if one != request_id]
        if sequence.slot is not None:
            return self._stop(sequence)
        self._waiting.remove(sequence)
        return []

    def take_preempted(self) -> tuple[RequestId, ...]:
        """Return who was preempted since the last call and has not ended meanwhile."""
        preempted, self._preempted = tuple(self._preempted), []
        return preempted

    def follow(self, moves: Sequence[BlockMove]) -> None:
        """Have all holders of blocks that were moved name the new ones."""
        targets = {move.source: move.target for move in moves}
        if not targets:
            return
        for request_id, sequence in self._running.items():
            for index, block in enumerate(sequence.blocks):
                if block in targets:
                    sequence.blocks[index] = targets[block]
                    self._moved_indices.setdefault(request_id, set()).add(index)

    def take_table_writes(self) -> list[TableWrite]:
        """Return what the next plan has to write before all else, because blocks have moved."""
        writes = []
        for request_id, indices in self._moved_indices.items():
            sequence = self._running[request_id]
            assert sequence.slot is not None, f"{sequence.arrival=}"
            writes += [TableWrite(sequence.slot, at, (sequence.blocks[at],)) for at in sorted(indices)]
        self._moved_indices.clear()
        return writes

    def check(self, flights: Sequence[Sequence[LiveSequence]]) -> None:
        """Raise if the books disagree with each other; `flights` are the sequences of each step in flight."""
        running, waiting = self.running(), list(self._waiting)
        order = [sequence.arrival for sequence in running + waiting]
        assert order == sorted(set(order)), f"running, then waiting, must be in order of arrival: {order}"
        assert {s.request.request_id for s in running + waiting} == self._live.keys(), f"{self._live.keys()=}"
        slots = sorted([s.slot for s in running if s.slot is not None] + self._free_slots)
        assert slots == list(range(self._max_seqs)), f"slots lost or given twice: {slots}"
        holding = [s.arrival for s in waiting if s.slot is not None or s.blocks]
        assert not holding, f"waiting with a slot or blocks: {holding}"
        midway = [s.arrival for s in running[:-1] if s.num_planned < s.num_prefill]
        assert not midway, f"in the midst of the prompt and not the youngest: {midway}"
        moved = self._moved_indices.keys()
        assert moved <= self._running.keys(), f"{moved=} {self._running.keys()=}"
        in_flight = Counter(s.arrival for flight in flights for s in flight)
        for s in running + waiting:
            assert s.num_in_flight == in_flight[s.arrival], f"{s.arrival=} {s.num_in_flight=} {in_flight=}"
            assert s.num_pending <= s.num_in_flight, f"{s.arrival=} {s.num_pending=} {s.num_in_flight=}"

    def _stop(self, sequence: LiveSequence) -> list[int]:
        assert sequence.slot is not None, f"{sequence.arrival=}"
        request_id = sequence.request.request_id
        del self._running[request_id]
        self._moved_indices.pop(request_id, None)
        heapq.heappush(self._free_slots, sequence.slot)
        blocks, sequence.blocks, sequence.slot = sequence.blocks, [], None
        return blocks
