"""The file of a snapshot: named sections behind a header that this installation has signed.

    magic, version, bytes of the header, HMAC of all but the sections     (little-endian)
    the header, as MessagePack: `_Header`
    the sections, one after the other

A section may hold addresses and kernel parameters, so a file is as trusted as code. The HMAC is checked
before the header is parsed, and a section against its digest in the header when it is read, so that a few
sections can be used without reading all of them.

Sections are read, not mapped: an unreadable block of a mapped file kills the process. A file is never
changed, only replaced or unlinked as a whole.
"""

from __future__ import annotations

import ctypes
import errno
import hmac
import os
import stat
import struct
import weakref
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import msgspec
from blake3 import blake3

from hearth.core.atomic_file import write_file
from hearth.core.errors import (
    SnapshotCorrupt,
    SnapshotError,
    SnapshotForeign,
    SnapshotTruncated,
    SnapshotUnauthenticated,
    StoreFull,
)
from hearth.snapshot.fingerprint import Fingerprint

MAGIC = b"HEARTHSN"
#: The version of this format, `Fingerprint` included. A file of another version is made anew.
VERSION = 3
KEY_BYTES = 32
#: Sections are read to such addresses, so that arrays of any type can be views of them.
ALIGNMENT = 64
#: Before the HMAC is checked, this bounds the memory that a damaged file can have allocated.
MAX_HEADER_BYTES = 4 << 20

_HEAD, _MAC_BYTES = struct.Struct("<8sII"), 32
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _SectionEntry(msgspec.Struct, frozen=True):
    num_bytes: int
    digest: bytes


class _Header(msgspec.Struct, frozen=True):
    fingerprint: Fingerprint
    sections: dict[str, _SectionEntry]  #: in the order of the file


class OpenSnapshot(Mapping[str, memoryview]):
    """The sections of a file whose header is authentic. Each is read and checked when it is accessed."""

    def __init__(self, path: Path, file: int, header: _Header, header_end: int) -> None:
        """Take ownership of the descriptor `file`, which is closed with this object."""
        self.path, self.fingerprint = path, header.fingerprint
        self._file, self._sections = file, header.sections
        *begins, self.num_bytes = accumulate(
            (one.num_bytes for one in header.sections.values()), initial=header_end
        )
        self._begins = dict(zip(header.sections, begins, strict=True))
        self._close_file = weakref.finalize(self, os.close, file)

    def __getitem__(self, name: str) -> memoryview:
        section, begin = self._sections[name], self._begins[name]
        assert self._close_file.alive, f"`{self.path}` was closed"  # its descriptor may be another file's
        data = _read(self.path, self._file, begin, begin + section.num_bytes)
        if not hmac.compare_digest(blake3(data).digest(), section.digest):
            raise SnapshotCorrupt(
                f"section `{name}` of `{self.path}` is damaged; delete the file, and it is made anew"
            )
        return data

    def __contains__(self, name: object) -> bool:
        return name in self._sections  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._sections)

    def __len__(self) -> int:
        return len(self._sections)

    def __enter__(self) -> OpenSnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def verify(self) -> None:
        for name in self:
            self[name].release()

    def close(self) -> None:
        self._close_file()


def write_snapshot(
    path: Path,
    fingerprint: Fingerprint,
    sections: Mapping[str, bytes],
    key: bytes,
    max_bytes: int | None = None,
) -> int:
    """Write a file and return its size. If that fails, the file that was there before remains. Raises
    StoreFull if the disk is full or the file would exceed `max_bytes`, and SnapshotError.
    """
    table = {name: _SectionEntry(len(data), blake3(data).digest()) for name, data in sections.items()}
    header = msgspec.msgpack.encode(_Header(fingerprint, table))
    assert len(header) <= MAX_HEADER_BYTES, f"{len(header)=}, limit: {MAX_HEADER_BYTES}"
    head = _HEAD.pack(MAGIC, VERSION, len(header))
    parts = [head, _mac(head + header, key), header, *sections.values()]
    num_bytes = sum(map(len, parts))
    if max_bytes is not None and num_bytes > max_bytes:
        raise StoreFull(
            f"a snapshot takes {num_bytes} bytes, limit of all snapshots, `store.snapshot_bytes`: "
            f"{max_bytes}; raise it"
        )
    try:
        write_file(path, parts)
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(
                f"the disk has no room for the snapshot `{path}`: {error.strerror}; free some, or lower "
                "`store.snapshot_bytes`"
            ) from error
        raise SnapshotError(f"the snapshot `{path}` cannot be written: {error}") from error
    return num_bytes


