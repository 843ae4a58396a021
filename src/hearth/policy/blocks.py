"""The books of paged KV: who holds which block, and which blocks hold a prefix worth keeping.

Touches no memory: a block is a number here, its content is the engine's.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from hashlib import blake2b

SINK_BLOCK = 0  #: takes the writes of padded rows; never handed out

DIGEST_BYTES = 16


def block_digests(tokens: Sequence[int], salt: bytes, block_tokens: int) -> list[bytes]:
    """One digest for each full block, standing for all tokens up to that block's end."""
    digests: list[bytes] = []
    extend_digests(digests, tokens, salt, block_tokens)
    return digests


def extend_digests(digests: list[bytes], tokens: Sequence[int], salt: bytes, block_tokens: int) -> None:
    """Append the digests of the full blocks of `tokens` that `digests` does not cover yet."""
    # The root is set apart by `person`, so that no salt can pass for the digest of another chain.
    parent = digests[-1] if digests else blake2b(salt, digest_size=DIGEST_BYTES, person=b"root").digest()
    first, last = len(digests) * block_tokens, len(tokens) // block_tokens * block_tokens
    content = array("I", tokens[first:last])
    stride = block_tokens * content.itemsize
    content_bytes = content.tobytes()
    for at in range(0, len(content_bytes), stride):
        parent = blake2b(parent + content_bytes[at : at + stride], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


class BlockBook:
    """Mutable; written only by the `Batcher` that owns it.

    Every block but the sink is exactly one of
        free    its content is worth nothing
        live    held by sequences; one with a digest may be held by several
        cached  held by nobody; its digest tells which prefix it contains
    """

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        assert num_blocks >= 2, f"the sink and one more block are needed: {num_blocks=}"
        assert block_tokens >= 1, f"{block_tokens=}"
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        #: Free blocks, a heap.
        self._free = list(range(SINK_BLOCK + 1, num_blocks))
        #: How many sequences hold each block; 0 unless live.
        self._num_holders = [0] * num_blocks
        #: Cached blocks, least recently used first.
        self._cached: dict[int, None] = {}
        #: Published blocks, live or cached, and the inverse map.
        self._digest_by_block: dict[int, bytes] = {}
        self._block_by_digest: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def capacity_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_tokens

    def num_holders(self, block: int) -> int:
        return self._num_holders[block]

    def is_published(self, block: int) -> bool:
        return block in self._digest_by_block

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks that hold the longest known prefix. Nothing is taken."""
        blocks: list[int] = []
        for digest in digests:
            block = self._block_by_digest.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_allocate(self, num_blocks: int, beside: Sequence[int] = ()) -> bool:
        """Whether `num_blocks` could be handed out once the blocks `beside` have been taken."""
        return num_blocks <= self.num_available - sum(block in self._cached for block in beside)

    def take(self, blocks: Sequence[int]) -> None:
        """Hold blocks that `match` found."""
        for block in blocks:
            assert block in self._digest_by_block, f"only a published block can be shared: {block=}"
            self._cached.pop(block, None)
            self._num_holders[block] += 1

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Hold `num_blocks` blocks of no content, or none at all if there are too few."""
        if num_blocks > self.num_available:
            return None
        blocks = [self._pop_available() for _ in range(num_blocks)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks, given head first; its tail will be evicted first."""
        for block in reversed(blocks):
            assert self._num_holders[block] > 0, f"released more often than taken: {block=}"
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if block in self._digest_by_block:
                self._cached[block] = None
            else:
                heapq.heappush(self._free, block)

    def publish(self, block: int, digest: bytes) -> None:
        """Let others find a live block by its content. Of two with the same content the first stays."""
        assert self._num_holders[block] > 0, f"only a live block can be published: {block=}"
        assert block not in self._digest_by_block, f"published twice: {block=}"
        if digest not in self._block_by_digest:
            self._digest_by_block[block] = digest
            self._block_by_digest[digest] = block

    def check(self) -> None:
        """Raise if a block is not exactly one of free, live and cached, or the digests disagree."""
        live = [block for block, count in enumerate(self._num_holders) if count > 0]
        owned = sorted([*self._free, *live, *self._cached])
        expected = list(range(SINK_BLOCK + 1, self.num_blocks))
        assert owned == expected, f"free, live and cached blocks must be 1..{expected[-1]}: {owned}"
        assert min(self._num_holders) >= 0, f"negative count: {self._num_holders}"
        inverse = {block: digest for digest, block in self._block_by_digest.items()}
        assert self._digest_by_block == inverse, f"{self._digest_by_block=} {inverse=}"
        lost = [block for block in self._cached if block not in self._digest_by_block]
        assert not lost, f"cached blocks without digest: {lost}"
        stale = [block for block in self._free if block in self._digest_by_block]
        assert not stale, f"free blocks with digest: {stale}"

    def _pop_available(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        block = next(iter(self._cached))
        del self._cached[block]
        del self._block_by_digest[self._digest_by_block.pop(block)]
        return block
