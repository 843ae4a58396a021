"""The xxh3 of every chunk in a file of weights, as this machine found them. Reads no weights.

    root/hashes/ab12...     of one file of weights; private, like all that lies there

They spare BLAKE3 where only decay is to be found. They are made while BLAKE3 is checked and never brought
along: one who makes a file could choose an xxh3 that fits other bytes. So they lie with the store, not with
the model, and hold for one state of one file that only this user may write. One that was written to or
replaced, or that others may write, is checked by BLAKE3 again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hearth.core.atomic_file import write_file
from hearth.core.types import Digest
from hearth.store.format.file_stamp import FileStamp, is_private
from hearth.store.format.manifest import WEIGHTS, StoredManifest, digest_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalHashes:
    weights: str  #: path of the file
    model: Digest  #: of the manifest that cuts the file into chunks
    stamp: FileStamp
    xxh3: tuple[str, ...]


_DECODER = msgspec.json.Decoder(LocalHashes)


def read_hashes(
    root: Path, directory: Path, manifest: StoredManifest, stamp: FileStamp
) -> LocalHashes | None:
    if not (is_private(root) and is_private(root / "hashes")):
        return None
    found = _read(_path(root, directory))
    if found is None or (found.weights, found.model) != (str(directory / WEIGHTS), manifest.digest):
        return None
    return found if found.stamp == stamp and len(found.xxh3) == len(manifest.chunks) else None


def write_hashes(
    root: Path, directory: Path, manifest: StoredManifest, stamp: FileStamp, xxh3: Sequence[str]
) -> None:
    """Keep what was found, unless others may write the file: they could change it and leave no trace.

    No load depends on that: without it, BLAKE3 is checked the next time.
    """
    if not stamp.is_ours:
        return
    path = _path(root, directory)
    hashes = LocalHashes(str(directory / WEIGHTS), manifest.digest, stamp, tuple(xxh3))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, [msgspec.json.encode(hashes)], syncs=False)
    except OSError as error:
        log.warning("hashes_not_kept directory=%s reason=%s", directory, error)


def forget_hashes(root: Path, directory: Path) -> None:
    with suppress(OSError):
        _path(root, directory).unlink()


def collect_hashes(root: Path) -> None:
    for path in root.glob("hashes/[!.]*"):
        found = _read(path)
        if found is None or not Path(found.weights).exists():
            with suppress(OSError):
                path.unlink()


def _path(root: Path, directory: Path) -> Path:
    return root / "hashes" / digest_of(str(directory).encode())[:32]


def _read(path: Path) -> LocalHashes | None:
    try:
        found = _DECODER.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, ValueError, RecursionError):
        return None
    is_sound = all(re.fullmatch("[0-9a-f]{32}", one) for one in found.xxh3)
    return found if is_sound else None
