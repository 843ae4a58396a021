"""Digests of the blocks of a token sequence. Each covers all tokens up to the end of its block."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from hearth.core.types import AdapterId

#: Long enough that no two prefixes with one digest can be found: else the KV of another text could be served.
DIGEST_BYTES = 32


class DigestChain:
    """Tokens, and the digests of their full blocks, computed on demand. Mutable.

    Tokens are only appended, by the `Batcher`. Chains of different salts or adapters share no digest.
    """

    __slots__ = ("_adapter", "_digests", "_salt", "block_tokens", "tokens")

    def __init__(
        self, tokens: Sequence[int], block_tokens: int, salt: bytes = b"", adapter: AdapterId | None = None
    ) -> None:
        self.tokens = tokens if isinstance(tokens, array) else array("I", tokens)
        self.block_tokens = block_tokens
        self._salt, self._adapter = salt, adapter
        self._digests: list[bytes] = []

    @property
    def num_known(self) -> int:
        return len(self._digests)

    def digest(self, block: int) -> bytes:
        digests = self._digests
        if block >= len(digests):
            parent = digests[-1] if digests else _root(self._salt, self._adapter)
            first, last = len(digests) * self.block_tokens, (block + 1) * self.block_tokens
            assert last <= len(self.tokens), f"{block=} {self.block_tokens=} {len(self.tokens)=}"
            digests += chained_digests(parent, self.tokens[first:last], self.block_tokens)
        return digests[block]

    def computed(self, block: int) -> bytes | None:
        return self._digests[block] if block < len(self._digests) else None

    def adopt(self, first: int, digests: Sequence[bytes]) -> None:
        """Take digests of equal tokens for the blocks from `first` on. Those before must be known."""
        assert first <= len(self._digests), f"{first=} {len(self._digests)=}"
        self._digests += digests[len(self._digests) - first :]


def chained_digests(parent: bytes, tokens: array[int], block_tokens: int) -> list[bytes]:
    if len(tokens) == block_tokens:  # the common case
        return [blake2b(parent + tokens.tobytes(), digest_size=DIGEST_BYTES).digest()]
    digests: list[bytes] = []
    stride, content = block_tokens * tokens.itemsize, tokens.tobytes()
    for at in range(0, len(content), stride):
        parent = blake2b(parent + content[at : at + stride], digest_size=DIGEST_BYTES).digest()
        digests.append(parent)
    return digests


@lru_cache(maxsize=256)
def _root(salt: bytes, adapter: AdapterId | None) -> bytes:
    # Domain separation by `person`: no salt can pass for the digest of another chain.
    root = blake2b(salt, digest_size=DIGEST_BYTES, person=b"root").digest()
    if adapter is None:
        return root
    return blake2b(root + adapter.encode(), digest_size=DIGEST_BYTES, person=b"adapter").digest()
