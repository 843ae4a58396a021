"""What each chunk is worth to its tier: the seconds its models would lose without it. Evicts nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from hearth.policy.bandwidth import RunningRate
from hearth.policy.demand import Demand
from hearth.policy.evict import Price, reload_cost, tail_first
from hearth.store.manifest import Digest
from hearth.store.model import StoredModel
from hearth.types import Rung

#: A chunk is worth keeping for requests that come within this time.
HORIZON_S = 600.0
#: Bytes per second, until a rung has shown its own.
PRIORS = {Rung.HOST: 20e9, Rung.DISK: 2e9, Rung.OBJECT: 0.2e9}


@dataclass(slots=True)
class _Member:
    """Where a chunk stands in one of the models that share it."""

    model: StoredModel
    position: int


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    members: dict[str, _Member] = field(default_factory=dict)


class Prices:
    """Mutable; any thread may call it."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._demand = Demand()
        self._rates = {rung: RunningRate() for rung in Rung}
        self._entries: dict[Digest, _Entry] = {}
        #: Loads begin and end on several threads while tiers ask for prices.
        self._lock = Lock()

    def asked(self, model: StoredModel) -> None:
        """A request for the model has come."""
        with self._lock:
            self._demand.arrived(model.name, self._clock_s())
            for position, chunk in enumerate(model.manifest.chunks):
                entry = self._entries.setdefault(chunk.digest, _Entry(chunk.num_bytes))
                entry.members[model.name] = _Member(model, position)

    def forget(self, model: StoredModel) -> None:
        """The model is no longer deployed; what it shares with others keeps their price."""
        with self._lock:
            for chunk in model.manifest.chunks:
                entry = self._entries.get(chunk.digest)
                if entry is None:
                    continue
                entry.members.pop(model.name, None)
                if not entry.members:
                    del self._entries[chunk.digest]

    def moved(self, rung: Rung, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._rates[rung].add(num_bytes, seconds)

    def bytes_per_s(self, rung: Rung) -> float:
        with self._lock:
            return self._rate(rung)

    def of_host_chunk(self, digest: str) -> Price:
        """Without it, its models fetch it from disk, or from object storage those that came from there."""
        return self._price(digest, lambda model: Rung.DISK if model.remote is None else Rung.OBJECT)

    def of_disk_chunk(self, digest: str) -> Price:
        return self._price(digest, lambda _: Rung.OBJECT)

    def _price(self, digest: str, below: Callable[[StoredModel], Rung]) -> Price:
        with self._lock:
            entry = self._entries.get(Digest(digest))
            if entry is None:
                return tail_first(0.0, 0)
            now_s = self._clock_s()
            cost = sum(
                reload_cost(
                    self._demand.probability(member.model.name, now_s, HORIZON_S),
                    entry.num_bytes,
                    self._rate(below(member.model)),
                    member.model.weight,
                )
                for member in entry.members.values()
            )
            return tail_first(cost, min(member.position for member in entry.members.values()))

    def _rate(self, rung: Rung) -> float:
        return self._rates[rung].bytes_per_s or PRIORS[rung]
