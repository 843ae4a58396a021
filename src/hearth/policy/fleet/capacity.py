"""Room for a model on a worker: whose promises have to end for its own. Evicts nothing itself.

A model is promised its weights, its workspace and the least KV that it can be served with. What it has beyond
that its worker lends it, so nobody goes for more KV. Retained models go before warm ones, busy and pinned
ones are not touched, and no more go than have to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hearth.policy.fleet.estimates import Estimates
from hearth.policy.fleet.events import Footprint
from hearth.policy.fleet.ranking import Ranking
from hearth.policy.fleet.replica import Replica, Worker
from hearth.types import Hold, WorkerId

#: Names in a sentence for people.
MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class CapacityIndex:
    """The workers of one kind of device, by bytes."""

    free: Ranking[WorkerId] = field(default_factory=Ranking)
    #: Free once all retained models are gone.
    retained: Ranking[WorkerId] = field(default_factory=Ranking)
    #: Free once all idle, unpinned models are gone.
    idle: Ranking[WorkerId] = field(default_factory=Ranking)
    #: Free once all unpinned models are gone, busy ones included.
    unpinned: Ranking[WorkerId] = field(default_factory=Ranking)
    budget: Ranking[WorkerId] = field(default_factory=Ranking)

    def put(self, worker: Worker) -> None:
        name, held_bytes = worker.name, worker.held_bytes
        free_bytes = worker.free_bytes
        retained_bytes = free_bytes + held_bytes[Hold.RETAINED]
        self.free.put(name, free_bytes)
        self.retained.put(name, retained_bytes)
        self.idle.put(name, retained_bytes + held_bytes[Hold.WARM])
        self.unpinned.put(name, worker.budget_bytes - held_bytes[Hold.PINNED])
        self.budget.put(name, worker.budget_bytes)

    def drop(self, worker: Worker) -> None:
        for ranking in self.rankings:
            ranking.drop(worker.name)

    @property
    def rankings(self) -> tuple[Ranking[WorkerId], ...]:
        return self.free, self.retained, self.idle, self.unpinned, self.budget


@dataclass(frozen=True, slots=True)
class Victim:
    """A replica that may have to go."""

    replica: Replica
    cost_s: float  #: the reload cost of all of its weights

    @property
    def rank(self) -> tuple[Hold | None, float, str]:
        """The lowest goes first: what is held least, then what costs least per byte."""
        replica = self.replica
        return replica.hold, self.cost_s / max(1, replica.num_bytes), replica.model.name


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """Enough for a model, once the victims are gone."""

    victims: tuple[Victim, ...]

    @property
    def evict_s(self) -> float:
        """What it is expected to cost to have all of them back."""
        return sum(victim.cost_s for victim in self.victims)


def plan_evictions(
    worker: Worker, footprint: Footprint, estimates: Estimates, now_s: float
) -> EvictionPlan | None:
    """None: not even if everything idle went."""
    if idle_bytes(worker) < footprint.least_bytes:
        return None
    lacking_bytes = footprint.least_bytes - worker.free_bytes
    if lacking_bytes <= 0:
        return EvictionPlan(())
    idle = (replica for replica in worker.replicas.values() if replica.hold in (Hold.RETAINED, Hold.WARM))
    return EvictionPlan(fewest([victim(replica, estimates, now_s) for replica in idle], lacking_bytes))


def idle_bytes(worker: Worker, most: Hold = Hold.WARM) -> int:
    """Free once all models that are held at most so are gone."""
    return worker.free_bytes + sum(worker.held_bytes[: most + 1])


def victim(replica: Replica, estimates: Estimates, now_s: float) -> Victim:
    model = replica.model
    if model.profile is None or replica.is_stale:
        return Victim(replica, 0.0)
    load_s = estimates.load_s(replica.total_bytes, model.bytes_by_rung)
    weight = model.profile.weight
    return Victim(replica, estimates.reload.cost_s(model.name, load_s, weight, now_s))


def fewest(victims: Iterable[Victim], num_bytes: int) -> tuple[Victim, ...]:
    """Those of lowest rank that together have so many bytes; who turned out not to be needed is spared."""
    chosen: list[Victim] = []
    for candidate in sorted(victims, key=lambda victim: victim.rank):
        if num_bytes <= 0:
            break
        chosen.append(candidate)
        num_bytes -= candidate.replica.num_bytes
    assert num_bytes <= 0, f"the victims do not suffice: {num_bytes} bytes are missing"
    spared = set()
    for candidate in reversed(chosen):
        if num_bytes + candidate.replica.num_bytes <= 0:
            num_bytes += candidate.replica.num_bytes
            spared.add(candidate.replica)
    return tuple(victim for victim in chosen if victim.replica not in spared)


def shortage(worker: Worker, footprint: Footprint) -> str | None:
    """Why there is no room, for people; None if there is."""
    freeable_bytes = idle_bytes(worker)
    if freeable_bytes >= footprint.least_bytes:
        return None
    holders = [replica.model.name for replica in worker.replicas.values() if replica.hold is Hold.BUSY]
    text = f"needs {size(footprint.least_bytes)}, {size(freeable_bytes)} can be freed"
    return text + _named("busy", holders) + pinned_names(worker)


def pinned_names(worker: Worker) -> str:
    """The end of a sentence; empty if nothing is pinned there."""
    pinned = [replica.model.name for replica in worker.replicas.values() if replica.hold is Hold.PINNED]
    return _named("pinned", pinned)


def size(num_bytes: int) -> str:
    """For people."""
    if num_bytes >= 10**9:
        return f"{num_bytes / 1e9:.2f} GB"
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 10**6 else f"{num_bytes} bytes"


def _named(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"; {what}: {', '.join(names[:MAX_NAMES])}{rest}"
