"""How much of a waiting sequence is in the book already: followed step by step, for a match of all its blocks
before every step would cost more than the step where many wait. Holds no block.
"""

from __future__ import annotations

from collections.abc import Sequence

from hearth.policy.batch.blocks import BlockBook


class KnownPrefix:
    """Mutable; written only by `follow`."""

    def __init__(self) -> None:
        #: Which block of the prefix each one is, in order.
        self._indices: dict[int, int] = {}
        self._num_seen = 0  #: of what the book has forgotten

    @property
    def blocks(self) -> list[int]:
        """As they were when last followed, as are the others."""
        return list(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def follow(self, book: BlockBook, digests: Sequence[bytes], num_most: int) -> None:
        """`digests` are the same as the last time, or more."""
        forgotten = book.forgotten_since(self._num_seen)
        self._num_seen = book.num_forgotten
        if forgotten is None:
            self._indices.clear()
        for block in forgotten or ():
            if (index := self._indices.get(block)) is not None:
                while len(self._indices) > index:
                    self._indices.popitem()
        while (num_known := len(self._indices)) < num_most:
            found = book.match(digests[num_known : num_known + 1])
            if not found:
                break
            self._indices[found[0]] = num_known

    def collect(self, blocks: set[int]) -> None:
        """Add them all. Whoever has one has all before it, for its digest stands for all of the prefix."""
        for block in reversed(self._indices):
            if block in blocks:
                break
            blocks.add(block)
