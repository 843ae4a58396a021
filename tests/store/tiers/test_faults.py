"""What breaks in the field, from file or server to the device: a load heals, or says why it cannot."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from bench import bad_server
from bench.bad_server import BadServer, Behaviour
from hearth import LLM, SamplingParams
from hearth.core.errors import ChunkCorrupt, ChunkMissing, Unreachable
from hearth.core.types import Rung
from hearth.store.format.manifest import WEIGHTS
from hearth.store.tiers.model import StoredModel
from hearth.store.tiers.remote import RemoteModel
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.destination import whole
from hearth.store.transfer.record import LoadRecord
from hearth.store.transfer.transfer import Loader
from tests.completions import completions
from tests.store.s3_server import S3Server
from tests.store.stored import (
    CHUNK_BYTES,
    QUICK,
    WEIGHTS_BYTES,
    converted,
    files_of,
    flip,
    serving,
    tiers_at,
    write_model,
)

#: The chunk that breaks.
AT = 5


@dataclass(frozen=True, slots=True)
class Loaded:
    data: bytes
    record: LoadRecord


def load(tiers: Tiers, model: StoredModel) -> Loaded:
    """To the device's memory, which here is a CPU's."""
    base = torch.zeros(model.manifest.num_bytes, dtype=torch.uint8)
    running = Loader(torch.device("cpu")).load(
        model.name, model.manifest, whole(model.manifest, base), lambda chunks: tiers.fetch(model, chunks)
    )
    record = running.wait()
    return Loaded(base.numpy().tobytes(), record)


def bytes_by_rung(record: LoadRecord) -> dict[Rung, int]:
    return {rung: use.num_bytes for rung, use in record.rungs.items()}


def settle(tiers: Tiers) -> None:
    """Until what was fetched is kept; then nobody holds anything."""
    tiers.fetcher.close()
    book = tiers.fetcher.book
    book.check()
    assert (book.num_leased, book.num_filling) == (0, 0)


def chunk_files(tiers: Tiers) -> list[Path]:
    """Temporary ones included."""
    return [path for path in (tiers.disk.root / "chunks").rglob("*") if path.is_file()]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_model(tmp_path / "made" / "tiny")
    return tmp_path / "made" / "tiny"


@pytest.fixture
def data(source: Path) -> bytes:
    return (source / WEIGHTS).read_bytes()


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    with tiers_at(tmp_path / "root") as tiers:
        yield tiers
        settle(tiers)


def open_impatient(tiers: Tiers, server: BadServer, stall_s: float = QUICK.stall_s) -> StoredModel:
    """The server's model, by a client that tries again at once. `stall_s`: how long it may be silent."""
    url = f"{server.url}/tiny"
    return replace(tiers.open(url), remote=RemoteModel(url, replace(QUICK, stall_s=stall_s)))


