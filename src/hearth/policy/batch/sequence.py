"""The requests of a batcher: their tokens and blocks, which of them run in which slot, and which wait."""

from __future__ import annotations

import heapq
from array import array
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import attrgetter

from hearth.core.types import Pooling, RequestId
from hearth.policy.batch.blocks import BlockMove
from hearth.policy.batch.digest_chain import DigestChain
from hearth.policy.batch.plan import EngineRequest, Guide, RowReading, TableWrites
from hearth.policy.batch.prefix import KnownPrefix, PrefixIndex


@dataclass(slots=True, eq=False)
class LiveSequence:
    """One request that has not ended. Mutable; written only by the `Batcher` and its parts."""

    request: EngineRequest
    arrival: int
    chain: DigestChain  #: of `tokens`
    max_length: int  #: of prompt and output
    sits_out: bool  #: while its last token is not committed, or would need a mask
    is_pipelined: bool  #: it sits out even where its guide needs no mask
    tokens: array[int] = field(init=False)  #: prompt and committed output, as words ("I")
    request_id: RequestId = field(init=False)
    guide: Guide | None = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    is_read: bool = field(init=False)  #: more than samples is wanted of its prompt
    #: Place in the queue, the least first: its `line_s`, then its arrival.
    place: tuple[float, int] = field(init=False)
    prefix: KnownPrefix = field(default_factory=KnownPrefix)  #: while it waits
    #: Steps that must be committed before it is admitted again after a preemption, so that none of its old
    #: rows is in flight when it has a slot again.
    waits_for_steps: int = 0
    is_ended: bool = False

    #: None while waiting. The fields that follow are meaningful only while running.
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    room_tokens: int = 0  #: that fit into the blocks
    num_prefill: int = 0  #: length of `tokens` on admission; what comes later is decoded
    num_planned: int = 0  #: tokens whose KV is computed by the steps planned so far
    max_planned: int = 0  #: what `num_planned` may become before the next commit
    #: Leading full blocks of its prompt that were published: all that are planned, and of these those that
    #: were found or are committed.
    num_published: int = 0
    num_confirmed: int = 0
    #: While `tokens` are fewer, a token that is no stop token only has to be appended.
    quiet_until: int = 0

    def __post_init__(self) -> None:
        self.tokens = self.chain.tokens
        self.request_id, self.guide = self.request.request_id, self.request.guide
        self.stop_ids = frozenset(self.request.sampling.stop_ids)
        self.place = (self.request.line_s, self.arrival)
        sampling, pooling = self.request.sampling, self.request.pooling
        self.is_read = pooling is not None or sampling.prompt_logprobs is not None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def num_pending(self) -> int:
        """Tokens that were sampled on the device in steps not committed; they follow `tokens`."""
        return self.num_planned + 1 - len(self.tokens) if self.num_planned >= self.num_prefill else 0

    @property
    def is_in_prompt(self) -> bool:
        return self.num_planned < self.num_prefill

    @property
    def reads_all(self) -> bool:
        """True if all of its prompt has to be computed, because every token is read."""
        if not self.is_read or self.num_output:
            return False
        return self.request.pooling is Pooling.MEAN or self.request.sampling.prompt_logprobs is not None

    def reading(self, start: int, end: int) -> RowReading | None:
        if not self.is_read:
            return None
        prompt, pooling = self.request.prompt, self.request.pooling
        num_logprobs = self.request.sampling.prompt_logprobs
        if pooling is Pooling.LAST and end < len(prompt):
            pooling = None
        if self.num_output or (pooling is None and num_logprobs is None):
            return None
        targets = () if num_logprobs is None else tuple(prompt[start + 1 : end + 1])
        return RowReading(pooling, num_logprobs, targets)

    def known_prefix(self, index: PrefixIndex) -> KnownPrefix:
        # At least one token is computed, to sample from.
        num_most = 0 if self.reads_all else (len(self.tokens) - 1) // self.chain.block_tokens
        self.prefix.follow(index, self.chain, num_most)
        return self.prefix

    @property
    def mask(self) -> bytes | None:
        return None if self.guide is None or self.guide.num_free else self.guide.mask

    def allow_next(self) -> None:
        self.max_planned = self.max_length - 1
        if self.sits_out:
            num_ahead = 0 if self.guide is None or self.is_pipelined else self.guide.num_free
            self.max_planned = min(len(self.tokens) - 1 + max(num_ahead, 1), self.max_planned)

    def set_quiet(self) -> None:
        self.quiet_until = 0 if self.sits_out or self.is_ended else self.max_length - 1


