"""One chunk from the nearest place that has it whole: files on disk, and a server that misbehaves."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from bench import bad_server
from bench.bad_server import BadServer
from hearth.core.errors import ChunkCorrupt, ChunkMissing, Unreachable
from hearth.core.types import Rung
from hearth.policy.memory.byte_eviction import Price
from hearth.store.format.manifest import WEIGHTS
from hearth.store.tiers.disk import DiskTier
from hearth.store.tiers.model import StoredModel
from hearth.store.tiers.remote import RemoteModel
from hearth.store.transfer.chunk_reader import MAX_WRONG_ANSWERS, ChunkReader
from tests.store.stored import CHUNK_BYTES, QUICK, flip, serving, stored_at, write_model

#: The chunk of these tests.
AT = 3


@pytest.fixture
def local(tmp_path: Path) -> StoredModel:
    write_model(tmp_path / "models" / "tiny")
    return stored_at(tmp_path / "models" / "tiny")


@pytest.fixture
def server(local: StoredModel) -> Iterator[BadServer]:
    """It has the model as it was before any test breaks it."""
    with serving(local.directory) as server:
        yield server


@pytest.fixture
def remote(local: StoredModel, server: BadServer) -> StoredModel:
    return replace(local, remote=RemoteModel(f"{server.url}/tiny", QUICK))


@pytest.fixture
def disk(tmp_path: Path, local: StoredModel) -> DiskTier:
    """It has found the model."""
    return DiskTier(tmp_path)


def always() -> bool:
    return True


def no_price(digest: str) -> Price:
    return 0.0


def stored(model: StoredModel) -> bytes:
    return (model.directory / WEIGHTS).read_bytes()[AT * CHUNK_BYTES : (AT + 1) * CHUNK_BYTES]


def memory() -> memoryview:
    return memoryview(mmap.mmap(-1, CHUNK_BYTES))


class TestFromDisk:
    def test_a_chunk_on_disk_asks_nobody_else(
        self, disk: DiskTier, remote: StoredModel, server: BadServer
    ) -> None:
        buffer = memory()
        delivery = ChunkReader(disk, no_price).deliver(remote, AT, buffer, always)
        assert bytes(buffer) == stored(remote)
        assert (delivery.rung, delivery.num_bytes, delivery.num_failures) == (Rung.DISK, CHUNK_BYTES, 0)
        assert server.asked == []

    def test_a_corrupt_place_is_struck_off_and_the_next_one_read(
        self, disk: DiskTier, local: StoredModel, tmp_path: Path
    ) -> None:
        write_model(tmp_path / "other" / "copy")
        copy = stored_at(tmp_path / "other" / "copy")
        disk.register(copy.directory, copy.manifest)
        flip(local.directory / WEIGHTS, AT * CHUNK_BYTES)
        buffer = memory()
        delivery = ChunkReader(disk, no_price).deliver(local, AT, buffer, always)
        assert bytes(buffer) == stored(copy)
        assert delivery.num_failures == disk.counters.num_condemned == 1
        assert [place.path.parent for place in disk.locate(local.manifest.chunk_ids[AT])] == [copy.directory]

    def test_nowhere_to_be_had_names_chunk_tensors_and_what_was_tried(
        self, disk: DiskTier, local: StoredModel
    ) -> None:
        flip(local.directory / WEIGHTS, AT * CHUNK_BYTES)
        tensors = local.manifest.tensors_in(AT)
        with pytest.raises(
            ChunkCorrupt, match=rf"chunk {AT} of `tiny` \(`{tensors[0]}`.*weights.bin`.*hearth verify"
        ):
            ChunkReader(disk, no_price).deliver(local, AT, memory(), always)

    def test_a_model_that_is_known_nowhere_is_missing(self, tmp_path: Path, local: StoredModel) -> None:
        with pytest.raises(ChunkMissing, match="is known to be good, and it came from no URL"):
            ChunkReader(DiskTier(tmp_path / "empty"), no_price).deliver(local, AT, memory(), always)

    def test_a_place_that_cannot_even_be_deleted_does_not_stand_in_the_way(
        self, tmp_path: Path, remote: StoredModel
    ) -> None:
        name = f"{remote.manifest.chunk_ids[AT]}-{xxhash.xxh3_128_hexdigest(stored(remote))}"
        (tmp_path / "cache" / "chunks" / name[:2] / name / "in the way").mkdir(parents=True)
        buffer = memory()
        delivery = ChunkReader(DiskTier(tmp_path / "cache"), no_price).deliver(remote, AT, buffer, always)
        assert delivery.rung is Rung.OBJECT
        assert bytes(buffer) == stored(remote)


class TestFromObjectStorage:
    def test_a_chunk_that_the_disk_has_lost_comes_from_there(
        self, disk: DiskTier, remote: StoredModel, server: BadServer
    ) -> None:
        whole = stored(remote)
        os.truncate(remote.directory / WEIGHTS, AT * CHUNK_BYTES + 1)
        buffer = memory()
        delivery = ChunkReader(disk, no_price).deliver(remote, AT, buffer, always)
        assert bytes(buffer) == whole
        assert (delivery.rung, delivery.num_failures) == (Rung.OBJECT, 1)
        assert server.asked == [f"bytes={AT * CHUNK_BYTES}-{(AT + 1) * CHUNK_BYTES - 1}"]

    def test_wrong_bytes_are_asked_for_again(
        self, tmp_path: Path, remote: StoredModel, server: BadServer
    ) -> None:
        server.plan.extend([bad_server.flips_a_bit, bad_server.well])  # the latter gives the manifest
        server.plan.extend([bad_server.flips_a_bit] * (MAX_WRONG_ANSWERS - 2))
        buffer = memory()
        delivery = ChunkReader(DiskTier(tmp_path / "empty"), no_price).deliver(remote, AT, buffer, always)
        assert bytes(buffer) == stored(remote)
        assert delivery.num_failures == MAX_WRONG_ANSWERS - 1

    def test_wrong_bytes_again_and_again_are_corrupt(
        self, tmp_path: Path, remote: StoredModel, server: BadServer
    ) -> None:
        server.plan.extend([bad_server.flips_a_bit] * 10)
        with pytest.raises(ChunkCorrupt, match=rf"chunk {AT} of `tiny` .*sent bytes that hash to"):
            ChunkReader(DiskTier(tmp_path / "empty"), no_price).deliver(remote, AT, memory(), always)
        assert len([part for part in server.asked if part]) == MAX_WRONG_ANSWERS

    def test_a_server_that_always_fails_is_unreachable(
        self, tmp_path: Path, remote: StoredModel, server: BadServer
    ) -> None:
        server.plan.extend([bad_server.says(500)] * 10)
        with pytest.raises(Unreachable, match=rf"chunk {AT} of `tiny` .*tries: {QUICK.num_tries}"):
            ChunkReader(DiskTier(tmp_path / "empty"), no_price).deliver(remote, AT, memory(), always)


class TestKeeping:
    def test_what_was_kept_is_found_on_disk(self, tmp_path: Path, local: StoredModel) -> None:
        disk = DiskTier(tmp_path / "cache")
        chunk_reader = ChunkReader(disk, no_price)
        chunk_reader.keep(local, AT, memoryview(stored(local)))
        buffer = memory()
        assert chunk_reader.deliver(local, AT, buffer, always).rung is Rung.DISK
        assert bytes(buffer) == stored(local)

    def test_a_full_disk_is_told_once_and_harms_nobody(
        self, tmp_path: Path, local: StoredModel, caplog: pytest.LogCaptureFixture
    ) -> None:
        chunk_reader = ChunkReader(DiskTier(tmp_path / "cache", quota_bytes=0), no_price)
        with caplog.at_level(logging.WARNING):
            chunk_reader.keep(local, AT, memoryview(stored(local)))
            chunk_reader.keep(local, AT + 1, memoryview(stored(local)))
        assert [record.message.partition(" ")[0] for record in caplog.records] == ["chunks_not_kept"]
        assert not list((tmp_path / "cache").rglob("*"))

    def test_a_disk_that_cannot_be_written_is_told_and_harms_nobody(
        self, tmp_path: Path, local: StoredModel, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "chunks").write_text("a file where a directory should be")
        chunk_reader = ChunkReader(DiskTier(tmp_path / "cache"), no_price)
        with caplog.at_level(logging.WARNING):
            chunk_reader.keep(local, AT, memoryview(stored(local)))
        assert "chunks_not_kept model=tiny reason=a chunk of 4096 bytes cannot be written" in caplog.text
