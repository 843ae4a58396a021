"""Prefixes of token sequences by their content: which blocks hold them, and how much of a sequence is known.

Holds no block, and does not know which are free.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice

from hearth.types import AdapterId

#: So many that nobody finds two prefixes with one digest: who did could have the KV of another text served.
DIGEST_BYTES = 32

#: Digests are found in so many dicts, each so small that one which is made anew keeps nobody waiting.
_NUM_SHARDS = 256

#: Whoever has not looked for longer looks at everything anew.
KEPT_FORGOTTEN = 1024


def block_digests(
    tokens: Sequence[int], salt: bytes, block_tokens: int, adapter: AdapterId | None = None
) -> list[bytes]:
    """Return one digest for each full block, standing for all tokens up to that block's end."""
    digests: list[bytes] = []
    extend_digests(digests, tokens, salt, block_tokens, adapter)
    return digests


def extend_digests(
    digests: list[bytes],
    tokens: Sequence[int],
    salt: bytes,
    block_tokens: int,
    adapter: AdapterId | None = None,
    num_blocks: int | None = None,
) -> None:
    """Append the digests of the full blocks of `tokens` that `digests` does not cover yet.

    `num_blocks`: only of so many of the first blocks. Prefixes of different salts or adapters have no digest
    in common.
    """
    num_full = len(tokens) // block_tokens
    first = len(digests) * block_tokens
    last = (num_full if num_blocks is None else min(num_blocks, num_full)) * block_tokens
    if last <= first:
        return
    parent = digests[-1] if digests else _root(salt, adapter)
    content = array("I", tokens[first:last])
    stride = block_tokens * content.itemsize
    content_bytes = content.tobytes()
    for at in range(0, len(content_bytes), stride):
        parent = blake2b(parent + content_bytes[at : at + stride], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)


@lru_cache(maxsize=256)
def _root(salt: bytes, adapter: AdapterId | None) -> bytes:
    # Set apart by `person`, so that no salt can pass for the digest of another chain.
    root = blake2b(salt, digest_size=DIGEST_BYTES, person=b"root").digest()
    if adapter is None:
        return root
    return blake2b(root + adapter.encode(), digest_size=DIGEST_BYTES, person=b"adapter").digest()


class PrefixIndex:
    """Mutable; written only by the `BlockBook` that owns it. Which block a digest leads to, and back."""

    def __init__(self) -> None:
        self.digests: list[bytes | None] = []  #: by block; None: none leads to it
        #: The blocks by their digests, by the first byte of these.
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_NUM_SHARDS)]
        #: Blocks that a digest no longer leads to, the last ones of `num_forgotten`.
        self._forgotten: deque[int] = deque(maxlen=KEPT_FORGOTTEN)
        self.num_forgotten = 0

    def __contains__(self, block: int) -> bool:
        return block < len(self.digests) and self.digests[block] is not None

    def __iter__(self) -> Iterator[int]:
        return (block for block, digest in enumerate(self.digests) if digest is not None)

    def reserve(self, num_blocks: int) -> None:
        """Have room for blocks of numbers below this."""
        self.digests.extend([None] * (num_blocks - len(self.digests)))

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks that hold the longest known prefix."""
        blocks: list[int] = []
        for digest in digests:
            block = self._shards[digest[0]].get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def leads(self, digest: bytes) -> bool:
        """True if a block is found by a digest."""
        return digest in self._shards[digest[0]]

    def forgotten_since(self, num_forgotten: int) -> list[int] | None:
        """Return blocks that no digest leads to since so many were forgotten; None: too long ago to know."""
        num_new = self.num_forgotten - num_forgotten
        if num_new > len(self._forgotten):
            return None
        return list(islice(reversed(self._forgotten), num_new))

    def add(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Let blocks be found by their content. Of two with the same content the first stays."""
        digest_by_block, shards = self.digests, self._shards
        for block, digest in zip(blocks, digests, strict=True):
            assert digest_by_block[block] is None, f"published twice: {block=}"
            if shards[digest[0]].setdefault(digest, block) == block:
                digest_by_block[block] = digest

    def forget(self, blocks: Sequence[int]) -> None:
        """No longer lead to blocks whose content is lost."""
        digests, shards = self.digests, self._shards
        for block in blocks:
            digest = digests[block]
            assert digest is not None, f"nothing leads to it: {block=}"
            del shards[digest[0]][digest]
            digests[block] = None
        self._note_forgotten(blocks)

    def move(self, source: int, target: int) -> None:
        """Lead to `target` where a digest has led to `source`, if one has."""
        if (digest := self.digests[source]) is not None:
            self.digests[source], self.digests[target] = None, digest
            self._shards[digest[0]][digest] = target
            self._note_forgotten((source,))

    def clear(self) -> None:
        """Forget all blocks at once."""
        self.digests = [None] * len(self.digests)
        for shard in self._shards:
            shard.clear()
        self._forgotten.clear()
        self.num_forgotten += KEPT_FORGOTTEN + 1

    def check(self) -> None:
        """Raise if blocks and digests do not lead to each other."""
        inverse = {block: digest for shard in self._shards for digest, block in shard.items()}
        led_to = {block: self.digests[block] for block in self}
        assert led_to == inverse, f"{led_to=} {inverse=}"

    def _note_forgotten(self, blocks: Sequence[int]) -> None:
        self._forgotten.extend(blocks)
        self.num_forgotten += len(blocks)


class KnownPrefix:
    """Mutable; written only by `follow`. How much of one waiting sequence an index leads to.

    It is followed step by step: a match of all blocks before every step would cost more than the step where
    many sequences wait.
    """

    def __init__(self) -> None:
        #: Which block of the prefix each one is, in order.
        self._indices: dict[int, int] = {}
        self._num_seen = 0  #: of what the index has forgotten

    @property
    def blocks(self) -> list[int]:
        """The blocks of the prefix, as they were when last followed."""
        return list(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def follow(self, index: PrefixIndex, digest_of: Callable[[int], bytes], num_most: int) -> None:
        """Take in what has changed since the last call; blocks have the same digests as then.

        No digest is asked for behind the first that leads nowhere: whoever waits for a long prompt that
        nobody knows need not wait for all of them.
        """
        forgotten = index.forgotten_since(self._num_seen)
        self._num_seen = index.num_forgotten
        if forgotten is None:
            self._indices.clear()
        for block in forgotten or ():
            if (at := self._indices.get(block)) is not None:
                while len(self._indices) > at:
                    self._indices.popitem()
        while (num_known := len(self._indices)) < num_most:
            found = index.match((digest_of(num_known),))
            if not found:
                break
            self._indices[found[0]] = num_known

    def collect(self, blocks: set[int]) -> None:
        """Add all blocks of the prefix to `blocks`, which has all before any that it has.

        For a digest stands for all of the prefix.
        """
        for block in reversed(self._indices):
            if block in blocks:
                break
            blocks.add(block)
