"""The order in which the regions of host memory are pinned for a device. Pins nothing itself.

The driver pins one region at a time, and whoever allocates or copies may have to wait for that. So a region
that a load is about to copy from comes at once, and all others only while no load is under way.
"""

from __future__ import annotations


class PinOrder:
    """Which regions were given out to be pinned, each of them once. Mutable; its owner guards it."""

    def __init__(self, num_regions: int) -> None:
        self.num_regions = num_regions
        self.num_loads = 0  #: under way
        self._is_given = bytearray(num_regions)
        self._first = 0  #: before it all are given

    @property
    def is_complete(self) -> bool:
        """True if every region was given out."""
        return self._first == self.num_regions

    def load_began(self) -> None:
        self.num_loads += 1

    def load_ended(self) -> None:
        assert self.num_loads > 0, f"{self.num_loads=}"
        self.num_loads -= 1

    def take(self, region: int) -> bool:
        """Give out a region that somebody waits for; False: it was given out before."""
        if self._is_given[region]:
            return False
        self._is_given[region] = True
        while self._first < self.num_regions and self._is_given[self._first]:
            self._first += 1
        return True

    def take_next(self) -> int | None:
        """Give out the first region that nobody waits for; None: there is none, or a load is under way."""
        if self.num_loads or self.is_complete:
            return None
        region = self._first
        self.take(region)
        return region
