"""Where in an arena the missing parts of a model go, and what has to move for it. Decides only.

Regions that can never move separate free memory, so they go to the ends: the workspace, one for all models
because only one steps at a time, to the low end, KV and tables to the high end; tensors that lie there shift.
If an immovable region is in the way, they go elsewhere. Tensors go where the packer puts them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from math import gcd

from hearth.core.types import ModelId
from hearth.memory.regions import COMMON, Owner, RegionList, Span, Use, aligned, blocks_within, bytes_around
from hearth.models.layout import ALIGNMENT_BYTES
from hearth.policy.memory.packing import Item, Move, Packing, Region

Packer = Callable[[Sequence[Region], Sequence[Item]], Packing | None]

#: Where memory is too much in pieces, about as many tries end with room for all of a model in one piece.
MAX_TRIES = 16

#: Key of a window for the packer: which block it will be is known only once it has its place.
_WINDOW = "window"


@dataclass(frozen=True, slots=True)
class PlacementNeed:
    model: ModelId
    tensors: tuple[Item, ...]  #: under their owners
    workspace_bytes: int
    num_blocks: int  #: of KV, in one extent
    block_bytes: int
    common_bytes: int = 0  #: of the workspace, that there are
    tables: tuple[Item, ...] = ()  #: under their owners

    @property
    def workspace(self) -> tuple[Item, ...]:
        """A workspace of the model's own, for where the common one cannot grow far enough."""
        item = Item(Owner(self.model, Use.WORKSPACE, 0), aligned(self.workspace_bytes))
        return (item,) if self.more_bytes else ()

    @property
    def more_bytes(self) -> int:
        return max(0, aligned(self.workspace_bytes) - self.common_bytes)

    @property
    def least_bytes(self) -> int:
        items_bytes = sum(item.num_bytes for item in (*self.tensors, *self.tables))
        return items_bytes + self.more_bytes + aligned(self.num_blocks * self.block_bytes)

    @property
    def step_bytes(self) -> int:
        """Bytes to free before the next attempt: large enough to bound the number of attempts."""
        items = (*self.tensors, *self.tables, *self.workspace, *_windows(self))
        return max(self.least_bytes // MAX_TRIES, *(item.num_bytes for item in items))


@dataclass(frozen=True, slots=True)
class Placement:
    moves: tuple[Move, ...]  #: to be carried out first, in this order
    #: Free then; an extent's first block is the index of its owner. The common workspace may be among them,
    #: for its larger span: it has the beginning of it already.
    spans: tuple[Span, ...]


def plan_placement(
    regions: RegionList, need: PlacementNeed, movable: Set[ModelId], packer: Packer
) -> Placement | None:
    """Return places for all parts, and the moves that they need; None: there are none.

    Only tensors of `movable` models move.
    """
    if need.least_bytes > regions.free_bytes:
        return None
    for grows in (True, False) if need.more_bytes else (True,):
        for is_high in (True, False):
            draft = _PlacementDraft(regions.copy(), movable)
            if grows and not _grow_common(draft, need):
                break
            if is_high and not _place_high(draft, need, has_own=not grows):
                continue
            if _pack_rest(draft, need, packer, has_own=not grows):
                return Placement(tuple(draft.moves), tuple(draft.spans))
    return None


def extent_span(model: ModelId, extent: range, block_bytes: int) -> Span:
    around = bytes_around(extent, block_bytes)
    return Span(around.begin, around.end, Owner(model, Use.KV, extent.start))


@dataclass(slots=True)
class _PlacementDraft:
    """A placement being planned. Mutable; `books` are as if it were carried out."""

    books: RegionList
    movable: Set[ModelId]
    moves: list[Move] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def move(self, moves: Iterable[Move]) -> None:
        for move in moves:
            self.books.give(_owner(move.key))
            self.books.take(Span(move.target, move.target + move.num_bytes, _owner(move.key)))
            self.moves.append(move)

    def take(self, span: Span) -> None:
        self.books.take(span)
        self.spans.append(span)

    def has(self, owner: Owner) -> bool:
        return any(span.owner == owner for span in self.spans)


def _grow_common(draft: _PlacementDraft, need: PlacementNeed) -> bool:
    """Grow the common workspace; False: a region behind it must not move, or has no room."""
    if not need.more_bytes:
        return True
    lowest = list(_stretches(draft.books, draft.movable))[-1]  # something is free
    moves = _room_at_begin(lowest, need.more_bytes)
    if lowest[0].begin != need.common_bytes or moves is None:
        return False
    draft.move(moves)
    if COMMON in draft.books:
        draft.books.give(COMMON)
    draft.take(Span(0, aligned(need.workspace_bytes), COMMON))
    return True


def _place_high(draft: _PlacementDraft, need: PlacementNeed, *, has_own: bool) -> bool:
    for stretch in _stretches(draft.books, draft.movable) if need.num_blocks else ():
        blocks = blocks_within(stretch[0].begin, stretch[-1].end, need.block_bytes)[-need.num_blocks :]
        if len(blocks) < need.num_blocks:
            continue
        span = extent_span(need.model, blocks, need.block_bytes)
        moves = _room_at_end(stretch, stretch[-1].end - span.begin)
        if moves is not None:
            draft.move(moves)
            draft.take(span)
            break
    for item in (*need.tables, *(need.workspace if has_own else ())):
        for stretch in _stretches(draft.books, draft.movable):
            moves = _room_at_end(stretch, item.num_bytes)
            if moves is not None:
                draft.move(moves)
                end = stretch[-1].end
                draft.take(Span(end - item.num_bytes, end, _owner(item.key)))
                break
    return bool(draft.spans)


def _pack_rest(draft: _PlacementDraft, need: PlacementNeed, packer: Packer, *, has_own: bool) -> bool:
    items = [*need.tensors, *need.tables, *(need.workspace if has_own else ())]
    items = [item for item in items if not draft.has(_owner(item.key))]
    has_blocks = any(span.owner is not None and span.owner.use is Use.KV for span in draft.spans)
    windows = () if has_blocks else _windows(need)
    if not items and not windows:
        return True
    regions = [
        Region(span.begin, span.num_bytes, span.owner, _is_fixed(span, draft.movable)) for span in draft.books
    ]
    packing = packer(regions, [*items, *windows])
    if packing is None:
        return False
    draft.moves += packing.moves
    for item in items:
        begin = packing.begins[item.key]
        draft.spans.append(Span(begin, begin + item.num_bytes, _owner(item.key)))
    for _ in windows:
        first = -(-packing.begins[_WINDOW] // need.block_bytes)
        extent = range(first, first + need.num_blocks)
        draft.spans.append(extent_span(need.model, extent, need.block_bytes))
    return True


def _windows(need: PlacementNeed) -> tuple[Item, ...]:
    if not need.num_blocks:
        return ()
    # The furthest that a boundary can be from the next block.
    ahead_bytes = need.block_bytes - gcd(need.block_bytes, ALIGNMENT_BYTES)
    return (Item(_WINDOW, aligned(ahead_bytes + need.num_blocks * need.block_bytes)),)


def _owner(key: Hashable) -> Owner:
    assert isinstance(key, Owner), f"{key=} is no owner"
    return key


# --- Shifting -----------------------------------------------------------------------------------------------
#
# Room at one end of a stretch is made by shifting tensors in it. Only those before enough holes shift:
#
#     | a |   | b | c |      |        | a | b | c |    | room |


def _is_fixed(span: Span, movable: Set[ModelId]) -> bool:
    owner = span.owner
    return owner is not None and (owner.use is not Use.TENSOR or owner.model not in movable)


def _stretches(regions: RegionList, movable: Set[ModelId]) -> Iterator[list[Span]]:
    stretch: list[Span] = []
    for span in reversed(list(regions)):
        if not _is_fixed(span, movable):
            stretch.append(span)
        elif stretch:
            yield stretch[::-1]
            stretch = []
    if stretch:
        yield stretch[::-1]


def _room_at_end(stretch: Sequence[Span], num_bytes: int) -> list[Move] | None:
    """Return moves towards the low end, in a safe order, that free the last `num_bytes`."""
    passed, free_bytes = _passed(reversed(stretch), num_bytes)
    if free_bytes < num_bytes:
        return None
    target = stretch[-1].end - num_bytes - sum(span.num_bytes for span in passed)
    moves = []
    for span in reversed(passed):
        moves.append(Move(span.owner, span.begin, target, span.num_bytes))
        target += span.num_bytes
    return [move for move in moves if move.source != move.target]


def _room_at_begin(stretch: Sequence[Span], num_bytes: int) -> list[Move] | None:
    """Return moves towards the high end, in a safe order, that free the first `num_bytes`."""
    passed, free_bytes = _passed(stretch, num_bytes)
    if free_bytes < num_bytes:
        return None
    end = stretch[0].begin + num_bytes + sum(span.num_bytes for span in passed)
    moves = []
    for span in reversed(passed):
        end -= span.num_bytes
        moves.append(Move(span.owner, span.begin, end, span.num_bytes))
    return [move for move in moves if move.source != move.target]


def _passed(spans: Iterable[Span], num_bytes: int) -> tuple[list[Span], int]:
    passed: list[Span] = []
    free_bytes = 0
    for span in spans:
        if free_bytes >= num_bytes:
            break
        if span.owner is None:
            free_bytes += span.num_bytes
        else:
            passed.append(span)
    return passed, free_bytes
