"""A chunk is what its digest says: neither another model's claim nor a forged hash puts other bytes there."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

from hearth.core.errors import ChunkCorrupt, StoreError
from hearth.core.types import Rung
from hearth.store.format.file_stamp import stamp_of
from hearth.store.format.local_hashes import read_hashes
from hearth.store.format.manifest import MANIFEST, WEIGHTS, Chunk, Manifest, chunk_of
from hearth.store.format.verify import verify
from hearth.store.tiers.tiers import Tiers
from tests.store.stored import (
    ARCH,
    CHUNK_BYTES,
    WEIGHTS_BYTES,
    all_chunks,
    consume,
    resident_bytes,
    serving,
    stored_at,
    tiers_at,
    until,
    write_model,
)

#: The first two words of xxh3's secret. A lane whose low half equals the secret's adds nothing but itself, so
#: two such lanes can be changed against each other.
_SECRET = [int.from_bytes(bytes.fromhex(word), "little") for word in ("b8fe6c3923a44bbe", "7c01812cf721ad1c")]


def twin(number: int) -> bytes:
    """A chunk; all of these have one xxh3."""
    data = bytearray(random.Random(7).randbytes(CHUNK_BYTES))
    for stripe, high in enumerate((number, 1_000_000 - number)):
        data[64 * stripe : 64 * stripe + 8] = (_SECRET[stripe] & 0xFFFFFFFF | high << 32).to_bytes(
            8, "little"
        )
    return bytes(data)


def write_with(directory: Path, first: bytes, *, chunk_bytes: int = CHUNK_BYTES) -> Manifest:
    """A model whose weights begin with this chunk."""
    data = first + random.Random(1).randbytes(WEIGHTS_BYTES - len(first))
    parts = [data[at : at + chunk_bytes] for at in range(0, len(data), chunk_bytes)]
    manifest = Manifest.of(ARCH, "float32", "none", tuple(map(chunk_of, parts)), chunk_bytes, {})
    directory.mkdir(parents=True)
    (directory / WEIGHTS).write_bytes(data)
    (directory / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def put(directory: Path, first: bytes) -> None:
    """Other bytes at the beginning of the weights, in place; the time of the last change looks as before."""
    path = directory / WEIGHTS
    before = path.stat()
    with path.open("r+b") as file:
        file.write(first)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def load(tiers: Tiers, where: Path | str) -> bytes:
    model = tiers.open(where)
    return consume(tiers.fetch(model, all_chunks(model)))


def test_the_twins_have_one_xxh3_and_two_digests() -> None:
    assert twin(1) != twin(2)
    assert xxhash.xxh3_128_hexdigest(twin(1)) == xxhash.xxh3_128_hexdigest(twin(2))
    assert chunk_of(twin(1)) != chunk_of(twin(2))


class TestForgedHash:
    def test_a_directory_that_brings_its_own_manifest_is_not_believed(self, tmp_path: Path) -> None:
        write_with(tmp_path / "tiny", twin(1))
        put(tmp_path / "tiny", twin(2))
        with tiers_at(tmp_path / "root") as tiers, pytest.raises(ChunkCorrupt, match="stored was"):
            load(tiers, tmp_path / "tiny")

    def test_a_bucket_that_was_tampered_with_is_not_believed(self, tmp_path: Path) -> None:
        write_with(tmp_path / "tiny", twin(1))
        put(tmp_path / "tiny", twin(2))
        with serving(tmp_path / "tiny") as server, tiers_at(tmp_path / "root") as tiers:
            with pytest.raises(ChunkCorrupt, match="sent bytes that hash to"):
                load(tiers, f"{server.url}/tiny")
            assert not list((tmp_path / "root").glob(f"chunks/*/{chunk_of(twin(1)).id}*"))

    @pytest.mark.parametrize("is_restarted", [False, True])
    def test_a_file_that_changes_after_it_was_checked_is_checked_by_its_digest_again(
        self, tmp_path: Path, is_restarted: bool
    ) -> None:
        manifest = write_with(tmp_path / "tiny", twin(1))
        root = tmp_path / "root"
        with tiers_at(root, num_cells=1) as tiers:
            assert load(tiers, tmp_path / "tiny")[:CHUNK_BYTES] == twin(1)
            stamp = stamp_of(tmp_path / "tiny" / WEIGHTS)
            assert stamp is not None
            assert read_hashes(root, tmp_path / "tiny", manifest, stamp) is not None
            put(tmp_path / "tiny", twin(2))
            if not is_restarted:
                with pytest.raises(ChunkCorrupt, match="stored was"):
                    load(tiers, tmp_path / "tiny")
        if is_restarted:
            with tiers_at(root) as tiers, pytest.raises(ChunkCorrupt, match="stored was"):
                load(tiers, tmp_path / "tiny")

    def test_a_file_that_changes_while_it_is_open_is_checked_by_its_digest_again(
        self, tmp_path: Path
    ) -> None:
        write_with(tmp_path / "tiny", twin(1))
        with tiers_at(tmp_path / "root", num_cells=1) as tiers:
            model = tiers.open(tmp_path / "tiny")
            assert consume(tiers.fetch(model, all_chunks(model)))[:CHUNK_BYTES] == twin(1)
            put(tmp_path / "tiny", twin(2))
            with pytest.raises(ChunkCorrupt, match="stored was"):
                consume(tiers.fetch(model, all_chunks(model)))

    def test_a_hash_that_is_brought_along_is_not_believed(self, tmp_path: Path) -> None:
        """Neither under the name that the store would give it, nor for another file of the same name."""
        write_with(tmp_path / "made" / "tiny", twin(1))
        assert verify(tmp_path / "made" / "tiny", store=tmp_path / "root") == []
        (hashes,) = (tmp_path / "root" / "hashes").iterdir()
        (tmp_path / "made").rename(tmp_path / "moved")
        put(tmp_path / "moved" / "tiny", twin(2))
        (tmp_path / "moved").rename(tmp_path / "made")
        assert hashes.exists()
        with tiers_at(tmp_path / "root") as tiers, pytest.raises(ChunkCorrupt, match="stored was"):
            load(tiers, tmp_path / "made" / "tiny")


class TestLocalHash:
    def test_what_was_verified_is_not_verified_by_its_digest_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data = write_model(tmp_path / "tiny")
        assert verify(tmp_path / "tiny", store=tmp_path / "root") == []
        monkeypatch.setattr(
            "hearth.store.tiers.verified_read.digest_of", lambda _: pytest.fail("BLAKE3 again")
        )
        with tiers_at(tmp_path / "root") as tiers:
            assert load(tiers, tmp_path / "tiny") == data

    def test_decay_is_found_by_the_local_hash(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As on a disk that forgets: the bytes change, and no time of the file does."""
        write_model(tmp_path / "tiny")
        assert verify(tmp_path / "tiny", store=tmp_path / "root") == []
        with tiers_at(tmp_path / "root") as tiers:
            model = tiers.open(tmp_path / "tiny")
            stamp = stamp_of(model.directory / WEIGHTS)
            put(tmp_path / "tiny", bytes(CHUNK_BYTES))
            monkeypatch.setattr("hearth.store.tiers.verified_read.stamp_of", lambda _: stamp)
            with pytest.raises(ChunkCorrupt, match="found before was"):
                consume(tiers.fetch(model, all_chunks(model)))

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"weights": 3}', "null", "[" * 10_000])
    def test_broken_hashes_are_as_none(self, tmp_path: Path, text: str) -> None:
        data = write_model(tmp_path / "tiny")
        assert verify(tmp_path / "tiny", store=tmp_path / "root") == []
        (hashes,) = (tmp_path / "root" / "hashes").iterdir()
        hashes.write_text(text)
        with tiers_at(tmp_path / "root") as tiers:
            assert load(tiers, tmp_path / "tiny") == data

    @pytest.mark.parametrize("mode", [0o664, 0o646])
    def test_a_file_that_others_may_write_is_checked_by_its_digest_each_time(
        self, tmp_path: Path, mode: int
    ) -> None:
        data = write_model(tmp_path / "tiny")
        (tmp_path / "tiny" / WEIGHTS).chmod(mode)
        assert verify(tmp_path / "tiny", store=tmp_path / "root") == []
        with tiers_at(tmp_path / "root") as tiers:
            assert load(tiers, tmp_path / "tiny") == data
            (location,) = tiers.disk.locate(stored_at(tmp_path / "tiny").manifest.chunk_ids[0])
            assert location.known is None
        assert not list(tmp_path.glob("root/hashes/*"))

    def test_a_chunk_that_stands_in_a_file_twice_does_not_keep_its_hashes_from_being_kept(
        self, tmp_path: Path
    ) -> None:
        manifest = write_with(tmp_path / "tiny", twin(1) * 3)
        with tiers_at(tmp_path / "root") as tiers:
            load(tiers, tmp_path / "tiny")
        stamp = stamp_of(tmp_path / "tiny" / WEIGHTS)
        assert stamp is not None
        kept = read_hashes(tmp_path / "root", tmp_path / "tiny", manifest, stamp)
        assert kept is not None
        assert kept.xxh3[:3] == (xxhash.xxh3_128_hexdigest(twin(1)),) * 3

    @pytest.mark.parametrize("folder", ["root", "root/hashes"])
    def test_hashes_in_a_folder_that_others_may_write_are_not_believed(
        self, tmp_path: Path, folder: str
    ) -> None:
        manifest = write_with(tmp_path / "tiny", twin(1))
        assert verify(tmp_path / "tiny", store=tmp_path / "root") == []
        stamp = stamp_of(tmp_path / "tiny" / WEIGHTS)
        assert stamp is not None
        (tmp_path / folder).chmod(0o770)
        assert read_hashes(tmp_path / "root", tmp_path / "tiny", manifest, stamp) is None

    def test_hashes_go_with_their_file(self, tmp_path: Path) -> None:
        write_model(tmp_path / "tiny")
        assert verify(tmp_path / "tiny", store=tmp_path / "root") == []
        (tmp_path / "tiny" / WEIGHTS).unlink()
        with tiers_at(tmp_path / "root"):
            assert list((tmp_path / "root" / "hashes").iterdir()) == []


