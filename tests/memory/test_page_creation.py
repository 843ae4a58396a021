"""Pages of a device without one: their addresses, and how they are created as memory comes free.

A driver that counts stands in, and a clock that is set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hearth.core.errors import DeviceError, OutOfDeviceMemory
from hearth.memory.cuda_pages import FIXED_ADDRESSES, MEMORY_PATIENCE_S, CudaPages, create_patiently

#: Where the kernel begins to put executables, on x86-64; all else that it places is above them.
EXECUTABLES = (1 << 47) // 3 * 2


def test_fixed_addresses_lie_where_neither_kernel_nor_driver_puts_anything() -> None:
    assert 0x18000000000 <= FIXED_ADDRESSES.start < FIXED_ADDRESSES.stop <= EXECUTABLES


@dataclass(slots=True)
class Device:
    """A device whose memory comes free by the clock. Mutable."""

    num_free: Callable[[float], int]  #: pages that there are, with those that were taken, by the time
    now_s: float = 0.0
    handles: list[int] = field(default_factory=list)

    def create(self) -> int:
        if len(self.handles) >= self.num_free(self.now_s):
            raise OutOfDeviceMemory("no memory")
        return len(self.handles)

    def pause(self, seconds: float) -> None:
        self.now_s += seconds

    def fill(self, num_wanted: int) -> None:
        create_patiently(self.create, self.handles, num_wanted, clock=lambda: self.now_s, pause=self.pause)


def test_pages_are_created_as_a_killed_process_gives_its_memory_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    device = Device(lambda now_s: 10 + int(now_s / (0.9 * MEMORY_PATIENCE_S)) * 30)
    device.fill(100)
    assert device.handles == list(range(100))
    assert "pool_waits pages=10 of=100" in caplog.text
    assert "pool_waits pages=70 of=100" in caplog.text


def test_memory_that_is_there_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    device = Device(lambda now_s: 100)
    device.fill(100)
    assert (len(device.handles), device.now_s, caplog.text) == (100, 0.0, "")


def test_memory_that_somebody_keeps_is_not_waited_for_any_longer() -> None:
    device = Device(lambda now_s: 10 if now_s < 1 else 50)
    with pytest.raises(OutOfDeviceMemory):
        device.fill(100)
    assert len(device.handles) == 50
    assert device.now_s == pytest.approx(1 + MEMORY_PATIENCE_S, abs=0.1)


def test_what_is_no_lack_of_memory_is_not_waited_for() -> None:
    device = Device(lambda now_s: 0)

    def refuse() -> int:
        raise DeviceError("the device is gone")

    with pytest.raises(DeviceError, match="the device is gone"):
        create_patiently(refuse, device.handles, 1, pause=device.pause)
    assert device.now_s == 0


class SlowDriver:
    """A driver whose first page is not free yet: that of a killed process still has it."""

    def __init__(self, num_refusals: int) -> None:
        self._num_refusals = num_refusals

    def creator(self, num_bytes: int, *, is_exportable: bool, is_rdma_capable: bool) -> Callable[[], int]:
        def create() -> int:
            self._num_refusals -= 1
            if self._num_refusals >= 0:
                raise OutOfDeviceMemory("no memory")
            return 7

        return create

    def release(self, handle: int) -> None:
        assert handle == 7


def test_memory_that_is_not_free_yet_takes_no_ability_from_the_device() -> None:
    pages = CudaPages.__new__(CudaPages)  # without a device
    pages._driver, pages.page_bytes, pages.fallbacks = SlowDriver(3), 16, Counter()  # type: ignore[assignment]
    pages.is_exportable = pages._is_rdma_capable = True
    pages._probe()
    assert (pages.is_exportable, pages._is_rdma_capable, pages.fallbacks) == (True, True, {})
