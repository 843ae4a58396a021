"""Chunks to their places on a device, here the CPU, from a stream whose chunks the test hands over."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting
from contextlib import suppress
from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.errors import ChunkCorrupt, ChunkMissing, LoadCancelled, StoreError
from hearth.core.types import Rung
from hearth.models.layout import ByteRange
from hearth.store.format.manifest import Manifest
from hearth.store.transfer.copies import SingleCopies
from hearth.store.transfer.destination import Destination, LoadPiece, whole
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.record import LoadRecord
from hearth.store.transfer.transfer import Loader, Transfer, TransferGate, TransferHooks
from hearth.system.cuda.batches import ByteCopy
from tests.store.stored import (
    CHUNK_BYTES,
    PATIENCE_S,
    Gated,
    Shelf,
    consume,
    converted,
    fetching,
    model_of,
    parts_of,
    stored_at,
)

PARTS = [*parts_of(1, 7), bytes(range(256)) * 4]  # the last one is shorter
DATA = b"".join(PARTS)
MODEL = model_of("m", PARTS)
MANIFEST = MODEL.manifest
CPU = Loader(torch.device("cpu"))


class Hand(SimpleQueue[HostChunk | Exception]):
    """A stream of chunks that the test hands over, or an error."""

    def __init__(self, parts: Sequence[bytes] = PARTS) -> None:
        self.parts = parts
        self.wanted: list[int] = []
        self.released: list[int] = []

    def give(self, *chunks: int) -> None:
        for index in chunks:
            self.put(HostChunk(index, memoryview(bytearray(self.parts[index])), cell=0, delivery=None))

    def opened(self, chunks: Sequence[int]) -> Hand:
        self.wanted = list(chunks)
        return self

    release_batch = 8

    def batches(self, most: int) -> Generator[list[HostChunk]]:
        num_left = len(self.wanted)
        while num_left:
            batch: list[HostChunk] = []
            while not batch or (len(batch) < min(most, num_left) and not self.empty()):
                match self.get():
                    case HostChunk() as chunk:
                        batch.append(chunk)
                    case error if not batch:
                        raise error
                    case error:
                        self.put(error)  # the last that the test hands over
                        break
            num_left -= len(batch)
            yield batch

    def release(self, *chunks: HostChunk) -> None:
        self.released += [chunk.index for chunk in chunks]

    def cancel(self) -> None:
        self.put(LoadCancelled("called off"))


def memory(num_bytes: int = len(DATA)) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def begin(hand: Hand, base: torch.Tensor, manifest: Manifest = MANIFEST) -> Transfer:
    return CPU.load("m", manifest, whole(manifest, base), hand.opened)


def chunk_range(*chunks: int) -> ByteRange:
    return ByteRange(MANIFEST.chunk_range(chunks[0]).begin, MANIFEST.chunk_range(chunks[-1]).end)


def assert_waits(future: Future[None]) -> None:
    with pytest.raises(StillWaiting):
        future.result(timeout=0.02)


class TestPlaces:
    def test_a_whole_model_lands_in_one_buffer_as_it_lies_in_its_file(self) -> None:
        hand, base = Hand(), memory()
        load = begin(hand, base)
        hand.give(*range(len(PARTS)))
        assert load.wait().num_bytes == len(DATA)
        assert base.numpy().tobytes() == DATA
        assert hand.wanted == hand.released == list(range(len(PARTS)))

    @given(spans=st.lists(st.tuples(*[st.integers(0, len(DATA))] * 2), max_size=6))
    def test_any_bytes_land_in_scattered_buffers(self, spans: list[tuple[int, int]]) -> None:
        parts = [ByteRange(min(span), max(span)) for span in spans]
        places = [memory(part.end - part.begin) for part in parts]
        pieces = list(map(LoadPiece.to, parts, places))
        hand = Hand()
        hand.give(*Destination(MANIFEST, pieces).chunks)
        CPU.load("m", MANIFEST, pieces, hand.opened).wait()
        assert [place.numpy().tobytes() for place in places] == [
            DATA[part.begin : part.end] for part in parts
        ]
        touched = {at // CHUNK_BYTES for part in parts for at in range(part.begin, part.end)}
        assert touched <= set(hand.wanted)
        assert hand.wanted == sorted(set(hand.wanted))

    def test_only_chunks_that_hold_wanted_bytes_are_fetched(self) -> None:
        spans = [ByteRange(5 * CHUNK_BYTES - 1, 5 * CHUNK_BYTES + 1), ByteRange(10, 20)]
        pieces = [LoadPiece.to(span, memory(span.end - span.begin)) for span in spans]
        assert Destination(MANIFEST, pieces).chunks == [0, 4, 5]

    def test_a_destination_of_the_wrong_size_is_a_bug(self) -> None:
        with pytest.raises(AssertionError, match="piece"):
            begin(Hand(), memory(len(DATA) - 1))


class TestWaiting:
    def test_bytes_that_have_come_can_be_used_before_the_others(self) -> None:
        hand, base = Hand(), memory()
        load = begin(hand, base)
        hand.give(0, 1)
        load.wait_for(chunk_range(0, 1))
        assert base[: 2 * CHUNK_BYTES].numpy().tobytes() == DATA[: 2 * CHUNK_BYTES]
        assert not load.is_done
        load.cancel()

    def test_whoever_needs_the_next_chunk_waits_for_just_that(self) -> None:
        hand = Hand()
        load = begin(hand, memory())
        with ThreadPoolExecutor() as pool:
            hand.give(0, 1)
            waiter = pool.submit(load.wait_for, chunk_range(2))
            assert_waits(waiter)
            hand.give(2)
            waiter.result(PATIENCE_S)
            load.cancel()

    def test_a_part_between_fetched_pieces_waits_for_what_comes_before_it(self) -> None:
        places = [memory(CHUNK_BYTES) for _ in range(2)]
        pieces = list(map(LoadPiece.to, map(chunk_range, (1, 5)), places))
        hand = Hand()
        load = CPU.load("m", MANIFEST, pieces, hand.opened)
        hand.give(1)
        load.wait_for(chunk_range(0, 4))
        assert places[0].numpy().tobytes() == PARTS[1]
        load.cancel()

    def test_layers_of_a_model_open_one_by_one(self) -> None:
        model = stored_at(converted("llama-gqa", chunk_bytes=16 << 10))
        manifest = model.manifest
        weights = (model.directory / "weights.bin").read_bytes()
        hand = Hand(
            [weights[r.begin : r.end] for r in map(manifest.chunk_range, range(len(manifest.chunks)))]
        )
        load = begin(hand, memory(manifest.num_bytes), manifest)
        gate = TransferGate(load, manifest)
        given = 0
        with ThreadPoolExecutor() as pool:
            for layer, span in enumerate(manifest.layers):
                hand.give(*range(given, manifest.chunks_of(span)[-1]))
                waiter = pool.submit(gate.layer, layer)
                assert_waits(waiter)
                given = manifest.chunks_of(span)[-1] + 1
                hand.give(given - 1)
                waiter.result(PATIENCE_S)
            gate.embed()
            head = pool.submit(gate.head)
            assert_waits(head)
            assert not gate.is_open()
            hand.give(*range(given, len(manifest.chunks)))
            head.result(PATIENCE_S)
        load.wait()
        assert gate.is_open()


class TestErrors:
    def test_an_error_reaches_everyone_who_waits(self) -> None:
        hand = Hand()
        load = begin(hand, memory())
        with ThreadPoolExecutor() as pool:
            part, end = pool.submit(load.wait_for, chunk_range(2)), pool.submit(load.wait)
            hand.give(0, 1)
            hand.put(ChunkCorrupt("chunk 2 is corrupt"))
            errors = [part.exception(PATIENCE_S), end.exception(PATIENCE_S)]
        assert [(type(error), str(error)) for error in errors] == [(ChunkCorrupt, "chunk 2 is corrupt")] * 2
        assert hand.released == [0, 1]

    def test_after_an_error_nothing_can_be_waited_for(self) -> None:
        """Also not what had come: a copy that was queued may read a cell that is somebody else's by now."""
        hand = Hand()
        load = begin(hand, memory())
        hand.give(0)
        hand.put(ChunkMissing("chunk 1 is missing"))
        with pytest.raises(ChunkMissing, match="chunk 1"):
            load.wait()
        with pytest.raises(ChunkMissing, match="chunk 1"):
            load.wait_for(chunk_range(0))

    def test_a_copy_that_raises_gives_its_chunk_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: SingleCopies, copy: ByteCopy) -> None:
            raise RuntimeError("no such device")

        monkeypatch.setattr(SingleCopies, "_copy", refuse)
        hand = Hand()
        load = begin(hand, memory())
        hand.give(0)
        with pytest.raises(StoreError, match="no such device"):
            load.wait()
        assert hand.released == [0]

    def test_a_stream_that_breaks_is_told_and_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        hand = Hand()
        load = begin(hand, memory())
        hand.put(RuntimeError("the stream broke"))
        with pytest.raises(StoreError, match=r"the load of `m` broke.*the stream broke"):
            load.wait()
        assert "load_broke model=m" in caplog.text

    def test_the_end_is_told_once_however_it_comes(self) -> None:
        ends: list[LoadRecord | StoreError] = []
        for last in (None, ChunkMissing("gone")):
            hand = Hand()
            hand.give(*range(len(PARTS) - 1))
            hand.put(last) if last else hand.give(len(PARTS) - 1)
            load = CPU.load("m", MANIFEST, whole(MANIFEST, memory()), hand.opened, ends.append)
            with suppress(StoreError):
                load.wait()
            load.cancel()  # whatever has come of it
        record, error = ends
        assert isinstance(record, LoadRecord)
        assert record.num_bytes == len(DATA)
        assert isinstance(error, ChunkMissing)

    @pytest.mark.parametrize("num_threads", [0, 1])
    def test_a_load_for_which_there_are_too_few_threads_is_told_and_leaves_nothing_open(
        self, num_threads: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loader, hand, outcomes = Loader(torch.device("cpu")), Hand(), SimpleQueue[object]()
        start, num_started = threading.Thread.start, itertools.count()

        def start_few(thread: threading.Thread) -> None:
            if next(num_started) >= num_threads:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_few)
        try:
            loader.load("m", MANIFEST, whole(MANIFEST, memory()), hand.opened, on_end=outcomes.put)
        except RuntimeError as error:
            outcomes.put(error)
        assert "can't start new thread" in str(outcomes.get(timeout=PATIENCE_S))
        assert isinstance(hand.get(timeout=PATIENCE_S), LoadCancelled), "the stream is left open"


