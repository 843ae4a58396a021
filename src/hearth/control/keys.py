"""API keys: who may use the service, and who may change it. The file holds hashes, never a key.

A key is 256 random bits, so nobody guesses it from its hash and a fast hash is the right one: what makes
passwords need a slow one, that people choose them, is not the case here.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import msgspec

from hearth.control.caller import Caller, GroupId, Role
from hearth.control.datadir import write_private
from hearth.errors import ConfigError

PREFIX = "hearth-"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._-]{0,63}", re.ASCII)
_SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """The owner of a key."""

    name: str
    role: Role
    created_at_s: float  #: since the epoch
    group: str | None  #: of keys that share cached prefixes; None: the key shares with no other


@dataclass(frozen=True, slots=True)
class _StoredKey:
    """A key as the file holds it."""

    name: str
    role: Role
    salt: str  #: in hexadecimal, as is the hash
    hash: str
    created_at_s: float
    group: str | None = None

    @property
    def info(self) -> KeyInfo:
        return KeyInfo(self.name, self.role, self.created_at_s, self.group)

    @property
    def caller(self) -> Caller:
        """The owner, in the group that was named, or else in one of the key alone.

        A key's own group is known by its salt: no name leads into it, nor does a later key of the same name.
        """
        group = f"key:{self.salt}" if self.group is None else f"group:{self.group}"
        return Caller(self.name, self.role, GroupId(group))


def add(path: Path, name: str, role: Role, group: str | None = None) -> str:
    """Make a key and return it; nothing can tell it again.

    Raises:
        ConfigError: the name is taken or cannot be one, nor the group's, or the file cannot be used.
    """
    _check_name("key", name)
    if group is not None:
        _check_name("group", group)
    key, salt = PREFIX + secrets.token_urlsafe(32), secrets.token_bytes(_SALT_BYTES)
    with _changing(path):
        entries = _read(path)
        if any(entry.name == name for entry in entries):
            raise ConfigError(
                f"`{path}` holds a key named `{name}` already; choose another name, or remove that one first"
            )
        _write(
            path, [*entries, _StoredKey(name, role, salt.hex(), _hash(key, salt).hex(), time.time(), group)]
        )
    return key


def remove(path: Path, name: str) -> None:
    """Remove a key. Raises ConfigError if there is none of that name."""
    with _changing(path):
        entries = _read(path)
        others = [entry for entry in entries if entry.name != name]
        if len(others) == len(entries):
            names = ", ".join(entry.name for entry in entries) or "none"
            raise ConfigError(f"`{path}` holds no key named {name!r:.80}; it holds: {names}")
        _write(path, others)


def is_loopback(host: str) -> bool:
    """True if an address or name means this machine, where nobody needs a key unless there are some."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def list_keys(path: Path) -> list[KeyInfo]:
    """Return the owners of all keys, the oldest key first; empty if there is no file."""
    return [entry.info for entry in _read(path)]


@dataclass(frozen=True, slots=True)
class _FileVersion:
    """The version of a file, which differs after every change: a change puts a new file in its place."""

    inode: int
    mtime_ns: int
    num_bytes: int


class ApiKeys:
    """The keys of a file, also after it has changed. Mutable; any one thread at a time may ask."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: _FileVersion | None = None
        self._entries: list[_StoredKey] = []
        self._have_existed = False

    @staticmethod
    def load(path: Path) -> ApiKeys:
        """Read a file of keys; no file means no keys. Raises ConfigError if it cannot be understood."""
        keys = ApiKeys(path)
        keys._refresh()
        return keys

    def __len__(self) -> int:
        self._refresh()
        return len(self._entries)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def are_required(self) -> bool:
        """True from the first key on: whoever makes one wants it asked for, and removing all opens nothing.

        Raises:
            ConfigError: the file has changed and cannot be understood.
        """
        self._refresh()
        return self._have_existed

    def check(self, key: str) -> Caller | None:
        """Return the owner of a key, None if it is nobody's, in the same time for wrong keys and right ones.

        Raises:
            ConfigError: the file has changed and cannot be understood.
        """
        self._refresh()
        found = None
        for entry in self._entries:
            given = _hash(key, bytes.fromhex(entry.salt))
            if hmac.compare_digest(given, bytes.fromhex(entry.hash)):
                found = entry.caller
        return found

    def _refresh(self) -> None:
        """Read the file again if it has changed; to look costs microseconds, so it is done for every key."""
        version = _version_of(self._path)
        if version != self._version or version is None:
            self._entries = _read(self._path)
            self._version = version
            self._have_existed = self._have_existed or bool(self._entries)


def _check_name(what: str, name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise ConfigError(
            f"the name of a {what} is 1 to 64 letters, digits, `@`, `.`, `_` or `-` and begins with a letter "
            f"or digit, given: {name!r:.80}"
        )


def _hash(key: str, salt: bytes) -> bytes:
    return hashlib.blake2b(key.encode(errors="replace"), key=salt, digest_size=32).digest()


def _version_of(path: Path) -> _FileVersion | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return _FileVersion(found.st_ino, found.st_mtime_ns, found.st_size)


def _read(path: Path) -> list[_StoredKey]:
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[_StoredKey])
        for entry in entries:
            if len(bytes.fromhex(entry.salt)) != _SALT_BYTES or len(bytes.fromhex(entry.hash)) != 32:
                raise ValueError(f"salt or hash of `{entry.name}` has another length")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise ConfigError(
            f"`{path}` cannot be read as API keys: {error}; move it away and make new ones with "
            "`hearth keys add NAME`"
        ) from error
    return entries


def _write(path: Path, entries: Sequence[_StoredKey]) -> None:
    write_private(path, msgspec.json.format(msgspec.json.encode(entries)).decode() + "\n")


@contextmanager
def _changing(path: Path) -> Iterator[None]:
    """Hold the lock of the file while it is changed: two changes at once would lose a key."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be written: {error}; check its directory") from error
