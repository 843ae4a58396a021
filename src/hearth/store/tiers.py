"""The rungs of one machine put together: models on disk, chunks in host memory, object storage behind them.

One process owns it. What it holds is bounded: the host segment by its slots, the disk by its quota; what goes
first is decided by price (`prices.py`). It copies nothing to a device: that is `loader.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hearth.config import StoreConfig
from hearth.errors import ChunkCorrupt, StoreError, Unreachable
from hearth.store.climb import Climber
from hearth.store.disk import DiskTier
from hearth.store.fetch import Fetch, Fetcher
from hearth.store.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    WEIGHTS,
    Manifest,
    digest_of,
    parse_manifest,
    read_manifest,
)
from hearth.store.model import StoredModel
from hearth.store.prices import Prices
from hearth.store.record import LoadRecord
from hearth.store.remote import RemoteModel
from hearth.store.segment import Segment
from hearth.store.writer import staged
from hearth.types import Rung

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierReport:
    """What a tier holds and has done, for people and metrics."""

    used_bytes: int
    capacity_bytes: int | None  #: None: as much as there is
    pinned_bytes: int
    bytes_per_s: float  #: running average of what it delivered
    counters: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Version:
    """Of a file: differs when it was replaced or written to."""

    inode: int
    mtime_ns: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _Opened:
    versions: list[_Version | None]
    model: StoredModel


class Tiers:
    """Any thread may call it. Close it, or its readers and its memory stay."""

    def __init__(self, config: StoreConfig, slot_bytes: int = CHUNK_BYTES) -> None:
        self.disk = DiskTier(Path(config.path).expanduser(), config.disk_bytes)
        self.prices = Prices()
        self.segment = Segment.create(config.host_bytes // slot_bytes, slot_bytes)
        self.segment.pin_in_background()
        #: Models that are open: reading a description takes milliseconds, which a cold start does not have.
        #: Single operations of a dict are atomic and opening twice does no harm, so it needs no lock.
        self._opened: dict[Path, _Opened] = {}
        self.fetcher = Fetcher(self.segment, Climber(self.disk, self.prices.of_disk_chunk), self.prices)

    def open(self, where: str | Path) -> StoredModel:
        """A converted model: its directory, or its URL in object storage.

        Of the latter, all but the weights is kept on disk; opening it again asks for the manifest alone.
        """
        if "://" in str(where):
            return self._admit(self._open_remote(str(where)))
        directory = Path(where).resolve()
        versions = [_version_of(directory / name) for name in (MANIFEST, WEIGHTS)]
        known = self._opened.get(directory)
        if known is not None and known.versions == versions:
            return known.model
        model = self._admit(_open_directory(directory))
        self._opened[directory] = _Opened(versions, model)
        return model

    def _admit(self, model: StoredModel) -> StoredModel:
        if model.manifest.chunk_bytes > self.segment.slot_bytes:
            raise StoreError(
                f"`{model.name}` has chunks of {model.manifest.chunk_bytes} bytes, a slot of host memory "
                f"holds {self.segment.slot_bytes}; convert it again with smaller chunks"
            )
        self.disk.register(model.directory, model.manifest)
        return model

    def fetch(self, model: StoredModel, chunks: Sequence[int]) -> Fetch:
        return self.fetcher.fetch(model, chunks)

    def loaded(self, record: LoadRecord) -> None:
        """Learn from a load how fast the rungs are."""
        for rung, use in record.rungs.items():
            self.prices.moved(rung, use.num_bytes, use.seconds)
        log.info(
            "model_loaded model=%s bytes=%d load_s=%.3f first_layer_s=%.3f rungs=%s",
            *(record.model, record.num_bytes, record.total_s, record.first_layer_s),
            ",".join(f"{rung}:{use.num_bytes}" for rung, use in record.rungs.items()),
        )

    def report(self) -> dict[Rung, TierReport]:
        book = self.fetcher.book
        host_bytes = (book.num_resident + book.num_filling) * self.segment.slot_bytes
        return {
            Rung.HOST: TierReport(
                used_bytes=host_bytes,
                capacity_bytes=self.segment.num_bytes,
                pinned_bytes=self.segment.pinned_bytes,
                bytes_per_s=self.prices.bytes_per_s(Rung.HOST),
                counters=asdict(self.fetcher.counters),
            ),
            Rung.DISK: TierReport(
                used_bytes=self.disk.used_bytes,
                capacity_bytes=self.disk.capacity_bytes,
                pinned_bytes=0,
                bytes_per_s=self.prices.bytes_per_s(Rung.DISK),
                counters=asdict(self.disk.counters),
            ),
        }

    def close(self) -> None:
        self.fetcher.close()
        self.segment.close()

    def _open_remote(self, url: str) -> StoredModel:
        remote = RemoteModel(url)
        name = f"{remote.url.rpartition('/')[2]}-{digest_of(remote.url.encode())[:8]}"
        directory = self.disk.root / "models" / name
        try:
            manifest = _refresh(remote, directory)
        except Unreachable as error:
            if not (directory / MANIFEST).is_file():
                raise
            log.warning("fallback description=disk model=%s reason=%s", name, error)
            manifest = read_manifest(directory)
        return StoredModel(name, manifest, directory, remote)


def _open_directory(directory: Path) -> StoredModel:
    return StoredModel(directory.name, read_manifest(directory), directory)


def _version_of(path: Path) -> _Version | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return _Version(found.st_ino, found.st_mtime_ns, found.st_size)


def _refresh(remote: RemoteModel, directory: Path) -> Manifest:
    """Have everything but the weights in the directory, as the URL has it now."""
    text = remote.read_file(MANIFEST)
    manifest = parse_manifest(text.decode(errors="replace"), f"{remote.url}/{MANIFEST}")
    path = directory / MANIFEST
    if path.is_file() and path.read_bytes() == text:
        return manifest
    num_bytes = len(text) + sum(file.num_bytes for file in manifest.files)
    with staged(directory, num_bytes, overwrite=True) as staging:
        for file in manifest.files:
            content = remote.read_file(file.name)
            if digest_of(content) != file.digest:
                raise ChunkCorrupt(
                    f"`{remote.url}/{file.name}` hashes to {digest_of(content)}, its manifest says "
                    f"{file.digest}; upload the model again"
                )
            staging.write_file(file.name, content)
        staging.write_file(MANIFEST, text)
    return manifest
