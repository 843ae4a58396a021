"""The fingerprint of a start: everything that a snapshot depends on. Finds nothing out itself."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields

import msgspec

from hearth.core.errors import SnapshotCorrupt

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field in which two fingerprints differ."""

    name: str
    here: str
    there: str

    def __str__(self) -> str:
        return f"`{self.name}` is {self.here} here and {self.there} there"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All that must be the same for a snapshot to be used. Plain texts and numbers, of any field."""

    manifest: str  #: digest of the model's manifest
    layers: str  #: the layers of it that are hosted, like 0-32
    addresses: str  #: where its memory lies: the slot of its space and the ranges in there; empty on a CPU
    dtype: str  #: that it is computed in
    limits: str  #: of its steps, and its context
    engine: str  #: configuration of the engine
    device: str  #: name, and on a CPU the number of threads
    device_bytes: int
    driver: str  #: of the device; empty on a CPU
    cuda: str  #: these four as they are loaded; empty where there is none
    cublas: str
    torch: str
    triton: str
    sources: str  #: digest of Hearth's own files that steps are made of, kernels included

    @property
    def digest(self) -> str:
        """A name for the fingerprint, which no other one has."""
        return hashlib.blake2b(self.pack(), digest_size=_DIGEST_BYTES).hexdigest()

    @property
    def slot(self) -> int | None:
        """The slot of the model's addresses; None: it had none, or they do not last."""
        found = re.search(r"\bslot=(\d+)", self.addresses)
        return None if found is None else int(found[1])

    def pack(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @staticmethod
    def unpack(raw: bytes) -> Fingerprint:
        """Return a fingerprint that was packed. Raises SnapshotCorrupt: these bytes are none."""
        try:
            values = msgspec.json.decode(raw, type=dict[str, str | int])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SnapshotCorrupt(f"a fingerprint cannot be read: {error}") from error
        names = {field.name for field in fields(Fingerprint)}
        if set(values) != names:
            different = ", ".join(f"`{name}`" for name in sorted(names ^ set(values)))
            raise SnapshotCorrupt(f"a fingerprint has other fields than those of this Hearth: {different}")
        try:
            return msgspec.convert(values, Fingerprint)
        except msgspec.ValidationError as error:
            raise SnapshotCorrupt(f"a fingerprint cannot be read: {error}") from error

    def differences(self, other: Fingerprint) -> list[FieldDifference]:
        """Return where this fingerprint, of what is here, differs from that of what was stored."""
        here, there = asdict(self), asdict(other)
        return [
            FieldDifference(name, _told(here[name]), _told(there[name]))
            for name in here
            if here[name] != there[name]
        ]


def _told(value: object) -> str:
    return str(value) or "nothing"
