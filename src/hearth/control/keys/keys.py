"""API keys: which callers may use the service, and which may change it. The file holds hashes, never a key.

A key is 256 random bits. So a fast hash is safe: only passwords, which people choose, need a slow one.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path

import msgspec

from hearth.control.requests.caller import OPERATOR, Caller, GroupId, KeyId, KeyTerms, Role, ServiceClass
from hearth.core.atomic_file import write_file
from hearth.core.errors import ConfigError, NameTaken, RequestError, UnknownKey
from hearth.policy.limits.key_limiter import KeyLimits

PREFIX = "hearth-"
MAX_MODELS = 64
MAX_LIMIT = 10**12

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9@._-]{0,63}", re.ASCII)
_SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class KeyInfo:
    name: str
    role: Role
    created_at_s: float  #: since the epoch
    group: str | None  #: of keys that share cached prefixes; None: the key shares with no other
    terms: KeyTerms
    key_id: KeyId


@dataclass(frozen=True, slots=True)
class NewKey:
    key: str
    info: KeyInfo


@dataclass(frozen=True, slots=True)
class _StoredKey:
    name: str
    role: Role
    salt: str  #: in hexadecimal, as is the hash
    hash: str
    created_at_s: float
    group: str | None = None
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrent: int | None = None
    models: tuple[str, ...] | None = None
    service_class: ServiceClass = "interactive"

    @property
    def terms(self) -> KeyTerms:
        limits = KeyLimits(self.requests_per_min, self.tokens_per_min, self.concurrent)
        return KeyTerms(limits, self.models, self.service_class)

    def with_terms(self, terms: KeyTerms) -> _StoredKey:
        return replace(
            self,
            requests_per_min=terms.limits.requests_per_min,
            tokens_per_min=terms.limits.tokens_per_min,
            concurrent=terms.limits.concurrent,
            models=terms.models,
            service_class=terms.service_class,
        )

    @property
    def key_id(self) -> KeyId:
        return KeyId(hashlib.blake2b(bytes.fromhex(self.salt), digest_size=16).hexdigest())

    @property
    def info(self) -> KeyInfo:
        return KeyInfo(self.name, self.role, self.created_at_s, self.group, self.terms, self.key_id)

    @property
    def caller(self) -> Caller:
        """The owner. Without a group, the key's own one is derived from its salt: no name leads into it."""
        group = f"key:{self.salt}" if self.group is None else f"group:{self.group}"
        return Caller(self.name, self.role, GroupId(group), self.terms, self.key_id)


def add(path: Path, name: str, role: Role, group: str | None = None, terms: KeyTerms | None = None) -> NewKey:
    """Make a key and return it; it cannot be shown again. Raises RequestError and ConfigError."""
    terms = terms or KeyTerms()
    _check_terms(terms)
    _check_name("key", name)
    if group is not None:
        _check_name("group", group)
    key, salt = PREFIX + secrets.token_urlsafe(32), secrets.token_bytes(_SALT_BYTES)
    with _changing(path):
        entries = _read(path)
        if any(entry.name == name for entry in entries):
            raise NameTaken(
                f"`{path}` holds a key named `{name}` already; choose another name, or remove that one first"
            )
        entry = _StoredKey(name, role, salt.hex(), _hash(key, salt).hex(), time.time(), group)
        entry = entry.with_terms(terms)
        _write(path, [*entries, entry])
    return NewKey(key, entry.info)


def change(path: Path, name: str, alter: Callable[[KeyTerms], KeyTerms]) -> KeyInfo:
    """Change the terms of a key. Raises RequestError and ConfigError."""
    with _changing(path):
        entries = _read(path)
        known = next((entry for entry in entries if entry.name == name), None)
        if known is None:
            raise _unknown(path, name, entries)
        terms = alter(known.terms)
        _check_terms(terms)
        changed = known.with_terms(terms)
        _write(path, [changed if entry is known else entry for entry in entries])
    return changed.info


def remove(path: Path, name: str) -> None:
    with _changing(path):
        entries = _read(path)
        others = [entry for entry in entries if entry.name != name]
        if len(others) == len(entries):
            raise _unknown(path, name, entries)
        _write(path, others)