class Sequences:
    """All sequences that have not ended. Mutable; written only by the `Batcher` that owns it.

    Each either runs, with a slot and blocks, or waits without. Both are ordered by their places.
    """

    def __init__(self, max_seqs: int, block_tokens: int, *, sits_out: bool = False) -> None:
        """`sits_out`: every sequence does while its last token is not committed, not only guided ones."""
        self._max_seqs, self._block_tokens, self._sits_out = max_seqs, block_tokens, sits_out
        self._live: dict[RequestId, LiveSequence] = {}
        self._running: dict[RequestId, LiveSequence] = {}  #: by their places
        self._waiting: deque[LiveSequence] = deque()  #: by their places
        #: The last one that started, and the last interactive one.
        self._newest: LiveSequence | None = None
        self._newest_read: LiveSequence | None = None
        self._free_slots = list(range(max_seqs))  #: a heap
        self.num_committed = 0  #: steps; written by the `Batcher`
        self._preempted: list[RequestId] = []
        #: By running request: indices of the blocks that its row of the block table does not have.
        self._moved_indices: dict[RequestId, set[int]] = {}
        self._num_arrivals = 0
        self.num_streamed = self.num_guided = 0
        self._num_stopped_by = Counter[int]()  #: by token: how many sequences it ends

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

    @property
    def stop_ids(self) -> KeysView[int]:
        return self._num_stopped_by.keys()

    def running(self) -> list[LiveSequence]:
        return list(self._running.values())

    def midway(self) -> LiveSequence | None:
        """Return the sequence in the middle of its prompt, if any: only the last one that started can be."""
        newest = self._newest
        return newest if newest is not None and newest.slot is not None and newest.is_in_prompt else None

    def decoding(self) -> list[LiveSequence]:
        running, midway = self.running(), self.midway()
        if midway is not None:
            running.remove(midway)
        return running

    def last(self) -> LiveSequence:
        return next(reversed(self._running.values()))

    @property
    def awaits_first_token(self) -> bool:
        """True if an interactive running sequence has no token; then the last one that started has none."""
        newest = self._newest_read
        return newest is not None and newest.slot is not None and not newest.num_output

    def first_waiting(self) -> LiveSequence | None:
        """Return the sequence that is admitted next, if it can be before the next commit."""
        if not self._waiting or (first := self._waiting[0]).waits_for_steps > self.num_committed:
            return None
        return first

    def behind(self, sequence: LiveSequence) -> list[LiveSequence]:
        place = sequence.place
        return list(takewhile(lambda one: one.place > place, reversed(self._running.values())))

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def next_in_line(self) -> Iterator[LiveSequence]:
        """Yield the waiting sequences that have a slot and could be admitted, in queue order."""
        for sequence in islice(self._waiting, len(self._free_slots)):
            if sequence.waits_for_steps > self.num_committed:
                return
            yield sequence

    def waiting_for_kv(self) -> Iterator[LiveSequence]:
        """Yield the waiting sequences that have a slot, also those that were preempted a moment ago."""
        yield from islice(self._waiting, len(self._free_slots))

    def add(self, request: EngineRequest, max_length: int) -> None:
        """Queue a new request, behind all others of the same `line_s`."""
        tokens = array("I", request.prompt)
        tokens.extend(request.output)
        chain = DigestChain(tokens, self._block_tokens, request.salt, request.adapter)
        if len(tokens) > self._block_tokens:
            chain.digest(0)  # needed to search a known prefix: computed here, not in a step
        sits_out = self._sits_out or request.guide is not None
        sequence = LiveSequence(request, self._num_arrivals, chain, max_length, sits_out, self._sits_out)
        self._num_arrivals += 1
        self._live[request.request_id] = sequence
        for token in sequence.stop_ids:
            self._num_stopped_by[token] += 1
        self._line_up(sequence)

    def start(self, sequence: LiveSequence) -> int:
        first, running = self._waiting.popleft(), self._running
        assert first is sequence, f"{sequence.arrival=} starts before {first.arrival=}"
        is_last = not running or next(reversed(running.values())).place < sequence.place
        running[sequence.request_id] = sequence
        if not is_last:
            self._running = dict(sorted(running.items(), key=lambda item: item[1].place))
        self._newest = sequence
        if not sequence.request.is_batch:
            self._newest_read = sequence
        self.num_streamed += sequence.request.is_streamed
        self.num_guided += sequence.guide is not None
        sequence.slot = slot = heapq.heappop(self._free_slots)
        sequence.num_prefill = len(sequence.tokens)
        sequence.allow_next()
        sequence.set_quiet()
        return slot

    def preempt(self, sequence: LiveSequence, num_planned_steps: int) -> list[int]:
        blocks = self._stop(sequence)
        sequence.waits_for_steps = num_planned_steps
        self._line_up(sequence)
        self._preempted.append(sequence.request_id)
        return blocks

    def end(self, sequence: LiveSequence) -> list[int]:
        sequence.is_ended, sequence.quiet_until = True, 0
        request_id = sequence.request_id
        del self._live[request_id]
        for token in sequence.stop_ids:
            self._num_stopped_by[token] -= 1
            if not self._num_stopped_by[token]:
                del self._num_stopped_by[token]
        if self._preempted:
            self._preempted = [one for one in self._preempted if one != request_id]
        if sequence.slot is not None:
            return self._stop(sequence)
        self._waiting.remove(sequence)
        return []

    def take_preempted(self) -> tuple[RequestId, ...]:
        preempted, self._preempted = tuple(self._preempted), []
        return preempted

    def follow(self, moves: Sequence[BlockMove]) -> None:
        targets = {move.source: move.target for move in moves}
        if not targets:
            return
        for request_id, sequence in self._running.items():
            for index, block in enumerate(sequence.blocks):
                if block in targets:
                    sequence.blocks[index] = targets[block]
                    self._moved_indices.setdefault(request_id, set()).add(index)

    @property
    def has_moved(self) -> bool:
        return bool(self._moved_indices)

    def rewrite(self, sequence: LiveSequence, index: int) -> None:
        """Have the next plan write a block to the block table again."""
        self._moved_indices.setdefault(sequence.request_id, set()).add(index)

    def take_table_writes(self, writes: TableWrites) -> None:
        for request_id, indices in self._moved_indices.items():
            sequence = self._running[request_id]
            assert sequence.slot is not None, f"{sequence.arrival=}"
            for at in sorted(indices):
                writes.add(sequence.slot, at, (sequence.blocks[at],))
        self._moved_indices.clear()

    def check(self, flights: Sequence[Sequence[LiveSequence]]) -> None:
        """Raise if the books disagree. `flights`: the sequences of each step in flight."""
        running, waiting = self.running(), list(self._waiting)
        for line in (running, waiting):
            places = [sequence.place for sequence in line]
            assert places == sorted(set(places)), f"out of order: {places}"
        assert {s.request_id for s in running + waiting} == self._live.keys(), f"{self._live.keys()=}"
        slots = sorted([s.slot for s in running if s.slot is not None] + self._free_slots)
        assert slots == list(range(self._max_seqs)), f"slots lost or given twice: {slots}"
        holding = [s.arrival for s in waiting if s.slot is not None or s.blocks]
        assert not holding, f"waiting with a slot or blocks: {holding}"
        midway = [s.arrival for s in running if s.is_in_prompt and s is not self._newest]
        assert not midway, f"in the middle of the prompt and not the last that started: {midway}"
        num_stopped_by = Counter(token for s in self._live.values() for token in s.stop_ids)
        assert self._num_stopped_by == num_stopped_by, f"{self._num_stopped_by=} {num_stopped_by=}"
        num_streamed = sum(s.request.is_streamed for s in running)
        num_guided = sum(s.guide is not None for s in running)
        assert (self.num_streamed, self.num_guided) == (num_streamed, num_guided), (
            f"{num_streamed=} {num_guided=}"
        )
        moved = self._moved_indices.keys()
        assert moved <= self._running.keys(), f"{moved=} {self._running.keys()=}"
        in_flight = Counter(s.arrival for flight in flights for s in flight)
        for s in running:
            num_pending, num_in_flight = s.num_pending, in_flight[s.arrival]
            assert 0 <= num_pending <= num_in_flight, f"{s.arrival=} {num_pending=} {num_in_flight=}"
            assert s.room_tokens == len(s.blocks) * self._block_tokens, f"{s.arrival=} {s.room_tokens=}"
            assert s.num_planned <= min(s.room_tokens, s.max_planned), f"{s.arrival=} {s.num_planned=}"
            assert s.quiet_until < s.max_length, f"{s.arrival=} {s.quiet_until=}"
            num_full = min(s.num_planned, s.num_prefill) // self._block_tokens
            assert s.num_published == num_full, f"{s.arrival=} {s.num_published=} {num_full=}"
            assert s.num_confirmed <= num_full, f"{s.arrival=} {s.num_confirmed=} {num_full=}"
            if len(s.tokens) > s.num_prefill:
                assert s.num_confirmed == num_full, f"{s.arrival=} {s.num_confirmed=} {num_full=}"
        early = [
            s.arrival for s in waiting if in_flight[s.arrival] and s.waits_for_steps <= self.num_committed
        ]
        assert not early, f"could be admitted with a row in flight: {early}"

    def _line_up(self, sequence: LiveSequence) -> None:
        if not self._waiting or self._waiting[-1].place < sequence.place:
            self._waiting.append(sequence)
        elif sequence.place < self._waiting[0].place:
            self._waiting.appendleft(sequence)
        else:
            insort(self._waiting, sequence, key=attrgetter("place"))

    def _stop(self, sequence: LiveSequence) -> list[int]:
        assert sequence.slot is not None, f"{sequence.arrival=}"
        request_id = sequence.request_id
        del self._running[request_id]
        self.num_streamed -= sequence.request.is_streamed
        self.num_guided -= sequence.guide is not None
        self._moved_indices.pop(request_id, None)
        heapq.heappush(self._free_slots, sequence.slot)
        blocks, sequence.blocks = sequence.blocks, []
        sequence.slot, sequence.room_tokens = None, 0
        return blocks
