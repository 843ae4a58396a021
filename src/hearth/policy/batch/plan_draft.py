"""A step plan in the making, and one that waits for its commit. Chooses nobody: that is the batcher's.

The sequences of a plan go with it: by the time of the commit an id could have a new owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hearth.policy.batch.plan import Admission, DecodeRows, Row, StepPlan, TableWrite
from hearth.policy.batch.sequence import LiveSequence
from hearth.types import RequestId


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that was planned and not committed."""

    plan: StepPlan
    sequences: list[LiveSequence]  #: one for each row


@dataclass(slots=True)
class PlanDraft:
    """A step plan in the making. Mutable; lives for one call of `Batcher.plan`, its only writer."""

    tokens_left: int
    admissions: list[Admission] = field(default_factory=list)
    table_writes: list[TableWrite] = field(default_factory=list)
    #: The columns of decode rows, as in `DecodeRows`.
    request_ids: list[RequestId] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    masks: dict[int, bytes] = field(default_factory=dict)
    prompts: list[Row] = field(default_factory=list)
    sequences: list[LiveSequence] = field(default_factory=list)  #: one for each row
    has_preempted: bool = False

    def assign(self, sequence: LiveSequence, blocks: list[int], block_tokens: int) -> None:
        """Give a sequence blocks that follow those which it has."""
        assert sequence.slot is not None, f"{sequence.arrival=}"
        self.table_writes.append(TableWrite(sequence.slot, len(sequence.blocks), tuple(blocks)))
        sequence.blocks += blocks
        sequence.room_tokens += len(blocks) * block_tokens

    def add_prompt(self, sequence: LiveSequence, num_tokens: int) -> None:
        """Have the next tokens of a prompt computed, for which the sequence has blocks."""
        assert sequence.slot is not None, f"{sequence.arrival=}"
        start = sequence.num_planned
        end = start + num_tokens
        samples = end == sequence.num_prefill
        mask = sequence.guide.mask if samples and sequence.guide is not None else None
        tokens = tuple(sequence.tokens[start:end])
        self.prompts.append(Row(sequence.request_id, sequence.slot, start, num_tokens, tokens, samples, mask))
        self.sequences.append(sequence)
        self.tokens_left -= num_tokens
        sequence.num_planned = end

    def step_plan(self, step_id: int, writes_before: Sequence[TableWrite]) -> StepPlan:
        """Return the plan; `writes_before` come before the draft's own."""
        return StepPlan(
            step_id,
            tuple(self.admissions),
            (*writes_before, *self.table_writes),
            DecodeRows(self.request_ids, self.slots, self.positions, self.masks),
            tuple(self.prompts),
        )
