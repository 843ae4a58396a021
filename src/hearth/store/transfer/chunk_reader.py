"""Reads one chunk into a buffer, from disk, other nodes or object storage. Schedules nothing, keeps no books.

Wrong bytes never leave this module: the place they came from is struck off, the next one is tried, and nodes
and object storage are asked again. What comes from outside this machine is checked by BLAKE3 each time; for
files, see `verified_read.py`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from functools import partial

import xxhash

from hearth.core.errors import ChunkCorrupt, ChunkMissing, HearthError, StoreError, UpstreamChanged
from hearth.core.types import Rung
from hearth.policy.memory.byte_eviction import Price
from hearth.store.format.manifest import WEIGHTS
from hearth.store.tiers.disk import DiskLocation, DiskTier
from hearth.store.tiers.model import RemoteFiles, StoredModel
from hearth.store.tiers.upstream import note_version, version_at
from hearth.store.tiers.verified_read import read_verified
from hearth.store.transfer.record import Delivery

#: How often wrong bytes may come for one chunk. `RemoteFiles` retry lost answers.
MAX_WRONG_ANSWERS = 3

log = logging.getLogger(__name__)


class ChunkReader:
    """Reads chunks from disk, then from elsewhere. Any thread may call it."""

    def __init__(
        self,
        disk: DiskTier,
        price: Callable[[str], Price],
        *,
        may_be_direct: bool = True,
        disk_bytes_per_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """`price` of a chunk on disk decides evictions there. `may_be_direct`: see `read_verified`.

        Another node's host memory is preferred if it is faster than `disk_bytes_per_s`.
        """
        self._disk = disk
        self._price = price
        self._may_be_direct = may_be_direct
        self._disk_bytes_per_s = disk_bytes_per_s
        self._is_full_known = False  #: a full or broken disk is logged once, not once per chunk
        self._telling = threading.Lock()  #: guards `_is_full_known`, for many readers

    def is_far(self, model: StoredModel, index: int) -> bool:
        if model.remote is None:
            return False
        is_on_disk = self._disk.holds(model.manifest.chunk_ids[index])
        return not is_on_disk or self._is_faster(model, index)

    def _is_faster(self, model: StoredModel, index: int) -> bool:
        return model.remote is not None and model.remote.is_faster(index, self._disk_bytes_per_s())

    def deliver(
        self, model: StoredModel, index: int, buffer: memoryview, is_wanted: Callable[[], bool]
    ) -> Delivery:
        """Fill `buffer` with a verified chunk; give up when `is_wanted` turns false. Raises StoreError."""
        failures: list[StoreError] = []
        from_disk = partial(self._from_disk, model, index, buffer, failures)
        from_remote = partial(self._from_remote, model, index, buffer, failures, is_wanted)
        is_on_disk = self._disk.holds(model.manifest.chunk_ids[index])
        delivery = from_remote(is_host_only=True) if is_on_disk and self._is_faster(model, index) else None
        delivery = delivery or from_disk() or from_remote()
        if delivery is None:
            raise _not_found(model, index, failures)
        return delivery

    def keep(self, model: StoredModel, index: int, data: memoryview) -> None:
        """Write a chunk from elsewhere to disk. A failure is logged and counted: no load depends on it."""
        if self._disk.holds(model.manifest.chunk_ids[index]):
            return
        failure = None
        try:
            xxh3 = xxhash.xxh3_128_hexdigest(data)
            self._disk.keep(model.manifest.chunk_ids[index], xxh3, data, self._price)
        except StoreError as error:
            failure = error
        with self._telling:
            if failure is not None and not self._is_full_known:
                log.warning("chunks_not_kept model=%s reason=%s", model.name, failure)
            self._is_full_known = failure is not None
            self._disk.counters.num_not_kept += failure is not None

    def _from_disk(
        self, model: StoredModel, index: int, buffer: memoryview, failures: list[StoreError]
    ) -> Delivery | None:
        chunk = model.manifest.chunks[index]
        for place in self._disk.locate(model.manifest.chunk_ids[index], model.directory):
            began_s = time.perf_counter()
            try:
                read = read_verified(
                    place.path,
                    place.offset,
                    buffer,
                    chunk.digest,
                    place.known,
                    may_be_direct=self._may_be_direct,
                )
            except StoreError as error:
                failures.append(error)
                if isinstance(error, ChunkCorrupt | ChunkMissing):
                    log.warning("place_condemned path=%s reason=%s", place.path, error)
                    self._condemn(place)
                continue
            if read.known is not None and read.known != place.known:
                self._disk.verified(place, read.known)
            return Delivery(Rung.DISK, len(buffer), began_s, read.read_s, read.verify_s, len(failures))
        return None

    def _condemn(self, place: DiskLocation) -> None:
        try:
            self._disk.condemn(place)
        except StoreError as error:  # the next read condemns it again
            log.warning("place_stays path=%s reason=%s", place.path, error)

    def _from_remote(
        self,
        model: StoredModel,
        index: int,
        buffer: memoryview,
        failures: list[StoreError],
        is_wanted: Callable[[], bool],
        *,
        is_host_only: bool = False,
    ) -> Delivery | None:
        remote = model.remote
        if remote is None:
            return None
        chunk = model.manifest.chunks[index]
        for num_wrong in range(MAX_WRONG_ANSWERS):
            began_s = time.perf_counter()
            try:
                arrival = remote.read_chunk(
                    model.manifest, index, buffer, is_wanted, is_host_only=is_host_only
                )
            except StoreError as error:
                failures.append(error)
                if isinstance(error, ChunkMissing) and (change := _change_upstream(model, remote)):
                    failures.append(change)
                return None
            found, source = arrival.digest, arrival.source
            read_s = time.perf_counter() - began_s - arrival.hash_s
            if found == chunk.digest:
                node = source if arrival.rung is Rung.PEER else ""
                return Delivery(
                    arrival.rung, len(buffer), began_s, read_s, arrival.hash_s, len(failures), node
                )
            log.warning(
                "%s_corrupt model=%s chunk=%d source=%s found=%s",
                arrival.rung,
                model.name,
                index,
                source or remote.url,
                found,
            )
            failures.append(
                ChunkCorrupt(
                    f"`{source or remote.url}` sent bytes that hash to {found}, stored: {chunk.digest}"
                )
            )
            remote.report_corrupt(source)
            if num_wrong == 0 and (change := _change_upstream(model, remote)):
                failures.append(change)
                return None  # asking again would bring the same
        return None


def _change_upstream(model: StoredModel, remote: RemoteFiles) -> UpstreamChanged | None:
    if remote.rung is not Rung.OBJECT:  # nodes are asked by the digest
        return None
    try:
        version = version_at(remote)
    except HearthError:  # the failure before says what is wrong
        return None
    note_version(model.directory, version)
    if version == model.manifest.digest:
        return None
    return UpstreamChanged(f"`{remote.url}` holds version {version} now, this is {model.manifest.digest}")


def _not_found(model: StoredModel, index: int, failures: list[StoreError]) -> StoreError:
    """Return the error of a chunk that no rung has: the kind of the last failure, the text of all."""
    tensors = model.manifest.tensors_in(index)
    tensors = tensors if len(tensors) < 3 else [tensors[0], tensors[-1]]
    nowhere = f"no {WEIGHTS} in `{model.directory}` is known to be good, and it came from no URL"
    tried = "; ".join(str(failure) for failure in failures) or nowhere
    kind = type(failures[-1]) if failures else ChunkMissing
    remedy = "run `hearth verify` on the model, and convert, fetch or deploy it again"
    if kind is UpstreamChanged:
        remedy = "deploy the model again, or put the version back; what is cached of it stays"
    return kind(
        f"chunk {index} of `{model.name}` (`{'` to `'.join(tensors)}`) could not be read: {tried}; {remedy}"
    )
