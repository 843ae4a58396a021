"""Loads from host memory that is not pinned yet: real shared memory, and a driver that takes notes."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hearth.core.config import StoreConfig
from hearth.core.errors import LoadCancelled, StoreError
from hearth.store.format.convert import convert
from hearth.store.format.manifest import WEIGHTS
from hearth.store.keeper_client import KeeperClient
from hearth.store.tiers.segment import Segment
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer import fetch as fetching
from hearth.store.transfer import lease as leases
from hearth.store.transfer.destination import whole
from hearth.store.transfer.fetch import NUM_FIRST_CELLS, HostChunk
from hearth.store.transfer.lease import Lease
from hearth.store.transfer.lease_client import LeaseClient, OpenedModel
from hearth.store.transfer.lease_connection import Grant
from hearth.store.transfer.lease_server import LeaseServer
from hearth.store.transfer.staging_buffers import StagingBuffers
from hearth.store.transfer.transfer import Loader
from tests.models.zoo import build
from tests.store.transfer.noted_driver import PATIENCE_S, NotedDriver, note_pins
from tests.store.transfer.test_leases import eventually

CELL_BYTES = 8 << 10
NUM_CELLS = 2048  # the least that a configuration allows: 16 MiB
NUM_SLOTS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("staging") / "model"
    convert(build("llama-gqa").directory, directory, chunk_bytes=CELL_BYTES)
    return directory


@dataclass(frozen=True, slots=True)
class Rig:
    """A model in the memory of a server, and a lease_client that may pin none of it for now."""

    driver: NotedDriver
    model: Path
    path: Path  #: of the server's socket
    tiers: Tiers
    lease_client: LeaseClient
    staging: StagingBuffers
    opened: OpenedModel
    stored: bytes  #: all bytes of the model

    @property
    def num_chunks(self) -> int:
        return len(self.opened.manifest.chunks)

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return self.staging._free.qsize()

    @property
    def num_leased(self) -> int:
        return self.tiers.fetcher.book.num_leased

    def lease(self, num_chunks: int | None = None) -> Lease:
        chunks = range(self.num_chunks if num_chunks is None else num_chunks)
        lease = Lease(self.lease_client, self.opened, chunks)
        lease.begin()
        assert lease._is_staged
        return lease


@pytest.fixture
def rig(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    driver = note_pins(monkeypatch, 16 * CELL_BYTES)
    monkeypatch.setattr(leases, "SLOT_WAIT_S", PATIENCE_S)  # after which a load pins: for good here
    config = StoreConfig(path=str(tmp_path), host_bytes=NUM_CELLS * CELL_BYTES)
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-"))) / "host.sock"
        tiers = stack.enter_context(closing(Tiers(config, CELL_BYTES, is_pinned=False)))
        stack.enter_context(closing(LeaseServer(tiers, path)))
        lease_client = stack.enter_context(closing(LeaseClient(path, is_device_up=False)))
        staging = StagingBuffers(CELL_BYTES, NUM_SLOTS)
        staging.pin()
        assert eventually(lambda: len(driver.registered) == 1)  # all slots are one region
        driver.may_register.clear()
        stack.callback(driver.may_register.set)
        lease_client.device_is_up(staging)
        opened = lease_client.open(model)
        yield Rig(driver, model, path, tiers, lease_client, staging, opened, (model / WEIGHTS).read_bytes())


@pytest.fixture
def disk_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no chunk stay in its first cell for a read that took long, as one may on a busy machine."""
    monkeypatch.setattr(fetching, "MAX_PASS_THROUGH_S", PATIENCE_S)


@contextmanager
def client_that_pins_the_first(rig: Rig) -> Iterator[LeaseClient]:
    """Yield a lease_client that has pinned the first cells, and pins no others meanwhile."""
    rig.driver.may_register.set()
    is_time = threading.Event()
    with closing(LeaseClient(rig.path, is_device_up=False)) as lease_client, ExitStack() as stack:
        stack.callback(is_time.set)
        lease_client.device_is_up(wait=lambda: _wait(is_time), pins_first=True)
        yield lease_client


def each(lease: Lease, most: int = 1) -> Iterator[HostChunk]:
    """Yield the chunks of a lease, as many as `most` of which are yielded at once."""
    for batch in lease.batches(most):
        assert 1 <= len(batch) <= most
        yield from batch