class TestDisk:
    def test_a_flipped_bit_without_another_copy_names_chunk_and_tensors(
        self, tiers: Tiers, source: Path
    ) -> None:
        model = tiers.open(source)
        flip(source / WEIGHTS, AT * CHUNK_BYTES + 17)
        tensor = model.manifest.tensors_in(AT)[0]
        with pytest.raises(ChunkCorrupt, match=rf"chunk {AT} of `tiny` \(`{tensor}`.*{source / WEIGHTS}`"):
            load(tiers, model)

    def test_a_flipped_bit_is_made_up_for_by_the_server(
        self, tiers: Tiers, server: BadServer, source: Path, data: bytes
    ) -> None:
        tiers.open(source)
        flip(source / WEIGHTS, AT * CHUNK_BYTES + 17)
        loaded = load(tiers, open_impatient(tiers, server))
        assert loaded.data == data
        assert bytes_by_rung(loaded.record) == {
            Rung.DISK: WEIGHTS_BYTES - CHUNK_BYTES,
            Rung.OBJECT: CHUNK_BYTES,
        }
        assert loaded.record.num_failures == tiers.disk.counters.num_condemned == 1

    def test_truncated_weights_say_how_many_bytes_are_there(self, tiers: Tiers, source: Path) -> None:
        model = tiers.open(source)
        os.truncate(source / WEIGHTS, AT * CHUNK_BYTES + 1)
        with pytest.raises(ChunkMissing, match=rf"chunk \d+ of `tiny`.* has {AT * CHUNK_BYTES + 1} bytes"):
            load(tiers, model)

    def test_missing_weights_are_named(self, tiers: Tiers, source: Path) -> None:
        model = tiers.open(source)
        (source / WEIGHTS).unlink()
        with pytest.raises(ChunkMissing, match=r"weights.bin` is gone: No such file"):
            load(tiers, model)

    def test_weights_that_were_never_there_have_no_known_place(self, tiers: Tiers, source: Path) -> None:
        (source / WEIGHTS).unlink()
        with pytest.raises(ChunkMissing, match=r"chunk \d+ of `tiny`.*is known to be good"):
            load(tiers, tiers.open(source))

    def test_a_corrupt_file_of_the_cache_is_fetched_and_written_anew(
        self, tmp_path: Path, tiers: Tiers, server: BadServer, data: bytes
    ) -> None:
        model = open_impatient(tiers, server)
        load(tiers, model)
        settle(tiers)
        broken = next(
            path for path in chunk_files(tiers) if path.name.startswith(model.manifest.chunk_ids[AT])
        )
        whole_chunk = broken.read_bytes()
        flip(broken, 17)
        with tiers_at(tmp_path / "root") as fresh:
            loaded = load(fresh, open_impatient(fresh, server))
            assert loaded.data == data
            assert bytes_by_rung(loaded.record)[Rung.OBJECT] == CHUNK_BYTES
            settle(fresh)
            assert broken.read_bytes() == whole_chunk
            assert (fresh.disk.counters.num_condemned, fresh.disk.counters.num_kept) == (1, 1)


