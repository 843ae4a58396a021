"""Loads whose places are mapped ahead of them: no chunk is copied before its place is there."""

from __future__ import annotations

import threading
from collections.abc import Generator
from queue import SimpleQueue

import pytest
import torch

from hearth.core.errors import DeviceError
from hearth.memory.pool import Gap, Space
from hearth.models.layout import ByteRange
from hearth.store.transfer import destination as page_mapping
from hearth.store.transfer.destination import PageMapping
from hearth.store.transfer.fetch import HostChunk
from hearth.store.transfer.transfer import Loader
from hearth.system.standing_threads import StandingThreads
from hearth.worker.weights_transfer import (
    AlmostLoaded,
    LoadNews,
    ModelBroken,
    Progressed,
    WeightsLoaded,
    WeightsTransfer,
)
from tests.store.stored import CHUNK_BYTES, PATIENCE_S, model_of, parts_of, until


class Lent:
    """A lease of all chunks of a model, given together as far as they are asked for."""

    name = "m"
    is_in_host = True
    release_batch = 8

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.released: list[int] = []
        self.num_taken = 0

    def begin(self) -> None: ...

    def batches(self, most: int) -> Generator[list[HostChunk]]:
        begins = range(0, len(self._data), CHUNK_BYTES)
        for first in range(0, len(begins), 4):
            batch = [
                HostChunk(first + at, memoryview(bytearray(self._data[begin : begin + CHUNK_BYTES])), 0, None)
                for at, begin in enumerate(begins[first : first + 4])
            ]
            self.num_taken += len(batch)
            yield batch

    def release(self, *chunks: HostChunk) -> None:
        self.released += [chunk.index for chunk in chunks]

    def cancel(self) -> None:
        pass


class Rig:
    """A load whose places are mapped as the test allows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parts = parts_of(3, 10)
        self.manifest, self.data = model_of("m", parts).manifest, b"".join(parts)
        self.lease, self.news = Lent(self.data), SimpleQueue[LoadNews]()
        self.base = torch.zeros(self.manifest.num_bytes, dtype=torch.uint8)
        self.allowed = threading.Semaphore(0)
        self.error: DeviceError | None = None
        monkeypatch.setattr(page_mapping, "FIRST_BYTES", CHUNK_BYTES)
        monkeypatch.setattr(page_mapping, "MOST_BYTES", CHUNK_BYTES)

    def begin(self) -> WeightsTransfer:
        whole = ByteRange(0, self.manifest.num_bytes)
        empty = torch.empty(0)
        space = Space({}, empty, empty, empty, 0, gaps=(Gap(whole, self.base),), parts=(whole,))
        transfer = WeightsTransfer(
            self.lease,  # type: ignore[arg-type] # what a transfer needs of it
            self.manifest,
            space,
            self.manifest.layout,
            lambda: PageMapping(self._map, [whole], StandingThreads("test", idle_s=1.0)),
            Loader(torch.device("cpu")),
            self.news.put,
        )
        transfer.start()
        return transfer

    def num_there(self) -> int:
        """Return how many chunks have come, from the first."""
        there = self.base.numpy().tobytes()
        return next(
            (
                at // CHUNK_BYTES
                for at in range(0, len(there), CHUNK_BYTES)
                if there[at : at + CHUNK_BYTES] != self.data[at : at + CHUNK_BYTES]
            ),
            len(self.manifest.chunks),
        )

    def _map(self, part: ByteRange) -> None:
        assert self.allowed.acquire(timeout=PATIENCE_S)
        if self.error is not None:
            raise self.error


def test_chunks_are_copied_as_their_places_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    rig.begin()
    for num_mapped in range(1, 7):
        rig.allowed.release()
        until(lambda: rig.num_there() == num_mapped)  # noqa: B023 - waited for in this turn
    rig.allowed.release(len(rig.manifest.chunks))
    while not isinstance(heard := rig.news.get(timeout=PATIENCE_S), WeightsLoaded):
        assert not isinstance(heard, ModelBroken)
    assert rig.base.numpy().tobytes() == rig.data
    assert rig.lease.released == list(range(len(rig.manifest.chunks)))


def test_a_place_that_cannot_be_mapped_breaks_the_load_and_gives_all_chunks_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch)
    rig.begin()
    rig.allowed.release(2)
    until(lambda: rig.num_there() == 2)
    rig.error = DeviceError("the device refused it")
    rig.allowed.release()
    while isinstance(heard := rig.news.get(timeout=PATIENCE_S), AlmostLoaded | Progressed):
        pass  # how far it came is told as well, where that took long
    assert isinstance(heard, ModelBroken)
    assert "the device refused it" in heard.failure.reason
    assert sorted(rig.lease.released) == list(range(rig.lease.num_taken)) == [0, 1, 2, 3]
