"""The books of paged KV: which blocks are free, held by sequences, or cached for their content.

Touches no memory: a block is a number here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, count, islice

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
        self._free = FreeBlocks()
        self._num_holders: list[int] = []  #: by block: how many sequences hold it
        self.num_live = 0  #: blocks that are held
        self._cached = CachedBlocks()
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
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the promised blocks. Constant: any thread may read it."""
        return self.floor_blocks * self.block_tokens

    def num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def num_holders(self, block: int) -> int:
        return self._num_holders[block] if block < len(self._num_holders) else 0

    def has_all(self, blocks: Iterable[int]) -> bool:
        return self._blocks.issuperset(blocks)

    def live_in(self, extent: range) -> list[int]:
        return [block for block in extent if self.num_holders(block)]

    def cached_among(self, blocks: Iterable[int]) -> list[int]:
        return [block for block in blocks if block in self._cached]

    def num_available_outside(self, extent: range) -> int:
        num_inside = sum(block in self._free or block in self._cached for block in extent)
        return self.num_available - num_inside

    def available_outside(self, extent: range, num_blocks: int) -> list[int]:
        available = chain(self._free, self._cached)
        return list(islice((block for block in available if block not in extent), num_blocks))

    # Blocks that come and go.

    def add(self, extent: range) -> None:
        known = self._blocks.intersection(extent)
        assert not known, f"given twice: {sorted(known)}"
        self._blocks.update(extent)
        self._num_holders.extend([0] * (extent.stop - len(self._num_holders)))
        for part in (self._free, self._cached, self.prefixes):
            part.reserve(extent.stop)
        self._free.add(extent)

    def remove(self, extent: range) -> None:
        """Remove blocks, none of which may be live; cached ones are forgotten."""
        assert self.has_all(extent), f"not in the book: {sorted(set(extent) - self._blocks)}"
        live = self.live_in(extent)
        assert not live, f"live blocks cannot be taken away: {live}"
        self._blocks.difference_update(extent)
        cached = self.cached_among(extent)
        self._cached.remove(cached)
        self._free.remove(extent)
        self._forget(cached)

    def remove_all(self) -> None:
        assert not self.num_live, f"live blocks cannot be taken away: {self._live()}"
        self._blocks.clear()
        self._free.clear()
        self._cached.clear()
        self.prefixes.clear()

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Move live blocks with their holders and content; the sources become free.

        Each target is free or cached, and no source.
        """
        for move in moves:
            source, target = move.source, move.target
            assert self.num_holders(source), f"only a live block has to move: {move}"
            if target in self._cached:
                self._cached.remove((target,))
                self._forget([target])
            else:
                assert target in self._free, f"the target of a move must be free or cached: {move}"
                self._free.remove((target,))
            self._free.add((source,))
            self._num_holders[target], self._num_holders[source] = self._num_holders[source], 0
        self.prefixes.move({move.source: move.target for move in moves})

    # Blocks that are held.

    def can_allocate(self, num_blocks: int, beside: Sequence[int] = ()) -> bool:
        # Blocks of `beside` without a holder are cached.
        num_cached = list(map(self._num_holders.__getitem__, beside)).count(0) if beside else 0
        return num_blocks <= len(self._free) + len(self._cached) - num_cached

    def take(self, blocks: Sequence[int]) -> None:
        num_holders, runs = self._num_holders, self.prefixes.runs
        assert None not in map(runs.__getitem__, blocks), f"only a published block can be shared: {blocks=}"
        if cached := [block for block in blocks if not num_holders[block]]:
            self._cached.remove(cached)
            self.num_live += len(cached)
        for block in blocks:
            num_holders[block] += 1

    def allocate(self, num_blocks: int) -> list[int] | None:
        if num_blocks > self.num_available:
            return None
        blocks = self._free.pop_lowest(num_blocks)
        if len(blocks) < num_blocks:
            evicted = self._cached.pop_oldest(num_blocks - len(blocks))
            self._forget(evicted)
            blocks += evicted
        num_holders = self._num_holders
        for block in blocks:
            num_holders[block] = 1
        self.num_live += num_blocks
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Release the blocks of a sequence, head first; its tail is evicted first."""
        self.release_all((blocks,))

    def release_all(self, sequences: Iterable[Sequence[int]]) -> None:
        # In bulk: a sequence that ends may have thousands of blocks.
        num_holders, unheld = self._num_holders, list[int]()
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
        self._cached.add([block for block in unheld if runs[block] is not None] if free else unheld)
        self._free.add(free)

    def _release_shared(self, blocks: Sequence[int]) -> int:
        """Release the leading blocks that other sequences hold too; return how many."""
        num_holders = self._num_holders
        for at, block in enumerate(blocks):
            if num_holders[block] <= 1:
                return at
            num_holders[block] -= 1
        return len(blocks)

    def _release_each(self, blocks: Iterable[int]) -> list[int]:
        num_holders, unheld = self._num_holders, list[int]()
        for block in blocks:
            num_left = num_holders[block] - 1
            assert num_left >= 0, f"released more often than taken: {block=}"
            num_holders[block] = num_left
            if not num_left:
                unheld.append(block)
        return unheld

    def publish(self, publications: Iterable[Publication]) -> None:
        num_holders, add = self._num_holders.__getitem__, self.prefixes.add
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
        self.withdraw(one for one in blocks if self._num_holders[one] == 1)

    def _forget(self, blocks: list[int]) -> None:
        """Remove blocks from the prefix index, and those that followed them in their runs.

        None of the given blocks is cached; of those that followed, cached ones become free.
        """
        lost = self.cached_among(self.prefixes.forget(blocks))
        if lost:
            self._cached.remove(lost)
            self._free.add(lost)

    def check(self, num_holders: dict[int, int] | None = None) -> None:
        owned = sorted([*self._free, *self._live(), *self._cached])
        expected = sorted(self._blocks)
        assert owned == expected, f"free, live and cached blocks must be {expected}: {owned}"
        assert min(self._num_holders, default=0) >= 0, f"held less than never: {self._num_holders}"
        assert self.num_live == len(self._live()), f"{self.num_live=} {self._live()=}"
        cached = list(self._cached)
        assert len(self._cached) == len(cached), f"{len(self._cached)=} {cached=}"
        self.prefixes.check()
        lost = [block for block in self._cached if block not in self.prefixes]
        assert not lost, f"cached blocks that are not in the index: {lost}"
        stale = [block for block in self.prefixes if block in self._free or block not in self._blocks]
        assert not stale, f"prefixes in blocks that are free or not in the book: {stale}"
        self._free.check()
        if num_holders is not None:
            self._check_holders(num_holders)

    def _check_holders(self, num_holders: dict[int, int]) -> None:
        for block in sorted(num_holders.keys() | set(self._live())):
            held, count = num_holders.get(block, 0), self.num_holders(block)
            assert held == count, f"{block=} held {held} times, in the book {count}"

    def _live(self) -> list[int]:
        return list(compress(count(), self._num_holders))
