"""Gives the tokens of a step to its sequences: which go on, which end, and which fail.

Leaves changes of the block books for later (`late_books.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count

from hearth.core.errors import GuideStuck, HearthError, LogitsNotFinite
from hearth.core.types import FinishReason
from hearth.policy.batch.late_books import LateBooks
from hearth.policy.batch.plan import CommittedStep, RequestFailed
from hearth.policy.batch.plan_draft import PlannedStep
from hearth.policy.batch.sequence import LiveSequence, Sequences


@dataclass(slots=True)
class StepCommit:
    """A step that is being committed. Mutable; lives for one call of `Batcher.take_tokens`."""

    flight: PlannedStep
    sequences: Sequences
    books: LateBooks
    committed: CommittedStep = field(default_factory=CommittedStep)

    def take(self, tokens: Sequence[int], broken_rows: Collection[int]) -> CommittedStep:
        """Take one token for each row that samples, in order; those of `broken_rows` are worthless."""
        plan, sequences, committed, lost = self.flight.plan, self.flight.sequences, self.committed, set[int]()
        num_samples = plan.num_samples
        assert len(tokens) == num_samples, f"{len(tokens)} tokens for {num_samples} samples, {plan.step_id=}"
        for row in broken_rows:
            sequences[row].quiet_until = 0
        for row in self._append_quiet(tokens):
            sequence = sequences[row]
            if sequence.is_ended or row in broken_rows:
                lost.add(row)
                self._lose(sequence)
            else:
                self._append(sequence, tokens[row])
        if plan.num_rows > num_samples:  # only the last row may be one that does not sample
            sequence = sequences[-1]
            if sequence.is_ended or num_samples in broken_rows:
                self._lose(sequence)
            else:
                sequence.num_confirmed = plan.prompts[-1].end // sequence.chain.block_tokens
        committed.request_ids, committed.tokens = plan.sampled_ids, tokens
        committed.sample_indices = range(num_samples)
        return committed.without(lost) if lost else committed

    def _append_quiet(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens that only have to be appended; return the other sampling rows, in order."""
        # There may be a thousand rows, and most of them are quiet.
        sequences, positions = self.flight.sequences, self.flight.plan.decode.positions
        stop_ids, loud, stopped = self.sequences.stop_ids, list[int](), list[int]()
        if not stop_ids.isdisjoint(tokens):
            stopped = [row for row, token in enumerate(tokens) if token in stop_ids]
        for row in stopped:
            sequences[row].quiet_until = 0
        for row, sequence, position, token in zip(count(), sequences, positions, tokens, strict=False):
            if position + 1 < sequence.quiet_until:  # its tokens are those up to the position
                sequence.tokens.append(token)
            else:
                loud.append(row)
        for row in stopped:  # perhaps it stops another
            sequences[row].set_quiet()
        return [*loud, *range(len(positions), len(tokens))]

    def _append(self, sequence: LiveSequence, token: int) -> None:
        tokens = sequence.tokens
        if len(tokens) == sequence.num_prefill:
            sequence.num_confirmed = sequence.num_published
        tokens.append(token)
        is_last = len(tokens) == sequence.max_length or token in sequence.stop_ids
        if is_last or sequence.sits_out:
            self._go_on_or_end(sequence, token)

    def _go_on_or_end(self, sequence: LiveSequence, token: int) -> None:
        reason, stuck = None, None
        if sequence.request.is_stopped_by(token, sequence.num_output - 1):
            reason = FinishReason.STOP
        elif sequence.guide is not None:
            try:
                reason = sequence.guide.take(token)
            except GuideStuck as error:
                stuck = error.with_traceback(None)  # its frames would hold on to all of this
        if reason is None and len(sequence.tokens) == sequence.max_length:
            reason = FinishReason.LENGTH
        if reason is None and stuck is None:
            sequence.allow_next()
            return
        self.books.publish_committed(sequence)
        if reason is not None:
            self.committed.finished[sequence.request_id] = reason
            self.books.release(self.sequences.end(sequence))
        elif stuck is not None:
            self._fail(sequence, stuck)

    def _lose(self, sequence: LiveSequence) -> None:
        if not sequence.is_ended:
            self.books.withdraw(sequence)
            self._fail(sequence, _not_finite(sequence))

    def _fail(self, sequence: LiveSequence, error: HearthError) -> None:
        self.books.release(self.sequences.end(sequence))
        self.committed.failures.append(RequestFailed(sequence.request_id, error))


def _not_finite(sequence: LiveSequence) -> LogitsNotFinite:
    num_prompt = len(sequence.request.prompt)
    return LogitsNotFinite(
        f"the model computed NaN or infinite logits after {num_prompt} tokens of prompt and "
        f"{len(sequence.tokens) - num_prompt} of output, so no token could be sampled; ask again, and if it "
        "persists check the model's files with `hearth verify`, or deploy it with `--dtype bfloat16` if it "
        "is in float16"
    )
