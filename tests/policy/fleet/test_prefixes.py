"""Digests of prompts, and what a replica is thought to have cached."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hearth.core.types import AdapterId
from hearth.policy.fleet.prefixes import (
    LENGTHS,
    PREFIX_TOKENS,
    KnownPrefixes,
    PrefixDigest,
    count_tokens,
    digest_prefixes,
)

SALT = bytes(32)
PROMPTS = st.lists(st.integers(0, 2), max_size=5)


def digests_of(path: list[int]) -> list[PrefixDigest]:
    """Digests of a prompt that is told apart from others by what comes at each length."""
    return [PrefixDigest(str(path[: at + 1])) for at in range(len(path))]


@given(st.lists(st.tuples(PROMPTS, st.booleans())), st.integers(0, 8))
def test_a_known_prefix_has_all_shorter_ones_and_the_newest_are_kept(
    prompts: list[tuple[list[int], bool]], max_digests: int
) -> None:
    known = KnownPrefixes(max_digests)
    for path, is_used in prompts:
        digests = digests_of(path)
        num_known = next((at for at, one in enumerate(digests) if one not in known.used), len(digests))
        assert known.count_cached(digests) == count_tokens(num_known)
        assert not any(one in known.used for one in digests[num_known:])
        if is_used:
            known.use(digests)
            assert known.count_cached(digests) == count_tokens(min(len(digests), max_digests))
        assert len(known.used) <= max_digests


def test_the_prompt_that_was_used_longest_ago_is_forgotten_first_and_its_longest_prefix_before_others() -> (
    None
):
    known, old, new = KnownPrefixes(4), digests_of([0, 0, 0]), digests_of([1, 1])
    known.use(old)
    known.use(new)
    assert (known.count_cached(old), known.count_cached(new)) == (count_tokens(2), count_tokens(2))
    known.use(old)
    assert (known.count_cached(old), known.count_cached(new)) == (count_tokens(3), count_tokens(1))


def test_digests_are_as_far_apart_as_the_limits_say() -> None:
    assert LENGTHS[0] == PREFIX_TOKENS
    for shorter, longer in pairwise(LENGTHS):
        assert PREFIX_TOKENS <= longer - shorter <= max(PREFIX_TOKENS, shorter // 8)
    assert len(LENGTHS) < 80, "also a prompt of a million tokens is described by few"


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_prompts_share_digests_exactly_as_far_as_they_are_equal(num_tokens: int, num_equal: int) -> None:
    prompt = list(range(num_tokens))
    other = [*prompt[:num_equal], *(token + 1 for token in prompt[num_equal:])]
    digests, others = digest_prefixes(prompt, SALT, "model"), digest_prefixes(other, SALT, "model")
    assert len(digests) == sum(length <= num_tokens for length in LENGTHS)
    assert [a == b for a, b in zip(digests, others, strict=True)] == [
        length <= num_equal for length in LENGTHS[: len(digests)]
    ]


def test_key_groups_models_and_adapters_share_no_digest() -> None:
    prompt, lora = [7] * 4000, AdapterId("lora")
    found = [
        *digest_prefixes(prompt, SALT, "model"),
        *digest_prefixes(prompt, b"another group".ljust(32), "model"),
        *digest_prefixes(prompt, SALT, "other"),
        *digest_prefixes(prompt, SALT, "model", lora),
        *digest_prefixes(prompt, SALT, "model", AdapterId("other")),
    ]
    assert len(found) == len(set(found))
