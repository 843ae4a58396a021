"""Writes a model's directory so that it is whole or not there at all. Reads no checkpoint.

.NAME.converting   everything is written here, manifest.json last; a lock tells the living from the dead
NAME               the same directory, renamed when all of it is on the disk
.NAME.replaced     the model that stood there before, where the system cannot exchange two directories at once
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from hearth.core.errors import StoreError, StoreFull
from hearth.models.layout import ALIGNMENT_BYTES
from hearth.store.format.manifest import MANIFEST, TEXT_FILES, WEIGHTS, Chunk, chunk_of
from hearth.store.tiers.upstream import UPSTREAM

if TYPE_CHECKING:  # torch is for those who convert, not for all who write a model
    from hearth.models.pack import PackedTensor

LOCK = ".lock"

#: How the system says that there is no room: the disk, the user's quota, the limit of a file's size.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

#: All that a model's directory may hold. One that holds more is never replaced.
KNOWN_FILES = TEXT_FILES | {MANIFEST, WEIGHTS, LOCK, UPSTREAM}

#: Found in every description that Hearth has written, whatever its version and however damaged.
_FORMAT_FIELD = re.compile(rb'"format"\s*:\s*"hearth-(model|adapter)"')

#: Flags of Linux' renameat2: relative to the working directory; swap the two.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


@dataclass(frozen=True, slots=True)
class Progress:
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    """The chunks that were written, and the xxh3 of each for this machine's own use (`local_hashes.py`)."""

    chunks: tuple[Chunk, ...]
    xxh3: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Staging:
    directory: Path
    num_bytes: int  #: bytes of all files that will be in it

    def write_weights(
        self,
        tensors: Iterable[PackedTensor],
        num_bytes: int,
        chunk_bytes: int,
        on_progress: OnProgress | None = None,
    ) -> WrittenWeights:
        return self.write_pieces(_padded(tensors), num_bytes, chunk_bytes, on_progress)

    def write_pieces(
        self,
        pieces: Iterable[memoryview],
        num_bytes: int,
        chunk_bytes: int,
        on_progress: OnProgress | None = None,
    ) -> WrittenWeights:
        assert chunk_bytes >= ALIGNMENT_BYTES, f"{chunk_bytes=}"
        assert chunk_bytes % ALIGNMENT_BYTES == 0, f"{chunk_bytes=}"
        chunks: list[Chunk] = []
        xxh3: list[str] = []
        done_bytes = 0
        if on_progress is not None:
            on_progress(Progress(0, num_bytes))
        with self._create(WEIGHTS) as file:
            for data in _cut(pieces, chunk_bytes):
                self._write(file, data)
                chunks.append(chunk_of(data, on_all_cores=True))
                xxh3.append(xxhash.xxh3_128_hexdigest(data))
                done_bytes += len(data)
                if on_progress is not None:
                    on_progress(Progress(done_bytes, num_bytes))
        assert done_bytes == num_bytes, f"{done_bytes=} {num_bytes=}"
        return WrittenWeights(tuple(chunks), tuple(xxh3))

    def write_file(self, name: str, content: bytes) -> None:
        with self._create(name) as file:
            self._write(file, memoryview(content))

    def check_room(self) -> None:
        if shutil.disk_usage(self.directory).free < self.num_bytes:
            raise self._full("its file system is too full")

    @contextmanager
    def _create(self, name: str) -> Iterator[int]:
        """Yield a file descriptor; what was written to it is on the disk afterwards."""
        with self._translated():
            file = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            yield file
            with self._translated():
                os.fsync(file)
        finally:
            os.close(file)

    def _write(self, file: int, data: memoryview) -> None:
        with self._translated():
            while data:
                data = data[os.write(file, data) :]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                raise self._full(os.strerror(error.errno)) from error
            raise StoreError(f"cannot write in `{self.directory}`: {error}; check the device") from error

    def _full(self, reason: str) -> StoreFull:
        written_bytes = sum(path.stat().st_size for path in self.directory.iterdir())
        free_bytes = shutil.disk_usage(self.directory).free + written_bytes
        return StoreFull(
            f"no room for a model in `{self.directory.parent}`, {reason}; needed: {self.num_bytes} bytes, "
            f"free: {free_bytes} bytes; make room or choose another destination"
        )


@contextmanager
def staged(dest: Path, num_bytes: int, *, overwrite: bool = False, wait: bool = False) -> Iterator[Staging]:
    """Yield a directory to write a model in, which becomes `dest` at the end or is gone.

    Raises StoreError where `dest` is taken, or another writes it and `wait` is False; StoreFull where
    `num_bytes` do not fit.
    """
    dest = dest.resolve()
    if not dest.name:
        raise StoreError(f"a model cannot be `{dest}` itself; name a directory in it")
    staging = Staging(dest.with_name(f".{dest.name}.converting"), num_bytes)
    with ExitStack() as locks, ExitStack() as undo:
        locks.enter_context(_locked(staging.directory, wait=wait))
        undo.callback(_remove, staging.directory)
        with _translated(f"cannot clear what an interrupted conversion has left beside `{dest}`"):
            _clear(staging.directory)
            _recover(dest)
        _refuse_taken(dest, overwrite)
        staging.check_room()
        yield staging
        _refuse_taken(dest, overwrite)  # again: much may have happened since
        if (dest / MANIFEST).is_file():
            # The old model may take the place of the staging directory, which is ours alone.
            locks.enter_context(_locked(dest, wait=True))
        with _translated(f"cannot put the model to `{dest}`"):
            _publish(staging.directory, dest)
        undo.pop_all()


