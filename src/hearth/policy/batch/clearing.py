"""How blocks that are to be taken away come free: who gives way, and what has to move. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.sequence import LiveSequence


@dataclass(frozen=True, slots=True)
class Clearing:
    """What happens before an extent can leave the book. Whatever is live in it after that has to move."""

    preempted: tuple[LiveSequence, ...]  #: youngest first


def plan_clearing(
    book: BlockBook,
    running: Sequence[LiveSequence],
    extent: range,
    *,
    may_move: bool,
    may_preempt: bool,
) -> Clearing | None:
    """Preempt as few of the running ones (oldest first) as it takes; None if that is not possible.

    Nobody is preempted where less than what is promised would be left. As one sequence never needs more than
    that, the oldest gives way only where blocks may not move.
    """
    num_inside = len(book.live_in(extent))
    num_outside = book.num_available_outside(extent) if may_move and num_inside else 0
    if num_inside <= num_outside:
        return Clearing(())
    if not may_preempt or book.num_blocks - len(extent) < book.floor_blocks:
        return None
    num_released, preempted = Counter[int](), []
    for sequence in reversed(running):
        preempted.append(sequence)
        for block in sequence.blocks:
            num_released[block] += 1
            if num_released[block] == book.num_holders(block):
                num_inside -= block in extent
                num_outside += may_move and block not in extent
        if num_inside <= num_outside:
            break
    assert num_inside <= num_outside, f"live blocks of no running sequence: {book.live_in(extent)}"
    return Clearing(tuple(preempted))
