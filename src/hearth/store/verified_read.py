"""Reads chunks out of files and hashes them meanwhile. Trusts nothing on disk and writes nothing.

What the page cache holds is copied from there, at 40 GB/s with 16 readers. The rest is read past it
(O_DIRECT): a read through the cache copies every byte once more and pushes out what others need, 2.2 GB/s
against 3.5 on a virtual SSD (docs/log.md). File systems that allow no direct reads get plain ones.
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

import xxhash

from hearth.errors import ChunkCorrupt, ChunkMissing, StoreError
from hearth.types import Digest

#: Bytes of one request to the disk. What the page cache holds comes in one piece: with as many readers as
#: cores, every call that ends has to wait for the interpreter, so few calls beat hashing what a core's cache
#: still holds.
DIRECT_PIECE_BYTES = 4 << 20
#: Direct reads begin and end on a block. One that ends elsewhere has met the end of the file.
_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ReadTimes:
    """How long reading and hashing a chunk took."""

    read_s: float
    verify_s: float


def read_verified(
    path: Path, offset: int, buffer: memoryview, digest: Digest, *, may_be_direct: bool = True
) -> ReadTimes:
    """Fill `buffer`, whose address and length are multiples of 4 KiB, with the chunk at `offset`.

    `may_be_direct`: whether what the page cache lacks is read past it; else the cache has it afterwards.

    Raises:
        ChunkMissing: the file is gone or ends early.
        ChunkCorrupt: these are not the bytes that `digest` names.
        StoreError: it cannot be read now, which says nothing about the bytes.
    """
    try:
        return _read(path, offset, buffer, digest, may_be_direct=may_be_direct)
    except OSError as error:
        if error.errno == errno.EINVAL:  # this file system wants other blocks, or no direct reads after all
            return _read(path, offset, buffer, digest, may_be_direct=False)
        raise


def _read(path: Path, offset: int, buffer: memoryview, digest: Digest, *, may_be_direct: bool) -> ReadTimes:
    hasher = xxhash.xxh3_128()
    verify_s = 0.0
    began_s = time.perf_counter()
    try:
        with _opened(path, offset, len(buffer), may_be_direct) as (fd, piece_bytes):
            done = 0
            while done < len(buffer):
                num_bytes = os.preadv(fd, [buffer[done : done + piece_bytes]], offset + done)
                if num_bytes == 0 or (num_bytes % _BLOCK_BYTES and piece_bytes == DIRECT_PIECE_BYTES):
                    raise ChunkMissing(
                        f"`{path}` has {os.fstat(fd).st_size} bytes, wanted: up to byte "
                        f"{offset + len(buffer)}; it is truncated, so fetch or convert the model again"
                    )
                read_at_s = time.perf_counter()
                hasher.update(buffer[done : done + num_bytes])
                verify_s += time.perf_counter() - read_at_s
                done += num_bytes
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ChunkMissing(f"`{path}` is gone: {error.strerror}") from error
    except OSError as error:
        if error.errno == errno.EINVAL and may_be_direct:
            raise
        raise StoreError(f"`{path}` cannot be read at byte {offset}: {error.strerror}") from error
    if hasher.hexdigest() != digest:
        raise ChunkCorrupt(
            f"`{path}`: bytes {offset} to {offset + len(buffer)} hash to {hasher.hexdigest()}, "
            f"stored was {digest}"
        )
    return ReadTimes(time.perf_counter() - began_s - verify_s, verify_s)


@contextmanager
def _opened(path: Path, offset: int, num_bytes: int, may_be_direct: bool) -> Iterator[tuple[int, int]]:
    """Yield a descriptor for the faster way to read this part, and how many bytes to read at a time."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        piece_bytes = num_bytes
        if may_be_direct and not is_cached(fd, offset, num_bytes):
            direct = _open_direct(path)
            if direct is not None:
                os.close(fd)
                fd, piece_bytes = direct, DIRECT_PIECE_BYTES
        yield fd, piece_bytes
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
