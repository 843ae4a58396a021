"""Reads chunks out of files and checks them. Trusts no file and writes nothing.

    the chunk's xxh3 is known here    compared while it is read, 7 GB/s on a core: it finds decay
    else                              BLAKE3 of what was read, 4.5 GB/s on a core: it finds forgery too, and
                                      the xxh3 found meanwhile serves the next time

An xxh3 is known only if this machine computed it of bytes whose BLAKE3 digest was right, and holds while
their file is the same and others may not write it (`local_hashes.py`): xxh3 can be forged.

What the page cache holds is copied from there, at 40 GB/s with 16 readers. The rest is read past it
(O_DIRECT): a read through the cache copies every byte once more and pushes out what others need, 2.2 GB/s
against 3.5 on a virtual SSD (docs/log). File systems that allow no direct reads get plain ones.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hearth.core.errors import ChunkCorrupt, ChunkMissing, StoreError
from hearth.core.types import Digest
from hearth.store.format.file_stamp import FileStamp, stamp_of
from hearth.store.format.manifest import digest_of
from hearth.store.tiers.read_hashed import CACHED_PIECE_BYTES, HashedRead, read_hashed

DIRECT_PIECE_BYTES = 4 << 20
#: Direct reads begin and end on a block. One that ends elsewhere has met the end of the file.
_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LocalHash:
    """The xxh3 that this machine found of a chunk whose digest was right."""

    xxh3: str
    #: Of its file then: in another state of the file it means nothing. None: the file is the store's own.
    stamp: FileStamp | None


@dataclass(frozen=True, slots=True)
class VerifiedRead:
    read_s: float
    verify_s: float
    known: LocalHash | None  #: None: the file has changed while it was read, or others may write it


def read_verified(
    path: Path,
    offset: int,
    buffer: memoryview,
    digest: Digest,
    known: LocalHash | None = None,
    *,
    may_be_direct: bool = True,
) -> VerifiedRead:
    """Fill `buffer`, whose address and length are multiples of 4 KiB, with the chunk at `offset`.

    `may_be_direct`: whether what the page cache lacks is read past it; else the cache has it afterwards.
    Raises ChunkMissing, ChunkCorrupt, and StoreError if it cannot be read now.
    """
    began_s = time.perf_counter()
    read, before, after = _read(path, offset, buffer, may_be_direct)
    read_at_s = time.perf_counter()
    if known is not None and _is_sure(known, before, after):
        if read.xxh3 != known.xxh3:
            raise _corrupt(path, offset, buffer, f"xxh3 {read.xxh3}, found before was {known.xxh3}")
    else:
        if (found := digest_of(buffer)) != digest:
            raise _corrupt(path, offset, buffer, f"{found}, stored was {digest}")
        found_now = LocalHash(read.xxh3, before)
        known = found_now if _is_sure(found_now, before, after) else None
    checked_s = time.perf_counter() - read_at_s
    return VerifiedRead(read_at_s - began_s - read.hash_s, read.hash_s + checked_s, known)


def _is_sure(known: LocalHash, before: FileStamp | None, after: FileStamp | None) -> bool:
    is_same = before is not None and before == after and before.is_ours
    return is_same and known.stamp in (None, before)


def _corrupt(path: Path, offset: int, buffer: memoryview, found: str) -> ChunkCorrupt:
    return ChunkCorrupt(f"`{path}`: bytes {offset} to {offset + len(buffer)} hash to {found}")


def _read(
    path: Path, offset: int, buffer: memoryview, may_be_direct: bool
) -> tuple[HashedRead, FileStamp | None, FileStamp | None]:
    try:
        try:
            return _read_file(path, offset, buffer, may_be_direct=may_be_direct)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # This file system wants other blocks, or no direct reads after all.
            return _read_file(path, offset, buffer, may_be_direct=False)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ChunkMissing(f"`{path}` is gone: {error.strerror}") from error
    except OSError as error:
        raise StoreError(f"`{path}` cannot be read at byte {offset}: {error.strerror}") from error


def _read_file(
    path: Path, offset: int, buffer: memoryview, *, may_be_direct: bool
) -> tuple[HashedRead, FileStamp | None, FileStamp | None]:
    with _opened(path, offset, len(buffer), may_be_direct) as (fd, is_direct):
        piece_bytes, block_bytes = (
            (DIRECT_PIECE_BYTES, _BLOCK_BYTES) if is_direct else (CACHED_PIECE_BYTES, 1)
        )
        before = stamp_of(fd)
        read = read_hashed(fd, offset, buffer, piece_bytes, block_bytes)
        after = stamp_of(fd)
        if read.num_bytes < len(buffer):
            raise ChunkMissing(
                f"`{path}` has {os.fstat(fd).st_size} bytes, wanted: up to byte "
                f"{offset + len(buffer)}; it is truncated, so fetch or convert the model again"
            )
    return read, before, after


@contextmanager
def _opened(path: Path, offset: int, num_bytes: int, may_be_direct: bool) -> Iterator[tuple[int, bool]]:
    """Yield a descriptor for the faster way to read this part, and whether that is past the page cache."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    is_direct = False
    try:
        if may_be_direct and not is_cached(fd, offset, num_bytes):
            direct = _open_direct(path)
            if direct is not None:
                os.close(fd)
                fd, is_direct = direct, True
        yield fd, is_direct
    finally:
        os.close(fd)


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:  # not on this file system
            return None
        raise


def is_cached(fd: int, offset: int, num_bytes: int) -> bool:
    """Return True if the page cache holds all of a part; False where the kernel cannot or will not say.

    Asking by a read that must not wait (RWF_NOWAIT) would start reading ahead.
    """
    wanted = (ctypes.c_uint64 * 2)(offset, num_bytes)
    found = (ctypes.c_uint64 * 5)()  # the first counts the pages that are cached
    if _LIBC.syscall(_CACHESTAT, fd, wanted, found, 0) != 0:
        return False
    return found[0] * os.sysconf("SC_PAGE_SIZE") >= num_bytes


_LIBC = ctypes.CDLL(None, use_errno=True)
_CACHESTAT = 451  # Linux 6.5, the same number on every architecture
