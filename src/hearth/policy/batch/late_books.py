"""Changes of the block books that wait until readers have their tokens: in bulk they take less time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.prefix import Publication
from hearth.policy.batch.sequence import LiveSequence


class LateBooks:
    """Changes of a `BlockBook` to be made later. Mutable; written only by the `Batcher` that owns it."""

    def __init__(self, book: BlockBook) -> None:
        self._book = book
        #: Changes in order; those in the two lists below follow.
        self._closed: deque[Callable[[], None]] = deque()
        self._published: list[Publication] = []
        self._released: list[Sequence[int]] = []

    @property
    def is_settled(self) -> bool:
        return not (self._closed or self._published or self._released)

    def publish(self, sequence: LiveSequence, num_tokens: int) -> None:
        """Publish the full blocks of a running sequence's first `num_tokens`, which are all planned."""
        begin, num_full = sequence.num_published, num_tokens // self._book.block_tokens
        if num_full <= begin:
            return
        blocks = sequence.blocks
        before = blocks[begin - 1] if begin else None
        self._published.append(Publication(sequence.chain, begin, before, blocks[begin:num_full]))
        sequence.num_published = num_full

    def publish_committed(self, sequence: LiveSequence) -> None:
        self.withdraw_planned(sequence)
        if len(sequence.tokens) > sequence.num_prefill and sequence.slot is not None:
            self.publish(sequence, len(sequence.tokens) - 1)  # all but the last are computed

    def withdraw_planned(self, sequence: LiveSequence) -> None:
        if blocks := sequence.blocks[sequence.num_confirmed : sequence.num_published]:
            self._close()
            self._closed.append(partial(self._book.withdraw, blocks))

    def release(self, blocks: Sequence[int]) -> None:
        self._released.append(blocks)

    def withdraw(self, sequence: LiveSequence) -> None:
        self.withdraw_planned(sequence)
        self._close()
        self._closed.append(partial(self._book.withdraw_unshared, tuple(sequence.blocks)))

    def settle(self) -> None:
        """Make all changes. One that raises stays first, so that no later one is made."""
        self._close()
        while self._closed:
            self._closed[0]()
            self._closed.popleft()  # only now: until then `is_settled` is False

    def _close(self) -> None:
        # Publishing before releasing changes nothing.
        if self._published:
            self._closed.append(partial(self._book.publish, self._published))
            self._published = []
        if self._released:
            self._closed.append(partial(self._book.release_all, self._released))
            self._released = []
