from __future__ import annotations

import os
from pathlib import Path
from threading import Event, Timer

import pytest

from hearth.core.errors import BadCheckpoint
from hearth.store.format.convert import convert
from hearth.store.format.manifest import MANIFEST, WEIGHTS, Manifest, read_manifest
from hearth.store.format.verify import BadChunk, BadFile, _Checked, verify
from hearth.store.format.writer import Progress
from tests.models.zoo import build

CHUNK_BYTES = 1 << 16


@pytest.fixture
def model(tmp_path: Path) -> Path:
    convert(build("llama-gqa").directory, tmp_path / "m", chunk_bytes=CHUNK_BYTES)
    return tmp_path / "m"


def _flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def _tensors_at(model: Path, chunk: int) -> tuple[str, ...]:
    """By brute force over bytes: whose lie in the chunk."""
    chunk_bytes = set(range(chunk * CHUNK_BYTES, (chunk + 1) * CHUNK_BYTES))
    return tuple(
        spec.name
        for spec in read_manifest(model).tensors
        if chunk_bytes & set(range(spec.offset, spec.offset + spec.nbytes))
    )


def test_a_whole_model_has_no_bad_chunks(model: Path) -> None:
    assert verify(model) == []


def test_progress_counts_from_nothing_to_the_end(model: Path) -> None:
    num_bytes = (model / WEIGHTS).stat().st_size
    seen: list[Progress] = []

    verify(model, seen.append)

    assert seen[:2] == [Progress(0, num_bytes), Progress(CHUNK_BYTES, num_bytes)]
    assert seen[-1] == Progress(num_bytes, num_bytes)


@pytest.mark.parametrize("offset", [0, CHUNK_BYTES - 1, CHUNK_BYTES, 5 * CHUNK_BYTES + 17, -1])
def test_a_flipped_bit_names_its_chunk_and_its_tensors(model: Path, offset: int) -> None:
    num_bytes = (model / WEIGHTS).stat().st_size
    _flip(model / WEIGHTS, offset)

    (bad,) = verify(model)

    assert isinstance(bad, BadChunk)
    assert bad.index == offset % num_bytes // CHUNK_BYTES
    assert bad.tensors == _tensors_at(model, bad.index)
    assert "the manifest says" in bad.reason


def test_a_truncated_file_names_every_chunk_that_is_not_there(model: Path) -> None:
    os.truncate(model / WEIGHTS, 2 * CHUNK_BYTES + 100)

    bad = verify(model)

    num_chunks = -(-516096 // CHUNK_BYTES)
    assert [chunk.index for chunk in bad if isinstance(chunk, BadChunk)] == list(range(2, num_chunks))
    assert isinstance(bad[-1], BadChunk)
    assert bad[0].reason == f"the file ends after 100 of its {CHUNK_BYTES} bytes"
    assert bad[-1].tensors[-1] == "head.weight"


def test_bytes_too_many_are_found(model: Path) -> None:
    with (model / WEIGHTS).open("ab") as file:
        file.write(b"more")

    bad = verify(model)

    assert bad == [BadFile("weights.bin", "4 bytes too many")]


def test_missing_weights_are_named_and_the_other_files_still_looked_at(model: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / "generation_config.json").unlink()

    bad = verify(model)

    reason = "cannot be read: No such file or directory"
    assert bad == [BadFile("weights.bin", reason), BadFile("generation_config.json", reason)]


def test_a_read_that_gives_only_a_part_is_continued(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: pread(file, min(size, 10_000), offset))

    assert verify(model) == []


def test_an_interrupt_does_not_wait_for_what_is_queued(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_chunks, num_threads, is_over = len(read_manifest(model).chunks), 2, Event()
    begun: list[int] = []

    def check(file: int, manifest: Manifest, index: int) -> _Checked:
        begun.append(index)
        if index:
            is_over.wait()
        return _Checked(None)

    def interrupt(progress: Progress) -> None:
        if progress.done_bytes == 0:
            return
        Timer(0.1, is_over.set).start()  # by then nothing is queued any more
        raise KeyboardInterrupt

    monkeypatch.setattr("hearth.store.format.verify._check_chunk", check)
    monkeypatch.setattr("hearth.store.format.verify.NUM_THREADS", num_threads)

    with pytest.raises(KeyboardInterrupt):
        verify(model, interrupt)

    assert len(begun) <= 1 + num_threads < num_chunks


def test_a_manifest_that_was_read_already_is_not_read_again(model: Path) -> None:
    manifest = read_manifest(model)
    (model / MANIFEST).unlink()

    assert verify(model, manifest=manifest) == []


def test_a_file_that_cannot_be_read_is_bad_throughout(model: Path) -> None:
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).mkdir()

    bad = verify(model)

    assert {chunk.reason for chunk in bad if isinstance(chunk, BadChunk)} == {
        "cannot be read: Is a directory"
    }


def test_a_changed_file_is_named(model: Path) -> None:
    _flip(model / "generation_config.json", 0)

    (bad,) = verify(model)

    assert isinstance(bad, BadFile)
    assert bad.name == "generation_config.json"
    assert "the manifest says" in bad.reason


def test_a_missing_file_is_named(model: Path) -> None:
    (model / "generation_config.json").unlink()

    bad = verify(model)

    assert bad == [BadFile("generation_config.json", "cannot be read: No such file or directory")]


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"no manifest\.json .* `hearth convert`, `hearth deploy`"):
        verify(tmp_path)


def test_padding_is_verified_too(model: Path) -> None:
    last = read_manifest(model).tensors[1]
    assert last.offset + last.nbytes < last.end
    _flip(model / WEIGHTS, last.end - 1)

    bad = verify(model)

    assert len(bad) == 1