class TestCalledOff:
    def test_nothing_is_written_after_cancel_has_returned(self) -> None:
        gated, base = Gated(Shelf(PARTS)), memory()
        with fetching(gated, num_cells=4) as fetcher:
            load = CPU.load("m", MANIFEST, whole(MANIFEST, base), lambda chunks: fetcher.fetch(MODEL, chunks))
            gated.next().allow()
            load.wait_for(chunk_range(0))
            gated.next()
            load.cancel()
            gated.open()
            assert consume(fetcher.fetch(MODEL, range(len(PARTS)))) == DATA  # the reader is past it all
        assert base.numpy().tobytes() == PARTS[0] + bytes(len(DATA) - CHUNK_BYTES)
        assert (fetcher.book.num_leased, fetcher.book.num_filling) == (0, 0)

    def test_cancel_waits_for_a_chunk_that_still_came(self) -> None:
        class Late(Hand):
            """One more chunk was on its way when it was called off."""

            def cancel(self) -> None:
                threading.Timer(0.05, self.end).start()

            def end(self) -> None:
                self.give(0)
                super().cancel()

        hand = Late()
        begin(hand, memory()).cancel()
        assert hand.released == [0]

    def test_whoever_waits_is_told(self) -> None:
        hand = Hand()
        load = begin(hand, memory())
        with ThreadPoolExecutor() as pool:
            waiter = pool.submit(load.wait_for, chunk_range(0))
            load.cancel()
            assert isinstance(waiter.exception(PATIENCE_S), LoadCancelled)
        with pytest.raises(LoadCancelled):
            load.wait()

    def test_cancelling_a_load_that_is_done_is_harmless(self) -> None:
        hand, base = Hand(), memory()
        load = begin(hand, base)
        hand.give(*range(len(PARTS)))
        record = load.wait()
        load.cancel()
        assert load.wait() == record
        load.wait_for(chunk_range(0, len(PARTS) - 1))


