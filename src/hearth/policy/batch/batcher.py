"""Continuous batching: which tokens of which sequences the next engine step computes.

Runs nothing and knows no text, no clock and no device: a `StepPlan` goes out, token ids come back.

There is no prefill phase and no decode phase. Every sequence has tokens, and a count of those whose KV is
planned; a step advances that count for as many sequences as the token budget allows, in queue order. A
running sequence needs one token, the one it sampled last; a starting one needs many and takes them in chunks.
The queue decides everything: sequences are admitted in its order, and when blocks run out the last one loses
its own and is computed again later. No sequence starts while another one is in the middle of its prompt, and
the first always advances.

The queue is ordered by arrival, but a request may be queued as of another time (`line_s`), as batch requests
are. So a waiting sequence may come before running ones. It starts beside them, unless it lacks a slot or
blocks: then the last ones are preempted, as is one behind it in the middle of a prompt. A request that is
`line_s` late yields to others for exactly that long.

Decoding sequences, and other models on the device, wait for the end of the step. So prompts may get fewer
tokens than the budget has (`prompt_allowance.py`). If no decoding request is streamed, they get all of it.

Steps run one ahead: step n+1 is planned before the tokens of step n are known.

    plan n    plan n+1    commit n    plan n+2    commit n+1    ...

Planning does not depend on which token was sampled: `num_pending` counts the tokens that the device knows and
the host does not. Only a stop token or a failure comes as a surprise, one row too late; the token of that row
is dropped. A guided sequence sits out every other step, because its last token decides what may come next,
except where its guide needs no masks. In
a pipeline of stages every sequence in flight sits out, because its token is known late, and the steps in
flight have different sequences. Only the step behind the return of the oldest one is planned ahead
(`plan_ahead`), so that it can be launched as soon as the tokens are known. Blocks and slots are reused at
once, because each device runs steps in order: the next owner overwrites what a late row writes before
reading it.

For the same reason a prompt is a known prefix as soon as it is planned: a step writes the KV of all its rows
in a layer before any row attends there. So of many equal prompts that arrive together the first computes the
beginning, and the others read it in the same step. If the logits of that row are NaN, or its request ends or
is preempted before the commit, its blocks are withdrawn: sequences that hold them keep them, no other finds
them.

A request with `max_tokens` of 0 wants only its prompt computed, for an embedding or logprobs. It ends like
all others, by a token, which is not reported. If every token of a prompt is read, no known prefix is skipped.

Adapters of requests are loaded before the requests are added. They have no queue of their own; they only keep
prefixes apart.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from itertools import accumulate

from hearth.core.types import RequestId
from hearth.policy.batch.batch_kv import BatchKv
from hearth.policy.batch.batch_limits import BatchLimits, RequestLimits
from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.decode_run import DecodeRun, decode_run, last_step, skip_steps
from hearth.policy.batch.digest_chain import DigestChain
from hearth.policy.batch.late_books import LateBooks
from hearth.policy.batch.plan import Admission, CommittedStep, EngineRequest, StepPlan, TableWrites
from hearth.policy.batch.plan_draft import NOTHING_DECODED, DecodedSequences, PlanDraft, PlannedStep
from hearth.policy.batch.preemption import preempted_for_first
from hearth.policy.batch.prefix import Publication
from hearth.policy.batch.sequence import LiveSequence, Sequences
from hearth.policy.batch.step_commit import StepCommit

#: Plans that may wait for their commit if the device knows each sequence's last token.
MAX_IN_FLIGHT = 2
#: Prompts are cut for the stages of a pipeline into pieces of at least this many tokens: with fewer, a stage
#: would read its weights more often without computing sooner.
MIN_PIECE_TOKENS = 128


class Batcher:
    """Mutable; written only by the step loop that owns it. Other threads may read the `blocks`."""

    def __init__(self, limits: BatchLimits, blocks: BlockBook, num_flights: int | None = None) -> None:
        """Take the number of steps that a pipeline has in flight, if tokens are known by commits alone."""
        self.limits = limits
        self.num_flights = num_flights  #: may be changed, but not from or to None
        self.request_limits = RequestLimits(limits.max_context, blocks.floor_blocks * blocks.block_tokens)
        self.blocks = blocks
        self._sequences = Sequences(limits.max_seqs, blocks.block_tokens, sits_out=num_flights is not None)
        #: Planned and not committed, oldest first; at most `max_in_flight`.
        self._flights: deque[PlannedStep] = deque()
        self._num_steps = 0
        self._last_decode = NOTHING_DECODED  #: of the step that was planned last
        self._late_books = LateBooks(blocks)  #: to be settled before `blocks` are read
        self.kv = BatchKv(limits, blocks, self._sequences, self._late_books, self._preempt)

    @property
    def max_in_flight(self) -> int:
        return MAX_IN_FLIGHT if self.num_flights is None else self.num_flights

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._flights)

    @property
    def num_steps(self) -> int:
        """Steps that were planned so far."""
        return self._num_steps

    @property
    def num_running(self) -> int:
        return self._sequences.num_running

    @property
    def num_waiting(self) -> int:
        return self._sequences.num_waiting

    # Requests.

    def add(self, request: EngineRequest) -> None:
        assert request.request_id not in self._sequences, f"request added twice: {request.request_id}"
        self.request_limits.check(request)
        self._sequences.add(request, self.request_limits.length_of(request))

    def cancel(self, request_id: RequestId) -> bool:
        """End a request now; tokens that it still samples are dropped. False if unknown."""
        if request_id not in self._sequences:
            return False
        self.settle()  # may publish blocks of it
        sequence = self._sequences[request_id]
        self._late_books.publish_committed(sequence)
        self._late_books.release(self._sequences.end(sequence))
        self._last_decode = NOTHING_DECODED  # which holds the ended sequence
        self.settle()
        return True

    def take_preempted(self) -> tuple[RequestId, ...]:
        """Return the requests that were preempted since the last call and have not ended."""
        return self._sequences.take_preempted()

    # KV that moves to and from other workers.

    def computed_blocks(self, request_id: RequestId) -> list[int]:
        """Return the leading full blocks of a request whose KV is computed, or cached while it waits."""
        self.settle()
        if request_id not in self._sequences:
            return []
        sequence = self._sequences[request_id]
        if sequence.slot is None:
            return sequence.known_prefix(self.blocks.prefixes).blocks
        num_blocks, num_tokens = sequence.num_confirmed, len(sequence.tokens)
        if num_tokens > sequence.num_prefill:  # all but the last are computed
            num_blocks = (num_tokens - 1) // self.blocks.block_tokens
        return sequence.blocks[:num_blocks]

    def cache_prefix(self, chain: DigestChain, num_blocks: int) -> tuple[int, list[int]]:
        """Make up to `num_blocks` of a chain known, which the caller fills before the next step.

        Returns how many were known before, and the blocks for those behind them.
        """
        self.settle()
        blocks = self.blocks
        known = blocks.prefixes.match(chain)[:num_blocks]
        blocks.take(known)
        added = blocks.allocate(min(num_blocks - len(known), blocks.num_available)) or []
        if added:
            blocks.publish([Publication(chain, len(known), known[-1] if known else None, added)])
        blocks.release_all([[*known, *added]])
        return len(known), added

    # Planning.

    def plan(
        self, max_prompt_tokens: int | None = None, max_lone_tokens: int | None = None
    ) -> StepPlan | None:
        """Decide the next step; None if nothing can be computed before a commit or an arrival.

        `max_prompt_tokens`: limit of prompt tokens beside streamed decoding; `max_lone_tokens`: beside none;
        the larger one if only requests decode that are not streamed. At least a block. None: no limit.
        """
        num_flights = len(self._flights)
        assert num_flights < self.max_in_flight, f"commit first: {num_flights} steps in flight"
        self.settle()
        for sequence in self._in_the_way():
            self._preempt(sequence)
        draft = PlanDraft(self.blocks.block_tokens, self.limits.step_sizes)
        has_streamed = self._add_decode_rows(draft)
        most_tokens = max_prompt_tokens if has_streamed else max_lone_tokens
        if len(draft.decode) and most_tokens is not None and max_prompt_tokens is not None:
            most_tokens = max(most_tokens, max_prompt_tokens)
        if self.num_flights is not None:
            share = self._prompt_share(self.num_flights - num_flights)
            most_tokens = share if most_tokens is None else min(most_tokens, share)
        draft.allow_prompts(self.limits.max_batch_tokens - len(draft.decode), most_tokens)
        self._continue_prompt(draft)
        if not draft.has_preempted:
            self._admit_waiting(draft)
        if not draft.sequences:
            return None
        self._sequences.take_table_writes(draft.table_writes)
        return self._planned(draft)

    def _planned(self, draft: PlanDraft) -> StepPlan:
        admissions, prompts = tuple(draft.admissions), tuple(draft.prompts)
        plan = StepPlan(self._num_steps, admissions, draft.table_writes, draft.decode, prompts)
        self._num_steps += 1
        self._flights.append(PlannedStep(plan, draft.sequences))
        return plan

    def plan_ahead(self) -> StepPlan | None:
        """Plan the step that decodes what the oldest one in flight samples; None: it has to be planned later.

        For a pipeline, when `plan` finds nothing. Launch it when these tokens are known, before they are
        committed, or call `undo_ahead`; no other change may come first.
        """
        self.settle()
        sequences, oldest = self._sequences, self._flights[0].sequences
        is_starting = sequences.midway() is not None or any(sequences.next_in_line()) or self._in_the_way()
        if is_starting or sequences.has_moved or any(one.guide for one in oldest):
            return None
        others = {one for flight in list(self._flights)[1:] for one in flight.sequences}
        ready = [
            one
            for one in oldest
            if one.slot is not None and one.num_planned < one.max_length - 1 and one not in others
        ]
        del ready[self._decode_share(len(sequences.decoding())) :]
        wanting = [one for one in ready if one.num_planned == one.room_tokens]
        blocks = self.blocks.allocate(len(wanting)) if ready else None
        if blocks is None:
            return None
        draft = PlanDraft(self.blocks.block_tokens)
        for sequence, block in zip(wanting, blocks, strict=True):
            draft.assign(sequence, [block])
        for sequence in ready:
            sequence.max_planned += 1
        draft.add_decode(ready, self._last_decode, has_guides=False)
        self._last_decode = DecodedSequences(ready, draft.decode)
        return self._planned(draft)

    def undo_ahead(self) -> None:
        """Forget the step that `plan_ahead` returned last. Its sequences keep their blocks."""
        step = self._flights.pop()
        self._num_steps -= 1
        self._last_decode = NOTHING_DECODED
        by_slot = {one.slot: one for one in step.sequences}
        for write in step.plan.table_writes:
            self._sequences.rewrite(by_slot[write.slot], write.begin)
        for sequence in step.sequences:
            sequence.num_planned -= 1
            sequence.max_planned -= 1

    def _decode_share(self, num_decoding: int) -> int:
        """Return how many sequences a step may decode, so that no stage of a pipeline waits for tokens."""
        return min(self.limits.max_batch_tokens, -(-num_decoding // (self.num_flights or 1)))

    def _prompt_share(self, num_free: int) -> int:
        """Return how many tokens of prompts one of `num_free` steps has, so that no stage waits for them."""
        midway = self._sequences.midway()
        num_planned = 0 if midway is None else midway.num_planned
        return max(MIN_PIECE_TOKENS, -(-(self.waiting_prompt_tokens() - num_planned) // num_free))

    def _in_the_way(self) -> list[LiveSequence]:
        first = self._sequences.first_waiting()
        if first is None or not (behind := self._sequences.behind(first)):
            return []
        has_free_slot = self._sequences.has_free_slot
        return preempted_for_first(self.blocks, first, behind, has_free_slot=has_free_slot)

    def _add_decode_rows(self, draft: PlanDraft) -> bool:
        """Add decode rows in queue order; return whether a streamed one decodes in this step or the next."""
        # Column by column: there may be a thousand rows, most of which only need their position.
        decoding = self._sequences.decoding()
        ready = [one for one in decoding if one.num_planned < one.max_planned]
        del ready[self._decode_share(len(decoding)) :]
        self._make_room_for_all([one for one in ready if one.num_planned == one.room_tokens], draft)
        if draft.has_preempted:
            ready = [one for one in ready if one.slot is not None]
        draft.add_decode(ready, self._last_decode, has_guides=self._sequences.num_guided > 0)
        self._last_decode = DecodedSequences(ready, draft.decode)
        if not self._sequences.num_streamed:
            return False
        # A guided one that sits out this step waits for its end as well.
        return any(one.request.is_streamed for one in ready) or any(
            one.sits_out and one.slot is not None and one.request.is_streamed for one in decoding
        )

    def _make_room_for_all(self, sequences: Sequence[LiveSequence], draft: PlanDraft) -> None:
        """Give each sequence a block for its next token, preempting the last in line if too few are left."""
        blocks = self.blocks.allocate(len(sequences))
        if blocks is not None:
            for sequence, block in zip(sequences, blocks, strict=True):
                draft.assign(sequence, [block])
            return
        for sequence in sequences:
            if sequence.slot is not None:  # else just preempted
                self._make_room(sequence, 1, draft)

    def _continue_prompt(self, draft: PlanDraft) -> None:
        if not draft.has_room or (midway := self._sequences.midway()) is None:
            return
        while True:
            num_rows = len(draft.decode)
            num_tokens = draft.chunk_tokens(midway.num_planned, midway.num_prefill)
            has_room = self._make_room(midway, num_tokens, draft)
            if draft.has_preempted:
                draft.drop_preempted()  # sequences behind it may have had rows
            if not has_room:
                return
            if len(draft.decode) == num_rows:
                break  # else the padding of the step changed, and with it the room for this prompt
        draft.add_prompt(midway, num_tokens)
        self._late_books.publish(midway, midway.num_planned)

    def _make_room(self, sequence: LiveSequence, num_tokens: int, draft: PlanDraft) -> bool:
        """Give a sequence blocks for its next tokens, preempting the last in line; False: that was itself."""
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
        self._last_decode = NOTHING_DECODED  # which names the slot that it loses
        self._late_books.publish_committed(sequence)
        self._late_books.release(self._sequences.preempt(sequence, self._num_steps))
        self.settle()

    def _admit_waiting(self, draft: PlanDraft) -> None:
        sequences, first_waiting = self._sequences, self._sequences.first_waiting
        prefixes, num_blocks_of = self.blocks.prefixes, self.blocks.num_blocks_of
        started, digests, num_promised = list[LiveSequence](), set[bytes](), 0
        while draft.has_room and (first := first_waiting()) is not None and sequences.has_free_slot:
            if not started:
                self.settle()  # publishes prompts of this step
            hits = first.known_prefix(prefixes).blocks
            digest = first.chain.computed(len(hits))  # of the first unknown block, if it was searched
            # A sequence that starts in this step computes that block: allocate and publish it first.
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

        `num_promised`: blocks for sequences that start in this step and have none yet.
        """
        # Few calls: dozens may start in one step.
        request, num_tokens, block_tokens = sequence.request, len(sequence.tokens), self.blocks.block_tokens
        num_hits = len(hits)
        num_cached = num_hits * block_tokens
        num_first = draft.chunk_tokens(num_cached, num_tokens)
        # Room for all of it, though only the first chunk takes blocks now: else it would preempt itself at a
        # later chunk and compute the first ones again and again.
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
        num_blocks_of = self.blocks.num_blocks_of
        ends = list(accumulate(num_blocks_of(one.num_planned) - len(one.blocks) for one in started))
        blocks = self.blocks.allocate(ends[-1])
        assert blocks is not None, f"{ends[-1]=} {self.blocks.num_available=}"
        for sequence, begin, end in zip(started, [0, *ends], ends, strict=False):
            draft.assign_first(sequence, blocks[begin:end])
            self._late_books.publish(sequence, sequence.num_planned)

    # Committing.

    def commit(
        self, plan: StepPlan, tokens: Sequence[int], broken_rows: Collection[int] = ()
    ) -> CommittedStep:
        """Take the tokens of the oldest step in flight: one for each row that samples, in order.

        `broken_rows`: rows whose logits were not finite. Their requests fail, and their KV is withdrawn.
        """
        committed = self.take_tokens(plan, tokens, broken_rows)
        self.settle()
        return committed

    def take_tokens(
        self, plan: StepPlan, tokens: Sequence[int], broken_rows: Collection[int] = ()
    ) -> CommittedStep:
        """Commit all but the books of blocks, which take long for long prompts: readers wait for the tokens.

        Ended requests hold their blocks until `settle`.
        """
        flight = self._flights.popleft()
        assert flight.plan is plan, f"{plan.step_id=} committed before {flight.plan.step_id=}"
        self._sequences.num_committed += 1
        committed = StepCommit(flight, self._sequences, self._late_books).take(tokens, broken_rows)
        if committed.finished or committed.failures:
            self._last_decode = NOTHING_DECODED  # which holds the ended sequence
        return committed

    @property
    def is_settled(self) -> bool:
        return self._late_books.is_settled

    def settle(self) -> None:
        """Publish and release the blocks that `plan` and `take_tokens` have left for later."""
        self._late_books.settle()

    # Requests that wait for their first token.

    @property
    def has_newcomer(self) -> bool:
        return self._has_newcomer_to_start or self._sequences.awaits_first_token

    @property
    def newcomers_are_planned(self) -> bool:
        sequences = self._sequences
        is_planned = sequences.awaits_first_token and sequences.midway() is None
        return is_planned and not self._has_newcomer_to_start

    @property
    def _has_newcomer_to_start(self) -> bool:
        first = self._sequences.first_waiting()
        if first is None or first.request.is_batch:
            return False
        return self._sequences.has_free_slot or bool(self._in_the_way())

    def waiting_prompt_tokens(self) -> int:
        midway = self._sequences.midway()
        num_tokens = 0 if midway is None else midway.num_prefill
        return num_tokens + sum(len(one.tokens) for one in self._sequences.next_in_line())

    # Simulated steps.

    def decode_run(self, max_steps: int, more_blocks: int = 0) -> DecodeRun:
        """Return the next steps, up to `max_steps`, that only give every running sequence a token.

        No sequence is admitted, ends at its limit or is preempted, and free blocks and `more_blocks` suffice.
        Zero steps if a step in flight does anything else.
        """
        self.settle()
        flights = [flight.sequences for flight in self._flights]
        assert len(flights) < self.max_in_flight, f"commit first: {len(flights)} steps in flight"
        running = self._sequences.running()
        if (
            len(running) > self.limits.max_batch_tokens
            or any(self._sequences.next_in_line())
            or self._in_the_way()
        ):
            max_steps = 0
        num_blocks = len(self.blocks.free) + more_blocks
        return decode_run(running, flights, max_steps, num_blocks, self.blocks.block_tokens)

    def skip(self, num_steps: int, token: int) -> StepPlan | None:
        """Skip `num_steps` of `decode_run`, in each of which every sequence samples `token`.

        The books are the same as after planning and committing that many steps. Returns the step in flight
        afterwards, if one was.
        """
        run = self.decode_run(num_steps)
        assert run.num_steps == num_steps, f"{num_steps=} {run=}"
        running = self._sequences.running()
        skip_steps(running, self.blocks, num_steps, token)
        self._sequences.take_table_writes(TableWrites())
        self._num_steps += num_steps
        self._sequences.num_committed += num_steps
        if not self._flights:
            return None
        self._flights[0] = last_step(running, self._num_steps - 1)
        return self._flights[0].plan

    def check(self) -> None:
        self.settle()
        flights = [flight.sequences for flight in self._flights]
        self._sequences.check(flights)
        self.blocks.check(Counter(block for s in self._sequences.running() for block in s.blocks))
