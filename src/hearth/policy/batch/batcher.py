"""Continuous batching: which tokens of which sequences the next engine step computes.

Runs nothing and knows no text, no clock and no device: a `StepPlan` goes out, token ids come back.

The founding idea: there is no prefill phase and no decode phase. Every sequence has tokens, and a count
of those whose KV is planned; a step moves that count forward for as many sequences as the token budget
allows, the first in line first. A sequence that runs needs one token (the one it sampled last), a sequence
that starts needs many and takes them in chunks. The line decides everything: sequences are admitted in its
order, and when blocks run out the last one gives up its own and is computed again later. Nobody starts while
another is in the midst of its prompt, and the first always advances.

The line is that of arrival, but who adds a request may have it stand there since another time (`line_s`), as
batch requests do, which give way. Then one that waits may stand before some that run. It starts beside them,
unless it lacks a slot or blocks: for these the last in line give up theirs, as does who is behind it and in
the midst of a prompt. Whoever stands before all that may still come is preempted by none of them: so a
request that is `line_s` late gives way for just as long.

Whoever decodes waits for the end of the step, and so do other models of the device. So prompts may be allowed
fewer tokens than the budget has; how many is not decided here (`prompt_allowance.py`). Beside requests of
which nobody sees a token before the last they have the whole budget: for these only the sum counts.

Steps run one ahead: step n+1 is planned before the tokens of step n are known.

    plan n    plan n+1    commit n    plan n+2    commit n+1    ...

What a sampled token is does not matter for planning, only that there is one: `num_pending` says how many
tokens the device knows and the host does not. Only a stop token or a failure comes as a surprise, one
row too late; that row's token is dropped. A guided sequence is the exception: what may come next depends on
its last token, so it sits out the step in between. Blocks and slots are reused at once, because the device
runs steps in order: whatever a late row writes, the next owner overwrites before reading.

For the same reason a prompt is a known prefix from the moment it is planned, not only once it is committed:
a step writes the KV of all its rows in a layer before any row attends there. So of many prompts that begin
alike and arrive together the first computes the beginning, and the others read it in the very same step. If
that row's logits turn out to be NaN, or its request ends or is preempted before the commit, its blocks are
withdrawn: requests that hold them keep them, and no other one finds them.

A request of no tokens (`max_tokens` of 0) is one whose prompt alone is wanted, for its embedding or for the
logprobs of its tokens. It ends like all others, by a token, of which nobody is told. Where something is
wanted of every token of a prompt, no known prefix is skipped.

Requests may have adapters, which are with the model before they are added (whoever adds them holds back the
others). Here they are like all others: an adapter has no share and no queue, so the line decides between two
adapters as it does between two requests of one. Only no two of them share a prefix.

Whom to preempt is said by `preemption.py`, what a token does to its sequence by `step_commit.py`.

Who only simulates steps may `skip` those in which nothing happens but that every sequence gets a token.

KV may grow and shrink between steps. `wanted_blocks` says what the next plan could use; `clear` takes blocks
away, for which live ones move, with their copies queued behind the steps in flight, or the last give up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

from hearth.core.types import RequestId
from hearth.policy.batch.batch_limits import BatchLimits, RequestLimits
from hearth.policy.batch.blocks import BlockBook, BlockMove
from hearth.policy.batch.decode_run import DecodeRun, blocks_wanted_by, decode_run, last_step, skip_steps
from hearth.policy.batch.elastic import KvUse
from hearth.policy.batch.late_books import LateBooks
from hearth.policy.batch.plan import Admission, CommittedStep, EngineRequest, StepPlan, TableWrites
from hearth.policy.batch.plan_draft import NOBODY, DecodedSequences, PlanDraft, PlannedStep
from hearth.policy.batch.preemption import preempted_for_extent, preempted_for_first
from hearth.policy.batch.sequence import LiveSequence, Sequences
from hearth.policy.batch.step_commit import StepCommit

MAX_IN_FLIGHT = 2  #: plans that may wait for their commit


class Batcher:
    """Mutable; written only by the step loop that owns it. Others may read the `blocks`, which it writes."""

    def __init__(self, limits: BatchLimits, blocks: BlockBook) -> None:
        self.limits = limits
        self.request_limits = RequestLimits(limits.max_context, blocks.capacity_tokens)
        self.blocks = blocks
        self._sequences = Sequences(limits.max_seqs, blocks.block_tokens)
        #: Planned and not committed, oldest first; at most MAX_IN_FLIGHT.
        self._flights: deque[PlannedStep] = deque()
        self._num_steps = 0
        self._last_decode = NOBODY  #: of the step that was planned last
        self._late_books = LateBooks(blocks)  #: whatever reads the `blocks` here settles them first

    @property
    def has_work(self) -> bool:
        """True if anything is left to plan or to commit."""
        return bool(self._sequences or self._flights)

    @property
    def num_running(self) -> int:
        return self._sequences.num_running

    @property
    def num_waiting(self) -> int:
        return self._sequences.num_waiting

    @property
    def _num_committed(self) -> int:
        return self._num_steps - len(self._flights)

    # Requests.

    def add(self, request: EngineRequest) -> None:
        """Queue a request that fits."""
        assert request.request_id not in self._sequences, f"request added twice: {request.request_id}"
        self.request_limits.check(request)
        self._sequences.add(request, self.request_limits.length_of(request))

    def cancel(self, request_id: RequestId) -> bool:
        """End a request now, whatever it is doing; what it still samples is dropped. False if unknown."""
        if request_id not in self._sequences:
            return False
        self.settle()  # which may publish blocks of it
        sequence = self._sequences[request_id]
        self._late_books.publish_committed(sequence)
        self._late_books.release(self._sequences.end(sequence))
        self._last_decode = NOBODY  # or it would keep the text of who has ended
        self.settle()
        return True

    def take_preempted(self) -> tuple[RequestId, ...]:
        """Return who lost its slot since the last call and will be admitted again; none of them has ended."""
        return self._sequences.take_preempted()

    # Steps: who computes what.

    def plan(
        self, max_prompt_tokens: int | None = None, max_lone_tokens: int | None = None
    ) -> StepPlan | None:
        """Decide the next step; None if nothing can be computed before a commit or an arrival.

        `max_prompt_tokens`: of prompts beside requests that decode, `max_lone_tokens`: where nobody does, or
        the larger of both where nobody sees the tokens of those who do; a block at least. None: what fits.
        """
        assert len(self._flights) < MAX_IN_FLIGHT, f"commit first: {len(self._flights)} steps in flight"
        self.settle()
        for sequence in self._in_the_way():
            self._preempt(sequence)
        draft = PlanDraft(self.blocks.block_tokens, self.limits.step_sizes)
        has_streamed = self._add_decode_rows(draft)
        most_tokens = max_prompt_tokens if has_streamed else max_lone_tokens
        if len(draft.decode) and most_tokens is not None and max_prompt_tokens is not None:
            most_tokens = max(most_tokens, max_prompt_tokens)
        draft.allow_prompts(self.limits.max_batch_tokens - len(draft.decode), most_tokens)
        self._continue_prompt(draft)
        if not draft.has_preempted:
            self._admit_waiting(draft)
        if not draft.sequences:
            return None
        self._sequences.take_table_writes(draft.table_writes)
        plan = draft.step_plan(self._num_steps)
        self._num_steps += 1
        self._flights.append(PlannedStep(plan, draft.sequences))
        return plan

    def _in_the_way(self) -> list[LiveSequence]:
        """Return who has to give up slot and blocks for the first that waits, of those behind it."""
        first = self._sequences.first_waiting(self._num_committed)
        if first is None or not (behind := self._sequences.behind(first)):
            return []
        has_free_slot = self._sequences.has_free_slot
        return preempted_for_first(self.blocks, first, behind, has_free_slot=has_free_slot)

    def _add_decode_rows(self, draft: PlanDraft) -> bool:
        """Add decode rows, in line; return whether one that is streamed decodes, in this step or the next."""
        # Column by column: there may be a thousand rows, of which few need more than their number.
        decoding = self._sequences.decoding()
        ready = [one for one in decoding if one.num_planned < one.max_planned]
        del ready[self.limits.max_batch_tokens :]
        self._make_room_for_all([one for one in ready if one.num_planned == one.room_tokens], draft)
        if draft.has_preempted:
            ready = [one for one in ready if one.slot is not None]
        draft.add_decode(ready, self._last_decode, has_guides=self._sequences.num_guided > 0)
        self._last_decode = DecodedSequences(ready, draft.decode)
        if not self._sequences.num_streamed:
            return False
        # A guided one that sits out this step waits for its end as those do that have a row.
        return any(one.request.is_streamed for one in ready) or any(
            one.guide is not None and one.slot is not None and one.request.is_streamed for one in decoding
        )

    def _make_room_for_all(self, sequences: Sequence[LiveSequence], draft: PlanDraft) -> None:
        """Give each sequence a block for its next token, preempting the last in line where few are left."""
        blocks = self.blocks.allocate(len(sequences))
        if blocks is not None:
            for sequence, block in zip(sequences, blocks, strict=True):
                draft.assign(sequence, [block])
            return
        for sequence in sequences:
            if sequence.slot is not None:  # else preempted a moment ago
                self._make_room(sequence, 1, draft)

    def _continue_prompt(self, draft: PlanDraft) -> None:
        """Go on with the prompt that is in the midst, if there is one."""
        if not draft.has_room or (midway := self._sequences.midway()) is None:
            return
        while True:
            num_rows = len(draft.decode)
            num_tokens = draft.chunk_tokens(midway.num_planned, midway.num_prefill)
            has_room = self._make_room(midway, num_tokens, draft)
            if draft.has_preempted:
                draft.drop_preempted()  # who stands behind it may have had a row
            if not has_room:
                return
            if len(draft.decode) == num_rows:
                break  # else the step has other padding now, and room for more or for less
        draft.add_prompt(midway, num_tokens)
        self._late_books.publish(midway, midway.num_planned)

    def _make_room(self, sequence: LiveSequence, num_tokens: int, draft: PlanDraft) -> bool:
        """Give a sequence blocks for its next tokens, preempting the last in line; False if that was it."""
        num_blocks = self.blocks.num_blocks_of(sequence.num_planned + num_tokens) - len(sequence.blocks)
        if num_blocks <= 0:
            return True
        while (blocks := self.blocks.allocate(num_blocks)) is None:
            last = self._sequences.last()
            self._preempt(last)
            draft.has_preempted = True
            if last is sequence:
                return False
        draft.assign(sequence, blocks)
        return True

    def _preempt(self, sequence: LiveSequence) -> None:
        """Have a sequence wait, at its place, with nothing but its tokens."""
        self._last_decode = NOBODY  # or the next rows could name a slot that it has no more
        self._late_books.publish_committed(sequence)
        self.settle()
        self.blocks.release(self._sequences.preempt(sequence, self._num_steps))

    def _admit_waiting(self, draft: PlanDraft) -> None:
        """Start waiting sequences, in line, as long as there is room."""
        next_to_start, num_committed = self._sequences.next_to_start, self._num_committed
        prefixes, num_blocks_of = self.blocks.prefixes, self.blocks.num_blocks_of
        started, digests, num_promised = list[LiveSequence](), set[bytes](), 0
        while draft.has_room and (first := next_to_start(num_committed)) is not None:
            if not started:
                self.settle()  # publishes prompts of this very step
            hits = first.known_prefix(prefixes).blocks
            # Of the first block that is not known, if it was looked for.
            digest = first.chain.computed(len(hits))
            # One that starts in this step computes it, and has no blocks yet.
            if digest in digests and not first.reads_all:
                self._allocate_first(started, draft)
                started, digests, num_promised = [], set(), 0
                continue
            if not self._admit(first, hits, draft, num_promised):
                break
            started.append(first)
            num_promised += num_blocks_of(first.num_planned) - len(hits)
            if digest is not None:
                digests.add(digest)
        if started:
            self._allocate_first(started, draft)

    def _admit(self, sequence: LiveSequence, hits: list[int], draft: PlanDraft, num_promised: int) -> bool:
        """Start the first waiting sequence, with the blocks of its known prefix; False: it must wait.

        `num_promised`: blocks that sequences get which start with it and have none yet.
        """
        # In few calls: dozens may start in one step.
        request, num_tokens, block_tokens = sequence.request, len(sequence.tokens), self.blocks.block_tokens
        num_hits = len(hits)
        num_cached = num_hits * block_tokens
        num_first = draft.chunk_tokens(num_cached, num_tokens)
        # Room for all of it, though only the first chunk takes its blocks now: one that starts without would
        # preempt itself at a later chunk and compute the first ones again and again.
        num_most = num_promised + -(-num_tokens // block_tokens) - num_hits
        if not num_first or not self.blocks.can_allocate(num_most, beside=hits):
            return False
        if hits:
            self.blocks.take(hits)
        slot = self._sequences.start(sequence)
        sequence.blocks, sequence.num_planned = hits, num_cached
        sequence.num_published = sequence.num_confirmed = num_hits
        tokens, num_prompt = sequence.tokens[:], len(request.prompt)
        draft.admissions.append(
            Admission(sequence.request_id, slot, tokens, num_prompt, num_cached, request.sampling)
        )
        draft.add_prompt(sequence, num_first)
        return True

    def _allocate_first(self, started: Sequence[LiveSequence], draft: PlanDraft) -> None:
        """Give sequences that start in this step the blocks of their first chunks, all at once."""
        num_blocks_of = self.blocks.num_blocks_of
        ends = list(accumulate(num_blocks_of(one.num_planned) - len(one.blocks) for one in started))
        blocks = self.blocks.allocate(ends[-1])
        assert blocks is not None, f"{ends[-1]=} {self.blocks.num_available=}"
        for sequence, begin, end in zip(started, [0, *ends], ends, strict=False):
            draft.assign_first(sequence, blocks[begin:end])
            self._late_books.publish(sequence, sequence.num_planned)

    # Steps: what came of them.

    def commit(
        self, plan: StepPlan, tokens: Sequence[int], broken_rows: Collection[int] = ()
    ) -> CommittedStep:
        """Take in what the oldest step in flight sampled: one token for each row that samples, in order.

        `broken_rows` are the indices of rows behind which the logits were not finite. Their tokens mean
        nothing, their KV may be wrong, and their requests fail.
        """
        committed = self.take_tokens(plan, tokens, broken_rows)
        self.settle()
        return committed

    def take_tokens(
        self, plan: StepPlan, tokens: Sequence[int], broken_rows: Collection[int] = ()
    ) -> CommittedStep:
        """Commit all but the books of blocks: a long prompt has many, and its reader waits for a token.

        Until `settle` is called, here or by whatever needs these books, blocks of who has ended are held.
        """
        flight = self._flights.popleft()
        assert flight.plan is plan, f"{plan.step_id=} committed before {flight.plan.step_id=}"
        committed = StepCommit(flight, self._sequences, self._late_books).take(tokens, broken_rows)
        if committed.finished or committed.failures:
            self._last_decode = NOBODY  # or it would keep the text of who has ended
        return committed

    @property
    def is_settled(self) -> bool:
        """True if the books of blocks are those of all that was planned and committed."""
        return self._late_books.is_settled

    def settle(self) -> None:
        """Publish and release blocks, which `plan` and `take_tokens` have left to be done."""
        self._late_books.settle()

    # Who waits.

    @property
    def has_newcomer(self) -> bool:
        """True if a request with a reader that runs, or could, waits for its first token."""
        return self._has_newcomer_to_start or self._sequences.awaits_first_token

    @property
    def newcomers_are_planned(self) -> bool:
        """True if newcomers wait, and all that they wait for is in steps that were planned."""
        sequences = self._sequences
        is_planned = sequences.awaits_first_token and sequences.midway() is None
        return is_planned and not self._has_newcomer_to_start

    @property
    def _has_newcomer_to_start(self) -> bool:
        first = self._sequences.first_waiting(self._num_committed)
        if first is None or first.request.is_batch:
            return False
        return bool(self._sequences.next_to_start(self._num_committed) or self._in_the_way())

    def waiting_prompt_tokens(self) -> int:
        """Return the length of all prompts that are computed now or could be: a measure of who waits."""
        midway = self._sequences.midway()
        num_tokens = 0 if midway is None else midway.num_prefill
        return num_tokens + sum(len(one.tokens) for one in self._sequences.next_in_line(self._num_committed))

    # KV that comes and goes.

    def kv_use(self) -> KvUse:
        """Return how KV is used between two steps, for `Elastic` to decide by."""
        self.settle()
        return KvUse(
            num_blocks=self.blocks.num_blocks,
            num_live=self.blocks.num_live,
            num_cached=self.blocks.num_cached,
            num_wanted=self.wanted_blocks(),
            num_running=self.num_running,
        )

    def wanted_blocks(self) -> int:
        """Return how many blocks the next plan would hand out if there were enough for everybody.

        A prompt counts with all that is left of it, for it is not admitted without room for that. Prompts
        that begin alike count as if none of them found the blocks of another.
        """
        self.settle()
        tokens_left, num_wanted = self.limits.max_batch_tokens, 0
        for sequence in self._sequences.decoding():
            num_planned = sequence.num_planned
            if num_planned < sequence.max_planned:
                tokens_left -= 1
                num_wanted += num_planned == sequence.room_tokens
        if (midway := self._sequences.midway()) is not None:
            tokens_left -= midway.num_prefill - midway.num_planned
            num_wanted += self.blocks.num_blocks_of(midway.num_prefill) - len(midway.blocks)
        for sequence in self._coming():
            if tokens_left <= 0:
                break
            num_hits = len(sequence.known_prefix(self.blocks.prefixes))
            num_tokens = len(sequence.tokens)
            tokens_left -= num_tokens - num_hits * self.blocks.block_tokens
            num_wanted += self.blocks.num_blocks_of(num_tokens) - num_hits
        return num_wanted

    def _coming(self) -> Iterator[LiveSequence]:
        """Yield who could be admitted now if there were blocks, also one for whom a slot is given up."""
        yield from self._sequences.next_in_line(self._num_committed)
        first = self._sequences.first_waiting(self._num_committed)
        if first is not None and not self._sequences.has_free_slot and self._sequences.behind(first):
            yield first

    def cached_to_spare(self) -> int:
        """Return how many cached blocks the next plan could hand out: not what those who wait would read."""
        self.settle()
        hits: set[int] = set()
        for sequence in self._sequences.next_in_line(self._num_committed):
            sequence.known_prefix(self.blocks.prefixes).collect(hits)
        return self.blocks.num_cached - len(self.blocks.cached_among(hits))

    def add_blocks(self, extent: range) -> None:
        """Have blocks of KV from now on; what they hold does not matter."""
        self.blocks.add(extent)

    def remove_all_blocks(self) -> None:
        """Have no KV any more. No sequence runs."""
        self.settle()
        self.blocks.remove_all()

    def clear(
        self, extent: range, *, may_move: bool, may_preempt: bool, keeps_floor: bool = True
    ) -> list[BlockMove] | None:
        """Take an extent out of the book; None, and nothing has changed, if that is not possible.

        `keeps_floor`: nobody is preempted where less than what is promised would be left. What is returned
        has to be copied on the device behind the steps in flight and before the next one.
        """
        self.settle()
        if keeps_floor and self.blocks.num_blocks - len(extent) < self.blocks.floor_blocks:
            may_preempt = False
        running = self._sequences.running()
        preempted = preempted_for_extent(
            self.blocks, running, extent, may_move=may_move, may_preempt=may_preempt
        )
        if preempted is None:
            return None
        for sequence in preempted:
            self._preempt(sequence)
        live = self.blocks.live_in(extent)
        targets = self.blocks.available_outside(extent, len(live)) if live else []
        moves = list(map(BlockMove, live, targets))
        self.blocks.move(moves)
        self._sequences.follow(moves)
        self.blocks.remove(extent)
        return moves

    # Steps that are only simulated.

    def decode_run(self, max_steps: int, more_blocks: int = 0) -> DecodeRun:
        """Return the next steps in which nothing happens but that every running sequence gets a token.

        Nobody is admitted, ends at his limit or is preempted, and blocks that are free suffice, with so many
        more; beyond `max_steps` there may be further such steps. None of them, where a step is in flight that
        does anything else.
        """
        self.settle()
        flights = [flight.sequences for flight in self._flights]
        assert len(flights) < MAX_IN_FLIGHT, f"commit first: {len(flights)} steps in flight"
        running = self._sequences.running()
        if (
            len(running) > self.limits.max_batch_tokens
            or self._sequences.next_to_start(self._num_committed)
            or self._in_the_way()
        ):
            max_steps = 0
        num_blocks = self.blocks.num_free + more_blocks
        return decode_run(running, flights, max_steps, num_blocks, self.blocks.block_tokens)

    def blocks_wanted_by(self, num_steps: int) -> int:
        """Return how many blocks so many steps of `decode_run` hand out."""
        return blocks_wanted_by(self._sequences.running(), num_steps, self.blocks.block_tokens)

    def skip(self, num_steps: int, token: int) -> StepPlan | None:
        """Have so many steps of `decode_run` be over, in each of which all that run sampled `token`.

        The books are the same as if that often the next step had been planned, and the oldest in flight
        committed. Returns the step that is in flight then, if one was. Blocks that had to come are there.
        """
        run = self.decode_run(num_steps)
        assert run.num_steps == num_steps, f"{num_steps=} {run=}"
        running = self._sequences.running()
        skip_steps(running, self.blocks, num_steps, token)
        self._sequences.take_table_writes(TableWrites())
        self._num_steps += num_steps
        if not self._flights:
            return None
        self._flights[0] = last_step(running, self._num_steps - 1)
        return self._flights[0].plan

    def check(self) -> None:
        """Raise if the books disagree with each other. Tests call it after every change."""
        self.settle()
        flights = [flight.sequences for flight in self._flights]
        self._sequences.check(flights, self._num_committed)
        self.blocks.check(Counter(block for s in self._sequences.running() for block in s.blocks))
