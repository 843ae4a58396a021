"""Host memory that is pinned while loads come and go: real memory, and a driver that only takes notes."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from hearth.config import StoreConfig
from hearth.store import segment as segments
from hearth.store.borrower import Borrower
from hearth.store.convert import convert
from hearth.store.lender import Lender
from hearth.store.pinning import Pinning
from hearth.store.segment import Segment
from hearth.store.tiers import Tiers
from tests.models.zoo import build
from tests.worker.harness import folder

CELL_BYTES = 1 << 16
PATIENCE_S = 60.0


class NotedDriver:
    """Stands in for CUDA's calls: notes who is registered, and how many pages of it were there."""

    def __init__(self, codes: list[int] | None = None) -> None:
        self.registered: dict[int, int] = {}  #: bytes by address
        self.order: list[int] = []
        self.resident: list[bool] = []
        self.most_at_once = 0
        self.may_register = threading.Event()  #: until then a call does not return
        self.may_register.set()
        self._codes = list(codes or [])
        self._num_inside = 0

    def register(self, address: int, num_bytes: int) -> int:
        self._num_inside += 1
        self.most_at_once = max(self.most_at_once, self._num_inside)
        self.order.append(address)
        self.resident.append(is_resident(address, num_bytes))
        assert self.may_register.wait(PATIENCE_S)
        code = self._codes.pop(0) if self._codes else 0
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


@contextmanager
def pinned(
    monkeypatch: pytest.MonkeyPatch, driver: NotedDriver, num_cells: int, *, is_loading: bool = False
) -> Iterator[Segment]:
    """Yield a segment whose regions are of two cells. `is_loading`: with a load that began before it all."""
    monkeypatch.setattr(segments, "REGION_BYTES", 2 * CELL_BYTES)
    monkeypatch.setattr(segments, "has_cuda", lambda: True)
    monkeypatch.setattr(segments, "cuda_registration", lambda: (driver.register, driver.unregister))
    if is_loading:
        monkeypatch.setattr(segments, "Pinning", HeldPinning)
    segment = Segment.create(num_cells, CELL_BYTES)
    segment.pin_in_background()
    yield segment
    segment.close()


class HeldPinning(Pinning):
    """Pinning that starts with a load under way."""

    def _pin_all(self) -> None:
        self.load_began()
        super()._pin_all()


def places(driver: NotedDriver, segment: Segment) -> list[int]:
    """Return the regions in the order in which they were registered."""
    return [(address - segment._address) // (2 * CELL_BYTES) for address in driver.order]


def test_all_is_pinned_in_order_one_region_at_a_time_and_touched_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = NotedDriver()
    with pinned(monkeypatch, driver, num_cells=7) as segment:
        segment.wait_pinned()
        assert places(driver, segment) == [0, 1, 2, 3]
        assert driver.resident == [True] * 4
        assert driver.most_at_once == 1
        assert segment.pinned_bytes == segment.num_bytes == sum(driver.registered.values())
    assert driver.registered == {}


def test_while_a_load_is_under_way_only_what_it_copies_from_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = NotedDriver()
    with pinned(monkeypatch, driver, num_cells=8, is_loading=True) as segment:
        for cell in (5, 4, 1):
            segment.pin(cell)
        assert places(driver, segment) == [2, 0]
        assert segment.pinned_bytes == 4 * CELL_BYTES
        segment.load_ended()
        segment.wait_pinned()
        assert places(driver, segment) == [2, 0, 1, 3]


def test_a_load_waits_for_a_region_that_is_being_pinned_and_pins_it_not_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = NotedDriver()
    driver.may_register.clear()
    with pinned(monkeypatch, driver, num_cells=2) as segment:
        load = threading.Thread(target=segment.pin, args=(1,))
        load.start()
        load.join(0.05)
        assert load.is_alive()
        driver.may_register.set()
        load.join(PATIENCE_S)
        assert places(driver, segment) == [0]


def test_memory_that_cannot_be_pinned_is_told_once_and_holds_up_no_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = NotedDriver(codes=[0, 2, 2, 0])
    with pinned(monkeypatch, driver, num_cells=8) as segment:
        segment.wait_pinned()
        segment.pin(3)
        assert segment.pinned_bytes == 4 * CELL_BYTES
    assert caplog.text.count("fallback copies=pageable reason=pin_failed pinned=1 of=4 cuda_error=2") == 1
    assert driver.registered == {}


def test_closing_ends_pinning_and_wakes_a_load_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = NotedDriver()
    driver.may_register.clear()
    with pinned(monkeypatch, driver, num_cells=8) as segment:
        loads = [threading.Thread(target=segment.pin, args=(cell,)) for cell in (0, 5)]
        closer = threading.Thread(target=segment.close)
        for thread in (*loads, closer):
            thread.start()
        driver.may_register.set()
        for thread in (*loads, closer):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert driver.registered == {}
    assert driver.most_at_once == 1


def test_touching_makes_every_page_and_stops_when_asked() -> None:
    segment = Segment.create(8, CELL_BYTES)
    segment.touch_in_background()
    segment.wait_pinned()
    assert os.fstat(segment.fd).st_blocks * 512 == segment.num_bytes
    segment.close()


def test_a_loan_has_its_cells_pinned_and_until_it_ends_no_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, driver = tmp_path / "model", NotedDriver()
    convert(build("llama-gqa").directory, model, chunk_bytes=CELL_BYTES)
    config = StoreConfig(path=str(tmp_path), host_bytes=256 * CELL_BYTES)
    with (
        folder() as place,
        closing(Tiers(config, CELL_BYTES, is_pinned=False)) as tiers,
        closing(Lender(tiers, place / "host.sock")),
        pinned(monkeypatch, driver, num_cells=0, is_loading=True),
        closing(Borrower(place / "host.sock")) as borrower,
    ):
        segment, borrowed = borrower.segment, borrower.open(model)
        loan = borrower.fetch(borrowed, range(len(borrowed.manifest.chunks)))
        segment.load_ended()  # the one that there was from the beginning
        lent = list(loan)
        assert set(places(driver, segment)) == {chunk.cell // 2 for chunk in lent}
        loan.release(*lent)
        segment.wait_pinned()
        assert segment.pinned_bytes == segment.num_bytes > sum(len(chunk.data) for chunk in lent)
    assert driver.registered == {}
