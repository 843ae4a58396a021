"""A driver that only takes notes of what is pinned, for machines without a GPU; the memory is real."""

from __future__ import annotations

import ctypes
import mmap
import threading

import pytest

from hearth.store.tiers import segment as segments
from hearth.store.tiers.segment import Segment

PATIENCE_S = 60.0


class NotedDriver:
    """Stands in for CUDA's calls: notes who is registered, and how many pages of it were there."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}  #: bytes by address
        self.order: list[int] = []
        self.resident: list[bool] = []
        self.most_at_once = 0
        self.may_register = threading.Event()  #: until then a call does not return
        self.may_register.set()
        self.codes: list[int] = []  #: of the next calls; 0 of all others
        self._num_inside = 0

    def register(self, address: int, num_bytes: int) -> int:
        self._num_inside += 1
        self.most_at_once = max(self.most_at_once, self._num_inside)
        self.order.append(address)
        self.resident.append(is_resident(address, num_bytes))
        assert self.may_register.wait(PATIENCE_S)
        code = self.codes.pop(0) if self.codes else 0
        if code == 0:
            assert address not in self.registered
            self.registered[address] = num_bytes
        self._num_inside -= 1
        return code

    def unregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def is_resident(address: int, num_bytes: int) -> bool:
    """True if every page of a range is in memory."""
    pages = (ctypes.c_ubyte * (num_bytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), pages) == 0
    return all(page & 1 for page in pages)


def note_pins(monkeypatch: pytest.MonkeyPatch, region_bytes: int) -> NotedDriver:
    """Return the driver of all segments that are pinned from now on, in regions of that size."""
    driver = NotedDriver()
    monkeypatch.setattr(segments, "REGION_BYTES", region_bytes)
    monkeypatch.setattr(segments, "has_cuda", lambda: True)
    monkeypatch.setattr(segments, "cuda_registration", lambda: (driver.register, driver.unregister))
    return driver


def places(driver: NotedDriver, segment: Segment, region_bytes: int) -> list[int]:
    """Return the regions in the order in which they were registered."""
    return [(address - segment.address) // region_bytes for address in driver.order]
