"""The order in which regions of host memory are pinned for a device.

A region that a load needs comes at once, those behind it are next, because a load reads memory much in order,
and unneeded ones wait while a load is running. If loads never cease, they come slowly all the same.
"""

from __future__ import annotations

#: Loads hold back unneeded regions for this long. Then one comes this often until they cease: a region takes
#: a millisecond of the driver, a fiftieth of its time.
MAX_HELD_S, TRICKLE_S = 30.0, 0.05
#: A shorter gap between loads does not count as a pause.
MIN_PAUSE_S = 0.1


class RegionOrder:
    """Which regions were given out, each once. Mutable; its owner guards it and passes the time."""

    def __init__(self, num_regions: int, num_loads: int = 0, *, now_s: float = 0.0) -> None:
        self.num_regions = num_regions
        self.num_loads = num_loads  #: under way
        self._is_given = bytearray(num_regions)
        self._num_given = 0
        self._next = 0  #: behind the last one that was given out, or asked for
        self._held_s = now_s  #: since when loads hold back unneeded regions
        self._is_late = False  #: it was given out beside loads already
        self._free_s = now_s  #: since when no load is under way, if none is

    @property
    def is_complete(self) -> bool:
        return self._num_given == self.num_regions

    def load_began(self, now_s: float) -> None:
        if not self.num_loads and now_s - self._free_s >= MIN_PAUSE_S:
            self._held_s, self._is_late = now_s, False
        self.num_loads += 1

    def load_ended(self, now_s: float) -> None:
        assert self.num_loads > 0, f"{self.num_loads=}"
        self.num_loads -= 1
        self._free_s = now_s

    def take(self, region: int) -> bool:
        """Give out a region that a load needs; False: it was given out before."""
        self._next = region + 1
        if self._is_given[region]:
            return False
        self._is_given[region] = True
        self._num_given += 1
        return True

    def peek(self, now_s: float) -> int | None:
        """Return the next unneeded region; None: there is none, or loads hold it back."""
        if self.is_complete or self.wait_s(now_s) > 0.0:
            return None
        region = self._is_given.find(0, self._next)
        return region if region >= 0 else self._is_given.find(0)

    def take_unasked(self, region: int, now_s: float) -> None:
        self.take(region)
        self._held_s, self._is_late = now_s, self.num_loads > 0

    def wait_s(self, now_s: float) -> float:
        if not self.num_loads:
            return 0.0
        return max(0.0, self._held_s + (TRICKLE_S if self._is_late else MAX_HELD_S) - now_s)
