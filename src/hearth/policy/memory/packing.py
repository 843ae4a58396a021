"""Where new tensors go in a contiguous memory, and what has to move for them. Moves nothing itself.

Tangram's Partitioned-Gain Packing (its Algorithm 1, corrected; docs/design/memory.md has an example). Memory
between two fixed regions is a section: holes with runs of movable regions between them.

    | hole 0 |  run  | hole 1 |  run  | hole 2 |

Merging holes costs the bytes of the runs between them. A run that stays splits the section in two, each with
a part of the items: the largest run that can stay does, and so on in both parts.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

#: Holes and items that the search for partitions may look at, some tens of milliseconds of them. A pool of a
#: thousand regions hardly ever needs a quarter; if runs are sorted by size, each partition cuts off one hole.
MAX_LOOKS = 60_000


@dataclass(frozen=True, slots=True)
class Region:
    begin: int
    num_bytes: int
    key: Hashable | None  #: None: free
    is_fixed: bool = False  #: occupied, and must not be moved

    @property
    def end(self) -> int:
        return self.begin + self.num_bytes


@dataclass(frozen=True, slots=True)
class Item:
    key: Hashable
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy these bytes; source and target may overlap."""

    key: Hashable
    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Packing:
    begins: Mapping[Hashable, int]  #: of every item
    #: In an order that is safe: none writes over what a later one still reads.
    moves: tuple[Move, ...]

    @property
    def moved_bytes(self) -> int:
        return sum(move.num_bytes for move in self.moves)


def pack(regions: Sequence[Region], items: Sequence[Item]) -> Packing | None:
    """Return places for all items, with no more bytes moved than by `merge_all`; None: they do not fit.

    Without fixed regions they fit if there are enough free bytes. With them it is bin packing, and None means
    that none of three rules could divide the items over the sections.
    """
    return _packed(regions, items, _partitioned)


def merge_all(regions: Sequence[Region], items: Sequence[Item]) -> Packing | None:
    """The baseline: move everything movable to the front of its section; None exactly if `pack` is."""
    return _packed(regions, items, _merged)


def _packed(
    regions: Sequence[Region], items: Sequence[Item], lay: Callable[[_Section, Sequence[Item]], Packing]
) -> Packing | None:
    sections = _sections(regions)
    shares = _divide(sections, items)
    if shares is None:
        return None
    packings = [lay(section, share) for section, share in zip(sections, shares, strict=True)]
    begins = {key: begin for packing in packings for key, begin in packing.begins.items()}
    assert len(begins) == len(items), f"keys of items must differ: {len(begins)=} {len(items)=}"
    return Packing(begins, tuple(move for packing in packings for move in packing.moves))


class _Section:
    """Regions between two fixed ones, with at least one hole. Immutable."""

    def __init__(self, regions: Sequence[Region]) -> None:
        """`regions`: no two free ones touch."""
        self.regions = regions
        self.hole_indices = [index for index, region in enumerate(regions) if region.key is None]
        self.holes = [regions[index] for index in self.hole_indices]
        self.holes_bytes = [hole.num_bytes for hole in self.holes]
        self._free_before = [0, *accumulate(self.holes_bytes)]
        #: Bytes of the run behind each hole but the last: what is gained if it stays.
        self.gains_bytes = [after.begin - hole.end for hole, after in pairwise(self.holes)]

    @property
    def free_bytes(self) -> int:
        return self._free_before[-1]

    def room_bytes(self, holes: range) -> int:
        return self._free_before[holes.stop] - self._free_before[holes.start]

    def run_bytes(self, first: int, last: int) -> int:
        distance_bytes = self.holes[last].begin - self.holes[first].begin
        return distance_bytes - (self._free_before[last] - self._free_before[first])


def _sections(regions: Sequence[Region]) -> list[_Section]:
    parts: list[list[Region]] = [[]]
    for region in regions:
        if region.is_fixed:
            parts.append([])
        elif parts[-1] and parts[-1][-1].key is None and region.key is None:
            hole = parts[-1].pop()
            parts[-1].append(Region(hole.begin, hole.num_bytes + region.num_bytes, None))
        else:
            parts[-1].append(region)
    return [_Section(part) for part in parts if any(region.key is None for region in part)]


# --- Dividing items over sections and holes -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shares:
    by_bin: list[list[Item]]
    rooms_bytes: list[int]  #: that are left in each bin
    left: list[Item]  #: items for which no bin had the room


