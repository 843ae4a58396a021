"""A prefix that is followed step by step, against one that is looked up anew."""

from __future__ import annotations

from hashlib import blake2b

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hearth.policy.batch.blocks import BlockBook, BlockMove
from hearth.policy.batch.prefix import KEPT_FORGOTTEN, KnownPrefix, block_digests
from hearth.types import AdapterId

#: Chains that branch off each other.
TOKENS = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9], [1, 8, 8, 8], [7, 7, 7, 7, 7])
CHAINS = [block_digests(tokens, b"", 1) for tokens in TOKENS]


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_what_is_known_of_a_prefix_is_what_a_lookup_would_find(data: st.DataObject) -> None:
    book = BlockBook(block_tokens=1, floor_blocks=1)
    book.add(range(1, 9))
    next_block, extents = 20, [range(1, 9)]
    held: list[list[int]] = []
    prefixes = [KnownPrefix() for _ in CHAINS]
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["compute", "compute", "release", "grow", "clear", "look", "empty"])):
            case "compute":
                chain = data.draw(st.sampled_from(CHAINS))
                hits = book.prefixes.match(chain)
                if book.can_allocate(len(chain) - len(hits), beside=hits):
                    book.take(hits)
                    new = book.allocate(len(chain) - len(hits)) or []
                    book.publish(new, chain[len(hits) :])
                    held.append(hits + new)
            case "release" if held:
                book.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
            case "grow":
                extents.append(range(next_block, next_block + 2))
                book.add(extents[-1])
                next_block += 2
            case "clear" if extents:
                extent = data.draw(st.sampled_from(extents))
                live, targets = book.live_in(extent), book.available_outside(extent, len(extent))
                if len(live) <= len(targets):
                    moves = list(map(BlockMove, live, targets))
                    book.move(moves)
                    at = {move.source: move.target for move in moves}
                    held = [[at.get(block, block) for block in blocks] for blocks in held]
                    book.remove(extent)
                    extents.remove(extent)
            case "empty" if not held:
                book.remove_all()
                extents = []
            case _:
                index = data.draw(st.integers(0, len(CHAINS) - 1))
                prefixes[index].follow(book.prefixes, CHAINS[index].__getitem__, len(CHAINS[index]))
                assert prefixes[index].blocks == book.prefixes.match(CHAINS[index])
        book.check()
    collected: set[int] = set()
    for prefix, chain in zip(prefixes, CHAINS, strict=True):
        prefix.follow(book.prefixes, chain.__getitem__, len(chain))
        assert prefix.blocks == book.prefixes.match(chain)
        prefix.collect(collected)
    assert collected == {block for prefix in prefixes for block in prefix.blocks}


PROMPTS = st.lists(st.integers(0, 2), max_size=24)
SALTS = st.one_of(st.binary(max_size=4), st.binary(min_size=32, max_size=32))


@given(PROMPTS, PROMPTS, SALTS, SALTS, st.integers(1, 4))
@settings(derandomize=True, deadline=None)
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
@settings(derandomize=True, deadline=None)
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


def test_who_has_not_looked_for_long_looks_at_all_of_it_anew() -> None:
    book, prefix = BlockBook.fixed(3, block_tokens=1), KnownPrefix()
    for number in range(KEPT_FORGOTTEN + 4):
        (digest,) = block_digests([number], b"", 1)
        blocks = book.allocate(1) or []
        book.publish([blocks[0]], [digest])
        book.release(blocks)
        if number == 0:
            prefix.follow(book.prefixes, [digest].__getitem__, 1)
            assert len(prefix) == 1
    prefix.follow(book.prefixes, block_digests([0], b"", 1).__getitem__, 1)

    assert book.prefixes.forgotten_since(0) is None
    assert len(prefix) == 0


@given(st.integers(0, 6), st.integers(0, 6))
@settings(derandomize=True, deadline=None)
def test_no_digest_is_asked_for_behind_the_first_that_nobody_knows(num_known: int, num_most: int) -> None:
    book, prefix, chain = BlockBook.fixed(8, block_tokens=1), KnownPrefix(), CHAINS[0]
    book.publish(book.allocate(num_known) or [], chain[:num_known])
    asked: list[int] = []

    def digest_of(index: int) -> bytes:
        asked.append(index)
        return chain[index]

    prefix.follow(book.prefixes, digest_of, num_most)

    assert len(prefix) == min(num_known, num_most)
    assert asked == list(range(min(num_known + 1, num_most)))


def test_blocks_that_come_and_go_leave_nothing_behind() -> None:
    book = BlockBook(block_tokens=1, floor_blocks=1)
    for number in range(1000):
        extent = range(8 * number, 8 * number + 8)
        book.add(extent)
        book.remove(extent)
        book.check()  # which bounds the heap
