"""Continuous batching: which tokens of which sequences the next engine step computes.

Runs nothing and knows no text, no clock and no device: a `StepPlan` goes out, token ids come back.

The founding idea: there is no prefill phase and no decode phase. Every sequence has tokens, and a count
of those whose KV is planned; a step moves that count forward for as many sequences as the token budget
allows, oldest first. A sequence that runs needs one token (the one it sampled last), a sequence that
starts needs many and takes them in chunks. Age decides everything: sequences are admitted in order of
arrival, and when blocks run out the youngest gives up its own and is computed again later. So every
running sequence is older than every waiting one, only the youngest can be in the midst of its prompt,
and the oldest always advances.

Steps run one ahead: step n+1 is planned before the tokens of step n are known.

    plan n    plan n+1    commit n    plan n+2    commit n+1    ...

What a sampled token is does not matter for planning, only that there is one: `num_pending` counts the
tokens that the device knows and the host does not. Only a stop token comes as a surprise, one row too
late; that row's token is dropped. A guided sequence is the exception: what may come next depends on its
last token, so it sits out the step in between. Blocks and slots are reused at once, because the device runs
steps in order: whatever a late row writes, the next owner overwrites before reading.

KV may grow and shrink between steps. `wanted_blocks` says what the next plan could use; `clear` takes blocks
away, for which live ones move, with their copies queued behind the steps in flight, or the youngest give up.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from hearth.errors import BadPrompt, ConfigError, PromptTooLong
from hearth.policy.batch.blocks import BlockBook, BlockMove, extend_digests
from hearth.policy.batch.clearing import plan_clearing
from hearth.policy.batch.draft import Draft
from hearth.policy.batch.moved import MovedBlocks
from hearth.policy.batch.plan import Admission, Emission, EngineRequest, StepPlan
from hearth.policy.batch.prefix import KnownPrefix
from hearth.policy.batch.sequence import LiveSequence
from hearth.types import FinishReason, RequestId

MAX_IN_FLIGHT = 2  #: plans that may wait for their commit


@dataclass(frozen=True, slots=True)
class BatchLimits:
    max_batch_tokens: int  #: computed by one step
    max_seqs: int  #: running at once, each in a slot
    max_context: int  #: prompt and output tokens of one sequence

    def __post_init__(self) -> None:
        if min(self.max_batch_tokens, self.max_seqs, self.max_context) < 1:
            raise ConfigError(
                f"every limit of a batch must be at least 1, given: {self}; raise the one below"
            )


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    sequences: list[LiveSequence]  #: one for each row; an id could have a new owner by the time of the commit


class Batcher:
    """Mutable; written only by the step loop that owns it, as is the `BlockBook` given to it."""

    def __init__(self, limits: BatchLimits, blocks: BlockBook) -> None:
        self.limits = limits
        self.blocks = blocks
        #: All that have not ended; each is either running or waiting.
        self._live: dict[RequestId, LiveSequence] = {}
        #: Those with a slot, oldest first.
        self._running: dict[RequestId, LiveSequence] = {}
        #: Those without, oldest first; all younger than the running ones.
        self._waiting: deque[LiveSequence] = deque()
        #: Planned and not committed, oldest first; at most MAX_IN_FLIGHT.
        self._flights: deque[_Flight] = deque()
        #: A heap.
        self._free_slots = list(range(limits.max_seqs))
        #: Since `take_preempted` was called last, in order.
        self._preempted: list[RequestId] = []
        #: Of running sequences, until the next plan writes them to the table.
        self._moved = MovedBlocks()
        self._num_arrivals = 0
        self._num_steps = 0

    @property
    def _max_length(self) -> int:
        """Of prompt and output of one request, so that alone it fits into what is promised."""
        return min(self.limits.max_context, self.blocks.capacity_tokens)

    @property
    def has_work(self) -> bool:
        """Whether anything is left to plan or to commit."""
        return bool(self._live or self._flights)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def check_fits(self, request: EngineRequest) -> None:
        """Raise if the request can never be served. Reads limits only, so any thread may ask.

        Raises:
            BadPrompt: it is empty, or what it has sampled before was its end.
            PromptTooLong: it leaves no room for a single token.
        """
        num_prompt, num_output = len(request.prompt), len(request.output)
        if num_prompt == 0:
            raise BadPrompt("prompt has 0 tokens, at least 1 is needed; give a token to continue from")
        if num_prompt + num_output + 1 > self._max_length:
            what = f"prompt has {num_prompt} tokens" + (f" and output {num_output}" if num_output else "")
            raise PromptTooLong(
                f"{what}, limit: {self._max_length - 1} (the context holds "
                f"{self.limits.max_context}, the KV memory {self.blocks.capacity_tokens}, one is to be "
                "sampled); shorten the prompt or raise the lower one"
            )
        max_tokens = request.sampling.max_tokens
        is_full = max_tokens is not None and num_output >= max_tokens
        if is_full or (num_output and _stops(request, request.output[-1], num_output - 1)):
            raise BadPrompt(
                f"the output of {num_output} tokens is complete ({max_tokens=}, last token: "
                f"{request.output[-1]}), so nothing is left to sample; resume only what has not ended"
            )

    def add(self, request: EngineRequest) -> None:
        """Queue a request that fits. Its `max_tokens` is cut so that alone it can always finish."""
        assert request.request_id not in self._live, f"request added twice: {request.request_id}"
        self.check_fits(request)
        max_length, sampling = self._max_length, request.sampling
        if sampling.max_tokens is not None:
            max_length = min(max_length, len(request.prompt) + sampling.max_tokens)
        sequence = LiveSequence(request, self._num_arrivals, [*request.prompt, *request.output], max_length)
        self._num_arrivals += 1
        self._live[request.request_id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: RequestId) -> bool:
        """End a request now, whatever it is doing; what it still samples is dropped. False if unknown."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def plan(self) -> StepPlan | None:
        """Decide the next step; None if nothing can be computed before a commit or an arrival."""
        assert len(self._flights) < MAX_IN_FLIGHT, f"commit first: {len(self._flights)} steps in flight"
        draft = Draft(self.limits.max_batch_tokens)
        self._advance_running(draft)
        if not draft.has_preempted:
            self._admit_waiting(draft)
        if not draft.rows:
            return None
        writes = (*self._moved.take_writes(self._running), *draft.table_writes)
        plan = StepPlan(self._num_steps, tuple(draft.admissions), writes, tuple(draft.rows))
        self._num_steps += 1
        self._flights.append(_Flight(plan, draft.sequences))
        return plan

    def wanted_blocks(self) -> int:
        """Blocks that the next plan would hand out if there were enough of them for everybody.

        Whoever is admitted counts with all of its prompt, for it is not admitted without room for that.
        """
        tokens_left, num_wanted = self.limits.max_batch_tokens, 0
        block_tokens = self.blocks.block_tokens
        for sequence in self._running.values():
            if tokens_left == 0:
                return num_wanted
            num_tokens = min(sequence.num_unplanned, tokens_left)
            tokens_left -= num_tokens
            beyond_tokens = sequence.num_planned + num_tokens - len(sequence.blocks) * block_tokens
            if beyond_tokens > 0:
                num_wanted += self._num_blocks(beyond_tokens)
        for sequence in islice(self._waiting, len(self._free_slots)):
            if tokens_left == 0 or sequence.num_in_flight:
                break
            num_hits = len(self._known_prefix(sequence))
            num_tokens = len(sequence.tokens)
            tokens_left -= min(num_tokens - num_hits * block_tokens, tokens_left)
            num_wanted += self._num_blocks(num_tokens) - num_hits
        return num_wanted

    def cached_to_spare(self) -> int:
        """Cached blocks that the next plan could hand out: not those that whoever waits would read."""
        hits: set[int] = set()
        for sequence in islice(self._waiting, len(self._free_slots)):
            if sequence.num_in_flight:
                break
            self._known_prefix(sequence).collect(hits)
        return self.blocks.num_cached - len(self.blocks.cached_of(hits))

    def clear(self, extent: range, *, may_move: bool, may_preempt: bool) -> list[BlockMove] | None:
        """Take an extent out of the book; None, and nothing has changed, if that is not possible.

        What is returned has to be copied on the device behind the steps in flight and before the next one.
        """
        running = list(self._running.values())
        clearing = plan_clearing(self.blocks, running, extent, may_move=may_move, may_preempt=may_preempt)
        if clearing is None:
            return None
        for sequence in clearing.preempted:
            self._preempt(sequence)
        live = self.blocks.live_in(extent)
        targets = self.blocks.available_outside(extent, len(live)) if live else []
        moves = list(map(BlockMove, live, targets))
        self.blocks.move(moves)
        self._moved.follow(moves, self._running)
        self.blocks.remove(extent)
        return moves

    def commit(self, plan: StepPlan, tokens: Sequence[int]) -> list[Emission]:
        """Take in what the oldest step in flight sampled: one token for each row that samples, in order."""
        flight = self._flights.popleft()
        assert flight.plan is plan, f"{plan.step_id=} committed before {flight.plan.step_id=}"
        num_samples = sum(row.samples for row in plan.rows)
        assert len(tokens) == num_samples, f"{len(tokens)} tokens for {num_samples} samples, {plan.step_id=}"
        emissions: list[Emission] = []
        sample_index = 0
        for row, sequence in zip(plan.rows, flight.sequences, strict=True):
            sequence.num_in_flight -= 1
            if not sequence.is_ended:
                if sequence.slot is not None:
                    self._publish(sequence, row.start + row.num_tokens)
                if row.samples:
                    emissions.append(self._append(sequence, tokens[sample_index], sample_index))
            sample_index += row.samples
        return emissions

    def take_preempted(self) -> tuple[RequestId, ...]:
        """Who lost its slot since the last call, has not ended meanwhile and will be admitted again."""
        preempted, self._preempted = tuple(self._preempted), []
        return preempted

    def check(self) -> None:
        """Raise if the books disagree with each other. Tests call it after every change."""
        self.blocks.check()
        running, waiting = list(self._running.values()), list(self._waiting)
        order = [sequence.arrival for sequence in running + waiting]
        assert order == sorted(set(order)), f"running, then waiting, must be in order of arrival: {order}"
        assert {s.request.request_id for s in running + waiting} == self._live.keys(), f"{self._live.keys()=}"
        slots = sorted([s.slot for s in running if s.slot is not None] + self._free_slots)
        assert slots == list(range(self.limits.max_seqs)), f"slots lost or given twice: {slots}"
        holding = [s.arrival for s in waiting if s.slot is not None or s.blocks]
        assert not holding, f"waiting with a slot or blocks: {holding}"
        midway = [s.arrival for s in running[:-1] if s.num_planned < s.num_prefill]
        assert not midway, f"in the midst of the prompt and not the youngest: {midway}"
        holders = Counter(block for s in running for block in s.blocks)
        in_book = self.blocks.holders()
        for block in sorted(holders.keys() | in_book.keys()):
            count = in_book.get(block, 0)
            assert holders[block] == count, f"{block=} held {holders[block]} times, in the book {count}"
            assert count <= 1 or self.blocks.is_published(block), f"{block=} shared without digest"
        self._moved.check(self._running)
        in_flight = Counter(s.arrival for flight in self._flights for s in flight.sequences)
        for s in running + waiting:
            assert s.num_in_flight == in_flight[s.arrival], f"{s.arrival=} {s.num_in_flight=} {in_flight=}"
            assert s.num_pending <= s.num_in_flight, f"{s.arrival=} {s.num_pending=} {s.num_in_flight=}"

    def _advance_running(self, draft: Draft) -> None:
        """Decode rows, oldest first; the rest of a prompt comes last, since it is the youngest's."""
        for sequence in list(self._running.values()):
            if draft.tokens_left == 0:
                return
            if sequence.slot is None:
                continue  # preempted a moment ago
            num_tokens = min(sequence.num_unplanned, draft.tokens_left)
            if num_tokens and self._make_room(sequence, num_tokens, draft):
                draft.add_row(sequence, num_tokens)

    def _make_room(self, sequence: LiveSequence, num_tokens: int, draft: Draft) -> bool:
        """Give it blocks for its next tokens, preempting the youngest; False if that was itself."""
        num_blocks = self._num_blocks(sequence.num_planned + num_tokens) - len(sequence.blocks)
        if num_blocks <= 0:
            return True
        while (blocks := self.blocks.allocate(num_blocks)) is None:
            youngest = next(reversed(self._running.values()))
            self._preempt(youngest)
            draft.has_preempted = True
            if youngest is sequence:
                return False
        draft.assign(sequence, blocks)
        return True

    def _admit_waiting(self, draft: Draft) -> None:
        while self._waiting and self._free_slots and draft.tokens_left:
            if not self._admit(self._waiting[0], draft):
                return

    def _admit(self, sequence: LiveSequence, draft: Draft) -> bool:
        """Start the oldest waiting one, on top of the prefix that is found; False if it must wait."""
        if sequence.num_in_flight:
            return False
        request, num_tokens = sequence.request, len(sequence.tokens)
        hits = self._known_prefix(sequence).blocks
        num_cached = len(hits) * self.blocks.block_tokens
        num_first = min(num_tokens - num_cached, draft.tokens_left)
        # Room for all of it, though only the first chunk takes its blocks now: one that starts without would
        # preempt itself at a later chunk and compute the first ones again and again.
        if not self.blocks.can_allocate(self._num_blocks(num_tokens) - len(hits), beside=hits):
            return False
        self.blocks.take(hits)
        blocks = self.blocks.allocate(self._num_blocks(num_cached + num_first) - len(hits))
        assert blocks is not None, f"{num_tokens=} {self.blocks.num_available=}"

        self._waiting.popleft()
        self._running[request.request_id] = sequence
        sequence.slot = heapq.heappop(self._free_slots)
        sequence.num_prefill = num_tokens
        sequence.num_planned = num_cached
        sequence.num_published = len(hits)
        draft.admissions.append(
            Admission(
                request_id=request.request_id,
                slot=sequence.slot,
                tokens=tuple(sequence.tokens),
                num_prompt_tokens=len(request.prompt),
                num_cached_tokens=num_cached,
                sampling=request.sampling,
            )
        )
        draft.assign(sequence, hits + blocks)
        draft.add_row(sequence, num_first)
        return True

    def _known_prefix(self, sequence: LiveSequence) -> KnownPrefix:
        """The blocks that a waiting sequence would find computed."""
        block_tokens = self.blocks.block_tokens
        extend_digests(sequence.digests, sequence.tokens, sequence.request.salt, block_tokens)
        # At least one token is computed, for there must be something to sample from.
        sequence.prefix.follow(self.blocks, sequence.digests, (len(sequence.tokens) - 1) // block_tokens)
        return sequence.prefix

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.blocks.block_tokens)

    def _publish(self, sequence: LiveSequence, num_computed: int) -> None:
        """Offer the blocks that are full of computed and known tokens to the prefix cache."""
        num_full = num_computed // self.blocks.block_tokens
        if num_full <= sequence.num_published:
            return
        extend_digests(sequence.digests, sequence.tokens, sequence.request.salt, self.blocks.block_tokens)
        for index in range(sequence.num_published, num_full):
            self.blocks.publish(sequence.blocks[index], sequence.digests[index])
        sequence.num_published = num_full

    def _append(self, sequence: LiveSequence, token: int, sample_index: int) -> Emission:
        """Add a sampled token, and end the sequence if it was the last."""
        request = sequence.request
        num_before = len(sequence.tokens) - len(request.prompt)
        sequence.tokens.append(token)
        sequence.num_pending -= 1
        reason = None
        if _stops(request, token, num_before):
            reason = FinishReason.STOP
        elif request.guide is not None:
            reason = request.guide.take(token)
        if reason is None and len(sequence.tokens) == sequence.max_length:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(sequence)
        return Emission(request.request_id, token, sample_index, reason)

    def _preempt(self, sequence: LiveSequence) -> None:
        """Back to the head of the queue: the youngest that ran is older than all that wait."""
        self._stop_running(sequence)
        self._waiting.appendleft(sequence)
        self._preempted.append(sequence.request.request_id)

    def _end(self, sequence: LiveSequence) -> None:
        sequence.is_ended = True
        request_id = sequence.request.request_id
        del self._live[request_id]
        self._preempted = [one for one in self._preempted if one != request_id]
        if sequence.slot is None:
            self._waiting.remove(sequence)
        else:
            self._stop_running(sequence)

    def _stop_running(self, sequence: LiveSequence) -> None:
        assert sequence.slot is not None, f"{sequence.arrival=}"
        del self._running[sequence.request.request_id]
        self._moved.forget(sequence.request.request_id)
        heapq.heappush(self._free_slots, sequence.slot)
        self.blocks.release(sequence.blocks)
        sequence.slot = None
        sequence.blocks = []


def _stops(request: EngineRequest, token: int, num_before: int) -> bool:
    """Whether a token that follows `num_before` sampled ones ends the request."""
    return num_before >= request.sampling.min_tokens and token in request.sampling.stop_ids
