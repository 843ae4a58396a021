"""Steps in which every running sequence gets a token and nothing else happens: counted instead of planned.

Only for simulations: an engine runs each step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from hearth.core.types import RequestId
from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.plan import DecodeRows, StepPlan, TableWrites
from hearth.policy.batch.plan_draft import PlannedStep, adapters_of
from hearth.policy.batch.sequence import LiveSequence


@dataclass(frozen=True, slots=True)
class DecodeRun:
    num_steps: int
    request_ids: tuple[RequestId, ...]  #: of the rows of each step
    context_tokens: int  #: that the rows of the first step read, their own included; one more a row each step


_NO_STEPS = DecodeRun(0, (), 0)


def decode_run(
    running: Sequence[LiveSequence],
    flights: Sequence[Sequence[LiveSequence]],
    max_steps: int,
    num_blocks: int,
    block_tokens: int,
) -> DecodeRun:
    """Return the next steps, up to `max_steps`, in which no sequence reaches its limit and `num_blocks`
    suffice.

    `flights`: the sequences of each step in flight. Zero steps if one of these does more than decode all
    running sequences.
    """
    num_flights = len(flights)
    if not running or not max_steps or any(flight != running for flight in flights):
        return _NO_STEPS
    if not all(
        s.num_planned - num_flights >= s.num_prefill and s.num_pending == num_flights and not s.sits_out
        for s in running
    ):
        return _NO_STEPS
    most = min(max_steps, *(s.max_length - len(s.tokens) - 1 for s in running))

    def num_wanted(num_steps: int) -> int:
        return blocks_wanted_by(running, num_steps, block_tokens)

    if num_wanted(most) > num_blocks:
        most = bisect_right(range(1, most), num_blocks, key=num_wanted)
    return DecodeRun(most, tuple(s.request_id for s in running), sum(s.num_planned + 1 for s in running))


def blocks_wanted_by(running: Sequence[LiveSequence], num_steps: int, block_tokens: int) -> int:
    return sum(-(-(one.num_planned + num_steps) // block_tokens) - len(one.blocks) for one in running)


def skip_steps(running: Sequence[LiveSequence], book: BlockBook, num_steps: int, token: int) -> None:
    handed_out = _skipped_blocks(running, num_steps, book.block_tokens)
    for sequence in running:
        assert token not in sequence.stop_ids, f"{token=} would have ended {sequence}"
        sequence.tokens.extend([token] * num_steps)
        sequence.num_planned += num_steps
    blocks = book.allocate(len(handed_out))
    assert blocks is not None, f"{num_steps=} {book.num_available=}"
    for sequence, block in zip(handed_out, blocks, strict=True):
        sequence.blocks.append(block)
        sequence.room_tokens += book.block_tokens


def last_step(running: list[LiveSequence], step_id: int) -> PlannedStep:
    slots = [one.slot for one in running if one.slot is not None]
    positions = [one.num_planned - 1 for one in running]
    decode = DecodeRows([one.request_id for one in running], slots, positions, adapters=adapters_of(running))
    return PlannedStep(StepPlan(step_id, (), TableWrites(), decode, ()), running)


def _skipped_blocks(running: Sequence[LiveSequence], num_steps: int, block_tokens: int) -> list[LiveSequence]:
    due: list[tuple[int, LiveSequence]] = []  # by the number of the step
    for sequence in running:
        begin, end = sequence.num_planned, sequence.num_planned + num_steps
        more = range(len(sequence.blocks), -(-end // block_tokens))
        due += ((at * block_tokens + 1 - begin, sequence) for at in more)
    return [sequence for _, sequence in sorted(due, key=lambda one: one[0])]  # stable: the oldest first