def bytes_of(rig: Rig, index: int) -> bytes:
    part = rig.opened.manifest.chunk_range(index)
    return rig.stored[part.begin : part.end]


def test_chunks_come_in_order_by_slots_while_nothing_of_their_memory_is_pinned(rig: Rig) -> None:
    lease, slots = rig.lease(), set()
    for index, chunk in enumerate(each(lease, most=3)):
        assert (chunk.index, bytes(chunk.data)) == (index, bytes_of(rig, index))
        slots.add(torch.frombuffer(chunk.data, dtype=torch.uint8).data_ptr())
        lease.release(chunk)
    assert index == rig.num_chunks - 1
    assert len(slots) <= NUM_SLOTS < rig.num_chunks
    assert rig.lease_client.segment.pinned_bytes == 0
    assert rig.num_free == NUM_SLOTS
    assert eventually(lambda: rig.num_leased == 0)


def test_a_load_by_slots_has_all_bytes(rig: Rig) -> None:
    manifest = rig.opened.manifest
    target = torch.zeros(manifest.num_bytes, dtype=torch.uint8)
    load = Loader(torch.device("cpu")).load(
        *("tiny", manifest, whole(manifest, target)),
        lambda chunks: Lease(rig.lease_client, rig.opened, chunks),
    )
    assert load.wait().num_bytes == manifest.num_bytes
    assert bytes(target.numpy()) == rig.stored
    assert rig.num_free == NUM_SLOTS
    assert rig.lease_client.segment.pinned_bytes == 0


def test_loads_at_once_share_the_slots(rig: Rig) -> None:
    def load() -> bytes:
        lease, found = rig.lease(), b""
        for chunk in each(lease, most=3):
            found += bytes(chunk.data)
            lease.release(chunk)
        return found

    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(load) for _ in range(3)]
        assert [one.result(PATIENCE_S) for one in loads] == [rig.stored] * 3
    assert rig.num_free == NUM_SLOTS


def test_a_chunk_whose_memory_is_pinned_stays_where_it_is(rig: Rig) -> None:
    rig.driver.may_register.set()
    lease, segment = rig.lease(), rig.lease_client.segment
    chunks = each(lease)
    first = next(chunks)
    for cell in range(0, NUM_CELLS, 16):
        segment.pin(cell)
    num_before = 1 + len(lease._staged)  # some of them are on their way to slots
    lease.release(first)
    for chunk in chunks:
        if chunk.index >= num_before:
            assert _address(chunk.data) == _address(segment.memory(chunk.cell, len(chunk.data)))
        assert bytes(chunk.data) == bytes_of(rig, chunk.index)
        lease.release(chunk)
    assert chunk.index > num_before


def test_where_others_have_all_slots_a_load_pins_what_it_needs(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "SLOT_WAIT_S", 0.01)
    rig.driver.may_register.set()
    taken = [rig.staging.take(0.0) for _ in range(NUM_SLOTS)]
    assert None not in taken
    assert rig.staging.take(0.0) is None
    lease = rig.lease()
    first = next(each(lease))
    assert bytes(first.data) == bytes_of(rig, 0)
    assert rig.lease_client.segment.is_pinned(first.cell)
    lease.cancel()
    lease.release(first)


