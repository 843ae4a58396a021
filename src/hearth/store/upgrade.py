"""Makes a description of format 2 for a model of format 1, whose chunks were named by xxh3-128 alone.

All bytes are read again: only they can say what their BLAKE3 digest is. What was found is written down chunk
by chunk, so that an interrupted upgrade goes on where it stopped. Replaces no file: that is the caller's.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any, Protocol

import xxhash

from hearth.errors import BadCheckpoint, ChunkCorrupt, ChunkMissing, StoreError
from hearth.model_files import MAX_JSON_BYTES, parse_json, read_bytes, read_text
from hearth.store.file_stamp import stamp_of
from hearth.store.manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    WEIGHTS,
    Manifest,
    chunk_of,
    digest_of,
    is_digest,
    parse_manifest,
    with_digest,
)
from hearth.store.verify import NUM_THREADS
from hearth.store.writer import OnProgress, Progress

OLD_VERSION = 1


class ReadChunk(Protocol):
    """Reads the bytes of a chunk of the old model, by its index, its place and its old name."""

    def __call__(self, index: int, offset: int, num_bytes: int, xxh3: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class OldModel:
    """A model of format 1."""

    directory: Path
    fields: Mapping[str, Any]  #: of its manifest, which is JSON
    digest: str  #: of its manifest, as that format made it

    @property
    def xxh3(self) -> tuple[str, ...]:
        return tuple(chunk["digest"] for chunk in self.fields["chunks"])


def read_old(directory: Path) -> OldModel | None:
    """Return the model in a directory if it is of format 1. Raises BadCheckpoint if it is damaged."""
    path = directory / MANIFEST
    try:
        raw = parse_json(read_text(path, MAX_JSON_BYTES, BadCheckpoint), str(path), BadCheckpoint)
    except FileNotFoundError as error:
        raise BadCheckpoint(f"no {MANIFEST} in `{directory}`; convert the model again") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or raw.get("version") != OLD_VERSION:
        return None
    stated = raw.pop("digest", None)
    canonical = json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()
    if stated != xxhash.xxh3_128_hexdigest(canonical):
        raise BadCheckpoint(f"`{path}` is damaged or was changed by hand; convert the model again")
    old = OldModel(directory, raw, stated)
    try:
        is_sound = all(re.fullmatch("[0-9a-f]{32}", xxh3) for xxh3 in old.xxh3)
    except (KeyError, TypeError):
        is_sound = False
    if not is_sound:
        raise BadCheckpoint(f"`{path}` names chunks otherwise than format {OLD_VERSION}; convert it again")
    return old


def upgraded(
    old: OldModel, notes: Path, read_chunk: ReadChunk | None = None, on_progress: OnProgress | None = None
) -> Manifest:
    """Return the description of format 2.

    `notes` is the file for what was found so far. `read_chunk` is how chunks are had that are not in a
    weights.bin beside the manifest.

    Raises:
        ChunkCorrupt: bytes are not those that were stored.
        ChunkMissing: bytes are not there.
        BadCheckpoint: the manifest contradicts itself.
        StoreError: a disk does not read or write.
    """
    try:
        sizes = [int(chunk["num_bytes"]) for chunk in old.fields["chunks"]]
        files = [_new_file(old.directory, file) for file in old.fields["files"]]
        digests = list(_digests(old, sizes, notes, read_chunk, on_progress))
    except (KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(
            f"`{old.directory / MANIFEST}` is not a manifest of format {OLD_VERSION}: {error!r}"
        ) from error
    except OSError as error:
        raise StoreError(f"`{notes}` cannot be written: {error}; check its disk") from error
    chunks = [{"digest": digest, "num_bytes": size} for digest, size in zip(digests, sizes, strict=True)]
    fields = {**old.fields, "version": VERSION, "chunks": chunks, "files": files}
    return parse_manifest(json.dumps(with_digest(fields)), str(old.directory / MANIFEST))


def _digests(
    old: OldModel, sizes: list[int], notes: Path, read_chunk: ReadChunk | None, on_progress: OnProgress | None
) -> Iterator[str]:
    """Yield the digest of every chunk, those that are noted first."""
    known = _noted(old, notes)
    done_bytes, total_bytes = sum(sizes[: len(known)]), sum(sizes)
    if on_progress is not None:
        on_progress(Progress(done_bytes, total_bytes))
    yield from known
    with ExitStack() as stack:
        read = read_chunk or stack.enter_context(_Weights(old.directory / WEIGHTS))
        notes.parent.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(notes.open("a", encoding="utf-8"))
        if not known:
            file.truncate(0)
            file.write(f"{_header(old)}\n")
        threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="upgrade")
        stack.callback(threads.shutdown, cancel_futures=True)
        begins = list(accumulate(sizes, initial=0))
        check = _checked(old, read)
        rest = range(len(known), len(sizes))
        digests = threads.map(lambda index: check(index, begins[index], sizes[index]), rest)
        for index, digest in zip(rest, digests, strict=True):
            file.write(f"{digest}\n")
            file.flush()
            done_bytes += sizes[index]
            if on_progress is not None:
                on_progress(Progress(done_bytes, total_bytes))
            yield digest


def _checked(old: OldModel, read: ReadChunk) -> Callable[[int, int, int], str]:
    xxh3 = old.xxh3

    def check(index: int, offset: int, num_bytes: int) -> str:
        wanted = xxh3[index]
        data = read(index, offset, num_bytes, wanted)
        if len(data) != num_bytes:
            raise ChunkMissing(
                f"chunk {index} of `{old.directory}` has {len(data)} bytes, stored: {num_bytes}"
            )
        if (found := xxhash.xxh3_128_hexdigest(data)) != wanted:
            raise ChunkCorrupt(f"chunk {index} of `{old.directory}` hashes to {found}, stored was {wanted}")
        return chunk_of(data).digest

    return check


class _Weights:
    """The chunks in a weights.bin. Threads may read at the same time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> ReadChunk:
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ChunkMissing(f"`{self._path}` cannot be read: {error.strerror}") from error
        return self._read

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def _read(self, index: int, offset: int, num_bytes: int, xxh3: str) -> bytes:
        data = bytearray()
        try:
            while piece := os.pread(self._file, num_bytes - len(data), offset + len(data)):
                data += piece
        except OSError as error:
            raise StoreError(f"`{self._path}` cannot be read at byte {offset}: {error.strerror}") from error
        return bytes(data)


