"""A step plan being made, and one that waits for its commit.

The sequences of a plan go with it: by the time of the commit an id could have a new owner.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from hearth.core.types import AdapterId
from hearth.policy.batch.plan import Admission, DecodeRows, Row, StepPlan, TableWrites
from hearth.policy.batch.sequence import LiveSequence


@dataclass(frozen=True, slots=True)
class PlannedStep:
    plan: StepPlan
    sequences: list[LiveSequence]  #: one for each row


@dataclass(frozen=True, slots=True)
class DecodedSequences:
    sequences: list[LiveSequence] = field(default_factory=list)
    rows: DecodeRows = field(default_factory=DecodeRows)


NOTHING_DECODED = DecodedSequences()


@dataclass(slots=True)
class PlanDraft:
    """A step plan being made. Mutable; lives for one call of `Batcher.plan`, its only writer."""

    block_tokens: int
    step_sizes: Sequence[int] = ()  #: tokens that a step with prompts is padded to; empty: no padding
    budget_tokens: int = 0  #: room for prompt tokens
    max_prompt_tokens: int | None = None  #: limit for the sake of waiting requests; None: none
    prompt_tokens: int = 0  #: prompt tokens allowed; padding may be used beyond
    num_prompt_tokens: int = 0  #: prompt tokens so far
    margin_tokens: int = 0  #: of those allowed, kept from prompts that are cut
    is_cut: bool = False  #: the last prompt was cut: none may follow
    admissions: list[Admission] = field(default_factory=list)
    table_writes: TableWrites = field(default_factory=TableWrites)
    decode: DecodeRows = field(default_factory=DecodeRows)
    prompts: list[Row] = field(default_factory=list)
    sequences: list[LiveSequence] = field(default_factory=list)  #: one for each row
    has_preempted: bool = False

    def allow_prompts(self, budget_tokens: int, max_prompt_tokens: int | None) -> None:
        self.budget_tokens = self.prompt_tokens = budget_tokens
        self.max_prompt_tokens = max_prompt_tokens
        if max_prompt_tokens is not None and max_prompt_tokens < budget_tokens:
            self.prompt_tokens = min(budget_tokens, max(max_prompt_tokens, self.block_tokens))
            self.margin_tokens = self.prompt_tokens // 8

    @property
    def tokens_left(self) -> int:
        """The largest chunk of the next prompt: its allowance, or all padding of the step if that is more."""
        if self.is_cut:
            return 0
        return max(self.prompt_tokens - self.num_prompt_tokens, self._padding(self.num_prompt_tokens))

    @property
    def has_room(self) -> bool:
        return (self.prompt_tokens > self.num_prompt_tokens and not self.is_cut) or self.tokens_left > 0

    def chunk_tokens(self, start: int, end: int) -> int:
        """Return how many tokens of a prompt, from `start` on, the step should have; 0: it should wait.

        A prompt that does not fit is cut where the step needs no padding, or else where a block ends.
        """
        if end - start <= self.prompt_tokens - self.num_prompt_tokens and not self.is_cut:
            return end - start
        if end - start <= self.tokens_left:
            return end - start
        num_used = self.num_prompt_tokens
        num_most = self.prompt_tokens - num_used - self.margin_tokens
        if self.prompts and num_most < max(self.prompt_tokens // 4, self.block_tokens):
            num_padding = self._padding(num_used)
            return num_padding if num_padding >= self.block_tokens else 0
        num_before = len(self.decode) + num_used
        if at := bisect_right(self.step_sizes, num_before + num_most):
            num_unpadded = self.step_sizes[at - 1] - num_before
            if 2 * num_unpadded >= num_most:
                return num_unpadded
        num_whole = max(start + num_most, start + self.block_tokens) // self.block_tokens * self.block_tokens
        num_tokens = min(num_whole - start, self.tokens_left)
        return min(num_tokens + self._padding(num_used + num_tokens), end - start)

    def _padding(self, num_prompt_tokens: int) -> int:
        num_tokens = len(self.decode) + num_prompt_tokens
        if not num_prompt_tokens or (at := bisect_left(self.step_sizes, num_tokens)) == len(self.step_sizes):
            return 0
        return min(self.step_sizes[at] - num_tokens, self.budget_tokens - num_prompt_tokens)

    def assign(self, sequence: LiveSequence, blocks: list[int]) -> None:
        assert sequence.slot is not None, f"{sequence.arrival=}"
        self.table_writes.add(sequence.slot, len(sequence.blocks), blocks)
        sequence.blocks += blocks
        sequence.room_tokens += len(blocks) * self.block_tokens

    def assign_first(self, sequence: LiveSequence, blocks: list[int]) -> None:
        assert sequence.slot is not None, f"{sequence.arrival=}"
        sequence.blocks += blocks
        self.table_writes.add(sequence.slot, 0, sequence.blocks)
        sequence.room_tokens = len(sequence.blocks) * self.block_tokens

    def add_decode(
        self, sequences: list[LiveSequence], before: DecodedSequences, *, has_guides: bool
    ) -> None:
        """Compute the next token of each sequence, which has a block for it. `before`: of the last step."""
        positions = [one.num_planned for one in sequences]
        for sequence, position in zip(sequences, positions, strict=True):
            sequence.num_planned = position + 1
        if sequences == before.sequences:
            request_ids, slots, adapters = before.rows.request_ids, before.rows.slots, before.rows.adapters
        else:
            request_ids = [one.request_id for one in sequences]
            slots = [one.slot for one in sequences if one.slot is not None]
            adapters = adapters_of(sequences)
        masks: dict[int, bytes] = {}
        if has_guides:
            masks = {at: mask for at, one in enumerate(sequences) if (mask := one.mask) is not None}
        self.decode = DecodeRows(request_ids, slots, positions, masks, adapters)
        self.sequences += sequences

    def drop_preempted(self) -> None:
        """Remove rows and blocks of preempted sequences, which leaves their tokens to prompts.

        The draft has no prompt yet.
        """
        kept = [at for at, one in enumerate(self.sequences) if one.slot is not None]
        if len(kept) == len(self.sequences):
            return
        self.allow_prompts(self.budget_tokens + len(self.sequences) - len(kept), self.max_prompt_tokens)
        rows, self.sequences = self.decode, [self.sequences[at] for at in kept]
        lost_slots = set(rows.slots).difference(rows.slots[at] for at in kept)
        self.table_writes = TableWrites.of(*[one for one in self.table_writes if one.slot not in lost_slots])
        self.decode = DecodeRows(
            [rows.request_ids[at] for at in kept],
            [rows.slots[at] for at in kept],
            [rows.positions[at] for at in kept],
            {new: rows.masks[at] for new, at in enumerate(kept) if at in rows.masks},
            adapters_of(self.sequences),
        )

    def add_prompt(self, sequence: LiveSequence, num_tokens: int) -> None:
        assert sequence.slot is not None, f"{sequence.arrival=}"
        start = sequence.num_planned
        end = start + num_tokens
        samples = end == sequence.num_prefill
        mask = sequence.mask if samples else None
        tokens, reading = sequence.tokens[start:end], None
        if sequence.is_read:
            reading = sequence.reading(start, end)
        request_id, adapter = sequence.request_id, sequence.request.adapter
        row = Row(request_id, sequence.slot, start, num_tokens, tokens, samples, mask, reading, adapter)
        self.prompts.append(row)
        self.sequences.append(sequence)
        self.num_prompt_tokens += num_tokens
        self.is_cut = not samples
        sequence.num_planned = end


def adapters_of(sequences: Sequence[LiveSequence]) -> Sequence[AdapterId | None]:
    adapters = [one.request.adapter for one in sequences]
    return adapters if any(adapters) else ()
