"""A model or an adapter, and the places that may deliver it. Opens nothing but its description."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hearth.store.format.manifest import StoredManifest
from hearth.store.tiers.remote import RemoteModel


@dataclass(frozen=True, slots=True)
class StoredModel:
    name: str
    manifest: StoredManifest
    directory: Path  #: holds its files, and weights.bin unless it is remote
    remote: RemoteModel | None = None
    weight: float = 1.0  #: how much a second of its start matters against other models'