def test_a_load_that_found_no_slot_waits_for_none_until_there_is_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its chunks would wait as long as the first."""
    waits, take = list[float](), StagingBuffers.take

    def note(staging: StagingBuffers, most_s: float) -> int | None:
        waits.append(most_s)
        return take(staging, most_s)

    monkeypatch.setattr(leases, "SLOT_WAIT_S", 0.01)
    monkeypatch.setattr(StagingBuffers, "take", note)
    taken = [take(rig.staging, 0.0) for _ in range(NUM_SLOTS)]
    lease = rig.lease()
    rig.driver.may_register.set()  # while a load is under way none but that one pins
    chunks = each(lease)
    for _ in range(40):  # of more than one region
        lease.release(next(chunks))
    assert waits.count(0.01) == 1
    for slot in taken:
        assert slot is not None
        rig.staging.give_back(slot)
    for chunk in chunks:
        assert bytes(chunk.data) == bytes_of(rig, chunk.index)
        lease.release(chunk)
    assert rig.num_free == NUM_SLOTS


def test_a_load_called_off_in_the_middle_gives_back_every_slot_and_chunk(rig: Rig) -> None:
    lease = rig.lease()
    chunks = each(lease)
    held = [next(chunks), next(chunks)]
    lease.cancel()
    with pytest.raises(LoadCancelled):
        next(chunks)
    assert rig.num_free == NUM_SLOTS - 2  # they may still be copied from
    assert [bytes(chunk.data) for chunk in held] == [bytes_of(rig, 0), bytes_of(rig, 1)]
    lease.release(*held)
    assert rig.num_free == NUM_SLOTS
    assert eventually(lambda: rig.num_leased == 0)


def test_a_chunk_that_was_leased_while_the_load_was_called_off_is_not_yielded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before it were dropped: it would be taken for the first of them."""
    lease, fill, num_filled = rig.lease(3), StagingBuffers.fill, 0

    def cancel_at_third(staging: StagingBuffers, slot: int, source: Segment, cell: int, size: int) -> None:
        nonlocal num_filled
        num_filled += 1
        if num_filled == 3:
            lease.cancel()
        fill(staging, slot, source, cell, size)

    monkeypatch.setattr(StagingBuffers, "fill", cancel_at_third)
    monkeypatch.setattr(Grant, "has_next", lambda lease: True)
    with pytest.raises(LoadCancelled):
        next(each(lease))
    assert rig.num_free == NUM_SLOTS
    assert eventually(lambda: rig.num_leased == 0)


