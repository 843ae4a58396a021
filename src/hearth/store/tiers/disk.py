"""The disk rung: where on the local disk a chunk lies, and a bounded cache of those from object storage.

    root/models/NAME/manifest.json     a model; one that came from object storage has no weights.bin
    root/models/NAME/weights.bin
    root/chunks/ab/DIGEST-BYTES-XXH3   one chunk that came from object storage; whole or absent
    root/hashes/ab12...                the xxh3 of chunks in files of weights (`local_hashes.py`)

Reads no chunk: the reader verifies the bytes, condemns the location if they are wrong, and reports the xxh3
if it was not known.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

from hearth.core.atomic_file import write_file
from hearth.core.errors import HearthError, StoreError, StoreFull
from hearth.core.types import ChunkId
from hearth.policy.memory.byte_eviction import ChunkEvictionOrder, Price
from hearth.store.format.description import read_description
from hearth.store.format.file_stamp import FileStamp, is_private, stamp_of
from hearth.store.format.local_hashes import collect_hashes, forget_hashes, read_hashes, write_hashes
from hearth.store.format.manifest import MANIFEST, WEIGHTS, StoredManifest
from hearth.store.format.writer import NO_ROOM
from hearth.store.tiers.verified_read import LocalHash

log = logging.getLogger(__name__)

#: A chunk is written within seconds. A temporary file that is older belongs to a process that is dead.
TEMPORARY_MAX_AGE_S = 3600.0

_CHUNK_FILE = re.compile("([0-9a-f]{64}-[0-9]{1,15})-([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class DiskLocation:
    path: Path
    offset: int
    num_bytes: int
    known: LocalHash | None = field(default=None, compare=False)  #: None: only the chunk's digest is known


@dataclass(slots=True)
class DiskCounters:
    num_hits: int = 0
    num_kept: int = 0
    num_not_kept: int = 0  #: the disk was full, or failed; counted by the reader
    num_evicted: int = 0
    num_condemned: int = 0
    num_collected: int = 0
    kept_bytes: int = 0
    evicted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _ChunkFile:
    num_bytes: int
    xxh3: str
    is_sure: bool  #: only this user could have written it; False: only BLAKE3 counts


@dataclass(slots=True)
class _Registered:
    """A model that the disk tier knows. Mutable; written only by the tier, under its lock."""

    manifest: StoredManifest
    weights_bytes: int  #: what its weights.bin takes of the quota
    stamp: FileStamp | None  #: of its weights.bin; None: it has none
    #: The xxh3 of chunks in its weights.bin, as far as known. A chunk that stands there twice is read once.
    xxh3: dict[ChunkId, str] = field(default_factory=dict)


class DiskTier:
    """Chunks on the local disk, within a quota. Mutable; owned by one process, any thread of it may call.

    The quota covers chunk files and the weights.bin of models under the root. Only chunk files are
    evicted: a weights.bin may be the only copy. A reader that has an evicted file open reads it to its end.
    """

    def __init__(self, root: Path, quota_bytes: int | None = None) -> None:
        self.root = root.resolve()
        self.capacity_bytes = quota_bytes  #: None: as much as the disk takes
        self.counters = DiskCounters()
        #: Guards the books, for loads on many threads. Files are deleted with the lock held, so that books
        #: and disk agree, and written without it.
        self._lock = Lock()
        self._models: dict[Path, _Registered] = {}
        #: Where files of weights hold each chunk, in the order of registration. No list is empty.
        self._locations: dict[ChunkId, list[DiskLocation]] = {}
        self._files: dict[ChunkId, _ChunkFile] = {}
        #: Bytes of every chunk file being written. They count as used, and no other thread touches the file.
        self._writing: dict[ChunkId, int] = {}
        self._order = ChunkEvictionOrder()
        self._scan()

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used_bytes()

    def register(self, directory: Path, manifest: StoredManifest) -> None:
        """Know the model in a directory, under the root or not, so that its chunks are not collected.

        They are located in its weights.bin if it has one. Reads no weights.
        """
        directory = directory.resolve()
        weights = directory / WEIGHTS
        stamp = stamp_of(weights) if weights.is_file() else None
        found = None if stamp is None else read_hashes(self.root, directory, manifest, stamp)
        is_under_root = directory.is_relative_to(self.root)
        with self._lock:
            self._forget(directory)
            weights_bytes = stamp.num_bytes if stamp is not None and is_under_root else 0
            model = self._models[directory] = _Registered(manifest, weights_bytes, stamp)
            if stamp is None:
                return
            for index, chunk in enumerate(manifest.chunks):
                offset, known = index * manifest.chunk_bytes, None
                if found is not None:
                    model.xxh3[chunk.id] = found.xxh3[index]
                    known = LocalHash(found.xxh3[index], stamp)
                location = DiskLocation(weights, offset, chunk.num_bytes, known)
                self._locations.setdefault(chunk.id, []).append(location)

    def forget(self, directory: Path) -> None:
        directory = directory.resolve()
        with self._lock:
            self._forget(directory)
        forget_hashes(self.root, directory)

    def locate(self, chunk_id: ChunkId, directory: Path | None = None) -> list[DiskLocation]:
        """Return all locations that should hold a chunk, the trustier first.

        The weights in `directory`, the model's own, come first, so that a damaged or slow copy concerns only
        its model. Then the chunk's own file, which may be evicted before it is opened, and other weights.
        """
        with self._lock:
            locations = list(self._locations.get(chunk_id, ()))
            if chunk_id in self._files:
                file = self._files[chunk_id]
                known = LocalHash(file.xxh3, None) if file.is_sure else None
                locations.insert(0, DiskLocation(self._path(chunk_id, file), 0, file.num_bytes, known))
                self._order.discard(chunk_id)
            self.counters.num_hits += bool(locations)
            if len(locations) > 1:
                locations.sort(key=lambda location: location.path.parent != directory)
            return locations

    def holds(self, chunk_id: ChunkId) -> bool:
        return bool(self.resident([chunk_id]))

    def resident(self, chunk_ids: Iterable[ChunkId]) -> list[ChunkId]:
        with self._lock:
            return [one for one in chunk_ids if one in self._files or one in self._locations]

    def models(self) -> dict[Path, StoredManifest]:
        """Return what is registered, by directory: all models under the root, and others that were opened."""
        with self._lock:
            return {directory: model.manifest for directory, model in self._models.items()}

    def verified(self, location: DiskLocation, known: LocalHash) -> None:
        """Learn the xxh3 of a chunk in a file of weights, whose digest was found right.

        Once all of a file's are known, they are kept for the next process.
        """
        with self._lock:
            directory = location.path.parent
            model = self._models.get(directory)
            if model is None or known.stamp is None or known.stamp != model.stamp:
                return  # it has changed since it was registered
            index = location.offset // model.manifest.chunk_bytes
            locations = self._locations.get(model.manifest.chunk_ids[index], [])
            if location not in locations:
                return
            locations[locations.index(location)] = replace(location, known=known)
            model.xxh3[model.manifest.chunk_ids[index]] = known.xxh3
            if model.xxh3.keys() < set(model.manifest.chunk_ids):
                return
            xxh3 = [model.xxh3[chunk_id] for chunk_id in model.manifest.chunk_ids]
        write_hashes(self.root, directory, model.manifest, known.stamp, xxh3)

    def keep(self, chunk_id: ChunkId, xxh3: str, data: memoryview, price: Callable[[str], Price]) -> bool:
        """Write a verified chunk to a file of its own, evicting the cheapest where the quota demands it.

        Returns False if the chunk is on the disk in any location, or another thread is writing it. `price` is
        called with the lock held. Raises StoreFull; then nothing is left behind.
        """
        with self._lock:
            if chunk_id in self._files or chunk_id in self._locations or chunk_id in self._writing:
                return False
            self._make_room(data.nbytes, price)
            self._writing[chunk_id] = data.nbytes
        is_kept = False
        file = _ChunkFile(data.nbytes, xxh3, is_sure=False)
        try:
            _write(self._path(chunk_id, file), data)
            file = replace(file, is_sure=self._is_private(self._path(chunk_id, file)))
            is_kept = True
        finally:
            with self._lock:
                del self._writing[chunk_id]
                if is_kept:
                    self._files[chunk_id] = file
                    self.counters.num_kept += 1
                    self.counters.kept_bytes += data.nbytes
        return True

    def free(self, num_bytes: int, price: Callable[[str], Price]) -> int:
        """Evict the cheapest chunk files of so many bytes, or all of them; return the bytes."""
        with self._lock:
            return self._evict(num_bytes, price)

    def condemn(self, location: DiskLocation) -> None:
        """Delete a bad chunk file; leave bad weights out until their model is registered again."""
        with self._lock:
            chunk_id, model = _chunk_of(location.path), self._models.get(location.path.parent)
            file = None if chunk_id is None else self._files.get(chunk_id)
            if chunk_id is not None and file is not None and location.path == self._path(chunk_id, file):
                self._delete(chunk_id)
                self.counters.num_condemned += 1
            elif model is not None and location.path.name == WEIGHTS:
                wanted = model.manifest.chunk_ids[location.offset // model.manifest.chunk_bytes]
                self.counters.num_condemned += location in self._locations.get(wanted, ())
                self._remove_locations(wanted, lambda other: other == location)

    def collect(self) -> int:
        """Delete the chunk files that no model refers to, registered or under the root; return the bytes.

        While a description cannot be read, all chunks stay: some may be its own.
        """
        models = list(self._read_models())
        described = [manifest for _, manifest in models if manifest is not None]
        if len(described) < len(models):
            return 0
        with self._lock:
            wanted = {chunk_id for manifest in described for chunk_id in manifest.chunk_ids}
            wanted.update(*(model.manifest.chunk_ids for model in self._models.values()))
            garbage = [chunk_id for chunk_id in self._files if chunk_id not in wanted]
            freed_bytes = sum(self._delete(chunk_id) for chunk_id in garbage)
            self.counters.num_collected += len(garbage)
        collect_hashes(self.root)
        return freed_bytes

    def _scan(self) -> None:
        for directory, manifest in self._read_models():
            if manifest is not None:
                self.register(directory, manifest)
        for path in sorted(self.root.glob("chunks/*/*")):
            with suppress(FileNotFoundError):  # another process may tidy up as well
                if path.name.startswith("."):
                    if time.time() - path.stat().st_mtime > TEMPORARY_MAX_AGE_S:
                        path.unlink()
                elif (chunk_id := _chunk_of(path)) is not None:
                    xxh3 = path.name.rpartition("-")[2]
                    file = _ChunkFile(path.stat().st_size, xxh3, self._is_private(path))
                    if path == self._path(chunk_id, file):
                        self._files[chunk_id] = file

    def _read_models(self) -> Iterator[tuple[Path, StoredManifest | None]]:
        for path in sorted(self.root.glob(f"models/[!.]*/{MANIFEST}")):
            try:
                yield path.parent, read_description(path.parent)
            except HearthError as error:
                log.warning("model_skipped directory=%s reason=%s", path.parent, error)
                yield path.parent, None

    def _is_private(self, path: Path) -> bool:
        return all(map(is_private, (self.root, self.root / "chunks", path.parent)))

    def _path(self, chunk_id: ChunkId, file: _ChunkFile) -> Path:
        return self.root / "chunks" / chunk_id[:2] / f"{chunk_id}-{file.xxh3}"

    # Below here the lock is held.

    def _used_bytes(self) -> int:
        weights_bytes = sum(model.weights_bytes for model in self._models.values())
        return weights_bytes + self._file_bytes() + sum(self._writing.values())

    def _file_bytes(self) -> int:
        return sum(file.num_bytes for file in self._files.values())

    def _make_room(self, num_bytes: int, price: Callable[[str], Price]) -> None:
        """Evict until `num_bytes` fit, or raise before anything is evicted."""
        if self.capacity_bytes is None:
            return
        excess_bytes = self._used_bytes() + num_bytes - self.capacity_bytes
        if excess_bytes > self._file_bytes():
            raise StoreFull(
                f"no room for a chunk of {num_bytes} bytes in `{self.root}`: {self._used_bytes()} bytes of "
                f"{self.capacity_bytes} are used, too few of them by chunks that can be evicted; "
                "raise the quota or delete a model"
            )
        self._evict(excess_bytes, price)

    def _evict(self, num_bytes: int, price: Callable[[str], Price]) -> int:
        evicted_bytes = 0
        while evicted_bytes < num_bytes and (cheapest := self._order.pop(self._files, price)) is not None:
            num_freed = self._delete(ChunkId(cheapest))
            evicted_bytes += num_freed
            self.counters.num_evicted += 1
            self.counters.evicted_bytes += num_freed
        return evicted_bytes

    def _delete(self, chunk_id: ChunkId) -> int:
        path = self._path(chunk_id, self._files[chunk_id])
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"`{path}` cannot be deleted: {error}") from error
        self._order.discard(chunk_id)
        return self._files.pop(chunk_id).num_bytes

    def _forget(self, directory: Path) -> None:
        model = self._models.pop(directory, None)
        for chunk_id in model.manifest.chunk_ids if model else ():
            self._remove_locations(chunk_id, lambda location: location.path == directory / WEIGHTS)

    def _remove_locations(self, chunk_id: ChunkId, is_gone: Callable[[DiskLocation], bool]) -> None:
        locations = [location for location in self._locations.pop(chunk_id, ()) if not is_gone(location)]
        if locations:
            self._locations[chunk_id] = locations


def _chunk_of(path: Path) -> ChunkId | None:
    found = _CHUNK_FILE.fullmatch(path.name)
    return ChunkId(found[1]) if found else None


def _write(path: Path, data: memoryview) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(path, [data])
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StoreFull(
                f"no room for a chunk of {data.nbytes} bytes in `{path.parent}`: {error.strerror}; "
                "free some disk, or set a quota below what it has"
            ) from error
        raise StoreError(f"a chunk of {data.nbytes} bytes cannot be written to `{path}`: {error}") from error
