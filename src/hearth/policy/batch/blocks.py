"""The books of paged KV: which blocks are free, held by sequences, or only cached for their content.

Touches no memory: a block is a number here, its content is the engine's.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from hearth.policy.batch.prefix import PrefixIndex

SINK_BLOCK = 0  #: of a KV that is fixed: takes the writes of padded rows and is never handed out

#: The heap is made anew when it holds more than so many blocks, and more than two for each that is free.
SMALL_HEAP = 64


@dataclass(frozen=True, slots=True)
class BlockMove:
    """The content of one block belongs into another from now on."""

    source: int
    target: int


class FreeBlocks:
    """Mutable; written only by the `BlockBook` that owns it. A set of blocks that hands out the lowest."""

    def __init__(self) -> None:
        self._free: set[int] = set()
        self._heap: list[int] = []  #: holds all that are free, and some that are free no more

    def __len__(self) -> int:
        return len(self._free)

    def __contains__(self, block: int) -> bool:
        return block in self._free

    def __iter__(self) -> Iterator[int]:
        return iter(self._free)

    def add(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._free.add(block)
            heapq.heappush(self._heap, block)
        self._trim_heap()

    def remove(self, blocks: Iterable[int]) -> None:
        """Take out those of the blocks that are free."""
        self._free.difference_update(blocks)
        self._trim_heap()

    def pop_lowest(self, num_blocks: int) -> list[int]:
        """Take out so many of the lowest blocks, or all, the lowest first."""
        free, heap, blocks = self._free, self._heap, list[int]()
        num_blocks = min(num_blocks, len(free))
        while len(blocks) < num_blocks:
            if (block := heapq.heappop(heap)) in free:
                free.remove(block)
                blocks.append(block)
        self._trim_heap()
        return blocks

    def lowest_outside(self, extent: range, num_blocks: int) -> list[int]:
        """Return so many of the lowest blocks, or all, that are not in an extent."""
        return heapq.nsmallest(num_blocks, (block for block in self._free if block not in extent))

    def check(self) -> None:
        """Raise if a free block would never be handed out, or the heap is not bounded."""
        assert len(self._heap) <= max(2 * len(self._free), SMALL_HEAP), f"{len(self._heap)=}"
        assert self._free <= set(self._heap), f"free and never handed out: {self._free - set(self._heap)}"

    def _trim_heap(self) -> None:
        if len(self._heap) > max(2 * len(self._free), SMALL_HEAP):
            self._heap = sorted(self._free)


class BlockBook:
    """Mutable; written only by the `Batcher` that owns it.

    Every block but the sink, which is in no book, is exactly one of
        free    its content is worth nothing
        live    held by sequences; one with a digest may be held by several
        cached  held by nobody; its digest tells which prefix it contains

    A KV is given blocks and may have them taken away again; their numbers may be any. What it is promised are
    `floor_blocks`: whoever owns the memory gives it so many whenever it asks, so a sequence that needs no
    more can always finish. One that is fixed has its blocks from the beginning.
    """

    def __init__(self, block_tokens: int, floor_blocks: int) -> None:
        """Open a book that has no blocks yet."""
        assert block_tokens >= 1, f"{block_tokens=}"
        assert floor_blocks >= 1, f"{floor_blocks=}"
        self.block_tokens = block_tokens
        self.floor_blocks = floor_blocks
        #: All that it has, whatever their state.
        self._blocks: set[int] = set()
        self._free = FreeBlocks()
        #: How many sequences hold each live block, and no others.
        self._num_holders: dict[int, int] = {}
        #: Cached blocks, least recently used first.
        self._cached: dict[int, None] = {}
        #: Live or cached blocks that can be found by their content; cached ones all can.
        self.prefixes = PrefixIndex()

    @classmethod
    def fixed(cls, num_blocks: int, block_tokens: int) -> BlockBook:
        """Return the book of a KV that always has so many blocks, of which the first is the sink."""
        assert num_blocks >= 2, f"the sink and one more block are needed: {num_blocks=}"
        book = cls(block_tokens, floor_blocks=num_blocks - 1)
        book.add(range(SINK_BLOCK + 1, num_blocks))
        return book

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_live(self) -> int:
        return len(self._num_holders)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that could be handed out: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into what is promised. The number never changes, so any thread may ask."""
        return self.floor_blocks * self.block_tokens

    def num_holders(self, block: int) -> int:
        return self._num_holders.get(block, 0)

    def has_all(self, blocks: Iterable[int]) -> bool:
        return self._blocks.issuperset(blocks)

    def live_in(self, extent: range) -> list[int]:
        return [block for block in extent if block in self._num_holders]

    def cached_among(self, blocks: Iterable[int]) -> list[int]:
        return [block for block in blocks if block in self._cached]

    def num_available_outside(self, extent: range) -> int:
        """Return how many blocks beside the extent could be handed out."""
        num_inside = sum(block in self._free or block in self._cached for block in extent)
        return self.num_available - num_inside

    def available_outside(self, extent: range, num_blocks: int) -> list[int]:
        """Return so many blocks beside the extent, or all, in the order in which they would be handed out."""
        blocks = self._free.lowest_outside(extent, num_blocks)
        cached = (block for block in self._cached if block not in extent)
        return blocks + list(islice(cached, num_blocks - len(blocks)))

    # Blocks that come and go.

    def add(self, extent: range) -> None:
        """Have these blocks from now on, all free."""
        known = self._blocks.intersection(extent)
        assert not known, f"given twice: {sorted(known)}"
        self._blocks.update(extent)
        self._free.add(extent)

    def remove(self, extent: range) -> None:
        """Have these blocks no more. None is live; those that are cached are forgotten."""
        assert self.has_all(extent), f"not in the book: {sorted(set(extent) - self._blocks)}"
        live = self.live_in(extent)
        assert not live, f"live blocks cannot be taken away: {live}"
        self._blocks.difference_update(extent)
        self._forget(self.cached_among(extent))
        self._free.remove(extent)

    def remove_all(self) -> None:
        """Have no blocks any more. No sequence runs."""
        assert not self._num_holders, f"live blocks cannot be taken away: {sorted(self._num_holders)}"
        self._blocks.clear()
        self._free = FreeBlocks()
        self._cached.clear()
        self.prefixes.clear()

    def forget_prefixes(self) -> None:
        """Have all cached blocks free. No sequence runs."""
        assert not self._num_holders, f"live blocks have prefixes, too: {sorted(self._num_holders)}"
        cached = list(self._cached)
        self._forget(cached)
        self._free.add(cached)

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Have live blocks elsewhere, with their holders and their digests; they leave free blocks behind.

        Each target is free or cached, and no source.
        """
        for move in moves:
            source, target = move.source, move.target
            assert source in self._num_holders, f"only a live block has to move: {move}"
            if target in self._cached:
                self._forget((target,))
            else:
                assert target in self._free, f"the target of a move must be free or cached: {move}"
                self._free.remove((target,))
            self._free.add((source,))
            self._num_holders[target] = self._num_holders.pop(source)
            self.prefixes.move(source, target)

    # Blocks that are held.

    def can_allocate(self, num_blocks: int, beside: Sequence[int] = ()) -> bool:
        """True if `num_blocks` could be handed out once the blocks `beside` have been taken."""
        return num_blocks <= self.num_available - sum(block in self._cached for block in beside)

    def take(self, blocks: Sequence[int]) -> None:
        """Hold blocks that were found by their content."""
        for block in blocks:
            assert block in self.prefixes, f"only a published block can be shared: {block=}"
            self._cached.pop(block, None)
            self._num_holders[block] = self.num_holders(block) + 1

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hold `num_blocks` blocks of no content, or none at all if there are too few."""
        if num_blocks > self.num_available:
            return None
        blocks = self._free.pop_lowest(num_blocks)
        if len(blocks) < num_blocks:
            evicted = list(islice(self._cached, num_blocks - len(blocks)))
            self._forget(evicted)
            blocks += evicted
        self._num_holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks, given head first; its tail will be evicted first."""
        # Column by column: a sequence that ends may have thousands of blocks, and somebody waits for its end.
        num_holders, unheld = self._num_holders, list[int]()
        for block in reversed(blocks):
            num_before = num_holders.get(block, 0)
            assert num_before > 0, f"released more often than taken: {block=}"
            if num_before > 1:
                num_holders[block] = num_before - 1
            else:
                del num_holders[block]
                unheld.append(block)
        known = self.prefixes.blocks
        self._cached.update(dict.fromkeys([block for block in unheld if block in known]))
        self._free.add([block for block in unheld if block not in known])

    def publish(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Let others find live blocks by their content. Of two with the same content the first stays."""
        assert self._num_holders.keys() >= set(blocks), f"only a live block can be published: {blocks=}"
        self.prefixes.add(blocks, digests)

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Let nobody find live blocks any more whose content may be wrong.

        Not those with several holders: where such a one is wrong, all its readers fail, and the last one
        withdraws it.
        """
        known = self.prefixes.blocks
        self.prefixes.forget([one for one in blocks if self._num_holders[one] == 1 and one in known])

    def check(self, num_holders: dict[int, int] | None = None) -> None:
        """Raise if a block is not exactly one of free, live and cached, or the digests disagree.

        `num_holders`: how many sequences hold each block, if that is known; only published ones are shared.
        """
        owned = sorted([*self._free, *self._num_holders, *self._cached])
        expected = sorted(self._blocks)
        assert owned == expected, f"free, live and cached blocks must be {expected}: {owned}"
        assert min(self._num_holders.values(), default=1) > 0, f"live without a holder: {self._num_holders}"
        self.prefixes.check()
        lost = [block for block in self._cached if block not in self.prefixes]
        assert not lost, f"cached blocks without digest: {lost}"
        stale = [block for block in self.prefixes if block in self._free or block not in self._blocks]
        assert not stale, f"digests of blocks that are free or not in the book: {stale}"
        self._free.check()
        if num_holders is not None:
            self._check_holders(num_holders)

    def _check_holders(self, num_holders: dict[int, int]) -> None:
        for block in sorted(num_holders.keys() | self._num_holders.keys()):
            held, count = num_holders.get(block, 0), self.num_holders(block)
            assert held == count, f"{block=} held {held} times, in the book {count}"
            assert count <= 1 or block in self.prefixes, f"{block=} shared without digest"

    def _forget(self, blocks: Sequence[int]) -> None:
        """Have the content of cached blocks be worth nothing; the caller says what becomes of the blocks."""
        for block in blocks:
            del self._cached[block]
        self.prefixes.forget(blocks)
