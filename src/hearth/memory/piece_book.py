"""Where the pieces of adapters lie in a row of pages, several adapters on one. Knows no page and no driver.

slots    |     0     |     1     |     2     |     3     | ...      each has room for a page
pages    | page      |           | page      | page      |          a slot without pieces has none
pieces   |aa|bbb|  cc|           |d|      |eeeeeeee|     |          they may lie across slots

A piece goes to the lowest address that has the room on pages that are there, and else to the lowest at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from hearth.models.adapter import FACTOR_ALIGNMENT_BYTES
from hearth.models.layout import ByteRange
from hearth.types import AdapterId


@dataclass(frozen=True, slots=True)
class PiecePlan:
    """Places for the pieces of one adapter."""

    parts: tuple[ByteRange, ...]  #: by piece, rounded up
    runs: tuple[ByteRange, ...]  #: the same, those as one that lie one behind the other, in order
    new_slots: tuple[int, ...]  #: slots that need a page first


class _Rooms:
    """Ranges of addresses, in order, none of which touch but those that are used up. Mutable."""

    def __init__(self, ranges: Iterable[ByteRange]) -> None:
        self.begins: list[int] = []
        self._ends: list[int] = []
        for one in ranges:
            self.begins.append(one.begin)
            self._ends.append(one.end)

    def first_fit(self, num_bytes: int, first: int = 0) -> int | None:
        """Return the first range from `first` on that has so many bytes."""
        for index in range(first, len(self.begins)):
            if self._ends[index] - self.begins[index] >= num_bytes:
                return index
        return None

    def take(self, index: int, num_bytes: int, most: int) -> ByteRange:
        """Take so many bytes from the beginning of a range, at most as often as said, and return them."""
        begin = self.begins[index]
        num_times = min(most, (self._ends[index] - begin) // num_bytes)
        self.begins[index] += num_times * num_bytes
        return ByteRange(begin, self.begins[index])

    def take_out(self, part: ByteRange) -> None:
        """Take bytes that lie within one range."""
        index = bisect_right(self.begins, part.begin) - 1
        assert part.end <= self._ends[index], f"{part=} {self.begins[index]=} {self._ends[index]=}"
        self.begins.insert(index + 1, part.end)
        self._ends.insert(index, part.begin)

    def add(self, part: ByteRange) -> None:
        """Add bytes that lie in none of the ranges."""
        index = bisect_right(self.begins, part.begin)
        begin, end, low = part.begin, part.end, index
        while low and self._ends[low - 1] == begin:  # the one before touches it, used up or not
            low -= 1
            begin = self.begins[low]
        while index < len(self.begins) and self.begins[index] == end:
            end = self._ends[index]
            index += 1
        self.begins[low:index] = [begin]
        self._ends[low:index] = [end]


class PieceBook:
    """Mutable; written only by the pool that owns it."""

    def __init__(self, page_bytes: int, num_slots: int) -> None:
        assert page_bytes % FACTOR_ALIGNMENT_BYTES == 0, f"{page_bytes=}"
        self._page_bytes, self._num_slots = page_bytes, num_slots
        self._parts: dict[AdapterId, tuple[ByteRange, ...]] = {}
        #: By adapter, as in `PiecePlan`. Most have few, and whoever comes or goes has steps wait.
        self._runs: dict[AdapterId, tuple[ByteRange, ...]] = {}
        self._bytes: dict[AdapterId, int] = {}  #: of their pieces: a worker asks often, and has thousands
        #: Bytes of pages that no piece has, in order; no two of them touch.
        self._holes: list[ByteRange] = []
        self._num_runs: Counter[int] = Counter()  #: by slot that has a page: at least one
        #: Slots that have no page, before the last that ever had one.
        self._pageless: set[int] = set()
        self._num_known = 0  #: slots that have or had a page are before this one

    @property
    def slots(self) -> set[int]:
        """The slots that have a page."""
        return set(self._num_runs)

    def bytes_by_owner(self) -> dict[AdapterId, int]:
        """Return the bytes of each adapter's pieces, rounded up, by its id."""
        return dict(sorted(self._bytes.items()))

    def parts_of(self, owner: AdapterId) -> tuple[ByteRange, ...]:
        return self._parts[owner]

    def slots_of(self, owner: AdapterId) -> list[int]:
        """Return the slots on whose pages an adapter has pieces, in order."""
        return sorted({slot for run in self._runs[owner] for slot in self._slots_of(run)})

    def plan(self, sizes: Sequence[int], max_new_slots: int) -> PiecePlan | None:
        """Return places for pieces of these sizes, and change nothing.

        None: there are too few addresses, or more slots would need a page than may.
        """
        room_bytes = sum(map(_size, self._holes)) + max_new_slots * self._page_bytes
        if sum(map(piece_bytes, sizes)) > room_bytes:
            return None  # most often, where memory is full: whoever asks has others give way then
        holes = _Rooms(self._holes)
        rooms: _Rooms | None = None  #: holes, and what would be one with another page; made when it is needed
        runs: list[ByteRange] = []
        parts: list[ByteRange] = []
        new_slots: list[int] = []
        #: Before which hole none has room for so many bytes: holes that are used up stay in the list.
        first: dict[int, int] = {}
        for num_bytes, pieces in groupby(map(piece_bytes, sizes)):  # most are of one size
            assert num_bytes > 0, f"a piece has no bytes: {sizes}"
            num_left = sum(1 for _ in pieces)
            while num_left:
                index = holes.first_fit(num_bytes, first.get(num_bytes, 0))
                if index is None:
                    if rooms is None:
                        rooms = self._all_rooms(sum(map(piece_bytes, sizes)), runs)
                    added = self._slots_for(num_bytes, rooms, new_slots)
                    if added is None or len(new_slots) + len(added) > max_new_slots:
                        return None
                    new_slots += added
                    for slot in added:
                        holes.add(self._range_of(slot))
                    first.clear()
                    index = holes.first_fit(num_bytes)
                    assert index is not None, f"{added=} have no room for {num_bytes} bytes"
                first[num_bytes] = index
                run = holes.take(index, num_bytes, num_left)
                runs.append(run)
                if rooms is not None:
                    rooms.take_out(run)
                begins = range(run.begin, run.end, num_bytes)
                parts += [ByteRange(begin, begin + num_bytes) for begin in begins]
                num_left -= len(begins)
        return PiecePlan(tuple(parts), tuple(_merged(runs)), tuple(new_slots))

    def take(self, owner: AdapterId, plan: PiecePlan) -> None:
        """Give an adapter the places of a plan that was made a moment ago."""
        assert owner not in self._parts, f"adapter {owner} has its pieces"
        self._parts[owner], self._runs[owner] = plan.parts, plan.runs
        self._bytes[owner] = sum(map(_size, plan.runs))
        self._num_runs.update(slot for run in plan.runs for slot in self._slots_of(run))
        num_known = max(self._num_known, *(slot + 1 for slot in plan.new_slots), 0)
        self._pageless.update(range(self._num_known, num_known))
        self._pageless.difference_update(plan.new_slots)
        self._num_known = num_known
        self._holes = _without([*self._holes, *map(self._range_of, plan.new_slots)], plan.runs)

    def give(self, owner: AdapterId) -> list[int]:
        """Take the pieces of an adapter back. Returns the slots that have none any more, whose pages go."""
        slots, runs = self.slots_of(owner), self._runs.pop(owner)
        del self._parts[owner], self._bytes[owner]
        self._num_runs.subtract(slot for run in runs for slot in self._slots_of(run))
        empty = [slot for slot in slots if not self._num_runs[slot]]
        for slot in empty:
            del self._num_runs[slot]
        self._pageless.update(empty)
        self._holes = _without([*self._holes, *runs], list(map(self._range_of, empty)))
        return empty

    def check(self) -> None:
        """Raise unless every byte of every page is in one hand. For tests."""
        parts = [part for parts in self._parts.values() for part in parts]
        assert self._bytes == {owner: sum(map(_size, own)) for owner, own in self._parts.items()}
        assert self._holes == _merged(self._holes), f"holes touch: {self._holes}"
        covered = _merged([*parts, *self._holes])
        assert sum(map(_size, covered)) == sum(map(_size, [*parts, *self._holes])), "two have the same bytes"
        assert covered == _merged(map(self._range_of, self.slots)), f"{covered=} {self.slots=}"
        assert self._pageless == set(range(self._num_known)) - self.slots, f"{self._pageless=} {self.slots=}"
        for owner, own in self._parts.items():
            assert self._runs[owner] == tuple(_merged(own)), f"{owner} {own} {self._runs[owner]}"
        users = Counter(slot for runs in self._runs.values() for run in runs for slot in self._slots_of(run))
        assert users == self._num_runs, f"{users=} {self._num_runs=}"

    def _slots_for(self, num_bytes: int, rooms: _Rooms, new_slots: Sequence[int]) -> list[int] | None:
        """Return the slots that need a page so that a hole has so many bytes; None: there are too few."""
        index = rooms.first_fit(num_bytes)
        if index is None:
            return None
        begin = rooms.begins[index]
        wanted = self._slots_of(ByteRange(begin, begin + num_bytes))
        return [slot for slot in wanted if slot not in self._num_runs and slot not in new_slots]

    def _all_rooms(self, num_bytes: int, taken: Sequence[ByteRange]) -> _Rooms:
        """Return where pieces of so many bytes could lie, with pages that are there or not."""
        num_more = -(-num_bytes // self._page_bytes) + 1
        beyond = range(self._num_known, min(self._num_known + num_more, self._num_slots))
        rooms = _Rooms(_merged([*self._holes, *map(self._range_of, (*self._pageless, *beyond))]))
        for part in taken:
            rooms.take_out(part)
        return rooms

    def _range_of(self, slot: int) -> ByteRange:
        return ByteRange(slot * self._page_bytes, (slot + 1) * self._page_bytes)

    def _slots_of(self, part: ByteRange) -> range:
        return range(part.begin // self._page_bytes, -(-part.end // self._page_bytes))


def piece_bytes(num_bytes: int) -> int:
    """Return the bytes that a piece takes, which begins where kernels want it to."""
    return -(-num_bytes // FACTOR_ALIGNMENT_BYTES) * FACTOR_ALIGNMENT_BYTES


def _size(part: ByteRange) -> int:
    return part.end - part.begin


def _merged(parts: Iterable[ByteRange]) -> list[ByteRange]:
    """Return parts in order, those as one that touch."""
    merged: list[ByteRange] = []
    for part in sorted(parts, key=lambda part: part.begin):
        if merged and merged[-1].end >= part.begin:
            merged[-1] = ByteRange(merged[-1].begin, max(merged[-1].end, part.end))
        else:
            merged.append(part)
    return merged


def _without(parts: Iterable[ByteRange], taken: Iterable[ByteRange]) -> list[ByteRange]:
    """Return parts, merged, less those bytes; each taken part lies within one of them."""
    left: list[ByteRange] = []
    rest = iter(sorted(taken, key=lambda part: part.begin))
    gone = next(rest, None)
    for part in _merged(parts):
        begin = part.begin
        while gone is not None and gone.end <= part.end:
            if begin < gone.begin:
                left.append(ByteRange(begin, gone.begin))
            begin = gone.end
            gone = next(rest, None)
        if begin < part.end:
            left.append(ByteRange(begin, part.end))
    return left