class TestRecord:
    def test_bytes_and_seconds_add_up(self) -> None:
        span = ByteRange(CHUNK_BYTES + 5, 3 * CHUNK_BYTES + 5)
        with fetching(Shelf(PARTS), num_cells=8) as fetcher:
            consume(fetcher.fetch(MODEL, [1]))
            piece = LoadPiece.to(span, memory(span.end - span.begin))
            record = CPU.load("m", MANIFEST, [piece], lambda chunks: fetcher.fetch(MODEL, chunks)).wait()
        assert record.num_bytes == span.end - span.begin
        uses = {rung: (use.num_chunks, use.num_bytes) for rung, use in record.rungs.items()}
        assert uses == {Rung.HOST: (1, CHUNK_BYTES), Rung.DISK: (2, 2 * CHUNK_BYTES)}
        assert all(use.seconds > 0 for use in record.rungs.values())
        assert (record.read_s, record.verify_s) == (2.0, 1.0)  # as the shelf says
        assert 0 <= record.wait_s < record.total_s
        assert 0 < record.first_layer_s <= record.total_s

    def test_the_first_layer_is_timed_before_the_last_chunk_comes(self) -> None:
        hand = Hand()
        load = begin(hand, memory())
        hand.give(0)
        load.wait_for(chunk_range(0))
        threading.Timer(0.05, hand.give, range(1, len(PARTS))).start()
        record = load.wait()
        assert record.first_layer_s < record.total_s - 0.04


