"""Loads whose copies are queued one by one or by the batch, to a fake device: the same comes of both."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Generator

import pytest
import torch

from hearth.core.errors import DeviceError, HearthError, LoadCancelled, StoreError
from hearth.models.layout import ByteRange
from hearth.store.transfer import transfer
from hearth.store.transfer.copies import ChunkCopies, SingleCopies
from hearth.store.transfer.destination import Destination, LoadPiece
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.record import LoadRecord
from hearth.store.transfer.transfer import Transfer, TransferHooks, TransferState
from hearth.system.cuda.batches import BatchedCopies, ByteCopy, batches_of
from hearth.system.standing_threads import StandingThreads
from tests.fake_cuda import FakeCuda, fake_cuda
from tests.store.stored import CHUNK_BYTES, PATIENCE_S, model_of, parts_of, until

NUM_CHUNKS, MAX_QUEUED, STREAM = 41, 16, 7
PARTS = parts_of(1, NUM_CHUNKS)
DATA = b"".join(PARTS)
MANIFEST = model_of("m", PARTS).manifest
#: Every second KiB of the model: most chunks have several copies.
PIECES = [ByteRange(at, at + 1024) for at in range(0, len(DATA), 2048)]


class Event:
    """An event of the fake device, as torch has them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library, self._handle = library, ctypes.c_void_p()
        assert library.cuEventCreate(ctypes.byref(self._handle), 3) == 0
        assert library.cuEventRecord(self._handle, STREAM) == 0

    def synchronize(self) -> None:
        if self._library.cuEventSynchronize(self._handle):
            raise RuntimeError("the copies failed")

    def query(self) -> bool:
        return bool(self._library.cuEventQuery(self._handle) == 0)


