"""Every rule of the block book as an example, and its invariants under any order of calls."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.policy.batch.blocks import SINK_BLOCK, BlockBook, BlockMove
from hearth.policy.batch.digest_chain import DigestChain
from hearth.policy.batch.prefix import Publication


def allocate(book: BlockBook, num_blocks: int) -> list[int]:
    blocks = book.allocate(num_blocks)
    assert blocks is not None
    return blocks


def text(book: BlockBook, letters: str) -> DigestChain:
    """A text in which each letter fills a block."""
    return DigestChain([ord(one) for one in letters for _ in range(book.block_tokens)], book.block_tokens)


def publish(book: BlockBook, blocks: list[int], letters: str) -> None:
    book.publish([Publication(text(book, letters), 0, None, blocks)])


def found(book: BlockBook, letters: str) -> list[int]:
    return book.prefixes.match(text(book, letters))


def cached(book: BlockBook, letters: str) -> list[int]:
    """Blocks that were published with a text and then released."""
    blocks = allocate(book, len(letters))
    publish(book, list(blocks), letters)
    book.release_all([blocks])
    return blocks


def test_hands_out_the_lowest_blocks_and_never_the_sink() -> None:
    book = BlockBook.fixed(num_blocks=6, block_tokens=4)
    first = allocate(book, 4)
    book.release_all([[first[2], first[0]]])
    assert first == [1, 2, 3, 4]
    assert allocate(book, 3) == [1, 3, 5]
    assert book.num_holders[SINK_BLOCK] == 0


def test_allocates_all_or_nothing() -> None:
    book = BlockBook.fixed(num_blocks=4, block_tokens=4)
    assert book.allocate(4) is None
    assert book.num_available == 3


def test_a_published_block_that_was_released_is_still_found_and_counts_as_available() -> None:
    book = BlockBook.fixed(num_blocks=4, block_tokens=4)
    blocks = cached(book, "ab")
    assert found(book, "abc") == blocks
    assert book.num_available == 3


def test_match_ends_at_the_first_block_that_nobody_knows() -> None:
    book = BlockBook.fixed(num_blocks=4, block_tokens=4)
    cached(book, "ac")
    assert found(book, "abc") == [1]


def test_free_blocks_go_before_cached_ones() -> None:
    book = BlockBook.fixed(num_blocks=4, block_tokens=4)
    cached(book, "a")
    assert allocate(book, 2) == [2, 3]
    assert found(book, "a") == [1]


def test_evicts_the_least_recently_used_prefix_and_forgets_it() -> None:
    book = BlockBook.fixed(num_blocks=3, block_tokens=4)
    first = allocate(book, 1)
    second = allocate(book, 1)
    publish(book, [first[0]], "f")
    publish(book, [second[0]], "s")
    book.release_all([second])
    book.release_all([first])
    assert allocate(book, 1) == second
    assert found(book, "s") == []
    assert found(book, "f") == first


def test_evicts_the_tail_of_a_sequence_before_its_head() -> None:
    book = BlockBook.fixed(num_blocks=4, block_tokens=4)
    cached(book, "hmt")
    allocate(book, 1)
    assert found(book, "hmt") == [1, 2]


def test_a_shared_block_stays_live_until_its_last_holder_lets_go() -> None:
    book = BlockBook.fixed(num_blocks=3, block_tokens=4)
    blocks = allocate(book, 1)
    publish(book, [blocks[0]], "a")
    book.take(blocks)
    book.release_all([blocks])
    assert book.num_available == 1
    book.release_all([blocks])
    assert book.num_available == 2


def test_a_taken_block_is_not_evicted() -> None:
    book = BlockBook.fixed(num_blocks=3, block_tokens=4)
    hits = cached(book, "a")
    book.take(hits)
    assert book.allocate(2) is None
    assert allocate(book, 1) == [2]


def test_can_allocate_does_not_count_blocks_that_are_about_to_be_taken() -> None:
    book = BlockBook.fixed(num_blocks=4, block_tokens=4)
    hits = cached(book, "a")
    assert book.can_allocate(3)
    assert book.can_allocate(2, beside=hits)
    assert not book.can_allocate(3, beside=hits)


def test_of_two_blocks_with_the_same_content_the_first_stays() -> None:
    book = BlockBook.fixed(num_blocks=3, block_tokens=4)
    blocks = allocate(book, 2)
    publish(book, [blocks[0]], "s")
    publish(book, [blocks[1]], "s")
    assert found(book, "s") == [1]
    book.release_all([blocks])
    assert 2 not in book.prefixes
    book.check()


def test_releasing_too_often_is_refused() -> None:
    book = BlockBook.fixed(num_blocks=3, block_tokens=4)
    blocks = allocate(book, 1)
    book.release_all([blocks])
    with pytest.raises(AssertionError, match="block=1"):
        book.release_all([blocks])


def test_check_names_a_block_that_is_both_free_and_live() -> None:
    book = BlockBook.fixed(num_blocks=3, block_tokens=4)
    allocate(book, 1)
    book.free.add([1])
    with pytest.raises(AssertionError, match=r"\[1, 1, 2\]"):
        book.check()


def test_check_notices_a_block_that_is_in_no_run() -> None:
    book = BlockBook.fixed(num_blocks=3, block_tokens=4)
    cached(book, "a")
    book.prefixes.runs[2] = book.prefixes.runs[1]
    with pytest.raises(AssertionError, match="inverse"):
        book.check()


@given(st.data())
@settings(derandomize=True)
def test_no_block_is_lost_or_held_twice_under_any_order_of_calls(data: st.DataObject) -> None:
    book = BlockBook.fixed(num_blocks=data.draw(st.integers(2, 8)), block_tokens=2)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=2, max_size=8))
        chain, num_full = DigestChain(tokens, 2), len(tokens) // 2
        is_release = data.draw(st.booleans())
        if held and is_release:
            book.release_all([held.pop(data.draw(st.integers(0, len(held) - 1)))])
        else:
            hits = book.prefixes.match(chain)
            num_new = num_full - len(hits)
            if book.can_allocate(num_new, beside=hits):
                book.take(hits)
                blocks = allocate(book, num_new)
                assert not set(blocks) & {block for other in held for block in other}
                held.append(hits + blocks)
                book.publish([Publication(chain, len(hits), hits[-1] if hits else None, list(blocks))])
        book.check()
    for blocks in held:
        book.release_all([blocks])
    assert book.num_available == book.num_blocks


# --- elastic ---


def elastic(*extents: range) -> BlockBook:
    book = BlockBook(block_tokens=4, floor_blocks=3)
    for extent in extents:
        book.add(extent)
    return book


def test_an_elastic_book_has_no_blocks_before_it_is_given_some() -> None:
    book = elastic()
    assert book.allocate(1) is None
    book.add(range(7, 9))
    assert allocate(book, 2) == [7, 8]
    book.check()


def test_blocks_that_come_later_are_handed_out_first_if_they_are_lower() -> None:
    book = elastic(range(20, 23), range(5, 7))
    assert allocate(book, 3) == [5, 6, 20]


def test_a_block_cannot_be_given_twice() -> None:
    with pytest.raises(AssertionError, match=r"given twice: \[8\]"):
        elastic(range(7, 9), range(8, 10))


def test_blocks_that_are_taken_away_are_forgotten() -> None:
    book = elastic(range(1, 4), range(8, 10))
    cached(book, "ab")
    cached(book, "cde")
    assert book.cached.among(range(3, 10)) == [3, 8, 9]
    book.remove(range(8, 10))
    assert (book.num_blocks, len(book.cached), len(book.free)) == (3, 3, 0)
    assert (found(book, "ab"), found(book, "cde")) == ([1, 2], [3])
    assert not book.has_all([8])
    book.check()


def test_what_followed_a_block_that_is_taken_away_is_free_for_nobody_can_find_it() -> None:
    book = elastic(range(1, 4), range(8, 10))
    cached(book, "abcd")
    book.remove(range(2, 3))
    assert (book.num_blocks, len(book.cached), len(book.free)) == (4, 1, 3)
    assert found(book, "abcd") == [1]
    book.check()


def test_live_blocks_cannot_be_taken_away() -> None:
    book = elastic(range(1, 4))
    allocate(book, 2)
    with pytest.raises(AssertionError, match=r"live blocks cannot be taken away: \[2\]"):
        book.remove(range(2, 4))


def test_what_was_never_given_cannot_be_taken_away() -> None:
    with pytest.raises(AssertionError, match=r"not in the book: \[4\]"):
        elastic(range(1, 4)).remove(range(3, 5))


def test_a_block_moves_with_its_holders_and_its_content() -> None:
    book = elastic(range(1, 5))
    blocks = allocate(book, 1)
    publish(book, [blocks[0]], "a")
    book.take(blocks)
    assert book.remove(range(1, 3)) == [BlockMove(1, 3)]
    assert (book.num_holders[1], book.num_holders[3]) == (0, 2)
    assert found(book, "a") == [3]
    assert allocate(book, 1) == [4]
    book.check()


def test_a_block_that_moves_over_a_prefix_takes_its_place() -> None:
    book = elastic(range(1, 3))
    cached(book, "g")
    allocate(book, 1)
    assert book.remove(range(2, 3)) == [BlockMove(2, 1)]
    assert found(book, "g") == []
    assert (book.num_live, len(book.cached), len(book.free)) == (1, 0, 0)
    book.check()


def test_blocks_move_to_free_blocks_then_over_the_oldest_prefixes() -> None:
    book = elastic(range(1, 9))
    cached(book, "abc")
    allocate(book, 3)
    assert book.remove(range(3, 7)) == [BlockMove(4, 7), BlockMove(5, 8), BlockMove(6, 2)]
    assert found(book, "abc") == [1]
    book.check()


def test_a_block_moves_over_what_followed_a_prefix_that_was_moved_over() -> None:
    book = elastic(range(1, 5))
    publish(book, allocate(book, 2), "ab")
    book.release_all([[1], [2]])  # the head first, so that it is the oldest
    allocate(book, 2)
    assert book.remove(range(3, 5)) == [BlockMove(3, 1), BlockMove(4, 2)]
    book.check()


@given(st.data())
@settings(derandomize=True)
def test_no_block_is_lost_however_often_extents_come_and_go(data: st.DataObject) -> None:
    book = BlockBook(block_tokens=2, floor_blocks=1)
    extents, held = [range(1, 4)], list[list[int]]()
    book.add(extents[0])
    for number in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["grow", "clear", "hold", "release"])):
            case "grow":
                extents.append(range(10 * number + 10, 10 * number + data.draw(st.integers(11, 14))))
                book.add(extents[-1])
            case "clear" if extents:
                extent = data.draw(st.sampled_from(extents))
                if book.num_available >= len(extent):
                    new = {move.source: move.target for move in book.remove(extent)}
                    held = [[new.get(block, block) for block in blocks] for blocks in held]
                    extents.remove(extent)
            case "hold" if book.num_available:
                blocks = allocate(book, data.draw(st.integers(1, book.num_available)))
                held.append(blocks)
                publish(book, [blocks[0]], chr(number))
            case "release" if held:
                book.release_all([held.pop()])
        book.check()
        book.check(Counter(block for blocks in held for block in blocks))
    assert book.num_blocks == sum(map(len, extents))
