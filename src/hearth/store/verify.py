"""The bytes of a stored model against the hashes of its manifest. Repairs nothing."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hearth.errors import ChunkMissing
from hearth.store.manifest import WEIGHTS, Digest, Manifest, TextFile, digest_of, read_manifest
from hearth.store.writer import OnProgress, Progress

#: Reading and hashing release the GIL; more threads than this rarely find more bandwidth.
NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class BadChunk:
    index: int
    reason: str
    tensors: tuple[str, ...]  #: that have bytes in it


@dataclass(frozen=True, slots=True)
class BadFile:
    name: str
    reason: str


def verify(directory: Path, on_progress: OnProgress | None = None) -> list[BadChunk | BadFile]:
    """Hash every chunk and every file. The model is whole if the list is empty.

    Raises BadCheckpoint for a broken manifest, ChunkMissing if there are no weights at all.
    """
    manifest = read_manifest(directory)
    path = directory / WEIGHTS
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ChunkMissing(f"`{path}` cannot be opened: {error.strerror}; convert the model again") from error
    bad: list[BadChunk | BadFile] = []
    done_bytes = 0
    try:
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="verify") as threads:
            indices = range(len(manifest.chunks))
            reasons = threads.map(lambda index: _check_chunk(file, manifest, index), indices)
            for index, reason in zip(indices, reasons, strict=True):
                if reason is not None:
                    bad.append(BadChunk(index, reason, tuple(manifest.tensors_in(index))))
                done_bytes += manifest.chunks[index].num_bytes
                if on_progress is not None:
                    on_progress(Progress(done_bytes, manifest.num_bytes))
        num_extra_bytes = os.fstat(file).st_size - manifest.num_bytes
    finally:
        os.close(file)
    if num_extra_bytes > 0:
        bad.append(BadFile(WEIGHTS, f"{num_extra_bytes} bytes too many"))
    return bad + [
        BadFile(text.name, reason)
        for text in manifest.files
        if (reason := _check_text(directory / text.name, text)) is not None
    ]


def _check_text(path: Path, wanted: TextFile) -> str | None:
    try:
        data = path.read_bytes()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return _difference(data, wanted.digest)


def _check_chunk(file: int, manifest: Manifest, index: int) -> str | None:
    """What is wrong with a chunk."""
    part, wanted = manifest.chunk_range(index), manifest.chunks[index]
    try:
        data = os.pread(file, wanted.num_bytes, part.begin)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if len(data) != wanted.num_bytes:
        return f"the file ends after {len(data)} of its {wanted.num_bytes} bytes"
    return _difference(data, wanted.digest)


def _difference(data: bytes, wanted: Digest) -> str | None:
    found = digest_of(data)
    return None if found == wanted else f"its hash is {found}, the manifest says {wanted}"
