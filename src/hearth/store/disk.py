"""The disk rung: where on the local disk a chunk lies, and a bounded cache of those from object storage.

    root/models/NAME/manifest.json     a model; one that came from object storage has no weights.bin
    root/models/NAME/weights.bin
    root/chunks/ab/abcdef0123...       one chunk, named by its digest; whole or absent

Reads no chunk: whoever does finds out whether the bytes are right, and condemns the location if not.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from hearth.errors import HearthError, StoreError, StoreFull
from hearth.policy.memory.eviction import EvictionOrder, Price
from hearth.store.manifest import MANIFEST, WEIGHTS, Manifest, is_digest, read_manifest
from hearth.store.writer import NO_ROOM
from hearth.types import Digest

log = logging.getLogger(__name__)

#: A chunk is written within seconds. A temporary file that is older belongs to a process that is dead.
TEMPORARY_MAX_AGE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Location:
    """Where in a file a chunk lies."""

    path: Path
    offset: int
    num_bytes: int


@dataclass(slots=True)
class DiskCounters:
    """Counts of what a disk tier has done. Mutable; written only by the `DiskTier` that owns them."""

    num_hits: int = 0
    num_kept: int = 0
    num_evicted: int = 0
    num_condemned: int = 0
    num_collected: int = 0
    kept_bytes: int = 0
    evicted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Registered:
    """A model that the disk tier knows."""

    digest_by_offset: Mapping[int, Digest]
    weights_bytes: int  #: what its weights.bin takes of the quota


class DiskTier:
    """Chunks on the local disk, within a quota. Mutable; owned by one process, any thread of it may call.

    The quota covers chunk files and the weights.bin of models under the root. Only chunk files are
    evicted: a weights.bin may be the only copy. A reader that has an evicted file open reads it to its
    end, as POSIX keeps the bytes of a deleted file until the last descriptor is closed.
    """

    def __init__(self, root: Path, quota_bytes: int | None = None) -> None:
        self.root = root.resolve()
        self.capacity_bytes = quota_bytes  #: None: as much as the disk takes
        self.counters = DiskCounters()
        #: Loads on several threads look up, keep and condemn chunks in the same books. Files are deleted
        #: with the lock held, so that books and disk agree, and written without it.
        self._lock = Lock()
        self._models: dict[Path, _Registered] = {}
        #: Where files of weights hold each chunk, in the order of registration. No list is empty.
        self._locations: dict[Digest, list[Location]] = {}
        #: Size in bytes of every chunk file.
        self._files: dict[Digest, int] = {}
        #: Size in bytes of every chunk file that is being written. It counts as used already, and as long as
        #: a digest is in here nobody else touches its file.
        self._writing: dict[Digest, int] = {}
        #: Some of the chunk files, the first to be evicted first.
        self._order = EvictionOrder()
        self._scan()

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used_bytes()

    def register(self, directory: Path, manifest: Manifest) -> None:
        """Know the model in a directory, under the root or not, so that its chunks are no garbage.

        They can be located in its weights.bin if it has one. No byte of the weights is looked at.
        """
        directory = directory.resolve()
        weights = directory / WEIGHTS
        num_bytes = weights.stat().st_size if weights.is_file() else None
        digest_by_offset = {
            manifest.chunk_range(index).begin: chunk.digest for index, chunk in enumerate(manifest.chunks)
        }
        is_under_root = directory.is_relative_to(self.root)
        with self._lock:
            self._forget(directory)
            self._models[directory] = _Registered(digest_by_offset, (num_bytes or 0) if is_under_root else 0)
            if num_bytes is None:
                return
            for (offset, digest), chunk in zip(digest_by_offset.items(), manifest.chunks, strict=True):
                self._locations.setdefault(digest, []).append(Location(weights, offset, chunk.num_bytes))

    def forget(self, directory: Path) -> None:
        """Know the model in a directory no longer: the opposite of `register`. Deletes nothing."""
        with self._lock:
            self._forget(directory.resolve())

    def locate(self, digest: Digest) -> list[Location]:
        """Return all locations that should hold a chunk: its own file, then weights as they were registered.

        A chunk file may be evicted before it is opened.
        """
        with self._lock:
            locations = list(self._locations.get(digest, ()))
            if digest in self._files:
                locations.insert(0, Location(self._path(digest), 0, self._files[digest]))
                self._order.discard(digest)
            self.counters.num_hits += bool(locations)
            return locations

    def holds(self, digest: Digest) -> bool:
        """True if some location should hold the chunk. Counts no hit."""
        with self._lock:
            return digest in self._files or digest in self._locations

    def keep(self, digest: Digest, data: memoryview, price: Callable[[str], Price]) -> bool:
        """Write a chunk file, evicting the cheapest ones where the quota demands it.

        Returns False if the chunk is on the disk in any location, or another thread is writing it. `price` is
        called with the lock held. Raises StoreFull; then nothing is left behind.
        """
        with self._lock:
            if digest in self._files or digest in self._locations or digest in self._writing:
                return False
            self._make_room(data.nbytes, price)
            self._writing[digest] = data.nbytes
        is_kept = False
        try:
            _write(self._path(digest), data)
            is_kept = True
        finally:
            with self._lock:
                del self._writing[digest]
                if is_kept:
                    self._files[digest] = data.nbytes
                    self.counters.num_kept += 1
                    self.counters.kept_bytes += data.nbytes
        return True

    def condemn(self, location: Location) -> None:
        """Give up a location whose bytes are wrong or cannot be read.

        A chunk file is deleted; a location in a file of weights is left out until its model is registered
        again.
        """
        with self._lock:
            file, model = Digest(location.path.name), self._models.get(location.path.parent)
            if file in self._files and location.path == self._path(file):
                self._delete(file)
                self.counters.num_condemned += 1
            elif model and location.offset in model.digest_by_offset:
                digest = model.digest_by_offset[location.offset]
                self.counters.num_condemned += location in self._locations.get(digest, ())
                self._remove_locations(digest, lambda other: other == location)

    def collect(self) -> int:
        """Delete the chunk files that no model refers to, registered or under the root; return the bytes.

        While the description of a model cannot be read, nobody knows which chunks are its own, and all stay.
        """
        models = list(self._read_models())
        described = [manifest for _, manifest in models if manifest is not None]
        if len(described) < len(models):
            return 0
        with self._lock:
            wanted = {chunk.digest for manifest in described for chunk in manifest.chunks}
            wanted.update(*(model.digest_by_offset.values() for model in self._models.values()))
            garbage = [digest for digest in self._files if digest not in wanted]
            freed_bytes = sum(self._delete(digest) for digest in garbage)
            self.counters.num_collected += len(garbage)
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
                elif is_digest(path.name) and path == self._path(Digest(path.name)):
                    self._files[Digest(path.name)] = path.stat().st_size

    def _read_models(self) -> Iterator[tuple[Path, Manifest | None]]:
        """Yield the models under the root; None stands for a description that cannot be read."""
        for path in sorted(self.root.glob(f"models/[!.]*/{MANIFEST}")):
            try:
                yield path.parent, read_manifest(path.parent)
            except HearthError as error:
                log.warning("model_skipped directory=%s reason=%s", path.parent, error)
                yield path.parent, None

    def _path(self, digest: Digest) -> Path:
        return self.root / "chunks" / digest[:2] / digest

    # Below here the lock is held.

    def _used_bytes(self) -> int:
        weights_bytes = sum(model.weights_bytes for model in self._models.values())
        return weights_bytes + sum(self._files.values()) + sum(self._writing.values())

    def _make_room(self, num_bytes: int, price: Callable[[str], Price]) -> None:
        """Evict until `num_bytes` fit, or raise before anything is evicted."""
        if self.capacity_bytes is None:
            return
        excess_bytes = self._used_bytes() + num_bytes - self.capacity_bytes
        if excess_bytes > sum(self._files.values()):
            raise StoreFull(
                f"no room for a chunk of {num_bytes} bytes in `{self.root}`: {self._used_bytes()} bytes of "
                f"{self.capacity_bytes} are used, too few of them by chunks that can be evicted; "
                "raise the quota or delete a model"
            )
        while excess_bytes > 0:
            cheapest = self._order.pop(self._files, price)
            assert cheapest is not None, f"books say {excess_bytes=} can be evicted: {self._files}"
            evicted_bytes = self._delete(Digest(cheapest))
            excess_bytes -= evicted_bytes
            self.counters.num_evicted += 1
            self.counters.evicted_bytes += evicted_bytes

    def _delete(self, digest: Digest) -> int:
        """Delete a chunk file and return its bytes."""
        try:
            self._path(digest).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"`{self._path(digest)}` cannot be deleted: {error}") from error
        self._order.discard(digest)
        return self._files.pop(digest)

    def _forget(self, directory: Path) -> None:
        model = self._models.pop(directory, None)
        for digest in model.digest_by_offset.values() if model else ():
            self._remove_locations(digest, lambda location: location.path == directory / WEIGHTS)

    def _remove_locations(self, digest: Digest, is_gone: Callable[[Location], bool]) -> None:
        locations = [location for location in self._locations.pop(digest, ()) if not is_gone(location)]
        if locations:
            self._locations[digest] = locations


def _write(path: Path, data: memoryview) -> None:
    """Write a file under a temporary name, to the disk for certain, and rename it: it is whole or absent."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb", buffering=0) as file:
            rest = data.cast("B")
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StoreFull(
                f"no room for a chunk of {data.nbytes} bytes in `{path.parent}`: {error.strerror}; "
                "free some disk, or set a quota below what it has"
            ) from error
        raise StoreError(f"a chunk of {data.nbytes} bytes cannot be written to `{path}`: {error}") from error
    finally:
        with suppress(OSError):  # after a failure, that is the one to tell
            temporary.unlink()
