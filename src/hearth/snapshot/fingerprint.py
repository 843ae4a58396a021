"""All that a snapshot depends on. A snapshot is used only where every field is the same."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass

import msgspec

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class FieldDifference:
    name: str
    here: str
    there: str

    def __str__(self) -> str:
        return f"`{self.name}` is {self.here} here and {self.there} there"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    manifest: str  #: digest of the model's manifest
    layers: str  #: the hosted layers, like 0-32, and those of KV blocks if they are others
    addresses: str  #: the slot of the model's address space and its ranges; empty on a CPU
    dtype: str  #: of computation
    limits: str  #: of steps, and the context length
    engine: str  #: configuration of the engine
    device: str  #: name, and on a CPU the number of threads
    device_bytes: int
    driver: str  #: of the device; empty on a CPU
    cuda: str  #: these four are the loaded versions; empty where there is none
    cublas: str
    torch: str
    triton: str
    sources: str  #: digest of Hearth's own files that steps are made of, kernels included

    @property
    def digest(self) -> str:
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=_DIGEST_BYTES).hexdigest()

    @property
    def slot(self) -> int | None:
        """The slot of the model's address space; None: it had none, or its addresses are not fixed."""
        found = re.search(r"\bslot=(\d+)", self.addresses)
        return None if found is None else int(found[1])

    def differences(self, other: Fingerprint) -> list[FieldDifference]:
        here, there = asdict(self), asdict(other)
        return [
            FieldDifference(name, str(here[name]) or "nothing", str(there[name]) or "nothing")
            for name in here
            if here[name] != there[name]
        ]
