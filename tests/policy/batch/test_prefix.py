"""Prefixes that are found by runs of blocks, against an index of every single block and its content."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.policy.batch.blocks import BlockBook
from hearth.policy.batch.digest_chain import DigestChain
from hearth.policy.batch.prefix import KnownPrefix, PrefixRun, Publication

#: Texts that branch off each other.
TOKENS = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9, 9], [1, 2, 3, 9, 9, 4], [1, 8, 8, 8], [7, 7, 7, 7, 7])


@dataclass(slots=True)
class Holder:
    """A sequence that runs: its text, and the blocks that hold it."""

    chain: DigestChain
    blocks: list[int]
    num_published: int


@dataclass(slots=True)
class Shelf:
    """A book of blocks, what each one contains, and which block would be found by which content."""

    book: BlockBook
    holders: list[Holder] = field(default_factory=list)
    content: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: The blocks that an index of every single block would have, the first of each content.
    first: dict[tuple[int, ...], int] = field(default_factory=dict)
    has_twice: bool = False  #: a content that was found already was found once more
    has_headless: bool = False  #: a block was in the index once, and one in front of it was not

    def start(self, chain: DigestChain) -> None:
        hits = self.book.prefixes.match(chain)
        num_new = len(chain.tokens) - len(hits)
        if self.book.can_allocate(num_new, beside=hits):
            self.book.take(hits)
            blocks = self.book.allocate(num_new) or []
            self.holders.append(Holder(chain, hits + blocks, len(hits)))

    def publish(self, holder: Holder, num_blocks: int) -> None:
        """Let the next blocks of a sequence be found, so many at most."""
        begin = holder.num_published
        blocks = holder.blocks[begin : begin + num_blocks]
        if not blocks:
            return
        before = holder.blocks[begin - 1] if begin else None
        self.book.publish([Publication(holder.chain, begin, before, list(blocks))])
        for at, block in enumerate(blocks, begin + 1):
            content = self.content[block] = tuple(holder.chain.tokens[:at])
            if content not in self.first:
                assert block in self.book.prefixes
                self.first[content] = block
            self.has_twice |= self.first[content] != block and block in self.book.prefixes
        holder.num_published += len(blocks)

    def clear(self, extent: range) -> bool:
        if self.book.num_available < len(extent):
            return False
        at = {move.source: move.target for move in self.book.remove(extent)}
        for holder in self.holders:
            holder.blocks = [at.get(block, block) for block in holder.blocks]
        contents = {at[block]: self.content.pop(block) for block in at if block in self.content}
        self.content |= contents
        self.first |= {content: at[block] for content, block in self.first.items() if block in at}
        return True

    def check(self) -> None:
        self.book.check()
        known = self.book.prefixes
        self.first = {
            content: block
            for content, block in self.first.items()
            if block in known and self.content[block] == content
        }
        self.has_headless |= any(len(one) > 1 and one[:-1] not in self.first for one in self.first)

    def look(self, tokens: list[int]) -> list[int]:
        """What is found holds what it should, and no less is found than in an index of single blocks."""
        found = self.book.prefixes.match(DigestChain(tokens, 1))
        assert [self.content[block] for block in found] == [
            tuple(tokens[: at + 1]) for at in range(len(found))
        ]
        num_single = next(
            (at for at in range(len(tokens)) if tuple(tokens[: at + 1]) not in self.first), len(tokens)
        )
        assert (self.has_twice and self.has_headless) or len(found) == num_single
        return found


@given(st.data())
@settings(derandomize=True)
def test_as_much_is_found_as_by_digests_of_every_block_and_nothing_that_differs(data: st.DataObject) -> None:
    shelf = Shelf(BlockBook(block_tokens=1, floor_blocks=1))
    shelf.book.add(range(1, 9))
    next_block, extents = 20, [range(1, 9)]
    waiting = [(KnownPrefix(), DigestChain(tokens, 1)) for tokens in TOKENS]
    kinds = ["start", "start", "start", "publish", "publish", "end", "grow", "clear", "look", "empty", "fail"]
    for _ in range(data.draw(st.integers(8, 60))):
        kind, holders = data.draw(st.sampled_from(kinds)), shelf.holders
        holder = data.draw(st.sampled_from(holders)) if holders else None
        match kind:
            case "start":
                shelf.start(DigestChain(data.draw(st.sampled_from(TOKENS)), 1))
            case "publish" if holder is not None:
                shelf.publish(holder, data.draw(st.integers(1, 6)))
            case "end" | "fail" if holder is not None:
                if kind == "fail":
                    shelf.book.withdraw(holder.blocks)
                shelf.book.release_all([holder.blocks])
                holders[:] = [one for one in holders if one is not holder]
            case "grow":
                extents.append(range(next_block, next_block + 2))
                shelf.book.add(extents[-1])
                next_block += 2
            case "clear" if extents:
                extent = data.draw(st.sampled_from(extents))
                if shelf.clear(extent):
                    extents.remove(extent)
            case "empty" if not holders:
                shelf.book.remove_all()
                extents = []
            case _:
                prefix, chain = data.draw(st.sampled_from(waiting))
                prefix.follow(shelf.book.prefixes, chain, len(chain.tokens))
                assert prefix.blocks == shelf.look(list(chain.tokens))
        shelf.check()
    collected: set[int] = set()
    for prefix, chain in waiting:
        prefix.follow(shelf.book.prefixes, chain, len(chain.tokens))
        assert prefix.blocks == shelf.look(list(chain.tokens))
        assert len(prefix) == len(prefix.blocks)
        prefix.collect(collected)
    assert collected == {block for prefix, _ in waiting for block in prefix.blocks}


BLOCKS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@given(BLOCKS, BLOCKS, st.integers(1, 3), st.integers(0, 5), st.data())
@settings(derandomize=True)
def test_a_run_is_followed_up_to_the_first_block_that_differs(
    mine: list[int], theirs: list[int], block_tokens: int, first: int, data: st.DataObject
) -> None:
    before = [2] * first
    own = DigestChain([one for one in before + mine for _ in range(block_tokens)], block_tokens)
    other = DigestChain([one for one in before + theirs for _ in range(block_tokens)], block_tokens)
    tokens = array("I", own.tokens[first * block_tokens :])
    run = PrefixRun(first, own.digest(first), list(range(len(mine))), tokens)
    pairs = zip(mine, theirs, strict=False)
    num_alike = next((at for at, (one, two) in enumerate(pairs) if one != two), min(len(mine), len(theirs)))
    end = first + data.draw(st.integers(0, len(theirs)))
    begin = data.draw(st.integers(first, min(end, first + num_alike)))

    until = run.alike_until(other, begin, end)

    assert until == min(first + num_alike, end)
    if num_alike:
        other.digest(first)
        run.lend_digests(other, first + num_alike)
        assert other.num_known == first + num_alike
        assert [other.digest(at) for at in range(first + num_alike)] == [
            own.digest(at) for at in range(first + num_alike)
        ]
        run.check()


@given(st.integers(0, 6), st.integers(0, 6))
@settings(derandomize=True)
def test_no_digest_is_computed_behind_the_first_block_that_nobody_knows(
    num_known: int, num_most: int
) -> None:
    book, prefix = BlockBook.fixed(8, block_tokens=1), KnownPrefix()
    mine, theirs = DigestChain(TOKENS[0], 1), DigestChain(TOKENS[0], 1)
    if num_known:
        book.publish([Publication(theirs, 0, None, book.allocate(num_known) or [])])

    prefix.follow(book.prefixes, mine, num_most)

    assert len(prefix) == min(num_known, num_most)
    assert mine.num_known == (num_known + 1 if num_known < num_most else min(1, num_most))
    assert theirs.num_known == min(1, num_known)


def test_requests_of_the_same_prompt_have_its_digests_computed_once() -> None:
    book = BlockBook.fixed(32, block_tokens=1)
    texts = [DigestChain([1, 2, 3, 4, 5, last], 1) for last in (6, 7, 8)]
    blocks = [book.allocate(6) or [] for _ in texts]
    for text, held in zip(texts, blocks, strict=True):
        book.publish([Publication(text, 0, None, held[:5])])
    for text, held in zip(texts, blocks, strict=True):
        book.publish([Publication(text, 5, held[4], held[5:])])

    assert [book.prefixes.match(text) for text in texts] == [blocks[0][:5] + held[5:] for held in blocks]
    assert [text.num_known for text in texts] == [1, 6, 6]
    book.check()


def test_whoever_goes_on_where_a_run_ends_makes_it_longer() -> None:
    book = BlockBook.fixed(8, block_tokens=1)
    first, second = DigestChain([1, 2, 3], 1), DigestChain([1, 2, 3, 4, 5], 1)
    held = book.allocate(3) or []
    book.publish([Publication(first, 0, None, held[:])])
    hits = book.prefixes.match(second)
    book.take(hits)
    new = book.allocate(2) or []
    book.publish([Publication(second, 3, hits[-1], new[:])])

    assert book.prefixes.match(second) == held + new
    assert second.num_known == 4  # the last of which was looked for in vain
    assert len(set(map(id, filter(None, book.prefixes.runs)))) == 1
    book.check()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_that_computed_the_same_are_both_found_where_they_part(order: tuple[int, int]) -> None:
    book = BlockBook.fixed(16, block_tokens=1)
    texts = [DigestChain(one, 1) for one in ([1, 2, 3, 4], [1, 2, 3, 5])]
    held = [book.allocate(4) or [] for _ in texts]
    for text, blocks in zip(texts, held, strict=True):  # of which only those of the first are found
        book.publish([Publication(text, 0, None, blocks[:2])])
    for at in order:
        book.publish([Publication(texts[at], 2, held[at][1], held[at][2:])])

    common = held[0][:2] + held[order[0]][2:3]
    assert [book.prefixes.match(text) for text in texts] == [common + blocks[3:] for blocks in held]
    book.check()


def test_who_waits_does_not_find_what_another_has_put_where_a_run_was_cut() -> None:
    book, prefix = BlockBook.fixed(8, block_tokens=1), KnownPrefix()
    waiting, first, second = (DigestChain(one, 1) for one in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5], TOKENS[1]))
    held = book.allocate(5) or []
    book.publish([Publication(first, 0, None, held[:])])
    book.release_all([held])
    hits = book.prefixes.match(second)
    book.take(hits)
    prefix.follow(book.prefixes, waiting, 5)
    assert prefix.blocks == held
    new = book.allocate(2) or []
    book.allocate(2)  # for which the last two of the run have to go
    book.publish([Publication(second, 3, hits[-1], new[:])])

    prefix.follow(book.prefixes, waiting, 5)

    assert prefix.blocks == held[:3] == hits
    assert book.prefixes.match(second) == hits + new
    book.check()


def test_who_lost_what_is_before_is_not_taken_for_another_that_goes_on_alike() -> None:
    book = BlockBook.fixed(11, block_tokens=1)
    other, gone, mine = (DigestChain(one, 1) for one in ([1, 9, 3, 4], [1, 2], [1, 2, 3, 5]))
    held = [book.allocate(len(one.tokens)) or [] for one in (other, gone, mine)]
    for text, blocks in zip((other, gone, mine), held, strict=True):
        book.publish([Publication(text, 0, None, blocks[:2])])
    book.publish([Publication(other, 2, held[0][1], held[0][2:])])
    book.release_all([held[1]])
    assert book.allocate(2) is not None  # for which the only block that was found by 1 2 has to go
    book.publish([Publication(mine, 2, held[2][1], held[2][2:])])

    assert mine.digest(3) == DigestChain(mine.tokens, 1).digest(3)
    assert book.prefixes.match(DigestChain([1, 9, 3, 5], 1)) == held[0][:3]
    assert book.prefixes.match(DigestChain([1, 2, 3, 5], 1)) == held[0][:1]
    book.check()


def test_blocks_that_come_and_go_leave_nothing_behind() -> None:
    book = BlockBook(block_tokens=1, floor_blocks=1)
    for number in range(1000):
        extent = range(8 * number, 8 * number + 8)
        book.add(extent)
        book.remove(extent)
        book.check()  # which bounds the heap
