"""The file of a snapshot: named sections, authenticated by a key, whole or not there. Reads no section.

    magic, version, number of sections, when it was made, bytes of the file     (little-endian)
    per section: name, offset, length, digest of its bytes
    MAC of all above, by the key of this installation
    the sections, each at a multiple of `ALIGNMENT`

A section may hold addresses and parameters of kernels, so that a file is as trusted as code: nothing of one
is handed out before the MAC of its header, and with it the digests in there, has been found to be that of the
key. A section is checked against its digest when it is taken, so that a few can be had without reading all.

The bytes are read, not mapped: a block of a mapped file that the disk cannot read ends the process. Nobody
ever changes a file of that name: it is renamed to its place when all of it is on disk, and replaced or
unlinked as a whole.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import hmac
import os
import secrets
import stat
import struct
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from blake3 import blake3

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
#: The version of this format. A file of another one is made anew.
VERSION = 2
#: Sections begin at multiples of it, so that arrays of any type may be made over their bytes.
ALIGNMENT = 64
MAX_SECTIONS, MAX_NAME_BYTES = 4096, 64
KEY_BYTES = 32
#: The section that the file adds by itself.
FINGERPRINT = "fingerprint"

_DIGEST_BYTES = 32
_HEAD = struct.Struct("<8sIIdQ")
_ENTRY = struct.Struct(f"<{MAX_NAME_BYTES}sQQ{_DIGEST_BYTES}s")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class _Extent:
    begin: int
    end: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Header:
    created_at_s: float
    num_bytes: int  #: of the whole file
    sections: Mapping[str, _Extent]


class OpenSnapshot(Mapping[str, memoryview]):
    """The sections of a file whose header is authentic. A section is read, and checked, when it is taken."""

    def __init__(self, path: Path, file: int, header: _Header) -> None:
        """Take over the descriptor `file`, and read what the file was made for.

        Raises:
            SnapshotCorrupt: that is damaged, cannot be read, or is another Hearth's.
        """
        self.path, self.created_at_s, self.num_bytes = path, header.created_at_s, header.num_bytes
        self._file, self._sections = file, header.sections
        self._close_file = weakref.finalize(self, os.close, file)
        with self[FINGERPRINT] as raw:
            try:
                self.fingerprint = Fingerprint.unpack(bytes(raw))
            except SnapshotCorrupt as error:
                raise SnapshotCorrupt(f"`{path}` cannot be used: {error}") from error

    def __getitem__(self, name: str) -> memoryview:
        """Return the bytes of a section. Raises KeyError, and SnapshotCorrupt: they are not as written."""
        section = self._sections[name]
        assert self._close_file.alive, f"`{self.path}` was closed"  # and its descriptor may be another file's
        data = _read(self.path, self._file, section.begin, section.end)
        if not hmac.compare_digest(_digest(data), section.digest):
            raise SnapshotCorrupt(
                f"section `{name}` of `{self.path}` is not as it was written; delete the file, and it is "
                "made anew"
            )
        return data

    def __contains__(self, name: object) -> bool:
        return name in self._sections  # without a look at its bytes

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
        """Read all sections. Raises SnapshotCorrupt at the first that is not as it was written."""
        for name in self:
            self[name].release()

    def close(self) -> None:
        self._close_file()


def write_snapshot(path: Path, fingerprint: Fingerprint, sections: Mapping[str, bytes], key: bytes) -> int:
    """Write a file, and return its bytes. If that fails there is what was there before.

    Raises:
        StoreFull: the disk has no room for it.
        SnapshotError: the file cannot be written.
    """
    assert FINGERPRINT not in sections, "the file writes that itself"
    parts = {FINGERPRINT: fingerprint.pack(), **sections}
    header, begins = _header(parts, key)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as opened:
            opened.write(header)
            for name, data in parts.items():
                opened.write(bytes(begins[name] - opened.tell()))
                opened.write(data)
            num_bytes = opened.tell()
            opened.flush()
            os.fsync(file)
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(
                f"the disk has no room for the snapshot `{path}`: {error.strerror}; free some, or lower "
                "`store.snapshot_bytes`"
            ) from error
        raise SnapshotError(f"the snapshot `{path}` cannot be written: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return num_bytes


def open_snapshot(path: Path, fingerprint: Fingerprint, key: bytes) -> OpenSnapshot:
    """Return the sections of a file that was made for this fingerprint.

    Raises:
        FileNotFoundError: there is none.
        SnapshotForeign: it was made for another one.
        SnapshotError: see `open_any`.
    """
    opened = open_any(path, key)
    if opened.fingerprint != fingerprint:
        opened.close()
        differences = "; ".join(map(str, fingerprint.differences(opened.fingerprint)))
        raise SnapshotForeign(f"`{path}` was made for another start: {differences}")
    return opened


def open_any(path: Path, key: bytes) -> OpenSnapshot:
    """Return the sections of a file, whatever it was made for.

    Raises:
        FileNotFoundError: there is none.
        SnapshotTruncated: it ends early, or has more than it should.
        SnapshotCorrupt: its header contradicts itself, or its fingerprint is none of this Hearth's, or the
            disk cannot read them.
        SnapshotForeign: it is none, or of another version of the format.
        SnapshotUnauthenticated: it was not written with this key, or others may write to it.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise SnapshotUnauthenticated(
                f"`{path}` must be a file of user {os.geteuid()} that nobody else may write, and is of user "
                f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; delete it"
            )
        header = _read_header(path, file, found.st_size, key)
    except BaseException:
        os.close(file)
        raise
    return OpenSnapshot(path, file, header)


