"""The books of paged KV: which blocks are free, held by sequences, or cached for their content.

Touches no memory: a block is a number here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, count

from hearth.policy.batch.block_sets import CachedBlocks, FreeBlocks
from hearth.policy.batch.prefix import PrefixIndex, Publication

SINK_BLOCK = 0  #: of a fixed KV: takes the writes of padded rows and is never allocated


@dataclass(frozen=True, slots=True)
class BlockMove:
    source: int
    target: int


class BlockBook:
    """Mutable; written only by the `Batcher` that owns it.

    Every block but the sink, which is in no book, is exactly one of
        free    its content is worthless
        live    held by one or, if found by its content, several sequences
        cached  held by no sequence, and found by its content

    Blocks may be added and removed, with any numbers. `floor_blocks` are promised: the pool provides them on
    demand, so a sequence that needs no more can always finish. A fixed KV has all its blocks from the
    beginning.
    """

    def __init__(self, block_tokens: int, floor_blocks: int) -> None:
        assert block_tokens >= 1, f"{block_tokens=}"
        assert floor_blocks >= 1, f"{floor_blocks=}"
        self.block_tokens = block_tokens
        self.floor_blocks = floor_blocks
        self._blocks: set[int] = set()
        self.free, self.cached = FreeBlocks(), CachedBlocks()
        self.num_live = 0
        self.num_holders: list[int] = []  #: by block: how many sequences hold it
        #: Blocks that can be found by their content: some live ones and all cached ones.
        self.prefixes = PrefixIndex()

    @classmethod
    def fixed(cls, num_blocks: int, block_tokens: int) -> BlockBook:
        """Return the book of a fixed KV, whose first block is the sink."""
        assert num_blocks >= 2, f"the sink and one more block are needed: {num_blocks=}"
        book = cls(block_tokens, floor_blocks=num_blocks - 1)
        book.add(range(SINK_BLOCK + 1, num_blocks))
        return book

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_available(self) -> int:
        return len(self.free) + len(self.cached)

    def num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def has_all(self, blocks: Iterable[int]) -> bool:
        return self._blocks.issuperset(blocks)

    def live_in(self, extent: range) -> list[int]:
        return [block for block in extent if self.num_holders[block]]

    # Blocks that come and go.

    def add(self, extent: range) -> None:
        known = self._blocks.intersection(extent)
        assert not known, f"given twice: {sorted(known)}"
        self._blocks.update(extent)
        self.num_holders.extend([0] * (extent.stop - len(self.num_holders)))
        for part in (self.free, self.cached, self.prefixes):
            part.reserve(extent.stop)
        self.free.add(extent)

    def remove(self, extent: range) -> list[BlockMove]:
        """Remove blocks; cached ones are forgotten.

        Live ones move, with their holders and content, to free blocks and then to the oldest cached ones.
        """
        assert self.has_all(extent), f"not in the book: {sorted(set(extent) - self._blocks)}"
        live = self.live_in(extent)
        targets = (block for block in chain(self.free, self.cached) if block not in extent)
        moves = list(map(BlockMove, live, targets))
        assert len(moves) == len(live), f"live blocks cannot be taken away: {live}"
        self._move(moves)
        self._blocks.difference_update(extent)
        cached = self.cached.among(extent)
        self.cached.remove(cached)
        self.free.remove(extent)
        self._forget(cached)
        return moves

    def _move(self, moves: Sequence[BlockMove]) -> None:
        for move in moves:
            source, target = move.source, move.target
            if target in self.cached:
                self.cached.remove((target,))
                self._forget([target])
            else:  # forgetting another target may have freed it
                self.free.remove((target,))
            self.num_holders[target], self.num_holders[source] = self.num_holders[source], 0
        self.prefixes.move({move.source: move.target for move in moves})

    def remove_all(self) -> None:
        assert not self.num_live, f"live blocks cannot be taken away: {self._live()}"
        self._blocks.clear()
        self.free.clear()
        self.cached.clear()
        self.prefixes.clear()

    # Blocks that are held.

    def can_allocate(self, num_blocks: int, beside: Sequence[int] = ()) -> bool:
        # Blocks of `beside` without a holder are cached.
        num_cached = list(map(self.num_holders.__getitem__, beside)).count(0) if beside else 0
        return num_blocks <= len(self.free) + len(self.cached) - num_cached

    def take(self, blocks: Sequence[int]) -> None:
        num_holders, runs = self.num_holders, self.prefixes.runs
        assert None not in map(runs.__getitem__, blocks), f"only a published block can be shared: {blocks=}"
        if cached := [block for block in blocks if not num_holders[block]]:
            self.cached.remove(cached)
            self.num_live += len(cached)
        for block in blocks:
            num_holders[block] += 1

    def allocate(self, num_blocks: int) -> list[int] | None:
        if num_blocks > self.num_available:
            return None
        blocks = self.free.pop_lowest(num_blocks)
        if len(blocks) < num_blocks:
            evicted = self.cached.pop_oldest(num_blocks - len(blocks))
            self._forget(evicted)
            blocks += evicted
        num_holders = self.num_holders
        for block in blocks:
            num_holders[block] = 1
        self.num_live += num_blocks
        return blocks

    def release_all(self, sequences: Iterable[Sequence[int]]) -> None:
        """Release the blocks of each sequence, given head first; its tail is evicted first."""
        # In bulk: a sequence that ends may have thousands of blocks.
        num_holders, unheld = self.num_holders, list[int]()
        for blocks in sequences:
            num_shared = self._release_shared(blocks) if blocks and num_holders[blocks[0]] > 1 else 0
            unheld += reversed(blocks[num_shared:] if num_shared else blocks)
        num_held_once = list(map(num_holders.__getitem__, unheld)).count(1)
        if num_held_once == len(unheld) == len(set(unheld)):
            for block in unheld:
                num_holders[block] = 0
        else:
            unheld = self._release_each(unheld)
        self.num_live -= len(unheld)
        runs = self.prefixes.runs
        free = [block for block in unheld if runs[block] is None]
        self.cached.add([block for block in unheld if runs[block] is not None] if free else unheld)
        self.free.add(free)

    def _release_shared(self, blocks: Sequence[int]) -> int:
        """Release the leading blocks that other sequences hold too; return how many."""
        num_holders = self.num_holders
        for at, block in enumerate(blocks):
            if num_holders[block] <= 1:
                return at
            num_holders[block] -= 1
        return len(blocks)

    def _release_each(self, blocks: Iterable[int]) -> list[int]:
        num_holders, unheld = self.num_holders, list[int]()
        for block in blocks:
            num_left = num_holders[block] - 1
            assert num_left >= 0, f"released more often than taken: {block=}"
            num_holders[block] = num_left
            if not num_left:
                unheld.append(block)
        return unheld

    def publish(self, publications: Iterable[Publication]) -> None:
        num_holders, add = self.num_holders.__getitem__, self.prefixes.add
        for publication in publications:
            blocks = publication.blocks
            assert 0 not in map(num_holders, blocks), f"only a live block can be published: {blocks=}"
            add(publication)

    def withdraw(self, blocks: Iterable[int]) -> None:
        self._forget([one for one in blocks if one in self.prefixes])

    def withdraw_unshared(self, blocks: Iterable[int]) -> None:
        """Remove live blocks with one holder from the prefix index, because their content may be wrong.

        If one of several holders is wrong all its readers fail, and the last of them withdraws it.
        """
        self.withdraw(one for one in blocks if self.num_holders[one] == 1)

    def _forget(self, blocks: list[int]) -> None:
        """Remove blocks from the prefix index, and those that followed them in their runs.

        None of the given blocks is cached; of those that followed, cached ones become free.
        """
        lost = self.cached.among(self.prefixes.forget(blocks))
        if lost:
            self.cached.remove(lost)
            self.free.add(lost)

    def check(self, num_holders: dict[int, int] | None = None) -> None:
        owned = sorted([*self.free, *self._live(), *self.cached])
        expected = sorted(self._blocks)
        assert owned == expected, f"free, live and cached blocks must be {expected}: {owned}"
        assert min(self.num_holders, default=0) >= 0, f"held less than never: {self.num_holders}"
        assert self.num_live == len(self._live()), f"{self.num_live=} {self._live()=}"
        cached = list(self.cached)
        assert len(self.cached) == len(cached), f"{len(self.cached)=} {cached=}"
        self.prefixes.check()
        lost = [block for block in self.cached if block not in self.prefixes]
        assert not lost, f"cached blocks that are not in the index: {lost}"
        stale = [block for block in self.prefixes if block in self.free or block not in self._blocks]
        assert not stale, f"prefixes in blocks that are free or not in the book: {stale}"
        self.free.check()
        if num_holders is not None:
            for block in sorted(num_holders.keys() | set(self._live())):
                held, noted = num_holders.get(block, 0), self.num_holders[block]
                assert held == noted, f"{block=} held {held} times, in the book {noted}"

    def _live(self) -> list[int]:
        return list(compress(count(), self.num_holders))
