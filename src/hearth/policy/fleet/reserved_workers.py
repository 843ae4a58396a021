"""Workers whose room is kept for models that have waited longer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hearth.core.types import Hold, ModelId, WorkerId
from hearth.policy.fleet.capacity import MAX_SORTED, CapacityIndex
from hearth.policy.fleet.drain import leaves_room
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.profile import Footprint, ModelProfile
from hearth.policy.fleet.records import Drain, Place, Worker

MAX_OPTIONS = 8


@dataclass(slots=True)
class ReservedWorkers:
    """Mutable; written by `serving.py` within a step."""

    fleet: Fleet
    #: Drained workers. A model that leaves room for the waiting one may still be loaded there.
    drains: dict[WorkerId, Drain] = field(default_factory=dict)
    #: There are too many drains to check: each drained worker is kept for the model it is drained for.
    has_all_drained: bool = False
    #: By kind of device: workers are reserved that could hold any of these without unpinned models. None of
    #: them is larger in every way than another.
    footprints_by_kind: dict[str, list[Footprint]] = field(default_factory=dict)

    def add_drained(self, before: Place | None = None) -> None:
        """Reserve drained workers: all if there are many, else those of models with an earlier place."""
        drains = self.fleet.drains
        self.has_all_drained = len(drains) > MAX_OPTIONS
        if self.has_all_drained:
            return
        for drain in drains.values():
            first = drain.model.first_waiting
            if before is None or (first is not None and first.place < before):
                self.add_drain(drain)

    def add_drain(self, drain: Drain) -> None:
        for worker in drain.workers:
            self.drains[worker.name] = drain

    def add_suited(self, profile: ModelProfile) -> None:
        """Reserve all workers that could ever hold a model or a stage of it, except resting ones."""
        for kind in self.fleet.capacity.by_kind:
            if kind in profile.footprints:
                footprint = self.fleet.capacity.least_need(profile, kind)
                known = self.footprints_by_kind.get(kind, [])
                if not any(_fits_within(one, footprint) for one in known):
                    kept = [one for one in known if not _fits_within(footprint, one)]
                    self.footprints_by_kind[kind] = [*kept, footprint]

    @property
    def has_all(self) -> bool:
        drains = self.fleet.drains if self.has_all_drained else self.drains
        return len(drains) >= len(self.fleet.workers) or self.has_all_kinds

    @property
    def has_all_kinds(self) -> bool:
        kinds = self.fleet.capacity.by_kind
        if len(self.footprints_by_kind) < len(kinds):
            return False
        return all(self._has_kind(kind, index) for kind, index in kinds.items())

    def _has_kind(self, kind: str, index: CapacityIndex) -> bool:
        reserved = self.footprints_by_kind.get(kind)
        if not reserved:
            return False
        return min(one.least_bytes for one in reserved) <= (index.unpinned.lowest or 0)

    def most_open_bytes(self) -> int:
        """Return what a model may need at most to be loaded now on any worker; not less than it may."""
        self.fleet.rank_workers()
        drains = () if self.has_all_drained else self.fleet.drains.values()
        drained = [worker for drain in drains for worker in drain.workers]
        most_bytes = max((self._room_bytes(worker) for worker in drained), default=0)
        for kind, index in self.fleet.capacity.by_kind.items():
            if self.fleet.resting or not self._has_kind(kind, index):
                most_bytes = max(most_bytes, index.open.highest or 0)
        return most_bytes

    def _room_bytes(self, worker: Worker) -> int:
        promises = worker.promises
        return promises.turn_bytes if self.fleet.config.takes_turns else promises.freeable_bytes(Hold.WARM)

    def find_open(
        self, kind: str, footprint: Footprint, most: Hold | None, model: ModelId, *, roomiest_first: bool
    ) -> Iterator[WorkerId]:
        index, workers = self.fleet.capacity.by_kind[kind], self.fleet.workers
        names: Iterator[WorkerId]
        if self._has_kind(kind, index):
            names = (name for name in self.fleet.resting if name in index.promises)
        elif self.has_all_drained and (few := self._find_few(index, footprint, model)) is not None:
            own_bytes = footprint.promise.own_bytes
            names = iter(index.without[most].sort(few, from_rank=own_bytes, highest_first=roomiest_first))
        else:
            names = index.rank_fitting(footprint, most, roomiest_first=roomiest_first)
        fitting = (name for name in names if index.promises[name].has_room(footprint, most))
        if not (self.has_all_drained or self.drains or self.footprints_by_kind):
            return fitting
        return (name for name in fitting if not self.bars(workers[name], footprint, model))

    def _find_few(self, index: CapacityIndex, footprint: Footprint, model: ModelId) -> list[WorkerId] | None:
        """Return all workers without a drain that may have room for a model, and its own; None: many."""
        self.fleet.rank_workers()
        few = index.open.few_from_rank(footprint.promise.own_bytes, MAX_SORTED)
        drain = self.fleet.drains.get(model)
        if few is not None and drain is not None:
            few += [worker.name for worker in drain.workers if worker.name in index.promises]
        return few

    def bars(self, worker: Worker, footprint: Footprint, model: ModelId | None = None) -> bool:
        if worker.name in self.fleet.resting:
            return False
        if self.has_all_drained:
            is_closed = worker.drain is not None and worker.drain.model.name != model
        else:
            drain = self.drains.get(worker.name)
            is_closed = drain is not None and not leaves_room(self.fleet, drain, footprint)
        if is_closed:
            return True
        kept = self.footprints_by_kind.get(worker.kind, ())
        return any(worker.promises.has_room(one, Hold.BUSY) for one in kept)


def _fits_within(one: Footprint, other: Footprint) -> bool:
    mine, theirs = one.promise, other.promise
    return mine.own_bytes <= theirs.own_bytes and mine.workspace_bytes <= theirs.workspace_bytes