def snapshot_bytes(fingerprint: Fingerprint, sections: Mapping[str, bytes]) -> int:
    """Return how long a file of these sections is."""
    _, num_bytes = _layout({FINGERPRINT: fingerprint.pack(), **sections})
    return num_bytes


def _layout(parts: Mapping[str, bytes]) -> tuple[dict[str, int], int]:
    """Return where each section begins, and where the file ends."""
    begins, end = dict[str, int](), _HEAD.size + len(parts) * _ENTRY.size + _DIGEST_BYTES
    for name, data in parts.items():
        begins[name] = _aligned(end)
        end = begins[name] + len(data)
    return begins, end


def _header(parts: Mapping[str, bytes], key: bytes) -> tuple[bytes, dict[str, int]]:
    """Return all before the sections, and where each of these begins."""
    assert len(parts) <= MAX_SECTIONS, f"{len(parts)} sections, limit: {MAX_SECTIONS}"
    (begins, end), entries = _layout(parts), []
    for name, data in parts.items():
        spelled = name.encode()
        assert 0 < len(spelled) <= MAX_NAME_BYTES, f"a name has 1 to {MAX_NAME_BYTES} bytes: {name!r}"
        assert b"\0" not in spelled, f"no name of a section: {name!r}"
        entries.append(_ENTRY.pack(spelled, begins[name], len(data), _digest(data)))
    signed = _HEAD.pack(MAGIC, VERSION, len(parts), time.time(), end) + b"".join(entries)
    return signed + _mac(signed, key), begins


def _read_header(path: Path, file: int, file_bytes: int, key: bytes) -> _Header:
    """Return what an authentic file says of itself. Raises SnapshotError as `open_any`."""
    if file_bytes < _HEAD.size:
        raise _truncated(path, file_bytes, _HEAD.size)
    head = _read(path, file, 0, _HEAD.size)
    magic, version, num_sections, created_at_s, num_bytes = _HEAD.unpack(head)
    if magic != MAGIC:
        raise SnapshotForeign(f"`{path}` is no snapshot; delete it")
    if version != VERSION:
        raise SnapshotForeign(
            f"`{path}` has version {version} of the format, this Hearth reads {VERSION}; delete it, and it "
            "is made anew"
        )
    # Nobody has signed it yet, and the table of as many as it says might fill all memory.
    if num_sections > MAX_SECTIONS:
        raise SnapshotCorrupt(
            f"`{path}` says that it has {num_sections} sections, limit: {MAX_SECTIONS}; delete it, and it is "
            "made anew"
        )
    table_end = _HEAD.size + num_sections * _ENTRY.size
    if file_bytes < table_end + _DIGEST_BYTES:
        raise _truncated(path, file_bytes, table_end + _DIGEST_BYTES)
    # Before anything else is believed: whatever follows is what somebody with the key has written.
    signed = b"".join([head, _read(path, file, _HEAD.size, table_end)])
    if not hmac.compare_digest(_mac(signed, key), _read(path, file, table_end, table_end + _DIGEST_BYTES)):
        raise SnapshotUnauthenticated(
            f"`{path}` was not written by this installation, or not as it is now; delete it, and it is made "
            "anew"
        )
    if num_bytes != file_bytes:
        raise _truncated(path, file_bytes, num_bytes)
    sections: dict[str, _Extent] = {}
    end = table_end + _DIGEST_BYTES
    for raw_name, begin, length, digest in _ENTRY.iter_unpack(signed[_HEAD.size :]):
        if begin < end or length > num_bytes or begin + length > num_bytes:
            raise SnapshotCorrupt(f"the sections of `{path}` overlap or lie outside of it; delete it")
        end = begin + length
        sections[raw_name.rstrip(b"\0").decode(errors="replace")] = _Extent(begin, end, digest)
    if FINGERPRINT not in sections or len(sections) != num_sections:
        raise SnapshotCorrupt(f"`{path}` has no fingerprint, or names a section twice; delete it")
    return _Header(created_at_s, num_bytes, sections)


def _read(path: Path, file: int, begin: int, end: int) -> memoryview:
    """Return a part of a file, aligned. Raises SnapshotTruncated and SnapshotCorrupt: it cannot be read."""
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


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _digest(data: bytes | memoryview) -> bytes:
    return blake3(data).digest()


def _mac(data: bytes, key: bytes) -> bytes:
    assert len(key) == KEY_BYTES, f"a key has {KEY_BYTES} bytes, given: {len(key)}"
    return hashlib.blake2b(data, key=key, digest_size=_DIGEST_BYTES, person=b"hearth snapshot").digest()


def _sync_directory(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