def open_snapshot(path: Path, key: bytes) -> OpenSnapshot:
    """Return the sections of a file that was written with `key`. Raises FileNotFoundError, SnapshotTruncated,
    SnapshotCorrupt, SnapshotForeign, or SnapshotUnauthenticated if other users can write to it.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise SnapshotUnauthenticated(
                f"`{path}` must be a file that only user {os.geteuid()} can write, and is of user "
                f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; delete it"
            )
        opened = OpenSnapshot(path, file, *_read_header(path, file, found.st_size, key))
    except BaseException:
        os.close(file)
        raise
    if opened.num_bytes != found.st_size:
        opened.close()
        raise _truncated(path, found.st_size, opened.num_bytes)
    return opened


def _read_header(path: Path, file: int, file_bytes: int, key: bytes) -> tuple[_Header, int]:
    begin = _HEAD.size + _MAC_BYTES
    if file_bytes < begin:
        raise _truncated(path, file_bytes, begin)
    head = bytes(_read(path, file, 0, _HEAD.size))
    magic, version, header_bytes = _HEAD.unpack(head)
    if magic != MAGIC:
        raise SnapshotForeign(f"`{path}` is not a snapshot; delete it")
    if version != VERSION:
        raise SnapshotForeign(
            f"`{path}` has version {version} of the format, this Hearth reads {VERSION}; delete it, and it "
            "is made anew"
        )
    if header_bytes > MAX_HEADER_BYTES:
        raise SnapshotCorrupt(
            f"`{path}` has a header of {header_bytes} bytes, limit: {MAX_HEADER_BYTES}; delete it, and it is "
            "made anew"
        )
    if file_bytes < begin + header_bytes:
        raise _truncated(path, file_bytes, begin + header_bytes)
    mac = _read(path, file, _HEAD.size, begin)
    header = bytes(_read(path, file, begin, begin + header_bytes))
    if not hmac.compare_digest(_mac(head + header, key), mac):
        raise SnapshotUnauthenticated(
            f"`{path}` was not written by this installation, or was changed since; delete it, and it is made "
            "anew"
        )
    try:
        return msgspec.msgpack.decode(header, type=_Header), begin + header_bytes
    except msgspec.MsgspecError as error:  # fields were changed without a new `VERSION`
        raise SnapshotForeign(f"`{path}` was written by another Hearth: {error}; delete it") from error


def _read(path: Path, file: int, begin: int, end: int) -> memoryview:
    room = bytearray(end - begin + ALIGNMENT)
    aligned = -ctypes.addressof(ctypes.c_char.from_buffer(room)) % ALIGNMENT
    view = memoryview(room)[aligned : aligned + end - begin]
    num_read = 0
    while num_read < len(view):
        try:
            num_more = os.preadv(file, [view[num_read:]], begin + num_read)
        except OSError as error:
            raise SnapshotCorrupt(
                f"`{path}` cannot be read: {error.strerror}; delete it, and it is made anew"
            ) from error
        if num_more == 0:
            raise _truncated(path, begin + num_read, end)
        num_read += num_more
    return view.toreadonly()


def _truncated(path: Path, num_bytes: int, wanted_bytes: int) -> SnapshotTruncated:
    return SnapshotTruncated(
        f"`{path}` has {num_bytes} bytes and should have {wanted_bytes}; delete it, and it is made anew"
    )


def _mac(data: bytes, key: bytes) -> bytes:
    assert len(key) == KEY_BYTES, f"a key has {KEY_BYTES} bytes, given: {len(key)}"
    return hmac.digest(key, data, "sha256")
