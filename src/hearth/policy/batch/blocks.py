"""The books of paged KV: who holds which block, and which blocks hold a prefix worth keeping.

Touches no memory: a block is a number here, its content is the engine's.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

SINK_BLOCK = 0  #: of a KV that is fixed: takes the writes of padded rows and is never handed out

DIGEST_BYTES = 16

#: Whoever has not looked for longer looks at everything anew.
KEPT_FORGOTTEN = 1024
#: The heap is made anew when it holds more than so many blocks, and more than two for each that is free.
SMALL_HEAP = 64


def block_digests(tokens: Sequence[int], salt: bytes, block_tokens: int) -> list[bytes]:
    """One digest for each full block, standing for all tokens up to that block's end."""
    digests: list[bytes] = []
    extend_digests(digests, tokens, salt, block_tokens)
    return digests


def extend_digests(digests: list[bytes], tokens: Sequence[int], salt: bytes, block_tokens: int) -> None:
    """Append the digests of the full blocks of `tokens` that `digests` does not cover yet."""
    if len(tokens) < (len(digests) + 1) * block_tokens:
        return
    # The root is set apart by `person`, so that no salt can pass for the digest of another chain.
    parent = digests[-1] if digests else blake2b(salt, digest_size=DIGEST_BYTES, person=b"root").digest()
    first, last = len(digests) * block_tokens, len(tokens) // block_tokens * block_tokens
    content = array("I", tokens[first:last])
    stride = block_tokens * content.itemsize
    content_bytes = content.tobytes()
    for at in range(0, len(content_bytes), stride):
        parent = blake2b(parent + content_bytes[at : at + stride], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


@dataclass(frozen=True, slots=True)
class BlockMove:
    """The content of one block belongs into another from now on."""

    source: int
    target: int


class BlockBook:
    """Mutable; written only by the `Batcher` that owns it.

    Every block but the sink, which is in no book, is exactly one of
        free    its content is worth nothing
        live    held by sequences; one with a digest may be held by several
        cached  held by nobody; its digest tells which prefix it contains

    A fixed KV has its blocks from the beginning. An elastic one is given blocks and has them taken away
    again; their numbers may be any. What it is promised are `floor_blocks`: whoever owns the memory gives it
    so many whenever it asks, so a sequence that needs no more can always finish.
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        """A fixed KV of so many blocks, of which the first is the sink."""
        assert num_blocks >= 2, f"the sink and one more block are needed: {num_blocks=}"
        self.num_forgotten = 0
        self._open(block_tokens, floor_blocks=num_blocks - 1)
        self.add(range(SINK_BLOCK + 1, num_blocks))

    @classmethod
    def elastic(cls, block_tokens: int, floor_blocks: int) -> BlockBook:
        """A book that has no blocks yet."""
        assert floor_blocks >= 1, f"{floor_blocks=}"
        book = cls.__new__(cls)
        book.num_forgotten = 0
        book._open(block_tokens, floor_blocks)
        return book

    def _open(self, block_tokens: int, floor_blocks: int) -> None:
        assert block_tokens >= 1, f"{block_tokens=}"
        self.block_tokens = block_tokens
        self.floor_blocks = floor_blocks
        #: All that it has, whatever their state.
        self._blocks: set[int] = set()
        #: Free blocks; and a heap that holds all of them, and some that are free no more.
        self._free: set[int] = set()
        self._heap: list[int] = []
        #: How many sequences hold each live block, and no others.
        self._num_holders: dict[int, int] = {}
        #: Cached blocks, least recently used first.
        self._cached: dict[int, None] = {}
        #: Published blocks, live or cached, and the inverse map.
        self._digest_by_block: dict[int, bytes] = {}
        self._block_by_digest: dict[bytes, int] = {}
        #: Blocks that a digest no longer leads to, the last ones of `num_forgotten`.
        self._forgotten: deque[int] = deque(maxlen=KEPT_FORGOTTEN)

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
        return len(self._free) + len(self._cached)

    @property
    def capacity_tokens(self) -> int:
        """Of what is promised. It never changes, so any thread may ask."""
        return self.floor_blocks * self.block_tokens

    def num_holders(self, block: int) -> int:
        return self._num_holders.get(block, 0)

    def holders(self) -> dict[int, int]:
        """How many sequences hold each live block."""
        return dict(self._num_holders)

    def is_published(self, block: int) -> bool:
        return block in self._digest_by_block

    def has_all(self, blocks: Iterable[int]) -> bool:
        return self._blocks.issuperset(blocks)

    def live_in(self, extent: range) -> list[int]:
        return [block for block in extent if block in self._num_holders]

    def cached_of(self, blocks: Iterable[int]) -> list[int]:
        return [block for block in blocks if block in self._cached]

    def cached_in(self, extent: range) -> list[int]:
        return [block for block in extent if block in self._cached]

    def num_available_outside(self, extent: range) -> int:
        """Blocks beside the extent that could be handed out."""
        num_inside = sum(block in self._free or block in self._cached for block in extent)
        return self.num_available - num_inside

    def available_outside(self, extent: range, num_blocks: int) -> list[int]:
        """So many of them, or all, in the order in which they would be handed out."""
        blocks = heapq.nsmallest(num_blocks, (block for block in self._free if block not in extent))
        cached = (block for block in self._cached if block not in extent)
        return blocks + list(islice(cached, num_blocks - len(blocks)))

    def add(self, extent: range) -> None:
        """Blocks that it has from now on, all free."""
        known = self._blocks.intersection(extent)
        assert not known, f"given twice: {sorted(known)}"
        self._blocks.update(extent)
        for block in extent:
            self._put_free(block)

    def remove(self, extent: range) -> None:
        """Blocks that it has no more. None is live; those that are cached are forgotten."""
        assert self.has_all(extent), f"not in the book: {sorted(set(extent) - self._blocks)}"
        live = self.live_in(extent)
        assert not live, f"live blocks cannot be taken away: {live}"
        self._blocks.difference_update(extent)
        for block in self.cached_in(extent):
            self._forget(block)
        self._free.difference_update(extent)
        self._trim_heap()

    def remove_all(self) -> None:
        """No sequence runs, and it has no blocks any more."""
        assert not self._num_holders, f"live blocks cannot be taken away: {sorted(self._num_holders)}"
        self._open(self.block_tokens, self.floor_blocks)
        self.num_forgotten += KEPT_FORGOTTEN + 1

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Live blocks go elsewhere, with their holders and their digests, and leave free blocks behind.

        Each target is free or cached, and no source.
        """
        for move in moves:
            source, target = move.source, move.target
            assert source in self._num_holders, f"only a live block has to move: {move}"
            if target in self._cached:
                self._forget(target)
            else:
                assert target in self._free, f"the target of a move must be free or cached: {move}"
            self._free.discard(target)
            self._put_free(source)
            self._num_holders[target] = self._num_holders.pop(source)
            if (digest := self._digest_by_block.pop(source, None)) is not None:
                self._digest_by_block[target] = digest
                self._block_by_digest[digest] = target
                self._note_forgotten(source)

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix. Nothing is taken."""
        blocks: list[int] = []
        for digest in digests:
            block = self._block_by_digest.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def forgotten_since(self, num_forgotten: int) -> list[int] | None:
        """Blocks that digests have not led to since so many were forgotten; None: too long ago to know."""
        num_new = self.num_forgotten - num_forgotten
        if num_new > len(self._forgotten):
            return None
        return list(islice(reversed(self._forgotten), num_new))

    def can_allocate(self, num_blocks: int, beside: Sequence[int] = ()) -> bool:
        """Whether `num_blocks` could be handed out once the blocks `beside` have been taken."""
        return num_blocks <= self.num_available - sum(block in self._cached for block in beside)

    def take(self, blocks: Sequence[int]) -> None:
        """Hold blocks that `match` found."""
        for block in blocks:
            assert block in self._digest_by_block, f"only a published block can be shared: {block=}"
            self._cached.pop(block, None)
            self._num_holders[block] = self.num_holders(block) + 1

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hold `num_blocks` blocks of no content, or none at all if there are too few."""
        if num_blocks > self.num_available:
            return None
        blocks = [self._pop_available() for _ in range(num_blocks)]
        for block in blocks:
            self._num_holders[block] = 1
        self._trim_heap()
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks, given head first; its tail will be evicted first."""
        for block in reversed(blocks):
            num_holders = self.num_holders(block)
            assert num_holders > 0, f"released more often than taken: {block=}"
            if num_holders > 1:
                self._num_holders[block] = num_holders - 1
                continue
            del self._num_holders[block]
            if block in self._digest_by_block:
                self._cached[block] = None
            else:
                self._put_free(block)

    def publish(self, block: int, digest: bytes) -> None:
        """Let others find a live block by its content. Of two with the same content the first stays."""
        assert block in self._num_holders, f"only a live block can be published: {block=}"
        assert block not in self._digest_by_block, f"published twice: {block=}"
        if digest not in self._block_by_digest:
            self._digest_by_block[block] = digest
            self._block_by_digest[digest] = block

    def check(self) -> None:
        """Raise if a block is not exactly one of free, live and cached, or the digests disagree."""
        owned = sorted([*self._free, *self._num_holders, *self._cached])
        expected = sorted(self._blocks)
        assert owned == expected, f"free, live and cached blocks must be {expected}: {owned}"
        assert min(self._num_holders.values(), default=1) > 0, f"live without a holder: {self._num_holders}"
        inverse = {block: digest for digest, block in self._block_by_digest.items()}
        assert self._digest_by_block == inverse, f"{self._digest_by_block=} {inverse=}"
        lost = [block for block in self._cached if block not in self._digest_by_block]
        assert not lost, f"cached blocks without digest: {lost}"
        stale = [block for block in self._digest_by_block if block in self._free or block not in self._blocks]
        assert not stale, f"digests of blocks that are free or not in the book: {stale}"
        assert len(self._heap) <= max(2 * len(self._free), SMALL_HEAP), f"{len(self._heap)=}"
        assert self._free <= set(self._heap), f"free and never handed out: {self._free - set(self._heap)}"

    def _pop_available(self) -> int:
        while self._heap:
            block = heapq.heappop(self._heap)
            if block in self._free:
                self._free.remove(block)
                return block
        block = next(iter(self._cached))
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        """A cached block's content is worth nothing any more; the caller says what becomes of it."""
        del self._cached[block]
        del self._block_by_digest[self._digest_by_block.pop(block)]
        self._note_forgotten(block)

    def _note_forgotten(self, block: int) -> None:
        self._forgotten.append(block)
        self.num_forgotten += 1

    def _put_free(self, block: int) -> None:
        self._free.add(block)
        heapq.heappush(self._heap, block)
        self._trim_heap()

    def _trim_heap(self) -> None:
        if len(self._heap) > max(2 * len(self._free), SMALL_HEAP):
            self._heap = sorted(self._free)