class Stream:
    """A copy stream of the fake device."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def queue(self, copy: ByteCopy) -> None:
        self._cuda.driver.copy_from_host(copy.destination, copy.source, copy.num_bytes, STREAM)

    def drain(self) -> None:
        self._cuda.driver.call("cuStreamSynchronize", ctypes.c_void_p(STREAM))

    def record(self) -> Event:
        return Event(self._cuda.library)


class Shelf:
    """A `ChunkSource` that has lent so many chunks at a time, as a keeper with a window does."""

    def __init__(self, window: int = 32, release_batch: int = 8, num_chunks: int = NUM_CHUNKS) -> None:
        self.release_batch = release_batch
        self.released_at_once: list[int] = []
        self.released: list[int] = []
        self.batches_given: list[int] = []
        self._window, self._num_chunks, self._is_cancelled = window, num_chunks, False
        self._changed = threading.Condition()

    def batches(self, most: int) -> Generator[list[HostChunk]]:
        at = 0
        while at < self._num_chunks:
            with self._changed:
                while at - len(self.released) >= self._window and not self._is_cancelled:
                    assert self._changed.wait(PATIENCE_S)
                if self._is_cancelled:
                    raise LoadCancelled("called off")
                end = min(self._num_chunks, at + most, len(self.released) + self._window)
            self.batches_given.append(end - at)
            yield [HostChunk(i, memoryview(bytearray(PARTS[i])), 0, None) for i in range(at, end)]
            at = end

    def release(self, *chunks: HostChunk) -> None:
        with self._changed:
            self.released += [chunk.index for chunk in chunks]
            self.released_at_once.append(len(chunks))
            self._changed.notify_all()

    def cancel(self) -> None:
        with self._changed:
            self._is_cancelled = True
            self._changed.notify_all()


class Setting:
    """A fake device, a load to it, and where its bytes go."""

    def __init__(self, kind: str) -> None:
        self.cuda = fake_cuda()
        self.target = [torch.zeros(part.end - part.begin, dtype=torch.uint8) for part in PIECES]
        self._kind = kind

    def begin(self, shelf: Shelf, on_end: Callable[[object], None] = lambda outcome: None) -> Transfer:
        transfer = self._transfer(shelf, TransferHooks(ended=on_end))
        transfer.start(StandingThreads("test", idle_s=1.0))
        return transfer

    def run(
        self,
        shelf: Shelf,
        on_end: Callable[[LoadRecord | HearthError], None],
        on_arriving: Callable[[Transfer], None] = lambda transfer: None,
        num_chunks: int = NUM_CHUNKS,
    ) -> None:
        self._transfer(shelf, TransferHooks(arriving=on_arriving, ended=on_end), num_chunks).run()

    def _transfer(self, shelf: Shelf, hooks: TransferHooks, num_chunks: int = NUM_CHUNKS) -> Transfer:
        pieces = [one for one in self._pieces() if one.part.end <= num_chunks * CHUNK_BYTES]
        destination = Destination(MANIFEST, pieces)
        return Transfer("m", shelf, destination, self._copies(len(destination.chunks)), hooks)

    def _pieces(self) -> list[LoadPiece]:
        return [LoadPiece.to(part, target) for part, target in zip(PIECES, self.target, strict=True)]

    def num_there(self) -> int:
        """Return how many of the pieces have come."""
        return sum(
            target.numpy().tobytes() == DATA[part.begin : part.end]
            for part, target in zip(PIECES, self.target, strict=True)
        )

    def _copies(self, num_chunks: int) -> ChunkCopies:
        if self._kind == "single":
            return SingleCopies(Stream(self.cuda))  # type: ignore[arg-type] # no torch device
        batches = batches_of(self.cuda.driver)
        assert batches is not None, "tests need a C compiler"
        return BatchedCopies(batches, STREAM, lambda: 9, num_chunks, MAX_QUEUED)


@pytest.fixture(params=["batched", "single"])
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(request.param)


def test_all_bytes_come_and_chunks_are_given_back_in_order(setting: Setting) -> None:
    setting.cuda.set_times(pass_ns=200_000)
    shelf = Shelf()
    record = setting.begin(shelf).wait()
    assert record.num_bytes == sum(part.end - part.begin for part in PIECES)
    assert setting.num_there() == len(PIECES)
    assert shelf.released == list(range(NUM_CHUNKS))
    assert setting.cuda.max_queued <= MAX_QUEUED


def test_both_copy_the_same_in_the_same_order() -> None:
    noted: list[list[str | int]] = []
    for kind in ("batched", "single"):
        setting = Setting(kind)
        setting.begin(Shelf()).wait()
        piece_at = {target.data_ptr(): piece for piece, target in enumerate(setting.target)}
        noted.append(
            [
                "chunk" if name == "cuEventRecord" else piece_at[address]
                for name, address, _, _ in setting.cuda.calls
                if name in ("cuMemcpyHtoDAsync_v2", "cuEventRecord")
            ]
        )
    assert noted[0] == noted[1]
    assert [piece for piece in noted[0] if piece != "chunk"] == list(range(len(PIECES)))
    assert noted[0][:6] == [0, 1, "chunk", 2, 3, "chunk"]


def test_copies_are_queued_by_the_batch_as_chunks_come_and_not_more_at_once() -> None:
    setting, shelf = Setting("batched"), Shelf()
    setting.cuda.set_times(pass_ns=500_000)
    setting.begin(shelf).wait()
    assert max(shelf.batches_given) == BatchedCopies.max_batch
    assert len(shelf.batches_given) < NUM_CHUNKS / 2


@pytest.mark.parametrize("release_batch", [1, 5, 8])
def test_chunks_are_given_back_as_many_at_once_as_suits_their_stream(
    release_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "RELEASE_WAIT_S", PATIENCE_S)
    setting, shelf = Setting("batched"), Shelf(release_batch=release_batch)
    setting.cuda.set_times(pass_ns=1_000_000)
    setting.begin(shelf).wait()
    assert min(shelf.released_at_once[:-1]) >= release_batch


@pytest.mark.parametrize("window", [1, 3])
def test_few_cells_are_given_back_though_no_batch_is_full(window: int, setting: Setting) -> None:
    setting.begin(Shelf(window)).wait()
    assert setting.num_there() == len(PIECES)


def test_a_refused_copy_breaks_the_load_and_everything_is_given_back(setting: Setting) -> None:
    setting.cuda.refuse("cuMemcpyHtoDAsync_v2", num_before=20)
    ends: list[object] = []
    shelf = Shelf()
    load = setting.begin(shelf, ends.append)
    with pytest.raises(StoreError, match="refused cuMemcpyHtoDAsync_v2"):
        load.wait()
    with pytest.raises(StoreError, match="refused cuMemcpyHtoDAsync_v2"):
        load.wait_for(ByteRange(0, 1))
    assert sorted(shelf.released) == list(range(sum(shelf.batches_given)))
    assert len(ends) == 1
    assert ("cuStreamSynchronize", STREAM, 0, 0) in setting.cuda.calls, "a part of a chunk may be under way"


def test_events_that_cannot_be_given_back_break_the_load_and_it_ends(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(copies: ChunkCopies) -> None:
        raise DeviceError("the device is gone")

    for kind in (BatchedCopies, SingleCopies):
        monkeypatch.setattr(kind, "close", refuse)
    ends: list[object] = []
    load = setting.begin(Shelf(), ends.append)
    with pytest.raises(StoreError, match="the device is gone"):
        load.wait()
    assert [type(end) for end in ends] == [DeviceError]


def test_copies_that_fail_later_break_the_load(setting: Setting) -> None:
    setting.cuda.refuse("cuEventSynchronize", num_before=1)
    shelf = Shelf()
    with pytest.raises(StoreError, match="broke"):
        setting.begin(shelf).wait()
    assert sorted(shelf.released) == list(range(sum(shelf.batches_given)))


def test_a_load_that_is_called_off_in_the_middle_copies_nothing_more(setting: Setting) -> None:
    setting.cuda.set_times(pass_ns=20_000_000)
    shelf = Shelf()
    load = setting.begin(shelf)
    until(lambda: setting.num_there() >= 20)
    load.cancel()
    num_there = setting.num_there()
    assert num_there < len(PIECES)
    with pytest.raises(LoadCancelled):
        load.wait()
    assert sorted(shelf.released) == list(range(sum(shelf.batches_given)))
    if isinstance(load._copies, BatchedCopies):
        assert setting.cuda.num_events == 0


def test_a_layer_waits_on_its_stream_for_just_its_chunks() -> None:
    setting = Setting("batched")
    setting.cuda.set_times(pass_ns=2_000_000)
    load = setting.begin(Shelf())
    load.wait_for(ByteRange(0, 3 * CHUNK_BYTES))
    (waited,) = [call for call in setting.cuda.calls if call[0] == "cuStreamWaitEvent"]
    assert waited == ("cuStreamWaitEvent", 9, 2, 0)
    load.wait()
    load.wait_for(ByteRange(0, len(DATA)))  # nothing to wait for any more
    assert [call for call in setting.cuda.calls if call[0] == "cuStreamWaitEvent"] == [waited]
    assert setting.cuda.num_events == 0


@pytest.mark.parametrize("window", [1, 3, 32])
def test_a_transfer_by_one_thread_releases_all_that_it_has_before_it_waits_for_more(
    window: int, setting: Setting
) -> None:
    setting.cuda.set_times(pass_ns=200_000)
    shelf = Shelf(window)
    records: list[LoadRecord | HearthError] = []
    num_released: list[int] = []

    def end(record: LoadRecord | HearthError) -> None:
        records.append(record)
        num_released.append(len(shelf.released))
        assert setting.num_there() == len(PIECES)

    setting.run(shelf, end)
    (record,) = records
    assert isinstance(record, LoadRecord)
    assert record.num_bytes == sum(part.end - part.begin for part in PIECES)
    assert num_released[0] < NUM_CHUNKS, "the end is reported before the last chunks are released"
    assert shelf.released == list(range(NUM_CHUNKS))
    assert shelf.released_at_once == shelf.batches_given


@pytest.mark.parametrize(("num_chunks", "num_groups"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (8, 3)])
def test_a_transfer_arrives_while_the_last_chunks_are_copied_and_a_stream_waits_for_them(
    num_chunks: int, num_groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk is queued by itself, the last two together, and those between."""
    setting, told = Setting("batched"), list[Transfer | LoadRecord | HearthError]()
    monkeypatch.setattr(BatchedCopies, "has_passed", lambda *_: False)

    def arrive(transfer: Transfer) -> None:
        calls = [call for call, *_ in setting.cuda.calls]
        waited_for = [event for call, event, _, _ in setting.cuda.calls if call == "cuEventSynchronize"]
        assert waited_for == ([num_groups - 2] if num_groups > 1 else []), "that before the last"
        assert calls.count("cuEventRecord") == num_groups
        assert transfer.state is TransferState.ARRIVING
        transfer.have_stream_wait()
        transfer.wait_for(ByteRange(0, 1))
        transfer.wait_for(ByteRange(0, num_chunks * CHUNK_BYTES))
        told.append(transfer)

    setting.run(Shelf(num_chunks=num_chunks), told.append, arrive, num_chunks)

    transfer, record = told
    assert isinstance(transfer, Transfer)
    assert isinstance(record, LoadRecord)
    assert transfer.state is TransferState.DONE
    transfer.have_stream_wait()  # nothing to wait for any more
    waits = [call for call in setting.cuda.calls if call[0] == "cuStreamWaitEvent"]
    last = num_groups - 1
    assert waits == [("cuStreamWaitEvent", 9, position, 0) for position in (last, 0, last)]
    assert setting.cuda.num_events == 0


