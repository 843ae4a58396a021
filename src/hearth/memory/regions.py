"""The books of one contiguous memory: whose every byte is. They move no byte and choose no place.

    0                                                                                    num_bytes
    | workspace | a's tensor 0 | b's tensor 0 | free | a's tensor 1 | free | b's KV | a's KV |
      of all      what may move, from the low end        what may not, from the high end; tables, adapters too

A block of KV lies at its number times its size, so that a model sees all its blocks in one array. A run of
them takes what lies around it up to the next boundaries of the books.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from hearth.core.types import ModelId
from hearth.models.layout import ALIGNMENT_BYTES, ByteRange


class Use(StrEnum):
    TENSOR = "tensor"
    WORKSPACE = "workspace"
    KV = "kv"
    TABLE = "table"
    PIECES = "pieces"  #: of an adapter, all in one region


@dataclass(frozen=True, slots=True)
class Owner:
    model: ModelId  #: empty for an adapter
    use: Use
    #: Of the tensor in its layout, of an extent's first block, of a table, a number of the adapter; 0 for a
    #: workspace.
    index: int


#: One workspace for all models: only one steps at a time, and it holds nothing between two steps.
COMMON = Owner(ModelId(""), Use.WORKSPACE, 0)


@dataclass(frozen=True, slots=True)
class Span:
    begin: int
    end: int
    owner: Owner | None  #: None: it is free

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


class RegionList:
    """All regions of one memory. Mutable; written only by the pool that owns it."""

    def __init__(self, num_bytes: int) -> None:
        assert num_bytes % ALIGNMENT_BYTES == 0 < num_bytes, f"{num_bytes=} is no number of whole regions"
        self.num_bytes = num_bytes
        self.free_bytes = num_bytes
        self._begins = [0]
        #: Regions by where they begin. They touch and cover the memory; no two free ones are neighbours.
        self._span_by_begin = {0: Span(0, num_bytes, None)}
        self._begin_by_owner: dict[Owner, int] = {}
        self.used_bytes = Counter[Use]()
        #: By model: how often its regions have changed.
        self.num_changes = Counter[ModelId]()
        self.version = 0  #: the same for all models together

    def copy(self) -> RegionList:
        twin = RegionList(self.num_bytes)
        twin.free_bytes = self.free_bytes
        twin._begins = list(self._begins)
        twin._span_by_begin = dict(self._span_by_begin)
        twin._begin_by_owner = dict(self._begin_by_owner)
        twin.used_bytes = self.used_bytes.copy()
        twin.num_changes = self.num_changes.copy()
        twin.version = self.version
        return twin

    def __iter__(self) -> Iterator[Span]:
        return (self._span_by_begin[begin] for begin in self._begins)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._begin_by_owner

    def free_spans(self) -> list[Span]:
        return [span for span in self if span.owner is None]

    def free_within(self, begin: int, end: int) -> list[Span]:
        """Return the free regions that overlap these bytes; they may reach beyond."""
        first = bisect_right(self._begins, begin) - 1
        spans = (self._span_by_begin[at] for at in self._begins[first : bisect_left(self._begins, end)])
        return [span for span in spans if span.owner is None]

    def span_of(self, owner: Owner) -> Span:
        return self._span_by_begin[self._begin_by_owner[owner]]

    def take(self, span: Span) -> None:
        owner = span.owner
        assert owner is not None, f"{span} has no owner"
        assert owner not in self, f"{owner} has its region already"
        assert span.begin % ALIGNMENT_BYTES == span.end % ALIGNMENT_BYTES == 0 < span.num_bytes, f"{span}"
        free = self._span_by_begin[self._begins[bisect_right(self._begins, span.begin) - 1]]
        assert free.owner is None, f"{span} is not free: {free}"
        assert span.end <= free.end, f"{span} is more than what is free: {free}"
        self._remove(free)
        for part in (Span(free.begin, span.begin, None), span, Span(span.end, free.end, None)):
            if part.num_bytes:
                self._insert(part)
        self._begin_by_owner[owner] = span.begin
        self._count(owner, span.num_bytes)

    def give(self, owner: Owner) -> Span:
        """Free a region and merge it with adjacent free ones. Returns the span that the owner had."""
        given = self.span_of(owner)
        beside = self._free_beside(given)
        for span in (given, *beside):
            self._remove(span)
        begin = min(span.begin for span in (given, *beside))
        self._insert(Span(begin, max(span.end for span in (given, *beside)), None))
        del self._begin_by_owner[owner]
        self._count(owner, -given.num_bytes)
        return given

    def check(self) -> None:
        spans = list(self)
        assert (spans[0].begin, spans[-1].end) == (0, self.num_bytes), f"{spans[0]} .. {spans[-1]}"
        for before, after in pairwise(spans):
            assert before.end == after.begin, f"{before} and {after} do not touch"
            assert before.owner or after.owner, f"{before} and {after} are free and apart"
        assert all(span.num_bytes > 0 for span in spans), f"an empty region: {spans}"
        assert all(begin % ALIGNMENT_BYTES == 0 for begin in self._begins), f"{self._begins=}"
        assert self._span_by_begin.keys() == set(self._begins), "a region is in one book only"
        assert self._begin_by_owner == {span.owner: span.begin for span in spans if span.owner}
        free_bytes = sum(span.num_bytes for span in spans if not span.owner)
        assert free_bytes == self.free_bytes, f"{free_bytes} are free, the books say {self.free_bytes}"
        for use in Use:
            used_bytes = sum(span.num_bytes for span in spans if span.owner and span.owner.use is use)
            assert used_bytes == self.used_bytes[use], f"{use}: {used_bytes=} {self.used_bytes[use]=}"

    def _count(self, owner: Owner, num_bytes: int) -> None:
        self.free_bytes -= num_bytes
        self.used_bytes[owner.use] += num_bytes
        self.num_changes[owner.model] += 1
        self.version += 1

    def _free_beside(self, span: Span) -> list[Span]:
        at = bisect_left(self._begins, span.begin)
        begins = self._begins[max(at - 1, 0) : at] + self._begins[at + 1 : at + 2]
        return [self._span_by_begin[begin] for begin in begins if self._span_by_begin[begin].owner is None]

    def _insert(self, span: Span) -> None:
        insort(self._begins, span.begin)
        self._span_by_begin[span.begin] = span

    def _remove(self, span: Span) -> None:
        del self._begins[bisect_left(self._begins, span.begin)]
        del self._span_by_begin[span.begin]


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def blocks_within(begin: int, end: int, block_bytes: int) -> range:
    return range(-(-begin // block_bytes), end // block_bytes)


def bytes_around(blocks: range, block_bytes: int) -> ByteRange:
    begin = blocks.start * block_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return ByteRange(begin, aligned(blocks.stop * block_bytes))


def extents_of(blocks: range, block_bytes: int, batch_blocks: int) -> list[range]:
    """Return a run of blocks cut at multiples of a batch, unless two extents would share a boundary."""
    if batch_blocks * block_bytes % ALIGNMENT_BYTES:
        return [blocks]
    first = blocks.start // batch_blocks * batch_blocks
    cuts = range(first + batch_blocks, blocks.stop, batch_blocks)
    return [range(begin, end) for begin, end in pairwise((blocks.start, *cuts, blocks.stop))]
