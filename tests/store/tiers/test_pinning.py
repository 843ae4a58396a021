"""Host memory that is made ready while loads come and go: real memory, and a driver that takes notes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from hearth.core.errors import DeviceError
from hearth.policy.memory import region_order
from hearth.store.tiers.segment import Segment
from tests.store.transfer.noted_driver import PATIENCE_S, NotedDriver, is_resident, note_pins
from tests.store.transfer.noted_driver import places as places_of

CELL_BYTES = 1 << 16
REGION_BYTES = 2 * CELL_BYTES


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> NotedDriver:
    return note_pins(monkeypatch, REGION_BYTES)


def places(driver: NotedDriver, segment: Segment) -> list[int]:
    return places_of(driver, segment, REGION_BYTES)


@contextmanager
def new_segment(num_cells: int) -> Iterator[Segment]:
    with closing(Segment.create(num_cells, CELL_BYTES)) as segment:
        yield segment


def made_bytes(segment: Segment) -> int:
    return os.fstat(segment.fd).st_blocks * 512


def test_all_is_pinned_in_order_one_region_at_a_time_and_touched_before(driver: NotedDriver) -> None:
    with new_segment(7) as segment:
        segment.pin_in_background()
        segment.wait_pinned()
        assert places(driver, segment) == [0, 1, 2, 3]
        assert driver.resident == [True] * 4
        assert driver.most_at_once == 1
        assert segment.pinned_bytes == segment.num_bytes == sum(driver.registered.values())
    assert driver.registered == {}


def test_while_a_load_is_under_way_only_what_it_copies_from_is_pinned(driver: NotedDriver) -> None:
    with new_segment(8) as segment:
        segment.load_began()
        segment.pin_in_background()
        for cell in (5, 4, 1):
            segment.pin(cell)
        assert places(driver, segment) == [2, 0]
        assert segment.pinned_bytes == 4 * CELL_BYTES
        segment.load_ended()
        segment.wait_pinned()
        assert places(driver, segment) == [2, 0, 1, 3]


def test_all_is_pinned_in_the_end_beside_loads_that_never_cease(
    driver: NotedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region_order, "MAX_HELD_S", 0.05)
    monkeypatch.setattr(region_order, "TRICKLE_S", 0.001)
    with new_segment(8) as segment:
        segment.load_began()
        segment.pin_in_background()
        segment.wait_pinned()
        assert segment.is_all_pinned
        segment.load_ended()


def test_while_a_load_is_under_way_no_pages_are_made_that_nobody_needs() -> None:
    with new_segment(8) as segment:
        segment.load_began()
        segment.touch_in_background()
        segment.memory(3, CELL_BYTES)[:] = bytes(CELL_BYTES)
        assert made_bytes(segment) == CELL_BYTES
        segment.load_ended()
        segment.wait_pinned()
        assert made_bytes(segment) == segment.num_bytes


def test_while_a_load_is_under_way_a_worker_looks_for_no_pages() -> None:
    """Mapping memory for the load, or starting a thread, would wait behind each look."""
    with new_segment(8) as segment, closing(Segment(os.dup(segment.fd), 8, CELL_BYTES)) as mapped:
        segment.touch_in_background()
        segment.wait_pinned()
        mapped.load_began()
        mapped.touch_in_background()
        touching = mapped._touching
        assert touching is not None
        touching._threads[0].join(0.05)
        assert not touching.has_touched(0)
        mapped.load_ended()
        mapped.wait_pinned()
        assert touching.has_touched(0)


def test_a_worker_finds_pages_and_leaves_it_to_the_keeper_to_make_them() -> None:
    with new_segment(8) as segment, closing(Segment(os.dup(segment.fd), 8, CELL_BYTES)) as mapped:
        mapped.touch_in_background()
        assert made_bytes(segment) == 0
        segment.touch_in_background()
        mapped.wait_pinned()
        assert made_bytes(segment) == segment.num_bytes
        assert is_resident(mapped.address, mapped.num_bytes)


def test_a_load_waits_for_a_region_that_is_being_pinned_and_pins_it_not_again(driver: NotedDriver) -> None:
    driver.may_register.clear()
    with new_segment(2) as segment:
        segment.pin_in_background()
        load = threading.Thread(target=segment.pin, args=(1,))
        load.start()
        load.join(0.05)
        assert load.is_alive()
        driver.may_register.set()
        load.join(PATIENCE_S)
        assert places(driver, segment) == [0]


def test_a_load_pins_a_cell_of_a_region_that_is_not_all_made(driver: NotedDriver) -> None:
    """The last chunk of a model fills no cell, and nobody makes the rest of it before the load has ended."""
    with new_segment(4) as segment, closing(Segment(os.dup(segment.fd), 4, CELL_BYTES)) as mapped:
        mapped.pin_in_background()
        segment.memory(0, 1)[:] = b"x"
        mapped.pin(0)
        assert places(driver, mapped) == [0]


def test_memory_that_cannot_be_pinned_is_told_once_and_holds_up_no_load(
    driver: NotedDriver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.codes = [0, 2, 2, 0]
    with new_segment(8) as segment:
        segment.pin_in_background()
        segment.wait_pinned()
        segment.pin(3)
        assert segment.pinned_bytes == 4 * CELL_BYTES
    assert caplog.text.count("fallback copies=pageable reason=pin_failed pinned=1 of=4 cuda_error=2") == 1
    assert driver.registered == {}


def test_closing_ends_pinning_and_wakes_a_load_that_waits(driver: NotedDriver) -> None:
    driver.may_register.clear()
    with new_segment(8) as segment:
        segment.pin_in_background()
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


def test_a_driver_that_breaks_lets_nobody_wait(
    driver: NotedDriver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies from such a region are slow, and the load that asked for it goes on."""

    def broken(address: int, num_bytes: int) -> int:
        raise DeviceError("CUDA's driver refused cuCtxSetCurrent")

    monkeypatch.setattr(driver, "register", broken)
    with new_segment(4) as segment:
        segment.load_began()
        segment.pin_in_background()
        segment.pin(0)
        segment.pin(0)
        segment.load_ended()
        segment.wait_pinned()
        assert segment.pinned_bytes == 0
    assert "fallback copies=pageable" in caplog.text
