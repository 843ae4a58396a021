"""Digests of prompt prefixes, and which of them a replica has probably cached.

Every prompt is digested at the same lengths, so two prompts share a digest exactly if they share that prefix.
The brain remembers the digests of the requests that it dispatched to a replica; workers report nothing. A
wrong guess only costs time: workers look prefixes up by their own digests (`policy/batch/digest_chain.py`).

Digests are keyed with the secret salt of the caller's key group. A request never matches a prompt of another
group, and a journal shows only which requests of a group begin alike.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import NewType

from hearth.core.types import AdapterId

PrefixDigest = NewType("PrefixDigest", str)

#: Least tokens between two digests. Later ones are an eighth of their prefix apart: 128 Ki tokens have 52.
PREFIX_TOKENS = 128
_SHARE = 8
_MAX_TOKENS = 1 << 20
_DIGEST_BYTES = 6
#: Digests remembered per replica.
MAX_DIGESTS = 2048


def _lengths() -> Iterator[int]:
    num_tokens = PREFIX_TOKENS
    while num_tokens <= _MAX_TOKENS:
        yield num_tokens
        num_tokens += max(PREFIX_TOKENS, num_tokens // _SHARE // PREFIX_TOKENS * PREFIX_TOKENS)


#: The lengths of prefixes that have a digest.
LENGTHS = tuple(_lengths())


def digest_prefixes(
    prompt: Sequence[int], salt: bytes, model: str, adapter: AdapterId | None = None
) -> tuple[PrefixDigest, ...]:
    """Return digests of a prompt's prefixes, shortest first. `model`: the digest of its weights."""
    num_digests = bisect_right(LENGTHS, len(prompt))
    if not num_digests:
        return ()
    tokens = array("I", prompt[: LENGTHS[num_digests - 1]])
    content, begin, digests = tokens.tobytes(), 0, list[PrefixDigest]()
    state = blake2b(f"{model} {adapter}".encode(), key=salt, digest_size=_DIGEST_BYTES, person=b"routing")
    for num_tokens in LENGTHS[:num_digests]:
        end = num_tokens * tokens.itemsize
        state.update(content[begin:end])
        begin = end
        digests.append(PrefixDigest(b64encode(state.digest()).decode()))
    return tuple(digests)


def count_tokens(num_digests: int) -> int:
    """Return the length of the prefix that the last of the first `num_digests` digests stands for."""
    return LENGTHS[num_digests - 1] if num_digests else 0


@dataclass(slots=True)
class KnownPrefixes:
    """The prompt prefixes that were dispatched to a replica last. Evictions are not reported.

    If a prefix is known, so are all shorter prefixes of it: of a prompt, the longest is forgotten first.
    """

    max_digests: int = MAX_DIGESTS
    #: The one that was used longest ago first.
    used: dict[PrefixDigest, None] = field(default_factory=dict)

    def count_cached(self, digests: Sequence[PrefixDigest]) -> int:
        """Return the length of the longest known prefix of a prompt."""
        return count_tokens(bisect_left(digests, True, key=lambda digest: digest not in self.used))

    def use(self, digests: Sequence[PrefixDigest]) -> None:
        for digest in reversed(digests):
            self.used.pop(digest, None)
            self.used[digest] = None
        for digest in list(islice(self.used, max(0, len(self.used) - self.max_digests))):
            del self.used[digest]
