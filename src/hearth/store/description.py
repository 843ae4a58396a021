"""Reads the description of whatever is stored, model or adapter. Its `format` says which."""

from __future__ import annotations

from pathlib import Path

from hearth.errors import BadCheckpoint
from hearth.model_files import MAX_JSON_BYTES, parse_json, read_text
from hearth.store.adapter_manifest import FORMAT as ADAPTER_FORMAT
from hearth.store.adapter_manifest import adapter_manifest_of
from hearth.store.manifest import MANIFEST, StoredManifest, manifest_of


def read_description(directory: Path) -> StoredManifest:
    """Read and check the description in a directory. Raises BadCheckpoint."""
    path = directory / MANIFEST
    try:
        text = read_text(path, MAX_JSON_BYTES, BadCheckpoint)
    except FileNotFoundError:
        raise BadCheckpoint(
            f"no {MANIFEST} in `{directory}`; make a model with `hearth convert SOURCE DEST`"
        ) from None
    return parse_description(text, str(path))


def parse_description(text: str, where: str) -> StoredManifest:
    """Parse and check a description. Raises BadCheckpoint as `parse_manifest` does."""
    raw = parse_json(text, f"`{where}`", BadCheckpoint)
    is_adapter = isinstance(raw, dict) and raw.get("format") == ADAPTER_FORMAT
    return adapter_manifest_of(raw, where) if is_adapter else manifest_of(raw, where)
