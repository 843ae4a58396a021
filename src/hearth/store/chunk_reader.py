"""Reads one chunk from the nearest rung that has it whole into a buffer. Schedules nothing, keeps no books.

The order is disk, then object storage. Bytes that do not match their hash never leave this module: the place
they came from is struck off, the next one is tried, and object storage is asked again, for its errors pass.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from hearth.errors import ChunkCorrupt, ChunkMissing, StoreError
from hearth.policy.memory.eviction import Price
from hearth.store.disk import DiskTier, Location
from hearth.store.manifest import WEIGHTS, digest_of
from hearth.store.model import StoredModel
from hearth.store.record import Delivery
from hearth.store.verified_read import read_verified
from hearth.types import Digest, Rung

#: How often object storage may send wrong bytes for one chunk; lost answers are retried below this level.
MAX_WRONG_ANSWERS = 3

log = logging.getLogger(__name__)


class ChunkReader:
    """Reads chunks from disk, then from object storage. Any thread may call it."""

    def __init__(self, disk: DiskTier, price: Callable[[str], Price], *, may_be_direct: bool = True) -> None:
        """Read from `disk` first; `price` says what a chunk there is worth, should another need its room.

        `may_be_direct`: see `read_verified`.
        """
        self._disk = disk
        self._price = price
        self._may_be_direct = may_be_direct
        self._is_full_known = False  #: a full or broken disk is worth one line, not one per chunk
        self._telling = threading.Lock()  #: guards `_is_full_known`: readers find out at the same moment

    def deliver(
        self, model: StoredModel, index: int, buffer: memoryview, is_wanted: Callable[[], bool]
    ) -> Delivery:
        """Fill `buffer` with a verified chunk of the model; give up when nobody wants the chunk any more.

        Raises:
            StoreError: no rung has it; the message says what was tried.
        """
        digest = model.manifest.chunks[index].digest
        failures: list[StoreError] = []
        delivery = self._from_disk(digest, buffer, failures) or self._from_object(
            model, index, buffer, failures, is_wanted
        )
        if delivery is None:
            raise _nobody_has_it(model, index, failures)
        return delivery

    def keep(self, model: StoredModel, index: int, data: memoryview) -> None:
        """Write a chunk from object storage to disk, if the disk takes it: no load depends on that."""
        digest = model.manifest.chunks[index].digest
        failure = None
        try:
            self._disk.keep(digest, data, self._price)
        except StoreError as error:
            failure = error
        with self._telling:
            if failure is not None and not self._is_full_known:
                log.warning("chunks_not_kept model=%s reason=%s", model.name, failure)
            self._is_full_known = failure is not None

    def _from_disk(self, digest: Digest, buffer: memoryview, failures: list[StoreError]) -> Delivery | None:
        for place in self._disk.locate(digest):
            began_s = time.perf_counter()
            try:
                times = read_verified(
                    place.path, place.offset, buffer, digest, may_be_direct=self._may_be_direct
                )
            except StoreError as error:
                failures.append(error)
                if isinstance(error, ChunkCorrupt | ChunkMissing):
                    log.warning("place_condemned path=%s reason=%s", place.path, error)
                    self._condemn(place)
                continue
            return Delivery(Rung.DISK, len(buffer), began_s, times.read_s, times.verify_s, len(failures))
        return None

    def _condemn(self, place: Location) -> None:
        try:
            self._disk.condemn(place)
        except StoreError as error:  # it stays, and will be found out again
            log.warning("place_stays path=%s reason=%s", place.path, error)

    def _from_object(
        self,
        model: StoredModel,
        index: int,
        buffer: memoryview,
        failures: list[StoreError],
        is_wanted: Callable[[], bool],
    ) -> Delivery | None:
        if model.remote is None:
            return None
        chunk, part = model.manifest.chunks[index], model.manifest.chunk_range(index)
        for _ in range(MAX_WRONG_ANSWERS):
            began_s = time.perf_counter()
            try:
                model.remote.read_into(part.begin, buffer, is_wanted)
            except StoreError as error:
                failures.append(error)
                return None
            read_s = time.perf_counter() - began_s
            found = digest_of(buffer)
            verify_s = time.perf_counter() - began_s - read_s
            if found == chunk.digest:
                return Delivery(Rung.OBJECT, len(buffer), began_s, read_s, verify_s, len(failures))
            log.warning("object_corrupt model=%s chunk=%d found=%s", model.name, index, found)
            failures.append(
                ChunkCorrupt(f"`{model.remote.url}` sent bytes that hash to {found}, stored: {chunk.digest}")
            )
        return None


def _nobody_has_it(model: StoredModel, index: int, failures: list[StoreError]) -> StoreError:
    """Return the error of a chunk that no rung has: the last failure's kind, the text of all failures."""
    tensors = model.manifest.tensors_in(index)
    tensors = tensors if len(tensors) < 3 else [tensors[0], tensors[-1]]
    nowhere = f"no {WEIGHTS} in `{model.directory}` is known to be good, and it came from no URL"
    tried = "; ".join(str(failure) for failure in failures) or nowhere
    kind = type(failures[-1]) if failures else ChunkMissing
    return kind(
        f"chunk {index} of `{model.name}` (`{'` to `'.join(tensors)}`) cannot be had: {tried}; "
        "run `hearth verify` on the model and convert or fetch it again"
    )