def test_a_chunk_that_cannot_be_read_ends_the_load_and_leaves_nothing_taken(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server's memory that is no longer as long as it was."""
    fill, num_filled = StagingBuffers.fill, 0
    empty = (tmp_path / "empty").open("w+b")

    def break_third(staging: StagingBuffers, slot: int, source: Segment, cell: int, num_bytes: int) -> None:
        nonlocal num_filled
        num_filled += 1
        if num_filled == 3:
            monkeypatch.setattr(source, "fd", empty.fileno())
        fill(staging, slot, source, cell, num_bytes)
        monkeypatch.setattr(source, "fd", fd)

    fd = rig.lease_client.segment.fd
    monkeypatch.setattr(StagingBuffers, "fill", break_third)
    manifest = rig.opened.manifest
    target = torch.zeros(manifest.num_bytes, dtype=torch.uint8)
    with empty:
        load = Loader(torch.device("cpu")).load(
            *("tiny", manifest, whole(manifest, target)),
            lambda chunks: Lease(rig.lease_client, rig.opened, chunks),
        )
        with pytest.raises(StoreError, match="bytes of host memory cannot be read: No data available"):
            load.wait()
    assert eventually(lambda: rig.num_free == NUM_SLOTS)
    assert eventually(lambda: rig.num_leased == 0)


def test_once_all_is_pinned_no_load_goes_by_slots(rig: Rig) -> None:
    rig.driver.may_register.set()
    rig.tiers.segment.touch_in_background()
    rig.lease_client.segment.wait_pinned()
    lease = Lease(rig.lease_client, rig.opened, ())
    lease.begin()
    assert not lease._is_staged


@pytest.mark.usefixtures("disk_is_quick")
def test_a_load_from_disk_goes_through_the_first_cells_and_its_chunks_come_to_stay_later(rig: Rig) -> None:
    with client_that_pins_the_first(rig) as lease_client:
        segment, opened, cells = lease_client.segment, lease_client.open(rig.model), set[int]()
        first_bytes = NUM_FIRST_CELLS * CELL_BYTES
        assert segment.pinned_bytes == first_bytes
        lease = Lease(lease_client, opened, range(rig.num_chunks))
        for batch in lease.batches(3):
            for chunk in batch:
                assert bytes(chunk.data) == bytes_of(rig, chunk.index)
                cells.add(chunk.cell)
            lease.release(*batch)
        assert max(cells) < NUM_FIRST_CELLS < rig.num_chunks
        assert segment.pinned_bytes == first_bytes
        assert eventually(
            lambda: rig.tiers.fetcher.book.num_resident == rig.num_chunks and not rig.num_leased
        )
        again = lease_client.grant(opened, range(rig.num_chunks))
        assert again.is_in_host
        for chunk in again:
            assert chunk.cell >= NUM_FIRST_CELLS
            again.release(chunk)


@pytest.mark.usefixtures("disk_is_quick")
def test_of_a_model_no_chunks_come_to_stay_but_those_that_a_load_passed_on(rig: Rig) -> None:
    fetcher, ids = rig.tiers.fetcher, rig.opened.manifest.chunk_ids
    with client_that_pins_the_first(rig) as lease_client:
        lease = lease_client.grant(lease_client.open(rig.model), [2, 5])
        for chunk in lease:
            lease.release(chunk)
        assert eventually(lambda: fetcher.counters.num_fills >= 4 and not fetcher._live)
        assert (fetcher.resident(ids), fetcher.counters.num_fills) == ([ids[2], ids[5]], 4)


@pytest.mark.usefixtures("disk_is_quick")
def test_nothing_comes_to_stay_of_a_model_that_was_forgotten_meanwhile(rig: Rig) -> None:
    fetcher, ids = rig.tiers.fetcher, rig.opened.manifest.chunk_ids
    with client_that_pins_the_first(rig) as lease_client:
        opened = lease_client.open(rig.model)
        lease = lease_client.grant(opened, [2, 5])
        chunks = list(lease)
        asyncio.run(KeeperClient(rig.path).forget(str(rig.model)))
        lease.release(*chunks)
        lease_client.grant(opened, [])  # on the same line, so behind all that the release sets off
        assert eventually(lambda: not fetcher._live)
        assert (fetcher.resident(ids), fetcher.counters.num_fills) == ([], 2)


def test_a_load_passes_nothing_on_where_the_first_cells_are_not_pinned_or_all_are(rig: Rig) -> None:
    lease = rig.lease()
    for chunk in each(lease):
        lease.release(chunk)
    assert eventually(lambda: not rig.num_leased)
    assert rig.tiers.fetcher.book.num_resident == rig.num_chunks
    rig.driver.may_register.set()
    rig.tiers.segment.touch_in_background()
    rig.lease_client.segment.wait_pinned()
    assert not rig.lease_client._question(rig.opened, [0]).pass_through


def test_until_it_is_time_nothing_is_pinned_that_no_load_needs(rig: Rig) -> None:
    rig.driver.may_register.set()
    is_time = threading.Event()
    with closing(LeaseClient(rig.path, is_device_up=False)) as lease_client:
        lease_client.device_is_up(wait=lambda: _wait(is_time))
        lease = lease_client.grant(lease_client.open(rig.model), range(3))
        leased = list(lease)
        lease.release(*leased)
        segment = lease_client.segment
        assert segment.pinned_bytes == len({chunk.cell // 16 for chunk in leased}) * 16 * CELL_BYTES
        is_time.set()
        rig.tiers.segment.touch_in_background()
        assert eventually(lambda: segment.pinned_bytes == segment.num_bytes)


def test_memory_that_cannot_be_pinned_is_copied_from_by_slots(rig: Rig) -> None:
    rig.driver.codes = [2]  # out of memory, of one region
    rig.driver.may_register.set()
    rig.tiers.segment.touch_in_background()
    segment = rig.lease_client.segment
    segment.wait_pinned()
    lease = rig.lease()
    for chunk in each(lease):
        lies_there = _address(chunk.data) == _address(segment.memory(chunk.cell, len(chunk.data)))
        assert lies_there == segment.is_pinned(chunk.cell)
        assert bytes(chunk.data) == bytes_of(rig, chunk.index)
        lease.release(chunk)
    assert 0 < segment.pinned_bytes < segment.num_bytes


def test_chunks_larger_than_a_slot_go_by_none(rig: Rig) -> None:
    with closing(StagingBuffers(CELL_BYTES // 2, 1)) as small:
        rig.lease_client.staging, kept = small, rig.lease_client.staging
        lease = Lease(rig.lease_client, rig.opened, ())
        lease.begin()
        rig.lease_client.staging = kept
    assert not lease._is_staged


def test_without_a_compiler_there_are_no_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    tmp_path.chmod(0o700)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no-such-compiler"):
        StagingBuffers(CELL_BYTES, libraries=tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= num_open


def _address(data: memoryview) -> int:
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def _wait(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)
