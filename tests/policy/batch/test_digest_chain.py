"""Digests of blocks: what they depend on, and that whoever computes them when gets the same."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hearth.core.types import AdapterId
from hearth.policy.batch.digest_chain import DigestChain


def block_digests(
    tokens: Sequence[int], salt: bytes, block_tokens: int, adapter: AdapterId | None = None
) -> list[bytes]:
    chain = DigestChain(tokens, block_tokens, salt, adapter)
    return [chain.digest(block) for block in range(len(tokens) // block_tokens)]


def test_only_full_blocks_have_digests() -> None:
    assert len(block_digests(range(11), b"", block_tokens=4)) == 2
    assert block_digests(range(3), b"", block_tokens=4) == []


def test_a_digest_depends_on_everything_before_it_and_nothing_after() -> None:
    digests = block_digests([1, 2, 3, 4, 5, 6], b"", block_tokens=2)
    assert block_digests([1, 2, 3, 4, 9, 9], b"", block_tokens=2)[:2] == digests[:2]
    assert block_digests([9, 2, 3, 4, 5, 6], b"", block_tokens=2)[2] != digests[2]


def test_a_digest_has_too_many_bits_for_anybody_to_find_a_second_text_with_it() -> None:
    assert [len(digest) * 8 for digest in block_digests(range(8), b"", block_tokens=4)] == [256, 256]


def test_different_salts_share_nothing() -> None:
    plain = block_digests(range(8), b"", block_tokens=4)
    assert not set(plain) & set(block_digests(range(8), b"adapter", block_tokens=4))


def test_a_salt_cannot_pass_for_the_digest_of_a_prefix() -> None:
    head, tail = block_digests([1, 2, 3, 4], b"", block_tokens=2)
    assert block_digests([3, 4], head, block_tokens=2) != [tail]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(0, 20), st.integers(1, 5))
@settings(derandomize=True)
def test_extending_digests_step_by_step_equals_hashing_at_once(
    tokens: list[int], cut: int, block_tokens: int
) -> None:
    digests = block_digests(tokens, b"salt", block_tokens)
    chain = DigestChain(tokens[:cut], block_tokens, b"salt")
    num_before = len(chain.tokens) // block_tokens
    assert [chain.digest(block) for block in range(num_before)] == digests[:num_before]
    chain.tokens.extend(tokens[cut:])
    assert [chain.digest(block) for block in range(len(digests))] == digests


PROMPTS = st.lists(st.integers(0, 2), max_size=24)
SALTS = st.one_of(st.binary(max_size=4), st.binary(min_size=32, max_size=32))


@given(PROMPTS, PROMPTS, SALTS, SALTS, st.integers(1, 4))
@settings(derandomize=True)
def test_two_salts_have_no_digest_in_common_and_one_has_those_of_common_blocks(
    one: list[int], other: list[int], salt: bytes, other_salt: bytes, block_tokens: int
) -> None:
    mine = block_digests(one, salt, block_tokens)
    num_common = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    num_common = min(len(one), len(other)) if num_common is None else num_common
    shared = set(mine) & set(block_digests(other, salt, block_tokens))
    assert shared == set(mine[: num_common // block_tokens])

    assume(salt != other_salt)
    assert not set(mine) & set(block_digests(other, other_salt, block_tokens))


ADAPTERS = st.none() | st.text("ab", min_size=1, max_size=2).map(AdapterId)


@given(PROMPTS, SALTS, SALTS, ADAPTERS, ADAPTERS)
@settings(derandomize=True)
def test_two_adapters_have_no_digest_in_common_whatever_their_salts(
    prompt: list[int], salt: bytes, other_salt: bytes, adapter: AdapterId | None, other: AdapterId | None
) -> None:
    assume(adapter != other)
    mine, theirs = block_digests(prompt, salt, 2, adapter), block_digests(prompt, other_salt, 2, other)
    assert not set(mine) & set(theirs)


def test_a_salt_cannot_pass_for_an_adapter() -> None:
    root = blake2b(b"", digest_size=32, person=b"root").digest()
    mine = block_digests([1, 2], b"", 2, AdapterId("one"))
    assert not set(mine) & set(block_digests([1, 2], root + b"one", 2))