def _padded(tensors: Iterable[PackedTensor]) -> Iterator[memoryview]:
    for packed in tensors:
        spec = packed.spec
        yield packed.memory()
        yield memoryview(bytes(spec.end - spec.offset - spec.nbytes))
        del packed  # else it would stay in memory while the next one is read


def _cut(pieces: Iterable[memoryview], chunk_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes in chunks. Each is valid until the next one is asked for."""
    buffer = memoryview(bytearray(chunk_bytes))
    filled = 0
    for piece in pieces:
        begin = 0
        while begin < len(piece):
            end = min(len(piece), begin + chunk_bytes - filled)
            buffer[filled : filled + end - begin] = piece[begin:end]
            filled, begin = filled + end - begin, end
            if filled == chunk_bytes:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


@contextmanager
def _locked(directory: Path, *, wait: bool) -> Iterator[None]:
    """Make the directory and keep it locked for this process; the lock of a dead process is free."""
    with _translated(f"cannot write `{directory}`"):
        lock = _lock(directory, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        os.close(lock)


def _lock(directory: Path, operation: int) -> int:
    while True:
        with suppress(FileExistsError):  # it is there, or was a moment ago
            directory.mkdir(parents=True)
        with suppress(FileNotFoundError), ExitStack() as undo:  # where its owner takes the directory away
            lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            undo.callback(os.close, lock)
            try:
                fcntl.flock(lock, operation)
            except BlockingIOError:
                raise StoreError(
                    f"another conversion is writing `{directory}`; wait until it has ended"
                ) from None
            if os.path.samestat(os.fstat(lock), os.stat(directory / LOCK)):
                undo.pop_all()
                return lock


def _refuse_taken(dest: Path, overwrite: bool) -> None:
    with _translated(f"cannot look into `{dest}`"):
        if not dest.exists() or (dest.is_dir() and not any(dest.iterdir())):
            return
        if not _is_model(dest):
            raise StoreError(
                f"`{dest}` exists and is no Hearth model, so it stays; choose another destination"
            )
        foreign = sorted(p.name for p in dest.iterdir() if p.name not in KNOWN_FILES or not p.is_file())
    if foreign:
        raise StoreError(
            f"`{dest}` holds more than a model, so it stays: {', '.join(foreign)}; choose another "
            "destination, or move that elsewhere"
        )
    if not overwrite:
        raise StoreError(
            f"`{dest}` holds a model already; choose another destination, or replace it with `--force` "
            "(`overwrite=True` in Python)"
        )


def _is_model(directory: Path) -> bool:
    """Return True if the directory's manifest names our format, damaged or not: others are never replaced."""
    path = directory / MANIFEST
    return path.is_file() and _FORMAT_FIELD.search(path.read_bytes()) is not None


def _publish(directory: Path, dest: Path) -> None:
    """Move a directory with its lock, or another conversion could take it for a dead one's."""
    try:
        _sync(directory)
        if not (dest / MANIFEST).is_file():
            directory.rename(dest)
        elif _exchange(directory, dest):
            _sync(dest.parent)  # the old one goes when the new one is there for certain
            _remove(directory)
        else:
            _rename_both(directory, dest)
    finally:
        (dest / LOCK).unlink(missing_ok=True)
    _sync(dest)
    _sync(dest.parent)
    _remove(_replaced(dest))


def _exchange(directory: Path, dest: Path) -> bool:
    """Swap two directories at once, so that `dest` is always there; return False where that cannot be."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:  # a C library without it
        return False
    if renameat2(_AT_FDCWD, os.fsencode(directory), _AT_FDCWD, os.fsencode(dest), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(dest))


def _rename_both(directory: Path, dest: Path) -> None:
    try:
        dest.rename(_replaced(dest))
        directory.rename(dest)
    except BaseException:  # an interrupt too must not leave `dest` without its model
        if not dest.exists():
            _replaced(dest).rename(dest)
        raise


def _recover(dest: Path) -> None:
    replaced = _replaced(dest)
    if replaced.exists():
        with _locked(replaced, wait=True):  # its owner may be about to remove it
            if (replaced / MANIFEST).exists() and not dest.exists():
                replaced.rename(dest)
            else:
                _remove(replaced)
    if _is_model(dest):
        (dest / LOCK).unlink(missing_ok=True)


def _replaced(dest: Path) -> Path:
    return dest.with_name(f".{dest.name}.replaced")


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        if path.name != LOCK:
            path.unlink()


def _remove(directory: Path) -> None:
    """Remove a directory, its lock last: the next owner of the lock finds it empty, or clears it."""
    with suppress(OSError):
        _clear(directory)
        (directory / LOCK).unlink()
        directory.rmdir()


def _sync(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{what}: {error}; check the path and its permissions") from error
