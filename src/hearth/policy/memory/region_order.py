"""The order in which regions of host memory are made ready for a device. Makes nothing ready itself.

Whoever loads a model or allocates on a device may have to wait for a region that is being made ready. So one
that a load needs comes at once, those behind it are next, as a load goes through memory much as it lies, and
nothing that nobody waits for need come while a load is under way.
"""

from __future__ import annotations


class RegionOrder:
    """Which regions were given out, each of them once. Mutable; its owner guards it."""

    def __init__(self, num_regions: int, num_loads: int = 0) -> None:
        self.num_regions = num_regions
        self.num_loads = num_loads  #: under way
        self._is_given = bytearray(num_regions)
        self._num_given = 0
        self._next = 0  #: behind the last one that was given out, or asked for

    @property
    def is_complete(self) -> bool:
        """True if every region was given out."""
        return self._num_given == self.num_regions

    def load_began(self) -> None:
        self.num_loads += 1

    def load_ended(self) -> None:
        assert self.num_loads > 0, f"{self.num_loads=}"
        self.num_loads -= 1

    def take(self, region: int) -> bool:
        """Give out a region; False: it was given out before."""
        self._next = region + 1
        if self._is_given[region]:
            return False
        self._is_given[region] = True
        self._num_given += 1
        return True

    def peek(self) -> int | None:
        """Return the next region that nobody waits for; None: there is none, or a load is under way."""
        if self.num_loads or self.is_complete:
            return None
        region = self._is_given.find(0, self._next)
        return region if region >= 0 else self._is_given.find(0)
