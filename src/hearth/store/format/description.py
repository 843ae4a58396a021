"""Reads the description of whatever is stored, model or adapter. Its `format` says which."""

from __future__ import annotations

from pathlib import Path

from hearth.core.errors import BadCheckpoint
from hearth.core.model_files import parse_json
from hearth.store.format.adapter_manifest import FORMAT as ADAPTER_FORMAT
from hearth.store.format.adapter_manifest import adapter_manifest_of
from hearth.store.format.manifest import MANIFEST, StoredManifest, manifest_of, read_manifest_text


def read_description(directory: Path) -> StoredManifest:
    return parse_description(read_manifest_text(directory), str(directory / MANIFEST))


def parse_description(text: str, where: str) -> StoredManifest:
    """Parse and check a description. Raises BadCheckpoint as `parse_manifest` does."""
    raw = parse_json(text, f"`{where}`", BadCheckpoint)
    is_adapter = isinstance(raw, dict) and raw.get("format") == ADAPTER_FORMAT
    return adapter_manifest_of(raw, where) if is_adapter else manifest_of(raw, where)
