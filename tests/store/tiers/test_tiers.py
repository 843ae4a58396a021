"""Opening models on disk and behind a URL, and what the tiers tell of themselves."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bench import bad_server
from bench.bad_server import BadServer
from hearth.core.config import CPU_HOST_BYTES, StoreConfig
from hearth.core.errors import BadCheckpoint, ChunkCorrupt, StoreError, Unreachable, UpstreamChanged
from hearth.core.types import Rung
from hearth.store.format.manifest import MANIFEST, WEIGHTS, TextFile, digest_of
from hearth.store.tiers.tiers import Tiers
from hearth.store.tiers.upstream import Upstream, note_version, read_upstream
from hearth.store.transfer.record import LoadRecord, RungTotals
from tests.store.stored import (
    CHUNK_BYTES,
    all_chunks,
    consume,
    files_of,
    resident_bytes,
    serving,
    stored_at,
    tiers_at,
    write_model,
)

TEXT = b'{"a": "tokenizer"}'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model with a file beside its weights."""
    directory = tmp_path / "made" / "tiny"
    write_model(directory)
    (directory / "tokenizer.json").write_bytes(TEXT)
    file = TextFile("tokenizer.json", digest_of(TEXT), len(TEXT))
    manifest = replace(stored_at(directory).manifest, files=(file,))
    (directory / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return directory


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    with tiers_at(tmp_path / "root") as tiers:
        yield tiers


class TestDirectory:
    def test_a_changed_file_of_the_tokenizer_is_refused(self, tiers: Tiers, source: Path) -> None:
        tiers.open(source)
        (source / "tokenizer.json").write_bytes(TEXT.replace(b"a", b"b"))
        with pytest.raises(ChunkCorrupt, match=r"tokenizer.json` .*convert or fetch the model again"):
            tiers.open(source)

    def test_a_model_that_was_replaced_is_read_anew(self, tiers: Tiers, source: Path) -> None:
        before = tiers.open(source)
        assert tiers.open(source) is before
        manifest = replace(before.manifest, files=())
        (source / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        (source / "tokenizer.json").unlink()
        assert tiers.open(source).manifest.files == ()

    def test_chunks_that_no_model_refers_to_are_gone_after_a_start(self, tmp_path: Path) -> None:
        path = tmp_path / "root" / "chunks" / "ab" / f"{'ab' * 32}-{CHUNK_BYTES}-{'cd' * 16}"
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(CHUNK_BYTES))
        with tiers_at(tmp_path / "root"):
            assert not path.exists()

    def test_a_directory_is_opened_and_its_chunks_are_found(self, tiers: Tiers, source: Path) -> None:
        model = tiers.open(source)
        assert (model.name, model.directory, model.remote) == ("tiny", source, None)
        assert consume(tiers.fetch(model, all_chunks(model))) == (source / "weights.bin").read_bytes()

    def test_a_directory_without_a_model_is_refused(self, tiers: Tiers, tmp_path: Path) -> None:
        with pytest.raises(BadCheckpoint, match=r"no manifest\.json"):
            tiers.open(tmp_path)

    def test_a_model_whose_chunks_fit_no_cell_is_refused_when_it_is_opened(
        self, tmp_path: Path, source: Path
    ) -> None:
        refused = pytest.raises(StoreError, match=rf"`tiny` .*{CHUNK_BYTES} bytes.* 2048; convert it again")
        with tiers_at(tmp_path / "root", num_cells=(16 << 20) // 2048) as tiers, refused:
            tiers.open(source)


class TestUrl:
    def test_many_open_the_same_url_at_once(self, tiers: Tiers, server: BadServer) -> None:
        with ThreadPoolExecutor(6) as pool:
            models = list(pool.map(lambda _: tiers.open(f"{server.url}/tiny"), range(6)))
        assert len({model.manifest.digest for model in models}) == 1

    def test_a_damaged_file_of_the_tokenizer_is_fetched_again(self, tiers: Tiers, server: BadServer) -> None:
        model = tiers.open(f"{server.url}/tiny")
        (model.directory / "tokenizer.json").write_bytes(b"damaged")
        tiers.open(f"{server.url}/tiny")
        assert (model.directory / "tokenizer.json").read_bytes() == TEXT

    def test_everything_but_the_weights_is_on_disk_afterwards(
        self, tiers: Tiers, server: BadServer, source: Path
    ) -> None:
        model = tiers.open(f"{server.url}/tiny/")
        assert model.directory.is_relative_to(tiers.disk.root / "models")
        assert sorted(path.name for path in model.directory.iterdir()) == ["manifest.json", "tokenizer.json"]
        assert (model.directory / "tokenizer.json").read_bytes() == TEXT
        assert model.manifest == stored_at(source).manifest

    def test_opening_it_again_asks_for_the_manifest_alone(self, tiers: Tiers, server: BadServer) -> None:
        tiers.open(f"{server.url}/tiny")
        num_asked = len(server.asked)
        tiers.open(f"{server.url}/tiny")
        assert (num_asked, len(server.asked)) == (2, 3)

    def test_a_model_that_has_changed_replaces_what_is_on_disk(
        self, tiers: Tiers, server: BadServer, tmp_path: Path
    ) -> None:
        before = tiers.open(f"{server.url}/tiny")
        write_model(tmp_path / "changed", seed=1)
        server.files = files_of(tmp_path / "changed")
        after = tiers.open(f"{server.url}/tiny")
        assert after.manifest == stored_at(tmp_path / "changed").manifest
        assert [path.name for path in after.directory.iterdir()] == [MANIFEST]
        assert after.directory == before.directory

    def test_models_of_one_name_at_two_places_are_two_models(
        self, tiers: Tiers, server: BadServer, source: Path
    ) -> None:
        server.files = {**server.files, **files_of(source, "/other/tiny")}
        first, second = tiers.open(f"{server.url}/tiny"), tiers.open(f"{server.url}/other/tiny")
        assert first.directory != second.directory

    def test_a_file_that_is_not_what_the_manifest_says_leaves_nothing_behind(
        self, tiers: Tiers, server: BadServer
    ) -> None:
        server.plan.extend([bad_server.well, bad_server.flips_a_bit])
        with pytest.raises(ChunkCorrupt, match=r"tiny/tokenizer.json` hashes to .* upload the model again"):
            tiers.open(f"{server.url}/tiny")
        assert not [path for path in tiers.disk.root.rglob("*") if path.is_file()]

    def test_without_an_answer_the_description_on_disk_serves(
        self, tiers: Tiers, source: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with serving(source) as server:
            known = tiers.open(f"{server.url}/tiny")
        with caplog.at_level(logging.WARNING):
            again = tiers.open(f"{server.url}/tiny")
        assert again.manifest == known.manifest
        assert "fallback description=disk" in caplog.text

    def test_without_an_answer_an_unknown_model_is_unreachable(self, tiers: Tiers) -> None:
        with bad_server.serve({}) as server:
            pass
        with pytest.raises(Unreachable, match="gave no usable answer"):
            tiers.open(f"{server.url}/tiny")


class TestVersion:
    """A version of what lies at a URL, which another one replaces there."""

    @pytest.fixture
    def changed(self, tmp_path: Path) -> Path:
        write_model(tmp_path / "changed", seed=1)
        return tmp_path / "changed"

    def test_a_version_is_served_from_disk_whatever_is_uploaded_later(
        self, tiers: Tiers, server: BadServer, source: Path, changed: Path
    ) -> None:
        where = tiers.resolve(f"{server.url}/tiny")
        model = tiers.open(where)
        assert consume(tiers.fetch(model, all_chunks(model))) == (source / WEIGHTS).read_bytes()
        tiers.fetcher.close()  # waits for what is written on the side
        server.files = files_of(changed)
        newest = tiers.open(f"{server.url}/tiny")
        assert newest.manifest.digest != model.manifest.digest
        server.asked.clear()
        with tiers_at(tiers.disk.root) as later:
            again = later.open(where)
            assert again.manifest == model.manifest
            assert consume(later.fetch(again, all_chunks(again))) == (source / WEIGHTS).read_bytes()
        assert server.asked == []

    def test_opening_a_version_again_asks_nobody(self, tiers: Tiers, server: BadServer) -> None:
        where = tiers.resolve(f"{server.url}/tiny/")
        server.asked.clear()
        assert tiers.open(where) is tiers.open(where)
        assert tiers.resolve(where) == where
        assert server.asked == []

    def test_two_versions_lie_side_by_side_and_one_is_forgotten_alone(
        self, tiers: Tiers, server: BadServer, source: Path, changed: Path
    ) -> None:
        old = tiers.resolve(f"{server.url}/tiny")
        kept = tiers.open(old)
        consume(tiers.fetch(kept, all_chunks(kept)))
        server.files = files_of(changed)
        new = tiers.resolve(f"{server.url}/tiny")
        assert tiers.open(new).manifest == stored_at(changed).manifest
        assert tiers.open(old) is kept
        tiers.fetcher.close()  # waits for what is written on the side
        tiers.forget(new)
        assert resident_bytes(tiers, kept)[Rung.DISK] == kept.manifest.num_bytes
        assert (kept.directory / MANIFEST).exists()

    def test_a_chunk_that_is_gone_with_its_version_says_so_and_costs_nobody_else(
        self, tiers: Tiers, server: BadServer, source: Path, changed: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        where = tiers.resolve(f"{server.url}/tiny")
        model = tiers.open(where)
        consume(tiers.fetch(model, [0]))
        server.files = files_of(changed)
        new = tiers.open(tiers.resolve(f"{server.url}/tiny"))
        version = stored_at(changed).manifest.digest
        for _ in range(2):
            with pytest.raises(UpstreamChanged, match=rf"chunk 1 of .* holds version {version} now, this is"):
                consume(tiers.fetch(model, [1]))
        with pytest.raises(UpstreamChanged, match="deploy the model again, or put the version back"):
            consume(tiers.fetch(model, [1]))
        assert consume(tiers.fetch(model, [0])) == (source / WEIGHTS).read_bytes()[:CHUNK_BYTES]
        assert consume(tiers.fetch(new, all_chunks(new))) == (changed / WEIGHTS).read_bytes()
        noted = read_upstream(model.directory)
        assert noted is not None
        assert noted.change is not None
        assert (noted.version, noted.change.version) == (model.manifest.digest, version)
        assert caplog.text.count("upstream_changed") == 1

    def test_a_shorter_version_is_not_taken_for_a_broken_upload(
        self, tiers: Tiers, server: BadServer, changed: Path
    ) -> None:
        model = tiers.open(tiers.resolve(f"{server.url}/tiny"))
        server.files = {**files_of(changed), "/tiny/weights.bin": b""}
        with pytest.raises(UpstreamChanged, match="deploy the model again"):
            consume(tiers.fetch(model, [1]))

    def test_a_version_that_is_back_has_not_changed(
        self, tiers: Tiers, server: BadServer, source: Path
    ) -> None:
        model = tiers.open(tiers.resolve(f"{server.url}/tiny"))
        note_version(model.directory, "another")
        tiers.resolve(f"{server.url}/tiny")
        assert read_upstream(model.directory) == Upstream(model.manifest.digest)

    def test_a_damaged_description_is_fetched_again_while_the_version_is_there(
        self, tiers: Tiers, server: BadServer
    ) -> None:
        where = tiers.resolve(f"{server.url}/tiny")
        directory = tiers.open(where).directory
        (directory / "tokenizer.json").write_bytes(b"damaged")
        tiers.open(where)
        assert (directory / "tokenizer.json").read_bytes() == TEXT

    def test_a_damaged_description_of_a_version_that_is_gone_is_refused_and_kept(
        self, tiers: Tiers, server: BadServer, changed: Path
    ) -> None:
        where = tiers.resolve(f"{server.url}/tiny")
        directory = tiers.open(where).directory
        (directory / "tokenizer.json").write_bytes(b"damaged")
        server.files = files_of(changed)
        with pytest.raises(UpstreamChanged, match=r"is not whole on disk: .*tokenizer.json.*; deploy"):
            tiers.open(where)
        assert (directory / MANIFEST).exists()


class TestCounts:
    def test_it_says_what_the_tiers_hold_and_did(self, tiers: Tiers, source: Path) -> None:
        model = tiers.open(source)
        for _ in range(2):
            consume(tiers.fetch(model, all_chunks(model)))
        num_chunks, host = len(model.manifest.chunks), tiers.fetcher.counters
        assert tiers.used_host_bytes == num_chunks * tiers.segment.cell_bytes
        assert (host.num_fills, host.num_hits) == (num_chunks, num_chunks)
        assert tiers.disk.counters.num_hits == num_chunks
        assert tiers.disk.used_bytes == 0  # the model is not under the root

    def test_a_load_teaches_how_fast_its_rungs_are(self, tiers: Tiers) -> None:
        use = RungTotals(num_chunks=2, num_bytes=1000, seconds=4.0)
        tiers.loaded(LoadRecord("m", 1000, {Rung.DISK: use}, 4.0, 1.0, 0.0, 1.0, 5.0, 0))
        assert tiers.prices.bytes_per_s(Rung.DISK) == pytest.approx(250.0)


class TestForget:
    def test_a_model_behind_a_url_leaves_nothing_on_disk(
        self, tiers: Tiers, source: Path, server: BadServer, tmp_path: Path
    ) -> None:
        url = f"{server.url}/tiny"
        model = tiers.open(url)
        consume(tiers.fetch(model, all_chunks(model)))
        tiers.fetcher.close()  # waits for what is written on the side
        assert tiers.disk.used_bytes > 0

        assert tiers.forget(url) == model.directory

        assert not model.directory.exists()
        assert tiers.disk.used_bytes == 0
        assert not list((tmp_path / "root" / "chunks").glob("*/*"))

    def test_the_files_of_a_directory_are_their_owner_s(self, tiers: Tiers, source: Path) -> None:
        model = tiers.open(source)
        assert resident_bytes(tiers, model)[Rung.DISK] == model.manifest.num_bytes

        tiers.forget(source)

        assert (source / MANIFEST).exists()
        assert resident_bytes(tiers, model) == {Rung.HOST: 0, Rung.DISK: 0}


def test_tiers_that_keep_nothing_have_few_cells_and_give_them_back(tmp_path: Path) -> None:
    data = write_model(tmp_path / "tiny")
    config = StoreConfig(path=str(tmp_path / "root"), host_bytes=1 << 30)
    with closing(Tiers(config, CHUNK_BYTES, is_pinned=False, keeps_chunks=False)) as tiers:
        model = tiers.open(tmp_path / "tiny")
        for _ in range(2):
            fetch = tiers.fetch(model, all_chunks(model))
            chunks = list(fetch)
            assert b"".join(bytes(chunk.data) for chunk in chunks) == data
            assert all(chunk.delivery is not None for chunk in chunks)  # also the second time
            fetch.release(*chunks)
        assert tiers.segment.num_bytes == CPU_HOST_BYTES
        assert resident_bytes(tiers, model)[Rung.HOST] == 0
        assert os.fstat(tiers.segment.fd).st_blocks == 0