def _best_fit(rooms_bytes: Sequence[int], items: Sequence[Item]) -> _Shares:
    shares = _Shares([[] for _ in rooms_bytes], list(rooms_bytes), [])
    fullest = sorted((room, index) for index, room in enumerate(rooms_bytes))
    for item in items:
        at = bisect_left(fullest, (item.num_bytes, 0))
        if at == len(fullest):
            shares.left.append(item)
            continue
        room, index = fullest.pop(at)
        insort(fullest, (room - item.num_bytes, index))
        shares.by_bin[index].append(item)
        shares.rooms_bytes[index] = room - item.num_bytes
    return shares


def _first_fit(rooms_bytes: Sequence[int], items: Sequence[Item]) -> _Shares:
    shares = _Shares([[] for _ in rooms_bytes], list(rooms_bytes), [])
    for item in items:
        roomy = (index for index, room in enumerate(shares.rooms_bytes) if room >= item.num_bytes)
        index = next(roomy, None)
        if index is None:
            shares.left.append(item)
            continue
        shares.by_bin[index].append(item)
        shares.rooms_bytes[index] -= item.num_bytes
    return shares


def _holes_first(sections: Sequence[_Section], items: Sequence[Item]) -> _Shares:
    """Put each item into the section of a hole that it fits into; the rest by best fit."""
    owners = [index for index, section in enumerate(sections) for _ in section.holes]
    in_holes = _best_fit([room for section in sections for room in section.holes_bytes], items)
    rooms_bytes = [0] * len(sections)
    for owner, room in zip(owners, in_holes.rooms_bytes, strict=True):
        rooms_bytes[owner] += room
    shares = _best_fit(rooms_bytes, in_holes.left)
    for owner, placed in zip(owners, in_holes.by_bin, strict=True):
        shares.by_bin[owner].extend(placed)
    return shares


def _divide(sections: Sequence[_Section], items: Sequence[Item]) -> list[list[Item]] | None:
    for item in items:
        assert item.num_bytes > 0, f"an item without bytes has no place: {item.key} {item.num_bytes=}"
    largest_first = _largest_first(items)
    rooms_bytes = [section.free_bytes for section in sections]
    shares = _holes_first(sections, largest_first)
    if shares.left:
        shares = _best_fit(rooms_bytes, largest_first)
    if shares.left:
        shares = _first_fit(rooms_bytes, largest_first)
    return None if shares.left else [_largest_first(share) for share in shares.by_bin]


def _largest_first(items: Sequence[Item]) -> list[Item]:
    return sorted(items, key=lambda item: item.num_bytes, reverse=True)


# --- Partitioned-Gain Packing of one section ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fit:
    holes: range
    in_holes: list[list[Item]]  #: of each hole
    merged: range  #: holes that become one, with the runs between them moved; empty: nothing moves
    in_merged: list[Item]  #: items that go there, besides those of its holes
    moved_bytes: int


class _Subspace:
    """Consecutive holes, and the items that go there. Mutable; written by `_partition` and `_split`."""

    def __init__(self, section: _Section, holes: range, items: Sequence[Item]) -> None:
        self.holes = holes
        self.items = items
        #: The best without a partition.
        self.fit = _fit(section, holes, items)
        self.sides: list[_Subspace] = []
        self.moved_bytes = self.fit.moved_bytes
        self.num_looks = len(holes) + len(items)


def _partition(section: _Section, items: Sequence[Item]) -> Iterator[_Fit]:
    """Algorithm 1. Yield the fits of the final subspaces, which together have all the items."""
    whole = _Subspace(section, range(len(section.holes)), items)
    subspaces = [whole]
    num_looks = 0
    for subspace in subspaces:  # grows meanwhile
        if subspace.moved_bytes and num_looks < MAX_LOOKS:
            subspace.sides = _split(section, subspace)
            subspaces += subspace.sides
        num_looks += subspace.num_looks
    for subspace in reversed(subspaces):  # so that the sides of each are decided before it
        sides_bytes = sum(side.moved_bytes for side in subspace.sides)
        if subspace.sides and sides_bytes < subspace.moved_bytes:
            subspace.moved_bytes = sides_bytes
        else:
            subspace.sides = []
    pending = [whole]
    while pending:
        subspace = pending.pop()
        pending += reversed(subspace.sides)
        if not subspace.sides:
            yield subspace.fit