class TestPlantedChunk:
    """A chunk file is believed by its name only where nobody else could have put it."""

    @pytest.fixture
    def planted(self, tmp_path: Path) -> Path:
        """A store that has cached a remote model, with other bytes of our choice in the place of a chunk."""
        manifest = write_with(tmp_path / "tiny", twin(1))
        with serving(tmp_path / "tiny") as server, tiers_at(tmp_path / "root") as tiers:
            load(tiers, f"{server.url}/tiny")
        (cached,) = tmp_path.glob(f"root/chunks/*/{manifest.chunk_ids[0]}-*")
        assert (cached.stat().st_mode & 0o777, cached.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        other = bytes(CHUNK_BYTES)
        cached.unlink()
        cached = cached.with_name(f"{manifest.chunk_ids[0]}-{xxhash.xxh3_128_hexdigest(other)}")
        cached.write_bytes(other)
        return cached

    def test_in_a_folder_that_others_may_write(self, tmp_path: Path, planted: Path) -> None:
        planted.parent.chmod(0o777)
        self.check(tmp_path)

    def test_in_a_store_that_others_may_write(self, tmp_path: Path, planted: Path) -> None:
        (tmp_path / "root").chmod(0o770)
        self.check(tmp_path)

    def test_in_a_file_that_others_may_write(self, tmp_path: Path, planted: Path) -> None:
        planted.chmod(0o666)
        self.check(tmp_path)

    def test_what_was_kept_in_a_store_that_others_may_write_is_not_believed_either(
        self, tmp_path: Path
    ) -> None:
        """By the process that kept it: somebody may have renamed another of our own files since."""
        write_with(tmp_path / "tiny", twin(1))
        (tmp_path / "root").mkdir()
        (tmp_path / "root").chmod(0o770)
        with serving(tmp_path / "tiny") as server, tiers_at(tmp_path / "root") as tiers:
            model = tiers.open(f"{server.url}/tiny")
            consume(tiers.fetch(model, all_chunks(model)))
            until(lambda: tiers.disk.locate(model.manifest.chunk_ids[0]))
            (location,) = tiers.disk.locate(model.manifest.chunk_ids[0])
            assert location.known is None

    def check(self, tmp_path: Path) -> None:
        with serving(tmp_path / "tiny") as server, tiers_at(tmp_path / "root") as tiers:
            assert load(tiers, f"{server.url}/tiny")[:CHUNK_BYTES] == twin(1)
            assert tiers.disk.counters.num_condemned == 1


def claiming(directory: Path, victim: Manifest, chunk_bytes: int) -> None:
    """A model with bytes of its own, whose manifest names the victim's digests at other lengths."""
    own = write_with(directory, b"", chunk_bytes=chunk_bytes)
    sizes = [chunk.num_bytes for chunk in own.chunks]
    digests = [chunk.digest for chunk in victim.chunks]
    stolen = tuple(Chunk(digests[index % len(digests)], size) for index, size in enumerate(sizes))
    (directory / MANIFEST).write_text(replace(own, chunks=stolen).to_json(), encoding="utf-8")


@pytest.mark.parametrize("chunk_bytes", [3 * CHUNK_BYTES, 5 * CHUNK_BYTES, WEIGHTS_BYTES])
class TestWrongClaim:
    """A manifest that names another model's digests with another size harms nobody but itself."""

    def test_the_victim_stays_where_it_lies(self, tmp_path: Path, chunk_bytes: int) -> None:
        data = write_model(tmp_path / "victim")
        claiming(tmp_path / "hostile", stored_at(tmp_path / "victim").manifest, chunk_bytes)
        with tiers_at(tmp_path / "root") as tiers:
            tiers.open(tmp_path / "victim")
            with pytest.raises(StoreError):
                load(tiers, tmp_path / "hostile")
            assert load(tiers, tmp_path / "victim") == data

    def test_the_victims_chunks_in_host_memory_are_not_handed_over(
        self, tmp_path: Path, chunk_bytes: int
    ) -> None:
        data = write_model(tmp_path / "victim")
        claiming(tmp_path / "hostile", stored_at(tmp_path / "victim").manifest, chunk_bytes)
        with tiers_at(tmp_path / "root") as tiers:
            assert load(tiers, tmp_path / "victim") == data
            hostile = tiers.open(tmp_path / "hostile")
            assert resident_bytes(tiers, hostile)[Rung.HOST] == 0
            with pytest.raises(StoreError):
                consume(tiers.fetch(hostile, all_chunks(hostile)))

    def test_no_page_of_the_victim_is_taken_for_the_claimed_chunk(
        self, tmp_path: Path, chunk_bytes: int
    ) -> None:
        write_model(tmp_path / "victim")
        claiming(tmp_path / "hostile", stored_at(tmp_path / "victim").manifest, chunk_bytes)
        victim, hostile = stored_at(tmp_path / "victim").manifest, stored_at(tmp_path / "hostile").manifest
        assert not set(victim.chunk_ids) & set(hostile.chunk_ids)


def test_a_model_that_claims_the_right_chunk_but_has_other_bytes_harms_itself_alone(tmp_path: Path) -> None:
    """Whoever names a chunk truly gets what the digest says, and the file that lies is left out."""
    data = write_model(tmp_path / "victim")
    write_model(tmp_path / "hostile", seed=5)
    (tmp_path / "hostile" / MANIFEST).write_bytes((tmp_path / "victim" / MANIFEST).read_bytes())
    with tiers_at(tmp_path / "root") as tiers:
        tiers.open(tmp_path / "hostile")
        assert load(tiers, tmp_path / "victim") == data
        assert tiers.disk.counters.num_condemned == 0  # a model's own weights come first
        assert tiers.disk.locate(stored_at(tmp_path / "victim").manifest.chunk_ids[0])


def test_a_chunk_file_of_another_length_is_not_the_chunk(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    root = tmp_path / "root"
    with serving(tmp_path / "tiny") as server:
        with tiers_at(root) as tiers:
            data = load(tiers, f"{server.url}/tiny")
        cut = sorted((root / "chunks").glob("*/*"))[0]
        cut.write_bytes(cut.read_bytes()[:-1])
        with tiers_at(root) as tiers:
            assert load(tiers, f"{server.url}/tiny") == data
            assert tiers.disk.counters.num_condemned == 1