@pytest.mark.gpu
def test_loads_on_a_busy_device_do_not_wait_for_each_others_cells() -> None:
    """Copies that have not passed yet hold all cells when the next chunks are wanted."""
    device = torch.device("cuda")
    long = [random.Random(9).randbytes(CHUNK_BYTES) for _ in range(40)]
    model = model_of("long", long)
    loader = Loader(device)
    assert loader._stream is not None
    with fetching(Shelf(long), num_cells=4, num_readers=2) as fetcher:
        bases = [torch.zeros(model.manifest.num_bytes, dtype=torch.uint8, device=device) for _ in range(3)]
        with torch.cuda.stream(loader._stream._stream):
            torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call] # torch leaves it so
        loads = [
            loader.load(
                f"m{i}",
                model.manifest,
                whole(model.manifest, base),
                lambda chunks, i=i: fetcher.fetch(replace(model, name=f"m{i}"), chunks),  # type: ignore[misc]
            )
            for i, base in enumerate(bases)
        ]
        for load in loads:
            load.wait()
        torch.cuda.synchronize()
        assert [base.cpu().numpy().tobytes() for base in bases] == [b"".join(long)] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("is_idle", [False, True])
def test_copies_to_memory_that_is_idle_wait_for_nothing_else_on_the_device(is_idle: bool) -> None:
    device = torch.device("cuda")
    base = torch.zeros(len(DATA), dtype=torch.uint8, device=device)
    loader = Loader(device)  # before anything is queued: what comes first on a device waits for all of it
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call] # torch leaves it so
    steps = torch.cuda.Event()  # type: ignore[no-untyped-call] # as above
    steps.record()
    with fetching(Shelf(PARTS), num_cells=len(PARTS), num_readers=2) as fetcher:
        if is_idle:
            destination = Destination(MANIFEST, whole(MANIFEST, base))
            source = fetcher.fetch(MODEL, destination.chunks)
            load = loader.transfer("m", source, destination, TransferHooks())
            load.start(loader.threads)
        else:
            load = loader.load(
                "m", MANIFEST, whole(MANIFEST, base), lambda chunks: fetcher.fetch(MODEL, chunks)
            )
        load.wait()
        assert steps.query() != is_idle
    torch.cuda.synchronize()
    assert base.cpu().numpy().tobytes() == DATA
