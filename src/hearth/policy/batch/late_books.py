"""Changes of the books of blocks that are left until readers have their tokens. Decides nothing.

A plan publishes blocks of many prompts, and a commit releases those of all sequences that end. Readers need
not wait for that, and done together it takes a fraction of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.prefix import Publication
from hearth.policy.batch.sequence import LiveSequence


class LateBooks:
    """Changes of a `BlockBook` that wait to be made. Mutable; written only by the `Batcher` that owns it."""

    def __init__(self, book: BlockBook) -> None:
        self._book = book
        #: Changes in order; those noted since the last that had to stand alone follow.
        self._closed: deque[Callable[[], None]] = deque()
        self._published: list[Publication] = []
        self._released: list[Sequence[int]] = []

    @property
    def is_settled(self) -> bool:
        """True if the book has all that was noted."""
        return not (self._closed or self._published or self._released)

    def publish(self, sequence: LiveSequence, num_tokens: int) -> None:
        """Note that the full blocks of a sequence's first tokens can be found by their content.

        The sequence runs, and all of these tokens are computed by steps that are planned.
        """
        begin, num_full = sequence.num_published, num_tokens // self._book.block_tokens
        if num_full <= begin:
            return
        blocks = sequence.blocks
        before = blocks[begin - 1] if begin else None
        self._published.append(Publication(sequence.chain, begin, before, blocks[begin:num_full]))
        sequence.num_published = num_full

    def publish_committed(self, sequence: LiveSequence) -> None:
        """Note that of a sequence which stops running all that is committed can be found, and nothing else.

        Its output is published here too, not before: no other request needs an unfinished answer.
        """
        self.withdraw_planned(sequence)
        if len(sequence.tokens) > sequence.num_prefill and sequence.slot is not None:
            self.publish(sequence, len(sequence.tokens) - 1)  # all but the last are computed

    def withdraw_planned(self, sequence: LiveSequence) -> None:
        """Note that blocks cannot be found any more whose content a sequence has in steps not committed."""
        if blocks := sequence.blocks[sequence.num_confirmed : sequence.num_published]:
            self._close()
            self._closed.append(partial(self._book.withdraw, blocks))

    def release(self, blocks: Sequence[int]) -> None:
        """Note that a sequence lets go of its blocks, given head first."""
        self._released.append(blocks)

    def withdraw(self, sequence: LiveSequence) -> None:
        """Note that the blocks of a sequence may be wrong."""
        self.withdraw_planned(sequence)
        self._close()
        self._closed.append(partial(self._book.withdraw_unshared, tuple(sequence.blocks)))

    def settle(self) -> None:
        """Change the book as was noted. A change that raises stays the next: no later one is ever made."""
        self._close()
        while self._closed:
            self._closed[0]()
            self._closed.popleft()  # not before: who looks from outside sees books that are not finished

    def _close(self) -> None:
        """Have all that is noted done before what follows."""
        # To publish first changes nothing: what is released leads to where it led.
        if self._published:
            self._closed.append(partial(self._book.publish, self._published))
            self._published = []
        if self._released:
            self._closed.append(partial(self._book.release_all, self._released))
            self._released = []
