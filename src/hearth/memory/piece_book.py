"""Where the pieces of adapters lie in a row of pages, several adapters on one. Knows no page and no driver.

slots    |     0     |     1     |     2     |     3     | ...      each has room for a page
pages    | page      |           | page      | page      |          a slot without pieces has none
pieces   |aa|bbb|  cc|           |d|      |eeeeeeee|     |          they may lie across slots

A piece goes to the lowest address that has the room on pages that are there, and else to the lowest at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby

from hearth.core.types import AdapterId
from hearth.models.adapter import FACTOR_ALIGNMENT_BYTES
from hearth.models.layout import ByteRange

#: Shapes of adapters whose sizes are kept rounded.
MAX_SHAPES = 1024


@dataclass(frozen=True, slots=True)
class PieceStretch:
    begin: int  #: the place of the first one
    first: int  #: of the pieces
    end: int  #: the piece behind the last one


@dataclass(frozen=True, slots=True)
class PiecePlan:
    stretches: tuple[PieceStretch, ...]  #: all pieces, in their order
    sizes: tuple[int, ...]  #: by piece, rounded up
    runs: tuple[ByteRange, ...]  #: the same places, those as one that lie one behind the other, in order
    new_slots: tuple[int, ...]  #: slots that need a page first

    @staticmethod
    def in_a_row(sizes: Sequence[int], begin: int) -> PiecePlan:
        rounded = _RoundedSizes.of(tuple(sizes))
        run = ByteRange(begin, begin + rounded.num_bytes)
        return PiecePlan((PieceStretch(begin, 0, len(rounded.sizes)),), rounded.sizes, (run,), ())

    @property
    def parts(self) -> tuple[ByteRange, ...]:
        parts: list[ByteRange] = []
        for stretch in self.stretches:
            ends = list(accumulate(self.sizes[stretch.first : stretch.end], initial=stretch.begin))
            parts += map(ByteRange, ends, ends[1:])
        return tuple(parts)


@dataclass(frozen=True, slots=True)
class _RoundedSizes:
    sizes: tuple[int, ...]
    num_bytes: int
    groups: tuple[tuple[int, int], ...]  #: sizes, and how many pieces of each follow each other

    @staticmethod
    @lru_cache(maxsize=MAX_SHAPES)
    def of(sizes: tuple[int, ...]) -> _RoundedSizes:
        assert all(size > 0 for size in sizes), f"a piece has no bytes: {sizes}"
        rounded = tuple(map(piece_bytes, sizes))
        groups = tuple((size, sum(1 for _ in pieces)) for size, pieces in groupby(rounded))
        return _RoundedSizes(rounded, sum(rounded), groups)


class _Rooms:
    """Disjoint ranges of addresses, in order, no two of which touch. Mutable; sorted for binary search."""

    def __init__(self, begins: list[int], ends: list[int]) -> None:
        self.begins, self.ends = begins, ends

    def copy(self) -> _Rooms:
        return _Rooms(self.begins.copy(), self.ends.copy())

    def first_fit(self, num_bytes: int, first: int = 0) -> int | None:
        begins, ends = self.begins, self.ends
        for index in range(first, len(begins)):
            if ends[index] - begins[index] >= num_bytes:
                return index
        return None

    def take_out(self, part: ByteRange) -> None:
        index = bisect_right(self.begins, part.begin) - 1
        begin, end = self.begins[index], self.ends[index]
        assert begin <= part.begin < part.end <= end, f"{part=} {begin=} {end=}"
        if begin < part.begin and part.end < end:
            self.begins.insert(index + 1, part.end)
            self.ends.insert(index, part.begin)
        elif part.end < end:
            self.begins[index] = part.end
        elif begin < part.begin:
            self.ends[index] = part.begin
        else:
            del self.begins[index], self.ends[index]

    def add(self, part: ByteRange) -> None:
        begin, end = part.begin, part.end
        low = high = bisect_right(self.begins, begin)
        if low and self.ends[low - 1] == begin:
            low -= 1
            begin = self.begins[low]
        if high < len(self.begins) and self.begins[high] == end:
            end = self.ends[high]
            high += 1
        self.begins[low:high] = [begin]
        self.ends[low:high] = [end]


class PieceBook:
    def __init__(self, page_bytes: int, num_slots: int) -> None:
        assert page_bytes % FACTOR_ALIGNMENT_BYTES == 0, f"{page_bytes=}"
        self._page_bytes, self._num_slots = page_bytes, num_slots
        self._plans: dict[AdapterId, PiecePlan] = {}
        self._bytes: dict[AdapterId, int] = {}  #: of their pieces: a worker asks often, and has thousands
        self._holes = _Rooms([], [])  #: bytes of pages that no piece has
        self._hole_bytes = 0
        self._rooms = _Rooms([0], [num_slots * page_bytes])
        self._num_runs: dict[int, int] = {}  #: by slot that has a page: at least one

    @property
    def slots(self) -> set[int]:
        return set(self._num_runs)

    def bytes_by_owner(self) -> dict[AdapterId, int]:
        return dict(sorted(self._bytes.items()))

    def plan_of(self, owner: AdapterId) -> PiecePlan:
        return self._plans[owner]

    def slots_of(self, owner: AdapterId) -> list[int]:
        return sorted({slot for run in self._plans[owner].runs for slot in self._slots_of(run)})

    def plan(self, sizes: Sequence[int], max_new_slots: int) -> PiecePlan | None:
        """Return places for pieces of these sizes. Changes nothing.

        None: addresses are short, or more than `max_new_slots` would need a page.
        """
        rounded = _RoundedSizes.of(tuple(sizes))
        if rounded.num_bytes > self._hole_bytes + max_new_slots * self._page_bytes:
            return None  # the common case when memory is full: the caller evicts and asks again
        holes = self._holes.copy()
        rooms: _Rooms | None = None  #: made when it is needed, less what was taken
        runs: list[ByteRange] = []
        stretches: list[PieceStretch] = []
        num_placed = 0
        new_slots: list[int] = []
        #: By size: the first hole that may have room; none before it has.
        first: dict[int, int] = {}
        for num_bytes, num_pieces in rounded.groups:  # most are of one size
            num_left = num_pieces
            while num_left:
                index = holes.first_fit(num_bytes, first.get(num_bytes, 0))
                if index is None:
                    if rooms is None:
                        rooms = self._rooms.copy()
                        for run in runs:
                            rooms.take_out(run)
                    added = self._slots_for(num_bytes, num_left, rooms, new_slots)
                    if added is None or len(new_slots) + len(added) > max_new_slots:
                        return None
                    new_slots += added
                    for pages in self._ranges_of(added):
                        holes.add(pages)
                    first.clear()
                    index = holes.first_fit(num_bytes)
                    assert index is not None, f"{added=} have no room for {num_bytes} bytes"
                begin = holes.begins[index]
                num_times = min(num_left, (holes.ends[index] - begin) // num_bytes)
                run = ByteRange(begin, begin + num_times * num_bytes)
                holes.begins[index] = run.end  # nothing may be left of it, but those behind keep their place
                first[num_bytes] = index
                if rooms is not None:
                    rooms.take_out(run)
                if stretches and runs[-1].end == begin:
                    before = stretches.pop()
                    stretches.append(PieceStretch(before.begin, before.first, num_placed + num_times))
                else:
                    stretches.append(PieceStretch(begin, num_placed, num_placed + num_times))
                runs.append(run)
                num_placed += num_times
                num_left -= num_times
        return PiecePlan(tuple(stretches), rounded.sizes, tuple(_merged(runs)), tuple(new_slots))

    def take(self, owner: AdapterId, plan: PiecePlan) -> None:
        """Give an adapter the places of a plan. The book must not have changed since `plan`."""
        assert owner not in self._plans, f"adapter {owner} has its pieces"
        self._plans[owner] = plan
        self._bytes[owner] = num_bytes = sum(plan.sizes)
        for pages in self._ranges_of(plan.new_slots):
            self._holes.add(pages)
        self._hole_bytes += len(plan.new_slots) * self._page_bytes - num_bytes
        for run in plan.runs:
            self._holes.take_out(run)
            self._rooms.take_out(run)
            for slot in self._slots_of(run):
                self._num_runs[slot] = self._num_runs.get(slot, 0) + 1

    def give(self, owner: AdapterId) -> list[int]:
        """Take back the pieces of an adapter. Returns the slots that became empty, whose pages come free."""
        plan = self._plans.pop(owner)
        num_bytes = self._bytes.pop(owner)
        empty: list[int] = []
        for run in plan.runs:
            self._holes.add(run)
            self._rooms.add(run)
            for slot in self._slots_of(run):
                self._num_runs[slot] -= 1
                if not self._num_runs[slot]:
                    del self._num_runs[slot]
                    empty.append(slot)
        for pages in self._ranges_of(empty):
            self._holes.take_out(pages)
        self._hole_bytes += num_bytes - len(empty) * self._page_bytes
        return empty

    def check(self) -> None:
        parts = [part for plan in self._plans.values() for part in plan.parts]
        assert self._bytes == {owner: sum(map(_size, plan.parts)) for owner, plan in self._plans.items()}
        holes, rooms = (
            [ByteRange(begin, end) for begin, end in zip(some.begins, some.ends, strict=True)]
            for some in (self._holes, self._rooms)
        )
        assert holes == _merged(holes), f"holes touch: {holes}"
        assert self._hole_bytes == sum(map(_size, holes)), f"{self._hole_bytes=} {holes=}"
        covered = _merged([*parts, *holes])
        assert sum(map(_size, covered)) == sum(map(_size, [*parts, *holes])), "two have the same bytes"
        assert covered == list(self._ranges_of(sorted(self.slots))), f"{covered=} {self.slots=}"
        assert rooms == _merged(rooms), f"rooms touch: {rooms}"
        everything = ByteRange(0, self._num_slots * self._page_bytes)
        assert _merged([*parts, *rooms]) == [everything], f"{parts=} {rooms=}"
        assert sum(map(_size, [*parts, *rooms])) == everything.end, f"both taken and free: {parts=} {rooms=}"
        for plan in self._plans.values():
            assert plan.runs == tuple(_merged(plan.parts)), f"{plan}"
        users = Counter(
            slot for plan in self._plans.values() for run in plan.runs for slot in self._slots_of(run)
        )
        assert users == self._num_runs, f"{users=} {self._num_runs=}"

    def _slots_for(
        self, num_bytes: int, num_wanted: int, rooms: _Rooms, new_slots: Sequence[int]
    ) -> list[int] | None:
        """Return the slots that need a page so that pieces of `num_bytes` fit into the first room.

        For as many pieces as fit there, at most `num_wanted`; None: there is no room for any.
        """
        index = rooms.first_fit(num_bytes)
        if index is None:
            return None
        begin = rooms.begins[index]
        num_times = min(num_wanted, (rooms.ends[index] - begin) // num_bytes)
        wanted = self._slots_of(ByteRange(begin, begin + num_times * num_bytes))
        return [slot for slot in wanted if slot not in self._num_runs and slot not in new_slots]

    def _ranges_of(self, slots: Iterable[int]) -> Iterator[ByteRange]:
        begin = end = -1
        for slot in sorted(slots):
            if slot != end:
                if begin < end:
                    yield ByteRange(begin * self._page_bytes, end * self._page_bytes)
                begin = slot
            end = slot + 1
        if begin < end:
            yield ByteRange(begin * self._page_bytes, end * self._page_bytes)

    def _slots_of(self, part: ByteRange) -> range:
        return range(part.begin // self._page_bytes, -(-part.end // self._page_bytes))


def piece_bytes(num_bytes: int) -> int:
    return -(-num_bytes // FACTOR_ALIGNMENT_BYTES) * FACTOR_ALIGNMENT_BYTES


def _size(part: ByteRange) -> int:
    return part.end - part.begin


def _merged(parts: Iterable[ByteRange]) -> list[ByteRange]:
    begins, ends = list[int](), list[int]()
    for part in sorted(parts, key=lambda part: part.begin):
        if ends and ends[-1] >= part.begin:
            ends[-1] = max(ends[-1], part.end)
        else:
            begins.append(part.begin)
            ends.append(part.end)
    return list(map(ByteRange, begins, ends))