def _split(section: _Section, subspace: _Subspace) -> list[_Subspace]:
    """Let the largest run stay that can: its bytes need not move. Empty: none can."""
    holes = subspace.holes
    middle_first = list(holes[:-1])  # among equals: two halves are searched faster than one hole and the rest
    middle = len(middle_first) // 2
    middle_first[::2], middle_first[1::2] = middle_first[middle:], middle_first[:middle][::-1]
    for last in sorted(middle_first, key=section.gains_bytes.__getitem__, reverse=True):
        left, right = range(holes.start, last + 1), range(last + 1, holes.stop)
        subspace.num_looks += len(subspace.items)
        shares = _try_packing(subspace.items, section.room_bytes(left), section.room_bytes(right))
        if not shares.left:
            sides = zip((left, right), shares.by_bin, strict=True)
            return [_Subspace(section, side, share) for side, share in sides]
    return []


def _try_packing(items: Sequence[Item], left_bytes: int, right_bytes: int) -> _Shares:
    on_left: list[Item] = []
    on_right: list[Item] = []
    for item in items:
        num_bytes = item.num_bytes
        if left_bytes >= right_bytes:
            left_bytes -= num_bytes
            on_left.append(item)
        else:
            right_bytes -= num_bytes
            on_right.append(item)
        if left_bytes < 0 or right_bytes < 0:
            return _Shares([], [], [item])
    return _Shares([on_left, on_right], [left_bytes, right_bytes], [])


def _fit(section: _Section, holes: range, items: Sequence[Item]) -> _Fit:
    """Put items into holes as they are; for the rest, merge the holes with the least between them."""
    shares = _best_fit(section.holes_bytes[holes.start : holes.stop], items)
    merged = holes[:0]
    if shares.left:
        needed_bytes = sum(item.num_bytes for item in shares.left)
        merged = _cheapest_merge(section, holes, shares.rooms_bytes, needed_bytes)
    moved_bytes = section.run_bytes(merged[0], merged[-1]) if merged else 0
    return _Fit(holes, shares.by_bin, merged, shares.left, moved_bytes)


def _cheapest_merge(section: _Section, holes: range, rooms_bytes: Sequence[int], needed_bytes: int) -> range:
    """Return consecutive holes that together have room, with the fewest bytes between them."""
    best: range | None = None
    fewest_bytes = 0
    start, room_bytes = 0, 0
    for stop, room in enumerate(rooms_bytes, 1):
        room_bytes += room
        while room_bytes - rooms_bytes[start] >= needed_bytes:
            room_bytes -= rooms_bytes[start]
            start += 1
        if room_bytes >= needed_bytes:
            merged = holes[start:stop]
            run_bytes = section.run_bytes(merged[0], merged[-1])
            if best is None or run_bytes < fewest_bytes:
                best, fewest_bytes = merged, run_bytes
    assert best is not None, f"a subspace got more than it has room for: {needed_bytes=} {room_bytes=}"
    return best


# --- Addresses ----------------------------------------------------------------------------------------------


def _merged(section: _Section, items: Sequence[Item]) -> Packing:
    behind = section.regions[-1].end - section.free_bytes
    return Packing(_in_line(items, behind), tuple(_slide(section.regions)))


def _partitioned(section: _Section, items: Sequence[Item]) -> Packing:
    begins: dict[Hashable, int] = {}
    moves: list[Move] = []
    for fit in _partition(section, items):
        together = list(fit.in_merged)
        for hole, in_hole in zip(fit.holes, fit.in_holes, strict=True):
            if hole in fit.merged:
                together += in_hole
            else:
                begins |= _in_line(in_hole, section.holes[hole].begin)
        if fit.merged:
            first, last = (section.hole_indices[hole] for hole in (fit.merged[0], fit.merged[-1]))
            behind = section.regions[last].end - section.room_bytes(fit.merged)
            begins |= _in_line(together, behind)
            moves += _slide(section.regions[first : last + 1])
    return Packing(begins, tuple(moves))


def _in_line(items: Sequence[Item], begin: int) -> dict[Hashable, int]:
    begins = accumulate((item.num_bytes for item in items), initial=begin)
    return {item.key: at for item, at in zip(items, begins, strict=False)}


def _slide(regions: Sequence[Region]) -> list[Move]:
    """Move everything to the front, in the order of addresses: nothing is overwritten before it is read."""
    moves: list[Move] = []
    target = regions[0].begin
    for region in regions:
        if region.key is not None:
            if region.begin != target:
                moves.append(Move(region.key, region.begin, target, region.num_bytes))
            target += region.num_bytes
    return moves
