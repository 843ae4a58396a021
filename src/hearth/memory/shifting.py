"""Room at one end of a stretch of an arena, made by shifting the tensors in it. Decides only: moves nothing.

A stretch is what lies between two regions that must not move. Only tensors before enough holes shift:

    | a |   | b | c |      |        | a | b | c |    | room |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set

from hearth.memory.regions import RegionList, Span, Use
from hearth.policy.memory.packing import Move
from hearth.types import ModelId


def is_fixed(span: Span, movable: Set[ModelId]) -> bool:
    owner = span.owner
    return owner is not None and (owner.use is not Use.TENSOR or owner.model not in movable)


def stretches(regions: RegionList, movable: Set[ModelId]) -> Iterator[list[Span]]:
    """Those with anything in them, the highest first."""
    stretch: list[Span] = []
    for span in reversed(list(regions)):
        if not is_fixed(span, movable):
            stretch.append(span)
        elif stretch:
            yield stretch[::-1]
            stretch = []
    if stretch:
        yield stretch[::-1]


def room_at_end(stretch: Sequence[Span], num_bytes: int) -> list[Move] | None:
    """Moves towards the low end, in a safe order, with which the last so many bytes come free."""
    passed, free_bytes = _passed(reversed(stretch), num_bytes)
    if free_bytes < num_bytes:
        return None
    target = stretch[-1].end - num_bytes - sum(span.num_bytes for span in passed)
    moves = []
    for span in reversed(passed):
        moves.append(Move(span.owner, span.begin, target, span.num_bytes))
        target += span.num_bytes
    return [move for move in moves if move.source != move.target]


def room_at_begin(stretch: Sequence[Span], num_bytes: int) -> list[Move] | None:
    """Moves towards the high end, in a safe order, with which the first so many bytes come free."""
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
    """The tensors before so many free bytes, and how many those are."""
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
