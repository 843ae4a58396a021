"""Reads the description of what is stored, model or adapter. Its `format` says which."""

from __future__ import annotations

from pathlib import Path

from hearth.core.errors import BadCheckpoint, ChunkCorrupt, StoreError
from hearth.core.model_files import parse_json
from hearth.core.types import Digest
from hearth.store.format.adapter_manifest import FORMAT as ADAPTER_FORMAT
from hearth.store.format.adapter_manifest import adapter_manifest_of
from hearth.store.format.file_stamp import FileStamp, stamp_of
from hearth.store.format.manifest import (
    MANIFEST,
    TOKENIZER,
    Manifest,
    StoredManifest,
    damage_of,
    manifest_of,
    of_model,
    read_manifest_text,
)

MAX_MANIFESTS = 256


class Descriptions:
    """Descriptions that were read, and files beside them that were verified: each once, as both take
    milliseconds. Any thread may call it: single operations of a dict are atomic.
    """

    def __init__(self) -> None:
        self._manifests: dict[Digest, StoredManifest] = {}
        #: Verified files: their digest, and their state when it was checked.
        self._texts: dict[Path, tuple[Digest, FileStamp | None]] = {}

    def opened(self, digest: Digest, directory: Path) -> StoredManifest:
        """Return the description that the keeper found in a directory. Raises StoreError if it is another."""
        known = self._manifests.get(digest) or self._read(directory)
        if known.digest != digest:
            raise StoreError(f"`{directory}` was replaced while it was opened; open it again")
        return known

    def of_model(self, directory: Path) -> Manifest:
        """Read a model's manifest and check its tokenizer, before the model is opened. Raises HearthError."""
        manifest = of_model(self._read(directory), str(directory))
        self.text_file(manifest, directory, TOKENIZER)
        return manifest

    def text_file(self, manifest: Manifest, directory: Path, name: str) -> Path | None:
        """Return a file beside a model's weights; None: the model has none. Raises ChunkCorrupt."""
        file = next((file for file in manifest.files if file.name == name), None)
        if file is None:
            return None
        path = directory / name
        checked = (file.digest, stamp_of(path))
        if self._texts.get(path) != checked:
            if damage := damage_of(file, directory):
                raise ChunkCorrupt(f"`{path}` {damage}; convert or fetch the model again")
            self._texts[path] = checked
        return path

    def _read(self, directory: Path) -> StoredManifest:
        found = read_description(directory)
        if len(self._manifests) >= MAX_MANIFESTS:
            self._manifests.clear()
            self._texts.clear()
        self._manifests[found.digest] = found
        return found


def read_description(directory: Path) -> StoredManifest:
    return parse_description(read_manifest_text(directory), str(directory / MANIFEST))


def parse_description(text: str, where: str) -> StoredManifest:
    """Parse and check a description. Raises BadCheckpoint as `parse_manifest` does."""
    raw = parse_json(text, f"`{where}`", BadCheckpoint)
    is_adapter = isinstance(raw, dict) and raw.get("format") == ADAPTER_FORMAT
    return adapter_manifest_of(raw, where) if is_adapter else manifest_of(raw, where)
