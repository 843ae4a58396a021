"""The device memory that workers have promised to models, one worker at a time and ranked over all of a kind.

A model is promised its weights, its workspace and the least KV that it can be served with. What it has beyond
that is lent by its worker, so no model goes for more KV. Plans no evictions: that is `evictions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hearth.policy.fleet.events import Footprint, ModelProfile
from hearth.policy.fleet.ranking import Ranking
from hearth.types import Hold, WorkerId


@dataclass(slots=True)
class Promises:
    """Bytes of one worker's budget, by how the replicas are held that they are promised to.

    Mutable; a worker's own are written only by `Fleet.reindex`, a copy by whoever made it. Nothing else adds
    up what replicas take of a worker.
    """

    budget_bytes: int
    #: By `Hold`; together at most the budget.
    held_bytes: list[int] = field(default_factory=lambda: [0] * len(Hold))

    def add(self, num_bytes: int, hold: Hold) -> None:
        """Promise bytes to a replica that is held so."""
        self.held_bytes[hold] += num_bytes

    def release(self, num_bytes: int, hold: Hold) -> None:
        """Take back what a replica that is held so was promised."""
        self.held_bytes[hold] -= num_bytes

    def copy(self) -> Promises:
        """Return the same promises, to try out what would be free without some of them."""
        return Promises(self.budget_bytes, self.held_bytes.copy())

    @property
    def free_bytes(self) -> int:
        """Bytes that are promised to nobody; models may use them all the same."""
        return self.budget_bytes - sum(self.held_bytes)

    def freeable_bytes(self, most: Hold) -> int:
        """Return how many bytes are free once every replica that is held at most so is gone."""
        return self.budget_bytes - sum(self.held_bytes[most + 1 :])

    def has_room(self, footprint: Footprint) -> bool:
        """True if a model can be promised its least without anybody going."""
        return footprint.least_bytes <= self.free_bytes

    def could_have_room(self, footprint: Footprint, most: Hold) -> bool:
        """True if a model can be promised its least once every replica that is held at most so is gone."""
        return footprint.least_bytes <= self.freeable_bytes(most)

    @property
    def utilisation(self) -> float:
        """Share of the budget that is promised to busy, warm and pinned replicas."""
        used_bytes = sum(self.held_bytes) - self.held_bytes[Hold.RETAINED]
        return used_bytes / self.budget_bytes if self.budget_bytes else 1.0


@dataclass(frozen=True, slots=True)
class CapacityIndex:
    """The workers of one kind of device, ranked by bytes."""

    free: Ranking[WorkerId] = field(default_factory=Ranking)
    #: Free once all retained replicas are gone.
    retained: Ranking[WorkerId] = field(default_factory=Ranking)
    #: Free once all idle, unpinned replicas are gone.
    idle: Ranking[WorkerId] = field(default_factory=Ranking)
    #: Free once all unpinned replicas are gone, busy ones included.
    unpinned: Ranking[WorkerId] = field(default_factory=Ranking)
    budget: Ranking[WorkerId] = field(default_factory=Ranking)

    def put(self, name: WorkerId, promises: Promises) -> None:
        """Rank a worker by what it has promised now."""
        self.free.put(name, promises.free_bytes)
        self.retained.put(name, promises.freeable_bytes(Hold.RETAINED))
        self.idle.put(name, promises.freeable_bytes(Hold.WARM))
        self.unpinned.put(name, promises.freeable_bytes(Hold.BUSY))
        self.budget.put(name, promises.budget_bytes)

    def drop(self, name: WorkerId) -> None:
        """Forget a worker that was lost."""
        for ranking in self.rankings:
            ranking.drop(name)

    @property
    def rankings(self) -> tuple[Ranking[WorkerId], ...]:
        """All five rankings, each with the same workers."""
        return self.free, self.retained, self.idle, self.unpinned, self.budget


class FleetCapacity:
    """The ranked workers of every kind of device. Mutable; written only by the fleet."""

    def __init__(self) -> None:
        self.by_kind: dict[str, CapacityIndex] = {}

    def put(self, kind: str, name: WorkerId, promises: Promises) -> None:
        """Rank a worker, new or known, by what it has promised now."""
        index = self.by_kind.get(kind)
        if index is None:
            index = self.by_kind[kind] = CapacityIndex()
        index.put(name, promises)

    def drop(self, kind: str, name: WorkerId) -> None:
        """Forget a worker that was lost."""
        index = self.by_kind[kind]
        index.drop(name)
        if not len(index.budget):
            del self.by_kind[kind]

    def find_suited(self, profile: ModelProfile) -> Iterator[tuple[CapacityIndex, Footprint]]:
        """Yield the workers of each kind that the model can run on, with its footprint there."""
        for kind, index in self.by_kind.items():
            footprint = profile.footprints.get(kind)
            if footprint is not None:
                yield index, footprint

    def could_fit(self, profile: ModelProfile) -> bool:
        """True if some worker would have room for the model if everything unpinned went."""
        return any(
            footprint.least_bytes <= (index.unpinned.highest or 0)
            for index, footprint in self.find_suited(profile)
        )

    def can_fit_now(self, profile: ModelProfile) -> bool:
        """True if some worker would have room for the model if everything idle went."""
        return any(
            footprint.least_bytes <= (index.idle.highest or 0)
            for index, footprint in self.find_suited(profile)
        )
