"""Checks the bytes of a stored model against the digests of its manifest. Repairs nothing."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from hearth.store.format.description import read_description
from hearth.store.format.file_stamp import stamp_of
from hearth.store.format.local_hashes import write_hashes
from hearth.store.format.manifest import WEIGHTS, StoredManifest, damage_of, mismatch
from hearth.store.format.writer import OnProgress, Progress

#: Reading and hashing release the GIL: so many threads keep up with the fastest disks.
NUM_THREADS = 8


@dataclass(frozen=True, slots=True)
class BadChunk:
    index: int
    reason: str
    tensors: tuple[str, ...]  #: tensors that have bytes in the chunk


@dataclass(frozen=True, slots=True)
class BadFile:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Checked:
    reason: str | None  #: why the chunk is bad; None: it is good
    xxh3: str = ""


def verify(
    directory: Path,
    on_progress: OnProgress | None = None,
    manifest: StoredManifest | None = None,
    store: Path | None = None,
) -> list[BadChunk | BadFile]:
    """Hash every chunk and every file. The model is whole if the list is empty.

    `manifest` is that of the directory, where it has been read. Raises BadCheckpoint for a broken one.
    `store` is the root of a disk tier, which then need not check these chunks by BLAKE3 again.
    """
    manifest = manifest or read_description(directory)
    texts = [
        BadFile(file.name, reason)
        for file in manifest.files
        if (reason := damage_of(file, directory)) is not None
    ]
    directory = directory.resolve()
    before = stamp_of(directory / WEIGHTS)
    xxh3: list[str] = []
    bad = [*_check_weights(directory / WEIGHTS, manifest, on_progress, xxh3), *texts]
    if store is not None and not bad and before is not None and stamp_of(directory / WEIGHTS) == before:
        write_hashes(store.resolve(), directory, manifest, before, xxh3)
    return bad


def _check_weights(
    path: Path, manifest: StoredManifest, on_progress: OnProgress | None, xxh3: list[str]
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
        results = threads.map(lambda index: _check_chunk(file, manifest, index), indices)
        if on_progress is not None:
            on_progress(Progress(0, manifest.num_bytes))
        for index, checked in zip(indices, results, strict=True):
            xxh3.append(checked.xxh3)
            if checked.reason is not None:
                bad.append(BadChunk(index, checked.reason, tuple(manifest.tensors_in(index))))
            done_bytes += manifest.chunks[index].num_bytes
            if on_progress is not None:
                on_progress(Progress(done_bytes, manifest.num_bytes))
        num_extra_bytes = os.fstat(file).st_size - manifest.num_bytes
    finally:
        threads.shutdown(cancel_futures=True)  # an interrupt does not wait for what is queued
        os.close(file)
    return [*bad, BadFile(WEIGHTS, f"{num_extra_bytes} bytes too many")] if num_extra_bytes > 0 else bad


def _check_chunk(file: int, manifest: StoredManifest, index: int) -> _Checked:
    part, wanted = manifest.chunk_range(index), manifest.chunks[index]
    data, done = bytearray(wanted.num_bytes), 0
    try:
        while done < len(data) and (
            num_bytes := os.preadv(file, [memoryview(data)[done:]], part.begin + done)
        ):
            done += num_bytes
    except OSError as error:
        return _Checked(f"cannot be read: {error.strerror}")
    if done != wanted.num_bytes:
        return _Checked(f"the file ends after {done} of its {wanted.num_bytes} bytes")
    return _Checked(mismatch(data, wanted.digest), xxhash.xxh3_128_hexdigest(data))
