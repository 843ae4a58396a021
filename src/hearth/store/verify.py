"""Checks the bytes of a stored model against the hashes of its manifest. Repairs nothing."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hearth.store.manifest import WEIGHTS, Manifest, damage_of, mismatch, read_manifest
from hearth.store.writer import OnProgress, Progress

#: Reading and hashing release the GIL; more threads than this rarely find more bandwidth.
NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class BadChunk:
    """A chunk that is not what the manifest says."""

    index: int
    reason: str
    tensors: tuple[str, ...]  #: tensors that have bytes in the chunk


@dataclass(frozen=True, slots=True)
class BadFile:
    """A file that is not what the manifest says."""

    name: str
    reason: str


def verify(
    directory: Path, on_progress: OnProgress | None = None, manifest: Manifest | None = None
) -> list[BadChunk | BadFile]:
    """Hash every chunk and every file. The model is whole if the list is empty.

    `manifest` is that of the directory, where it has been read. Raises BadCheckpoint for a broken one.
    """
    manifest = manifest or read_manifest(directory)
    texts = [
        BadFile(file.name, reason)
        for file in manifest.files
        if (reason := damage_of(file, directory)) is not None
    ]
    return [*_check_weights(directory / WEIGHTS, manifest, on_progress), *texts]


def _check_weights(
    path: Path, manifest: Manifest, on_progress: OnProgress | None
) -> list[BadChunk | BadFile]:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        return [BadFile(WEIGHTS, f"cannot be read: {error.strerror}")]
    bad: list[BadChunk | BadFile] = []
    done_bytes = 0
    threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="verify")
    try:
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
        threads.shutdown(cancel_futures=True)  # an interrupt does not wait for what is queued
        os.close(file)
    return [*bad, BadFile(WEIGHTS, f"{num_extra_bytes} bytes too many")] if num_extra_bytes > 0 else bad


def _check_chunk(file: int, manifest: Manifest, index: int) -> str | None:
    """Return what is wrong with a chunk; None if nothing is."""
    part, wanted = manifest.chunk_range(index), manifest.chunks[index]
    data = bytearray()
    try:
        while read := os.pread(file, wanted.num_bytes - len(data), part.begin + len(data)):
            data += read
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if len(data) != wanted.num_bytes:
        return f"the file ends after {len(data)} of its {wanted.num_bytes} bytes"
    return mismatch(data, wanted.digest)