def test_a_transfer_whose_copies_are_done_at_once_does_not_arrive_first(setting: Setting) -> None:
    ends = list[LoadRecord | HearthError]()
    setting.run(Shelf(), ends.append, lambda transfer: pytest.fail("it is done"))
    assert [type(end) for end in ends] == [LoadRecord]


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync_v2", "cuEventSynchronize"])
def test_a_transfer_by_one_thread_that_is_refused_releases_everything(call: str) -> None:
    setting, shelf, ends = Setting("batched"), Shelf(), list[LoadRecord | HearthError]()
    setting.cuda.refuse(call, num_before=1)
    setting.run(shelf, ends.append)
    (error,) = ends
    assert isinstance(error, DeviceError)
    assert f"refused {call}" in str(error)
    assert sorted(shelf.released) == list(range(sum(shelf.batches_given)))
    assert shelf._is_cancelled
    assert setting.cuda.num_events == 0


def test_a_transfer_by_one_thread_whose_chunks_do_not_come_fails(setting: Setting) -> None:
    shelf, ends = Shelf(), list[LoadRecord | HearthError]()
    shelf.cancel()
    setting.run(shelf, ends.append)
    assert [type(end) for end in ends] == [LoadCancelled]
    assert setting.num_there() == 0


def test_pieces_that_lie_side_by_side_there_as_in_their_chunk_are_one_copy() -> None:
    memory = torch.zeros(3 * CHUNK_BYTES, dtype=torch.uint8)
    quarter = CHUNK_BYTES // 4

    def at(begin: int, num_bytes: int, place: int) -> LoadPiece:
        return LoadPiece.to(ByteRange(begin, begin + num_bytes), memory[place : place + num_bytes])

    pieces = [
        *(at(0, quarter, 0), at(quarter, quarter, quarter)),  # one behind the other, in both
        at(2 * quarter, quarter, CHUNK_BYTES),  # elsewhere
        at(3 * quarter, 2 * quarter, CHUNK_BYTES + quarter),  # behind it, and into the next chunk
        at(6 * quarter, quarter, CHUNK_BYTES + 3 * quarter),  # behind it there, but not here
    ]
    destination = Destination(MANIFEST, pieces)
    chunks = [HostChunk(i, memoryview(bytearray(PARTS[i])), 0, None) for i in destination.chunks]
    copies = [destination.copies_of([chunk]) for chunk in chunks]
    assert destination.num_bytes == 6 * quarter
    base = memory.data_ptr()
    assert [[(one.destination - base, one.num_bytes) for one in own] for own in copies] == [
        [(0, 2 * quarter), (CHUNK_BYTES, 2 * quarter)],
        [(CHUNK_BYTES + 2 * quarter, quarter), (CHUNK_BYTES + 3 * quarter, quarter)],
    ]
