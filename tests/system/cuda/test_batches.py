"""Calls of CUDA's driver by the batch and one by one: the same comes of both. The driver is a fake."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import pytest

from hearth.core.errors import DeviceError, OutOfDeviceMemory
from hearth.system.cuda import batches as cuda_batches
from hearth.system.cuda.batches import BatchedCopies, ByteCopy, CudaBatches, HandleRun, batches_of
from tests.fake_cuda import FakeCuda, fake_cuda

PAGE_BYTES, ADDRESS, STREAM = 1 << 21, 1 << 40, 7
PATIENCE_S = 60.0


class Mapping(Protocol):
    """A caller that maps pages."""

    def map(self, address: int, num_bytes: int, handles: Sequence[int]) -> None: ...


class BatchedMapping:
    """Maps by the batch, one run at a time."""

    def __init__(self, batches: CudaBatches) -> None:
        self._batches = batches

    def map(self, address: int, num_bytes: int, handles: Sequence[int]) -> None:
        assert list(self._batches.remap(num_bytes, [HandleRun(address, len(handles), handles)])) == [0]


@pytest.fixture
def cuda() -> FakeCuda:
    return fake_cuda()


def batches(cuda: FakeCuda) -> CudaBatches:
    found = batches_of(cuda.driver)
    assert found is not None, "tests need a C compiler"
    return found


@pytest.fixture(params=["batched", "single"])
def mapping(cuda: FakeCuda, request: pytest.FixtureRequest) -> Mapping:
    return BatchedMapping(batches(cuda)) if request.param == "batched" else cuda.driver


class TestMapping:
    def test_handles_are_mapped_in_order_and_access_is_allowed_to_all_at_once(
        self, cuda: FakeCuda, mapping: Mapping
    ) -> None:
        mapping.map(ADDRESS, PAGE_BYTES, [5, 3, 9])
        assert cuda.calls == [
            *(
                ("cuMemMap", ADDRESS + at * PAGE_BYTES, PAGE_BYTES, handle)
                for at, handle in enumerate([5, 3, 9])
            ),
            ("cuMemSetAccess", ADDRESS, 3 * PAGE_BYTES, 3),
        ]
        assert cuda.num_pages == 3

    @pytest.mark.parametrize(
        ("name", "num_before"), [("cuMemMap", 0), ("cuMemMap", 2), ("cuMemSetAccess", 0)]
    )
    def test_of_pages_that_are_refused_none_stays_mapped(
        self, name: str, num_before: int, cuda: FakeCuda, mapping: Mapping
    ) -> None:
        mapping.map(ADDRESS + 8 * PAGE_BYTES, PAGE_BYTES, [1])
        cuda.refuse(name, num_before)
        with pytest.raises(DeviceError, match=f"refused {name}\\("):
            mapping.map(ADDRESS, PAGE_BYTES, [5, 3, 9])
        assert cuda.num_pages == 1

    def test_too_little_memory_is_told_apart(self, cuda: FakeCuda, mapping: Mapping) -> None:
        cuda.refuse("cuMemMap", 0, code=2)
        with pytest.raises(OutOfDeviceMemory):
            mapping.map(ADDRESS, PAGE_BYTES, [5])

    def test_pages_that_cannot_even_be_unmapped_are_told_of(self, cuda: FakeCuda, mapping: Mapping) -> None:
        mapping.map(ADDRESS + PAGE_BYTES, PAGE_BYTES, [5])  # in the way of the second one
        cuda.refuse("cuMemUnmap", 0)
        with pytest.raises(DeviceError, match="refused cuMemUnmap"):
            mapping.map(ADDRESS, PAGE_BYTES, [5, 3])


class TestRemapping:
    RUNS = (
        HandleRun(ADDRESS, 2),
        HandleRun(ADDRESS + 8 * PAGE_BYTES, 1),
        HandleRun(ADDRESS + PAGE_BYTES, 2, (7, 4)),
        HandleRun(ADDRESS + 9 * PAGE_BYTES, 1, (6,)),
    )

    def mapped(self, cuda: FakeCuda) -> CudaBatches:
        """Return what has mapped what these runs unmap."""
        mapping = batches(cuda)
        list(
            mapping.remap(
                PAGE_BYTES, [HandleRun(ADDRESS, 2, (4, 7)), HandleRun(self.RUNS[1].address, 1, (6,))]
            )
        )
        return mapping

    def test_runs_are_unmapped_and_mapped_in_their_order(self, cuda: FakeCuda) -> None:
        mapping = self.mapped(cuda)
        num_before = len(cuda.calls)
        assert list(mapping.remap(PAGE_BYTES, self.RUNS)) == [0, 1, 2, 3]
        assert [(name, address) for name, address, *_ in cuda.calls[num_before:]] == [
            ("cuMemUnmap", ADDRESS),
            ("cuMemUnmap", ADDRESS + 8 * PAGE_BYTES),
            ("cuMemMap", ADDRESS + PAGE_BYTES),
            ("cuMemMap", ADDRESS + 2 * PAGE_BYTES),
            ("cuMemSetAccess", ADDRESS + PAGE_BYTES),
            ("cuMemMap", ADDRESS + 9 * PAGE_BYTES),
            ("cuMemSetAccess", ADDRESS + 9 * PAGE_BYTES),
        ]
        assert [call[3] for call in cuda.calls[num_before:] if call[0] == "cuMemMap"] == [7, 4, 6]

    @pytest.mark.parametrize(
        ("name", "num_before", "num_done", "num_pages"),
        [
            ("cuMemUnmap", 0, 0, 3),
            ("cuMemUnmap", 1, 1, 1),
            ("cuMemMap", 1, 2, 0),
            ("cuMemMap", 2, 3, 2),
            ("cuMemSetAccess", 1, 3, 2),
        ],
    )
    def test_what_was_done_before_a_refusal_is_told_and_nothing_after_it_is(
        self, name: str, num_before: int, num_done: int, num_pages: int, cuda: FakeCuda
    ) -> None:
        mapping = self.mapped(cuda)
        cuda.refuse(name, num_before)
        done: list[int] = []
        with pytest.raises(DeviceError, match=f"refused {name}\\("):
            done.extend(mapping.remap(PAGE_BYTES, self.RUNS))
        assert (len(done), cuda.num_pages) == (num_done, num_pages)


class Chunks:
    """Bytes on both sides: chunks of two copies each, the second one byte longer."""

    def __init__(self, num_chunks: int) -> None:
        self.source = (ctypes.c_uint8 * (num_chunks * 15))(*(at % 251 for at in range(num_chunks * 15)))
        self.target = (ctypes.c_uint8 * (num_chunks * 15))()
        source, target = ctypes.addressof(self.source), ctypes.addressof(self.target)
        self.copies = [
            [ByteCopy(target + at, source + at, 7), ByteCopy(target + at + 7, source + at + 7, 8)]
            for at in range(0, num_chunks * 15, 15)
        ]

    def num_there(self) -> int:
        """Return how many of the bytes have come, from the first."""
        return next((at for at, byte in enumerate(self.target) if byte != self.source[at]), len(self.target))


def copies_of(cuda: FakeCuda, num_chunks: int, max_queued: int = 4) -> BatchedCopies:
    return BatchedCopies(batches(cuda), STREAM, lambda: 9, num_chunks, max_queued)


class TestCopies:
    def test_chunks_come_in_order_with_an_event_behind_each(self, cuda: FakeCuda) -> None:
        chunks, copies = Chunks(5), copies_of(cuda, 5)
        copies.queue(chunks.copies[:3])
        copies.queue(chunks.copies[3:])
        assert (copies.num_queued, bytes(chunks.target)) == (5, bytes(chunks.source))
        names = [name for name, *_ in cuda.calls if name != "cuEventSynchronize"]
        assert names == 5 * ["cuMemcpyHtoDAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventCreate", "cuEventRecord"]
        assert {stream for name, _, _, stream in cuda.calls if "Memcpy" in name} == {STREAM}
        copies.wait(4)
        assert copies.has_passed(4)
        copies.have_stream_wait(2)
        assert cuda.calls[-1] == ("cuStreamWaitEvent", 9, 2, 0)
        copies.close()
        assert cuda.num_events == 0

    def test_so_many_chunks_are_under_way_and_no_more(self, cuda: FakeCuda) -> None:
        cuda.set_times(pass_ns=2_000_000)
        chunks, copies = Chunks(20), copies_of(cuda, 20)
        for begin in range(0, 20, 5):
            copies.queue(chunks.copies[begin : begin + 5])
        assert cuda.max_queued == 4
        assert not copies.has_passed(19)

    @pytest.mark.parametrize("name", ["cuMemcpyHtoDAsync_v2", "cuEventCreate", "cuEventRecord"])
    def test_a_chunk_that_is_refused_is_waited_for_and_leaves_no_event(
        self, name: str, cuda: FakeCuda
    ) -> None:
        chunks, copies = Chunks(5), copies_of(cuda, 5)
        cuda.refuse(name, num_before=5 if "Memcpy" in name else 2)
        with pytest.raises(DeviceError, match=f"refused {name}"):
            copies.queue(chunks.copies)
        assert copies.num_queued == 2
        assert cuda.calls[-1] == ("cuStreamSynchronize", STREAM, 0, 0)
        assert 30 <= chunks.num_there() <= 45
        copies.close()
        assert cuda.num_events == 0

    def test_a_copy_that_failed_is_told_where_it_is_waited_for(self, cuda: FakeCuda) -> None:
        chunks, copies = Chunks(8), copies_of(cuda, 8)
        cuda.refuse("cuEventSynchronize", num_before=1)
        with pytest.raises(DeviceError, match="refused cuEventSynchronize"):
            copies.queue(chunks.copies)
        assert copies.num_queued == 5
        with pytest.raises(DeviceError, match="refused cuEventSynchronize"):
            copies.wait(0)

    def test_stopping_ends_a_call_that_waits_for_room(self, cuda: FakeCuda) -> None:
        cuda.set_times(pass_ns=20_000_000)
        chunks, copies = Chunks(100), copies_of(cuda, 100)
        queueing = threading.Thread(target=copies.queue, args=(chunks.copies,))
        queueing.start()
        _until(lambda: chunks.num_there() >= 4 * 15)
        assert copies.num_queued == 0, "the call is over"  # and would be, with the interpreter held
        copies.stop()
        queueing.join(PATIENCE_S)
        assert 4 <= copies.num_queued < 100
        assert chunks.num_there() == 15 * copies.num_queued


def test_without_a_compiler_it_is_said_once_and_calls_are_made_one_by_one(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_batches, "_FOUND", [])
    monkeypatch.setenv("CC", "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        assert [batches_of(cuda.driver), batches_of(cuda.driver)] == [None, None]
    assert caplog.text.count("fallback driver_calls=interpreted") == 1


def _until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
