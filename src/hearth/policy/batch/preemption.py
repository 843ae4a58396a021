"""Which running sequences to preempt when blocks are needed. Preempts none itself.

The last in the queue go first, as few as necessary. A shared block is available only once all its holders
have released it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.sequence import LiveSequence


def preempted_for_first(
    book: BlockBook, first: LiveSequence, behind: list[LiveSequence], *, has_free_slot: bool
) -> list[LiveSequence]:
    """Return the sequences to preempt so that the first waiting one can start, of those `behind` it.

    `behind`: the last in the queue first. One in the middle of its prompt goes before all others, because no
    sequence starts beside it. Empty if all of them would not suffice.
    """
    hits = set(first.known_prefix(book.prefixes).blocks)
    num_wanted = book.num_blocks_of(len(first.tokens)) - len(hits)
    num_lacking = num_wanted - (book.num_available - len(book.cached.among(hits)))
    if num_lacking > sum(len(one.blocks) for one in behind):
        return []
    preempted: list[LiveSequence] = []
    num_released = Counter[int]()
    for sequence in sorted(behind, key=lambda one: one.is_in_prompt, reverse=True):  # stable
        has_slot = has_free_slot or bool(preempted)
        if has_slot and num_lacking <= 0 and not sequence.is_in_prompt:
            break
        preempted.append(sequence)
        num_lacking -= sum(block not in hits for block in _released(book, sequence, num_released))
    return preempted if num_lacking <= 0 else []


def preempted_for_extent(
    book: BlockBook, running: Sequence[LiveSequence], extent: range, *, may_move: bool, may_preempt: bool
) -> list[LiveSequence] | None:
    """Return the running sequences, given in queue order, to preempt so that an extent can be removed.

    Live blocks that remain in the extent must move. None: it cannot be removed. The first sequence is
    preempted only if blocks may not move, or if less than the promised KV would be left.
    """
    num_inside = len(book.live_in(extent))
    num_outside = book.num_available - (len(extent) - num_inside) if may_move else 0
    if num_inside <= num_outside:
        return []
    if not may_preempt:
        return None
    num_released, preempted = Counter[int](), list[LiveSequence]()
    for sequence in reversed(running):
        preempted.append(sequence)
        for block in _released(book, sequence, num_released):
            num_inside -= block in extent
            num_outside += may_move and block not in extent
        if num_inside <= num_outside:
            break
    assert num_inside <= num_outside, f"live blocks of no running sequence: {book.live_in(extent)}"
    return preempted


def _released(book: BlockBook, sequence: LiveSequence, num_released: Counter[int]) -> Iterator[int]:
    """Yield the blocks that come free when a sequence releases its own, after those before it did.

    `num_released`: how many sequences have released each block.
    """
    for block in sequence.blocks:
        num_released[block] += 1
        if num_released[block] == book.num_holders[block]:
            yield block
