"""What each chunk is worth to its tier: the seconds its models would lose without it. Evicts nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from hearth.policy.memory.bandwidth import RunningRate
from hearth.policy.memory.demand import Demand
from hearth.policy.memory.eviction import Price, reload_cost, tail_first
from hearth.store.model import StoredModel
from hearth.types import Digest, Rung

#: A chunk is worth keeping for requests that come within this time.
HORIZON_S = 600.0
#: Bytes per second, until a rung has shown its own.
PRIORS = {Rung.HOST: 20e9, Rung.DISK: 2e9, Rung.OBJECT: 0.2e9}


@dataclass(slots=True)
class _Entry:
    """Mutable; written only by `Prices`, under its lock."""

    num_bytes: int
    #: Where the chunk first stands in each of the models that share it, by the models' digests.
    positions: dict[Digest, int] = field(default_factory=dict)


class Prices:
    """Mutable; any thread may call it. A model is its manifest's digest: names and directories are reused."""

    def __init__(
        self,
        clock_s: Callable[[], float] = time.monotonic,
        is_on_disk: Callable[[Digest], bool] = lambda _: False,
    ) -> None:
        """`is_on_disk` is called without this object's lock: the disk asks for prices under its own."""
        self._clock_s = clock_s
        self._is_on_disk = is_on_disk
        self._demand = Demand()
        self._rates = {rung: RunningRate() for rung in Rung}
        self._entries: dict[Digest, _Entry] = {}
        #: As it was last asked for. Every model here is in `_digests`, and its chunks in `_entries`.
        self._models: dict[Digest, StoredModel] = {}
        #: What each directory holds; copies of one model share a digest.
        self._digests: dict[Path, Digest] = {}
        #: Loads begin and end on several threads while tiers ask for prices.
        self._lock = Lock()

    def asked(self, model: StoredModel) -> None:
        """A request for the model has come. Another that its directory held before is forgotten."""
        digest = model.manifest.digest
        with self._lock:
            self._demand.arrived(digest, self._clock_s())
            is_known = digest in self._models
            self._models[digest] = model
            if not is_known:
                self._enter(model)
            before = self._digests.get(model.directory)
            self._digests[model.directory] = digest
            if before is not None and before != digest:
                self._leave(before)

    def forget(self, directory: Path) -> None:
        """The model there is no longer deployed; what it shares with others keeps their price."""
        with self._lock:
            digest = self._digests.pop(directory, None)
            if digest is not None:
                self._leave(digest)

    def moved(self, rung: Rung, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._rates[rung].add(num_bytes, seconds)

    def bytes_per_s(self, rung: Rung) -> float:
        with self._lock:
            return self._rate(rung)

    def of_host_chunk(self, digest: str) -> Price:
        """Without it, its models fetch it from disk, or from object storage what is only there."""
        remote = Rung.DISK if self._is_on_disk(Digest(digest)) else Rung.OBJECT
        return self._price(digest, lambda model: Rung.DISK if model.remote is None else remote)

    def of_disk_chunk(self, digest: str) -> Price:
        return self._price(digest, lambda _: Rung.OBJECT)

    def _price(self, digest: str, below: Callable[[StoredModel], Rung]) -> Price:
        with self._lock:
            entry = self._entries.get(Digest(digest))
            if entry is None:
                return tail_first(0.0, 0)
            now_s = self._clock_s()
            cost = 0.0
            for member in entry.positions:
                model = self._models[member]
                p_miss = self._demand.probability(member, now_s, HORIZON_S)
                cost += reload_cost(p_miss, entry.num_bytes, self._rate(below(model)), model.weight)
            return tail_first(cost, min(entry.positions.values()))

    # Below here the lock is held.

    def _enter(self, model: StoredModel) -> None:
        for position, chunk in enumerate(model.manifest.chunks):
            entry = self._entries.setdefault(chunk.digest, _Entry(chunk.num_bytes))
            entry.positions.setdefault(model.manifest.digest, position)

    def _leave(self, digest: Digest) -> None:
        """A directory no longer holds this model; another may."""
        if digest in self._digests.values():
            return
        for chunk in self._models.pop(digest).manifest.chunks:
            entry = self._entries.get(chunk.digest)
            if entry is None:  # it stands in the model twice
                continue
            entry.positions.pop(digest, None)
            if not entry.positions:
                del self._entries[chunk.digest]

    def _rate(self, rung: Rung) -> float:
        return self._rates[rung].bytes_per_s or PRIORS[rung]