class TestKeeping:
    def test_what_came_from_a_server_loads_again_when_it_is_gone(
        self, tmp_path: Path, source: Path, data: bytes
    ) -> None:
        with tiers_at(tmp_path / "root") as tiers, serving(source) as server:
            first = load(tiers, tiers.open(f"{server.url}/tiny"))
        with tiers_at(tmp_path / "root") as tiers:
            second = load(tiers, tiers.open(f"{server.url}/tiny"))
        assert first.data == second.data == data
        assert bytes_by_rung(first.record) == {Rung.OBJECT: WEIGHTS_BYTES}
        assert bytes_by_rung(second.record) == {Rung.DISK: WEIGHTS_BYTES}

    def test_without_any_room_on_disk_the_load_succeeds_and_leaves_no_file(
        self, tmp_path: Path, server: BadServer, data: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        with tiers_at(tmp_path / "root", disk_bytes=0) as tiers:
            loaded = load(tiers, open_impatient(tiers, server))
            settle(tiers)
            assert loaded.data == data
            assert chunk_files(tiers) == []
            assert tiers.disk.counters.num_kept == 0
        assert caplog.text.count("chunks_not_kept") == 1

    def test_a_quota_smaller_than_the_model_is_never_exceeded(
        self, tmp_path: Path, server: BadServer, data: bytes
    ) -> None:
        quota_bytes = 3 * CHUNK_BYTES
        with tiers_at(tmp_path / "root", disk_bytes=quota_bytes) as tiers:
            loaded = load(tiers, open_impatient(tiers, server))
            settle(tiers)
            assert loaded.data == data
            assert sum(path.stat().st_size for path in chunk_files(tiers)) == quota_bytes
            counters = tiers.disk.counters
            assert counters.kept_bytes - counters.evicted_bytes == tiers.disk.used_bytes == quota_bytes

    def test_a_disk_that_takes_no_file_does_not_stop_the_load(
        self, tmp_path: Path, server: BadServer, data: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        with tiers_at(tmp_path / "root", num_cells=2) as tiers:
            model = open_impatient(tiers, server)
            (tiers.disk.root / "chunks").write_text("a file where a directory should be")
            assert load(tiers, model).data == data
            settle(tiers)
        assert "chunks_not_kept" in caplog.text


class TestServer:
    @pytest.mark.parametrize(
        "behaviour",
        [
            bad_server.says(500),
            bad_server.says(503),
            bad_server.is_silent,
            bad_server.stalls_in_the_body,
            bad_server.cuts_the_body,
            bad_server.promises_too_little,
            bad_server.hangs_up,
            bad_server.flips_a_bit,
        ],
        ids=["500", "503", "silence", "stall", "cut", "short", "hang-up", "wrong-bytes"],
    )
    def test_a_fault_that_passes_is_made_up_for_and_counted(
        self, tiers: Tiers, server: BadServer, data: bytes, behaviour: Behaviour
    ) -> None:
        is_silent = behaviour in (bad_server.is_silent, bad_server.stalls_in_the_body)
        model = open_impatient(tiers, server, stall_s=1.5 if is_silent else QUICK.stall_s)
        server.plan.append(behaviour)
        loaded = load(tiers, model)
        assert loaded.data == data
        assert model.remote is not None
        assert loaded.record.num_failures + model.remote.counters.num_retries == 1

    def test_a_server_that_never_sends_the_right_bytes_is_named_with_chunk_and_tensors(
        self, tiers: Tiers, server: BadServer
    ) -> None:
        model = open_impatient(tiers, server)
        server.plan.extend([bad_server.flips_a_bit] * 1000)
        with pytest.raises(
            ChunkCorrupt, match=rf"chunk \d+ of `tiny-\w+` \(`.*{server.url}/tiny` sent bytes"
        ):
            load(tiers, model)
        settle(tiers)
        assert chunk_files(tiers) == []

    def test_a_server_that_stays_silent_ends_the_load(self, tiers: Tiers, server: BadServer) -> None:
        model = open_impatient(tiers, server, stall_s=0.3)
        server.plan.extend([bad_server.is_silent] * 1000)
        with pytest.raises(Unreachable, match=rf"gave no usable answer, tries: {QUICK.num_tries}"):
            load(tiers, model)

    def test_weights_that_are_shorter_than_their_manifest_are_missing(
        self, tiers: Tiers, server: BadServer, data: bytes
    ) -> None:
        server.files = {**server.files, "/tiny/weights.bin": data[: AT * CHUNK_BYTES + 1]}
        model = open_impatient(tiers, server)
        with pytest.raises(ChunkMissing, match="ends too early"):
            load(tiers, model)

    def test_a_load_that_failed_can_be_tried_again(
        self, tiers: Tiers, server: BadServer, data: bytes
    ) -> None:
        model = open_impatient(tiers, server)
        whole_files, server.files = server.files, {}
        with pytest.raises(ChunkMissing, match="does not exist"):
            load(tiers, model)
        server.files = whole_files
        assert load(tiers, model).data == data


@pytest.mark.e2e
def test_a_model_in_s3_answers_as_its_directory_does(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = converted("llama-gqa")
    bucket = s3.bucket("models")  # as in the other tests: the server has room for few
    for name, content in files_of(directory, "converted").items():
        bucket.put(name, content)
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    answers = []
    with tiers_at(tmp_path / "root") as tiers:
        for where in ("s3://models/converted", directory):
            with LLM(where, store=tiers, skip_tokenizer_init=True) as llm:
                answers.append([answer.token_ids for answer in completions(llm, [[1, 2, 3], [7]], params)])
                record = llm.wait_loaded()
            assert record is not None
    assert answers[0] == answers[1]
    assert tiers.disk.counters.num_kept == len(tiers.open(directory).manifest.chunks)
