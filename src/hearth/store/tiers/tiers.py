"""The rungs of one machine: chunks in host memory, models on disk, object storage behind them.

One process owns them. Host memory is bounded by its cells, the disk by its quota; the cheapest chunk is
evicted first (`chunk_prices.py`). Nothing is copied to a device here: that is `transfer.py`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hearth.core.config import CPU_HOST_BYTES, StoreConfig
from hearth.core.errors import (
    BadCheckpoint,
    ChunkCorrupt,
    ModelNotOpen,
    StoreError,
    StoreFull,
    Unreachable,
    UpstreamChanged,
)
from hearth.core.node_messages import HeldChunks
from hearth.core.types import Digest, Rung
from hearth.store.format.description import parse_description, read_description
from hearth.store.format.file_stamp import FileStamp, stamp_of
from hearth.store.format.manifest import (
    CHUNK_BYTES,
    MANIFEST,
    WEIGHTS,
    StoredManifest,
    check_texts,
    damage_of,
    digest_of,
)
from hearth.store.format.writer import staged
from hearth.store.tiers.chunk_prices import ChunkPrices
from hearth.store.tiers.disk import DiskTier
from hearth.store.tiers.model import RemoteFiles, StoredModel
from hearth.store.tiers.remote import RemoteModel
from hearth.store.tiers.segment import Segment
from hearth.store.tiers.upstream import (
    PEERS,
    RemoteAddress,
    Upstream,
    description_directory,
    note_version,
    parse_address,
    write_upstream,
)
from hearth.store.transfer.chunk_reader import ChunkReader
from hearth.store.transfer.fetch import Fetch, Fetcher
from hearth.store.transfer.peer_model import PeerModel
from hearth.store.transfer.peers import Peers
from hearth.store.transfer.record import LoadRecord, rung_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Opened:
    stamps: Mapping[str, FileStamp | None]  #: by file name, of all files that make up the model
    model: StoredModel

    @property
    def is_current(self) -> bool:
        directory = self.model.directory
        return all(stamp_of(directory / name) == stamp for name, stamp in self.stamps.items())


class Tiers:
    """The tiers of one machine. Any thread may call them."""

    def __init__(
        self,
        config: StoreConfig,
        cell_bytes: int = CHUNK_BYTES,
        *,
        is_pinned: bool = True,
        keeps_chunks: bool = True,
        peers: Peers | None = None,
    ) -> None:
        """`is_pinned`: this process itself copies from host memory to a device.

        `keeps_chunks`: host memory keeps chunks for the next load. Not where the device is the CPU, which
        would hold models twice: chunks then pass through `CPU_HOST_BYTES` at most, and the page cache keeps
        them.
        `peers`: other nodes, for models at `hearth://DIGEST` and, on the head, in object storage.
        """
        assert keeps_chunks or not is_pinned, "pages that are pinned cannot be given back"
        self.keeps_chunks = keeps_chunks
        self.disk = DiskTier(Path(config.path).expanduser(), config.disk_bytes)
        self.disk.collect()  # chunks of models that were replaced or deleted
        self.prices = ChunkPrices(is_on_disk=self.disk.holds)
        host_bytes = config.host_bytes if keeps_chunks else min(config.host_bytes, CPU_HOST_BYTES)
        self.segment = Segment.create(host_bytes // cell_bytes, cell_bytes)
        if is_pinned:
            self.segment.pin_in_background()
        #: Reading a description takes milliseconds, too long for a cold start.
        #: Single operations of a dict are atomic and opening twice does no harm, so it needs no lock.
        self._opened: dict[Path, _Opened] = {}
        self._remotes: dict[RemoteAddress, RemoteFiles] = {}
        self.peers = peers
        self._known: Mapping[Digest, str] = {}
        reader = ChunkReader(
            self.disk,
            self.prices.of_disk_chunk,
            may_be_direct=keeps_chunks,
            disk_bytes_per_s=lambda: self.prices.bytes_per_s(Rung.DISK),
        )
        self.fetcher = Fetcher(self.segment, reader, self.prices, keeps_chunks=keeps_chunks)
        self._keeps_chunks = keeps_chunks

    def open(self, where: str | Path, weight: float = 1.0) -> StoredModel:
        """Open a converted model or adapter: its directory, its URL, or a version at that, `URL@DIGEST`.

        `hearth://DIGEST` is a model that other nodes have.
        All but the weights of a remote model is kept on disk. A URL is asked for its manifest each time; a
        version only if it is not on disk. `weight`: see `StoredModel`.
        """
        if "://" not in str(where):
            return self._open_described(Path(where).resolve(), weight)
        address = parse_address(str(where))
        if address.version is None:
            return self._admit(self._open_newest(address, weight))
        return self._open_version(address, weight)

    def set_known_models(self, where_by_digest: Mapping[Digest, str]) -> None:
        """Learn where models are that `find` may have to open, in the place of all known before."""
        self._known = where_by_digest

    def find(self, digest: Digest) -> StoredModel:
        """Return a model that is opened, known or described on disk. Raises ModelNotOpen, and as `open`."""
        for opened in list(self._opened.values()):
            if opened.model.manifest.digest == digest:
                return opened.model
        if digest not in self._known:
            for directory, manifest in self.disk.models().items():
                if manifest.digest == digest:
                    return StoredModel(directory.name, manifest, directory)
            raise ModelNotOpen(f"no model {digest} is known on this node")
        model = self.open(self._known[digest])
        if model.manifest.digest != digest:
            raise ModelNotOpen(f"`{self._known[digest]}` holds another version than {digest}")
        return model

    def resolve(self, where: str) -> str:
        """Keep the description of what a URL holds now, and return the address of that version, for `open`.

        An address that names its version stays what it is.
        """
        address = parse_address(where)
        if address.version is not None:
            self._open_version(address)
            return str(address)
        remote = RemoteModel(address.url)
        found = _read_description(remote)
        version = RemoteAddress(address.url, found.manifest.digest)
        self._keep_version(remote, found, description_directory(self.disk.root, version))
        return str(version)

    def _open_described(
        self, directory: Path, weight: float, remote: RemoteFiles | None = None
    ) -> StoredModel:
        known = self._opened.get(directory)
        if known is not None and known.is_current and known.model.weight == weight:
            return known.model
        stamps = {name: stamp_of(directory / name) for name in (MANIFEST, WEIGHTS)}
        manifest = read_description(directory)
        stamps |= {file.name: stamp_of(directory / file.name) for file in manifest.files}
        check_texts(manifest, directory)
        model = self._admit(StoredModel(directory.name, manifest, directory, remote, weight))
        self._opened[directory] = _Opened(stamps, model)
        return model

    def _admit(self, model: StoredModel) -> StoredModel:
        if model.manifest.chunk_bytes > self.segment.cell_bytes:
            raise StoreError(
                f"`{model.name}` has chunks of {model.manifest.chunk_bytes} bytes, a cell of host memory "
                f"holds {self.segment.cell_bytes}; convert it again with smaller chunks"
            )
        self.disk.register(model.directory, model.manifest)
        return model

    def fetch(self, model: StoredModel, chunks: Sequence[int], *, pass_through: bool = False) -> Fetch:
        return self.fetcher.fetch(model, chunks, pass_through=pass_through)

    def fetch_planned(self, model: StoredModel) -> Fetch | None:
        """Start fetching what a plan of the head names, in its order.

        None: there is no plan, another load follows it, or chunks would not stay until the load takes them.
        """
        if not isinstance(model.remote, PeerModel) or not self._keeps_all(model):
            return None
        ids = model.manifest.chunk_ids
        missing = set(ids) - {*self.fetcher.resident(ids), *self.disk.resident(ids)}
        order = model.remote.begin_plan([index for index, one in enumerate(ids) if one in missing])
        return self.fetcher.fetch_planned(model, order) if order else None

    def has_plan(self, model: StoredModel) -> bool:
        """True if some chunks of a model are still to come from certain nodes."""
        return isinstance(model.remote, PeerModel) and bool(model.remote.plan.order)

    def _keeps_all(self, model: StoredModel) -> bool:
        """True if host memory has room for a model, or the disk."""
        if self._keeps_chunks and len(model.manifest.chunks) <= self.segment.num_cells:
            return True
        return self.disk.capacity_bytes is None or model.manifest.num_bytes <= self.disk.capacity_bytes

    def end_plan(self, model: StoredModel) -> None:
        if isinstance(model.remote, PeerModel):
            model.remote.end_plan()

    def prefetch(self, model: StoredModel) -> Fetch | None:
        """Start fetching what host memory lacks of a model, behind all loads.

        None: nothing is missing, chunks would not stay, or the model does not fit.
        """
        missing = self._missing(model, range(len(model.manifest.chunks)))
        return self.fetcher.fetch(model, missing, is_prefetch=True) if missing else None

    def refill(self, model: StoredModel, passed_through: Sequence[int]) -> Fetch | None:
        """Start fetching chunks to stay which a load passed through; None as for `prefetch`."""
        missing = self._missing(model, passed_through)
        return self.fetcher.refill(model, missing) if missing else None

    def _missing(self, model: StoredModel, chunks: Sequence[int]) -> list[int]:
        ids = model.manifest.chunk_ids
        if not self._keeps_chunks or len(set(ids)) > self.segment.num_cells:
            return []
        indices = {ids[index]: index for index in chunks}
        resident = set(self.fetcher.resident(indices))
        return sorted(index for chunk_id, index in indices.items() if chunk_id not in resident)

    def host_bytes(self, model: StoredModel) -> int:
        sizes = {chunk.id: chunk.num_bytes for chunk in model.manifest.chunks}
        return sum(sizes[chunk_id] for chunk_id in self.fetcher.resident(sizes))

    def held(self) -> Iterator[HeldChunks]:
        """Yield which chunks lie in host memory and on disk, of all models opened or described on disk."""
        for digest, ids in {one.digest: one.chunk_ids for one in self.disk.models().values()}.items():
            in_host, on_disk = set(self.fetcher.resident(ids)), set(self.disk.resident(ids))
            yield HeldChunks(
                digest, _mask(one in in_host for one in ids), _mask(one in on_disk for one in ids)
            )

    def forget(self, where: str | Path) -> Path:
        """Forget a model that is no longer deployed; return the directory of its description.

        All that the disk keeps of a remote model is deleted; the files of a local one stay.
        """
        if is_url := "://" in str(where):
            address = parse_address(str(where))
            self._remotes.pop(address, None)
            directory = description_directory(self.disk.root, address)
        else:
            directory = Path(where).resolve()
        self._opened.pop(directory, None)
        self.prices.forget(directory)
        self.disk.forget(directory)
        if is_url:
            shutil.rmtree(directory, ignore_errors=True)
        self.disk.collect()
        return directory

    def loaded(self, record: LoadRecord) -> None:
        for rung, use in record.rungs.items():
            self.prices.moved(rung, use.num_bytes, use.seconds)
        log.info(
            "model_loaded model=%s bytes=%d load_s=%.3f first_layer_s=%.3f rungs=%s sources=%s",
            record.model,
            record.num_bytes,
            record.total_s,
            record.first_layer_s,
            ",".join(f"{rung}:{use.num_bytes}" for rung, use in record.rungs.items()),
            ",".join(f"{use.source}:{use.num_bytes}" for use in rung_bytes(record) if use.source),
        )

    @property
    def used_host_bytes(self) -> int:
        book = self.fetcher.book
        return (book.num_resident + book.num_filling) * self.segment.cell_bytes

    def close(self) -> None:
        self.fetcher.close()
        if self.peers is not None:
            self.peers.close()
        self.segment.close()

    def _open_newest(self, address: RemoteAddress, weight: float) -> StoredModel:
        remote, directory = self._remote(address), description_directory(self.disk.root, address)
        try:
            found = _read_description(remote)
            manifest = found.manifest
            if not found.is_in(directory):
                self._describe(remote, found, directory)
                self.disk.register(directory, manifest)
                self.disk.collect()
        except Unreachable as error:
            if not (directory / MANIFEST).is_file():
                raise
            log.warning("fallback description=disk model=%s reason=%s", directory.name, error)
            manifest = read_description(directory)
        return StoredModel(directory.name, manifest, directory, remote, weight)

    def _open_version(self, address: RemoteAddress, weight: float = 1.0) -> StoredModel:
        """Open one version, from disk if it is described there. Raises UpstreamChanged if it is gone."""
        remote, directory = self._remote(address), description_directory(self.disk.root, address)
        try:
            model = self._open_described(directory, weight, remote)
            if model.manifest.digest == address.version:
                if isinstance(remote, PeerModel):
                    remote.prepare(self.prices.bytes_per_s(Rung.DISK))
                return model
            reason = f"its digest is {model.manifest.digest}"
        except (BadCheckpoint, ChunkCorrupt) as error:
            reason = str(error)
        if directory.exists():
            log.warning("fallback description=upstream model=%s reason=%s", directory.name, reason)
        found = _read_description(remote)
        if found.manifest.digest != address.version:
            raise UpstreamChanged(
                f"`{address.url}` holds version {found.manifest.digest} now, and version {address.version} "
                f"is not whole on disk: {reason}; deploy the model again, or put that version back"
            )
        self._keep_version(remote, found, directory)
        return self._open_described(directory, weight, remote)

    def _remote(self, address: RemoteAddress) -> RemoteFiles:
        known = self._remotes.get(address)
        return self._remotes.setdefault(address, self._remote_files(address)) if known is None else known

    def _remote_files(self, address: RemoteAddress) -> RemoteFiles:
        if not address.url.startswith(PEERS):
            origin = RemoteModel(address.url)
            if self.peers is None or address.version is None:
                return origin
            return PeerModel(self.peers, Digest(address.version), origin)
        if self.peers is None:
            raise StoreError(f"`{address}` is a model of other nodes, and this one is in no cluster; join it")
        return PeerModel(self.peers, Digest(str(address.version)))

    def _keep_version(self, remote: RemoteFiles, found: _Description, directory: Path) -> None:
        if not found.is_in(directory):
            self._describe(remote, found, directory)
        if remote.rung is Rung.OBJECT and note_version(directory, found.manifest.digest) is None:
            write_upstream(directory, Upstream(found.manifest.digest))

    def _describe(self, remote: RemoteFiles, found: _Description, directory: Path) -> None:
        """Write a description. Where the disk is full, chunks give way: they can be fetched again."""
        num_bytes = len(found.text) + sum(file.num_bytes for file in found.manifest.files)
        try:
            self._write_description(remote, found, directory, num_bytes)
        except StoreFull as error:
            freed_bytes = self.disk.free(num_bytes, self.prices.of_disk_chunk)
            log.warning("disk_full model=%s evicted_bytes=%d reason=%s", directory.name, freed_bytes, error)
            if not freed_bytes:
                raise
            self._write_description(remote, found, directory, num_bytes)

    def _write_description(
        self, remote: RemoteFiles, found: _Description, directory: Path, num_bytes: int
    ) -> None:
        # Another thread or process that opens it at the same time waits, and finds it done.
        with staged(directory, num_bytes, overwrite=True, wait=True) as staging:
            for file in found.manifest.files:
                content = remote.read_file(file.name, file.num_bytes)
                if digest_of(content) != file.digest:
                    raise ChunkCorrupt(
                        f"`{remote.url}/{file.name}` hashes to {digest_of(content)}, its manifest says "
                        f"{file.digest}; upload the model again"
                    )
                staging.write_file(file.name, content)
            staging.write_file(MANIFEST, found.text)


@dataclass(frozen=True, slots=True)
class _Description:
    text: bytes
    manifest: StoredManifest

    def is_in(self, directory: Path) -> bool:
        """True if the directory holds this manifest, and whole all files that it names."""
        path = directory / MANIFEST
        is_same = path.is_file() and path.read_bytes() == self.text
        return is_same and not any(damage_of(file, directory) for file in self.manifest.files)


def _read_description(remote: RemoteFiles) -> _Description:
    text = remote.read_file(MANIFEST)
    return _Description(text, parse_description(text.decode(errors="replace"), f"{remote.url}/{MANIFEST}"))


def _mask(bits: Iterable[bool]) -> bytes:
    """Bit i of the mask, the lowest of the first byte first, is the i-th given."""
    given = list(bits)
    number = sum(1 << at for at, bit in enumerate(given) if bit)
    return number.to_bytes((len(given) + 7) // 8, "little")