def _header(old: OldModel) -> str:
    """Return what notes begin with: they are about one model, and one state of its file."""
    return json.dumps([old.digest, str(stamp_of(old.directory / WEIGHTS))])


def _noted(old: OldModel, notes: Path) -> list[str]:
    """Return the digests that an upgrade before has found, up to where it was cut short."""
    text = ""
    with suppress(OSError, UnicodeDecodeError):
        text = notes.read_text(encoding="utf-8")
    header, *lines = text.split("\n")
    if header != _header(old) or len(lines) - 1 > len(old.xxh3):
        return []
    whole = list(takewhile(is_digest, lines[:-1]))  # the last was not ended, or is empty
    if len(whole) < len(lines) - 1 or lines[-1]:  # they go, or the next digest would be written behind them
        notes.write_text("\n".join([header, *whole, ""]), encoding="utf-8")
    return whole


def _new_file(directory: Path, file: Mapping[str, Any]) -> dict[str, Any]:
    path = directory / str(file["name"])
    if path.parent != directory:
        raise ValueError(f"`files` names {file['name']!r:.80}")
    try:
        content = read_bytes(path, int(file["num_bytes"]), BadCheckpoint)
    except FileNotFoundError as error:
        raise ChunkMissing(f"`{path}` cannot be read: {error.strerror}") from error
    if xxhash.xxh3_128_hexdigest(content) != file["digest"]:
        raise ChunkCorrupt(f"`{path}` is not the file that was stored; convert the model again")
    return {"name": file["name"], "digest": digest_of(content), "num_bytes": len(content)}
