"""The price of each chunk in its tier: the reload costs of the models that it belongs to. Evicts nothing.

Whose demand prices a chunk: that of *requests*, which the gateway tells. A model that is constantly busy on a
device is never loaded, yet its chunks must not age in host memory: when its worker is lost, or the model is
paused, they are wanted at once. Loads are counted too, for a process without a gateway and for the moment
before it tells; the larger of both estimates holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from hearth.core.types import ChunkId, Digest, Rung
from hearth.policy.memory.byte_eviction import Price, tail_first
from hearth.policy.memory.demand import Demand
from hearth.policy.memory.reload_cost import HORIZON_S, ReloadCosts, reload_cost
from hearth.store.tiers.model import StoredModel


@dataclass(slots=True)
class _PricedChunk:
    num_bytes: int
    #: The chunk's first position in each of the models that share it, by the models' digests.
    positions: dict[Digest, int] = field(default_factory=dict)


class ChunkPrices:
    """The price of every chunk of the models that were loaded here. Mutable; any thread may call it.

    A model is its manifest's digest: names and directories are reused.
    """

    def __init__(
        self,
        clock_s: Callable[[], float] = time.monotonic,
        is_on_disk: Callable[[ChunkId], bool] = lambda _: False,
    ) -> None:
        """`is_on_disk` is called without this object's lock: the disk asks for prices under its own."""
        self._clock_s = clock_s
        self._is_on_disk = is_on_disk
        self._costs = ReloadCosts()  #: the demand of requests, and the speed of rungs
        self._loads = Demand()
        self._chunks: dict[ChunkId, _PricedChunk] = {}
        #: Each model's copies by directory, as they were last loaded: they share chunks and demand, but one
        #: may be remote or weigh more. Every model has a copy, and its chunks are in `_chunks`.
        self._copies: dict[Digest, dict[Path, StoredModel]] = {}
        self._digests: dict[Path, Digest] = {}
        self._lock = Lock()

    def load_began(self, model: StoredModel) -> None:
        digest = model.manifest.digest
        with self._lock:
            self._loads.arrived(digest, self._clock_s())
            if digest not in self._copies:
                self._enter(model)
            before = self._digests.get(model.directory)
            if before is not None and before != digest:
                self._leave(before, model.directory)
            self._digests[model.directory] = digest
            self._copies[digest][model.directory] = model

    def requests_came(self, digest: Digest, num_requests: int) -> None:
        """Count requests for a model since the last call; of one that was never loaded nothing is priced."""
        with self._lock:
            if digest in self._copies:
                self._costs.asked(digest, self._clock_s(), num_requests)

    def forget(self, directory: Path) -> None:
        """Forget the model of a directory that is no longer deployed; shared chunks keep others' prices."""
        with self._lock:
            digest = self._digests.pop(directory, None)
            if digest is not None:
                self._leave(digest, directory)

    def moved(self, rung: Rung, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._costs.moved(rung, num_bytes, seconds)

    def bytes_per_s(self, rung: Rung) -> float:
        with self._lock:
            return self._costs.bytes_per_s(rung)

    def of_host_chunk(self, chunk_id: str) -> Price:
        is_on_disk = self._is_on_disk(ChunkId(chunk_id))
        return self._price(
            chunk_id, lambda model: Rung.DISK if is_on_disk else _remote_rung(model, Rung.DISK)
        )

    def of_disk_chunk(self, chunk_id: str) -> Price:
        return self._price(chunk_id, lambda model: _remote_rung(model, Rung.OBJECT))

    def _price(self, chunk_id: str, below: Callable[[StoredModel], Rung]) -> Price:
        with self._lock:
            chunk = self._chunks.get(ChunkId(chunk_id))
            if chunk is None:
                return tail_first(0.0, 0)
            now_s = self._clock_s()
            cost = 0.0
            for member in chunk.positions:
                p_loaded = self._loads.probability(member, now_s, HORIZON_S)
                p_wanted = max(p_loaded, self._costs.p_wanted(member, now_s))
                cost += max(
                    reload_cost(p_wanted, chunk.num_bytes / self._costs.bytes_per_s(below(copy)), copy.weight)
                    for copy in self._copies[member].values()
                )
            return tail_first(cost, min(chunk.positions.values()))

    # Below here the lock is held.

    def _enter(self, model: StoredModel) -> None:
        self._copies[model.manifest.digest] = {}
        for position, chunk in enumerate(model.manifest.chunks):
            entry = self._chunks.setdefault(chunk.id, _PricedChunk(chunk.num_bytes))
            entry.positions.setdefault(model.manifest.digest, position)

    def _leave(self, digest: Digest, directory: Path) -> None:
        """Forget the copy of a model that a directory no longer holds, and with the last one the model."""
        left = self._copies[digest].pop(directory)
        if self._copies[digest]:
            return
        del self._copies[digest]
        self._costs.forget(digest)
        self._loads.forget(digest)
        for chunk_id in left.manifest.chunk_ids:
            entry = self._chunks.get(chunk_id)
            if entry is None:  # it stands in the model twice
                continue
            entry.positions.pop(digest, None)
            if not entry.positions:
                del self._chunks[chunk_id]


def _remote_rung(model: StoredModel, default: Rung) -> Rung:
    return default if model.remote is None else model.remote.rung
