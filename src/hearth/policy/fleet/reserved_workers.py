"""Workers whose room is kept for models that have waited longer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hearth.core.types import Hold, WorkerId
from hearth.policy.fleet.capacity import CapacityIndex
from hearth.policy.fleet.drain import leaves_room
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.profile import Footprint, ModelProfile
from hearth.policy.fleet.records import Drain, Worker

MAX_OPTIONS = 8


@dataclass(frozen=True, slots=True)
class ReservedWorkers:
    """Mutable; written by `serving.py` within a step."""

    fleet: Fleet
    #: Drained workers. A model that leaves room for the waiting one may still be loaded there, unless there
    #: are too many drains to check.
    drains: dict[WorkerId, Drain] = field(default_factory=dict)
    #: By kind of device: workers are reserved that could hold any of these without unpinned models. None of
    #: them is larger in every way than another.
    footprints_by_kind: dict[str, list[Footprint]] = field(default_factory=dict)

    def add_suited(self, profile: ModelProfile) -> None:
        """Reserve all workers that could ever hold a model, except resting ones."""
        for kind in self.fleet.capacity.by_kind:
            if (footprint := profile.footprints.get(kind)) is not None:
                known = self.footprints_by_kind.get(kind, [])
                if not any(_fits_within(one, footprint) for one in known):
                    kept = [one for one in known if not _fits_within(footprint, one)]
                    self.footprints_by_kind[kind] = [*kept, footprint]

    @property
    def has_all(self) -> bool:
        return len(self.drains) >= len(self.fleet.workers) or self._has_all_kinds

    @property
    def has_all_for_sure(self) -> bool:
        is_drained = len(self.drains) >= len(self.fleet.workers) > MAX_OPTIONS
        return not self.fleet.resting and (is_drained or self._has_all_kinds)

    @property
    def _has_all_kinds(self) -> bool:
        return all(self._has_kind(kind, index) for kind, index in self.fleet.capacity.by_kind.items())

    def _has_kind(self, kind: str, index: CapacityIndex) -> bool:
        least_bytes = min((one.least_bytes for one in self.footprints_by_kind.get(kind, ())), default=None)
        return least_bytes is not None and least_bytes <= (index.unpinned.lowest or 0)

    def find_open(
        self, kind: str, footprint: Footprint, most: Hold | None, *, roomiest_first: bool
    ) -> Iterator[WorkerId]:
        index = self.fleet.capacity.by_kind[kind]
        names = index.find_fitting(footprint, most, roomiest_first=roomiest_first)
        if self._has_kind(kind, index):
            resting = (name for name in self.fleet.resting if name in index.promises)
            names = (name for name in resting if index.promises[name].has_room(footprint, most))
        return (name for name in names if not self.bars(self.fleet.workers[name], footprint))

    def bars(self, worker: Worker, footprint: Footprint) -> bool:
        if worker.name in self.fleet.resting:
            return False
        drain = self.drains.get(worker.name)
        if drain is not None:
            is_closed = len(self.drains) > MAX_OPTIONS or not leaves_room(self.fleet, drain, footprint)
            if is_closed:
                return True
        kept = self.footprints_by_kind.get(worker.kind, ())
        return any(worker.promises.has_room(one, Hold.BUSY) for one in kept)


def _fits_within(one: Footprint, other: Footprint) -> bool:
    mine, theirs = one.promise, other.promise
    return mine.own_bytes <= theirs.own_bytes and mine.workspace_bytes <= theirs.workspace_bytes
