"""A step plan in the making, and one that waits for its commit. Chooses nobody: that is the batcher's.

The sequences of a plan go with it: by the time of the commit an id could have a new owner.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hearth.policy.batch.plan import Admission, Row, StepPlan, TableWrite
from hearth.policy.batch.sequence import LiveSequence


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
    rows: list[Row] = field(default_factory=list)
    sequences: list[LiveSequence] = field(default_factory=list)  #: one for each row
    has_preempted: bool = False

    def assign(self, sequence: LiveSequence, blocks: list[int]) -> None:
        """Give a sequence blocks that follow those which it has."""
        assert sequence.slot is not None, f"{sequence.arrival=}"
        self.table_writes.append(TableWrite(sequence.slot, len(sequence.blocks), tuple(blocks)))
        sequence.blocks.extend(blocks)

    def add_row(self, sequence: LiveSequence, num_tokens: int) -> None:
        """Have the next tokens of a sequence computed, for which it has blocks."""
        assert sequence.slot is not None, f"{sequence.arrival=}"
        start = sequence.num_planned
        end = start + num_tokens
        tokens = tuple(sequence.tokens[start:end]) if start < sequence.num_prefill else None
        samples = end >= sequence.num_prefill
        guide = sequence.request.guide if samples else None
        mask = None if guide is None else guide.mask
        self.rows.append(
            Row(sequence.request.request_id, sequence.slot, start, num_tokens, tokens, samples, mask)
        )
        self.sequences.append(sequence)
        self.tokens_left -= num_tokens
        sequence.num_planned = end
        sequence.num_pending += samples
        sequence.num_in_flight += 1
