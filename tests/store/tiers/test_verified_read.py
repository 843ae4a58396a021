"""Chunks out of real files, whatever of them the page cache holds."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hearth.core.errors import ChunkCorrupt, ChunkMissing, StoreError
from hearth.store.format.manifest import digest_of
from hearth.store.tiers import read_hashed
from hearth.store.tiers.verified_read import DIRECT_PIECE_BYTES, VerifiedRead, read_verified
from tests.store.stored import flip

CHUNK_BYTES = DIRECT_PIECE_BYTES + (64 << 10)  # more than one request to the disk, and a rest
DATA = random.Random(7).randbytes(3 * CHUNK_BYTES)
LIBC = ctypes.CDLL(None)
SECOND = DATA[CHUNK_BYTES : 2 * CHUNK_BYTES]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    with path.open("wb") as file:
        file.write(DATA)
        os.fsync(file.fileno())  # what is not on the disk cannot leave the cache
    return path


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A file on a file system without a disk, where this machine has one."""
    root = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=root if root.is_dir() else None) as directory:
        (Path(directory) / "weights.bin").write_bytes(DATA)
        yield Path(directory) / "weights.bin"


def leave_cache(path: Path, offset: int = 0, num_bytes: int = 0) -> None:
    """`num_bytes` 0: to the end."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), offset, num_bytes, os.POSIX_FADV_DONTNEED)


def num_cached_pages(path: Path) -> int:
    """Pages of the second chunk that the page cache holds. Asking has none of them read."""
    first, last = CHUNK_BYTES // mmap.PAGESIZE, -(-2 * CHUNK_BYTES // mmap.PAGESIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        there = (ctypes.c_char * (last - first))()
        begin = ctypes.c_char.from_buffer(mapped, first * mmap.PAGESIZE)
        try:
            num_bytes = ctypes.c_size_t(len(there) * mmap.PAGESIZE)
            assert LIBC.mincore(ctypes.byref(begin), num_bytes, there) == 0
        finally:
            del begin  # which keeps the mapping open
    return sum(page[0] & 1 for page in there)


def pages_that_stay(path: Path) -> int:
    """Have a file leave the cache; return what of its second chunk stays: all where files are in memory.

    Pages that another core has just added, and not told of yet, stay for a moment.
    """
    for _ in range(100):
        leave_cache(path)
        if not (num_pages := num_cached_pages(path)):
            break
        time.sleep(0.01)
    return num_pages


def read(path: Path, offset: int, data: bytes, *, may_be_direct: bool = True) -> tuple[bytes, VerifiedRead]:
    """What lies where `data` should."""
    memory = mmap.mmap(-1, len(data))
    times = read_verified(path, offset, memoryview(memory), digest_of(data), may_be_direct=may_be_direct)
    return memory[:], times


@pytest.fixture(params=["native", "interpreted"], autouse=True)
def _reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test runs with both readers: a machine without a C compiler has only the second."""
    if request.param == "interpreted":
        monkeypatch.setattr(read_hashed, "_native", lambda: None)
    else:
        assert read_hashed.is_native(), "these tests need a C compiler"


def test_a_cached_chunk_is_read(path: Path) -> None:
    assert path.read_bytes() == DATA  # all of it is in the cache now
    assert read(path, CHUNK_BYTES, SECOND)[0] == SECOND


def test_a_chunk_outside_the_cache_is_read_past_it(path: Path) -> None:
    num_before = pages_that_stay(path)
    assert read(path, CHUNK_BYTES, SECOND)[0] == SECOND
    assert num_cached_pages(path) <= num_before


def test_a_chunk_that_must_not_be_read_past_the_cache_is_in_it_afterwards(path: Path) -> None:
    def is_cached_after_a_read() -> bool:
        leave_cache(path)
        assert read(path, CHUNK_BYTES, SECOND, may_be_direct=False)[0] == SECOND
        return num_cached_pages(path) * mmap.PAGESIZE >= CHUNK_BYTES

    assert any(is_cached_after_a_read() for _ in range(10))  # a system may take cached pages back at any time


@pytest.mark.parametrize("at", [0, 4096, 64 << 10, DIRECT_PIECE_BYTES])
def test_a_chunk_that_is_partly_in_the_cache_is_read(path: Path, at: int) -> None:
    assert path.read_bytes() == DATA
    leave_cache(path, CHUNK_BYTES + at, 64 << 10)
    assert read(path, CHUNK_BYTES, SECOND)[0] == SECOND


def test_a_file_system_in_memory_is_read(in_memory: Path) -> None:
    assert read(in_memory, CHUNK_BYTES, SECOND)[0] == SECOND


def test_times_are_told_apart(path: Path) -> None:
    _, times = read(path, 0, DATA)
    assert times.read_s > 0
    assert times.verify_s > 0


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChunkMissing, match=r"gone` is gone: No such file"):
        read(tmp_path / "gone", 4096, SECOND)


def test_a_directory_is_no_chunk(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="Is a directory"):
        read(tmp_path, 0, SECOND)


def test_a_passing_error_says_nothing_about_the_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(StoreError, match="Too many open files") as caught:
        read(path, CHUNK_BYTES, SECOND)
    assert type(caught.value) is StoreError


def test_a_file_system_that_refuses_direct_reads_late_is_read_plainly(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_cache(path, 0, 3 * CHUNK_BYTES)
    plain = os.preadv

    def refuse(fd: int, *rest: object) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain(fd, *rest)  # type: ignore[arg-type] # whatever it was given

    monkeypatch.setattr(os, "preadv", refuse)
    assert read(path, CHUNK_BYTES, SECOND)[0] == SECOND


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES, 2 * CHUNK_BYTES - 1])
def test_a_file_that_ends_early_says_how_much_it_has(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)
    with pytest.raises(ChunkMissing, match=rf"has {num_bytes} bytes, wanted: up to byte {2 * CHUNK_BYTES}"):
        read(path, CHUNK_BYTES, SECOND)


@pytest.mark.parametrize("is_in_cache", [True, False])
@pytest.mark.parametrize("at", [0, CHUNK_BYTES // 2, CHUNK_BYTES - 1])
def test_one_wrong_bit_is_found_anywhere(path: Path, at: int, is_in_cache: bool) -> None:
    flip(path, CHUNK_BYTES + at)
    if not is_in_cache:
        os.sync()
        leave_cache(path)
    with pytest.raises(ChunkCorrupt, match=rf"bytes {CHUNK_BYTES} to .* stored was {digest_of(SECOND)}"):
        read(path, CHUNK_BYTES, SECOND)


def test_no_file_stays_open(path: Path) -> None:
    leave_cache(path)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ChunkCorrupt):
        read(path, 0, SECOND)
    read(path, CHUNK_BYTES, SECOND)
    assert len(os.listdir("/proc/self/fd")) <= num_open