def _unknown(path: Path, name: str, entries: Sequence[_StoredKey]) -> UnknownKey:
    names = ", ".join(entry.name for entry in entries) or "none"
    return UnknownKey(f"`{path}` holds no key named {name!r:.80}; it holds: {names}")


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def list_keys(path: Path) -> list[KeyInfo]:
    """Return the owners of all keys, the oldest key first; empty if there is no file."""
    return [entry.info for entry in _read(path)]


class ApiKeys:
    """The keys of a file, reread when it changes. Mutable; used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Inode, time and size of the file: each change puts a new file in its place.
        self._version: tuple[int, int, int] | None = None
        self._entries: list[_StoredKey] = []
        self._have_existed = False

    @staticmethod
    def load(path: Path) -> ApiKeys:
        """Read a file of keys; no file means no keys. Raises ConfigError if it is invalid."""
        keys = ApiKeys(path)
        keys._refresh()
        return keys

    def __len__(self) -> int:
        self._refresh()
        return len(self._entries)

    @property
    def are_required(self) -> bool:
        """True once there was a key: removing all does not open the service. Raises ConfigError."""
        self._refresh()
        return self._have_existed

    def check(self, key: str) -> Caller | None:
        """None: unknown. Takes the same time for wrong keys and right ones. Raises ConfigError."""
        self._refresh()
        found = None
        for entry in self._entries:
            given = _hash(key, bytes.fromhex(entry.salt))
            if hmac.compare_digest(given, bytes.fromhex(entry.hash)):
                found = entry.caller
        return found

    def find(self, key_id: KeyId) -> Caller | None:
        """Return the owner of a key that was checked before; None: it was removed. Raises ConfigError."""
        self._refresh()
        return next((entry.caller for entry in self._entries if entry.key_id == key_id), None)

    def is_current(self, caller: Caller) -> bool:
        """Whether a caller would still be let in, with the same rights."""
        try:
            if caller.key_id is None:
                return caller is OPERATOR or not self.are_required
            return self.find(caller.key_id) == caller
        except ConfigError:  # the guard logs it
            return False

    def ids(self) -> set[KeyId]:
        self._refresh()
        return {entry.key_id for entry in self._entries}

    def _refresh(self) -> None:
        """Read the file again if it has changed. The check takes microseconds, so every key has one."""
        version = _version_of(self.path)
        if version != self._version or version is None:
            self._entries = _read(self.path)
            self._version = version
            self._have_existed = self._have_existed or bool(self._entries)


def _check_name(what: str, name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise RequestError(
            f"the name of a {what} is 1 to 64 letters, digits, `@`, `.`, `_` or `-` and begins with a letter "
            f"or digit, given: {name!r:.80}"
        )


def _check_terms(terms: KeyTerms) -> None:
    limits = {
        "requests per minute": terms.limits.requests_per_min,
        "tokens per minute": terms.limits.tokens_per_min,
        "concurrent requests": terms.limits.concurrent,
    }
    for what, limit in limits.items():
        if limit is not None and not 1 <= limit <= MAX_LIMIT:
            raise RequestError(f"{what} of a key must be from 1 to {MAX_LIMIT}, given: {limit}")
    if terms.models is not None and not 1 <= len(terms.models) <= MAX_MODELS:
        raise RequestError(
            f"a key may be limited to 1 to {MAX_MODELS} models, given: {len(terms.models)}; allow all of them"
        )
    bad = next((one for one in terms.models or () if not 1 <= len(one) <= 256 or not one.isprintable()), None)
    if bad is not None:
        raise RequestError(f"the name of a model has 1 to 256 characters, given: {bad!r:.80}")


def _hash(key: str, salt: bytes) -> bytes:
    return hashlib.blake2b(key.encode(errors="replace"), key=salt, digest_size=32).digest()


def _version_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> list[_StoredKey]:
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[_StoredKey])
        for entry in entries:
            if len(bytes.fromhex(entry.salt)) != _SALT_BYTES or len(bytes.fromhex(entry.hash)) != 32:
                raise ValueError(f"salt or hash of `{entry.name}` has another length")
            _check_terms(entry.terms)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RequestError) as error:  # msgspec's errors are ValueErrors
        raise ConfigError(
            f"`{path}` cannot be read as API keys: {error}; move it away and make new ones with "
            "`hearth keys add NAME`"
        ) from error
    return entries


def _write(path: Path, entries: Sequence[_StoredKey]) -> None:
    write_file(path, [msgspec.json.format(msgspec.json.encode(entries)), b"\n"])


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
