"""Device memory that workers have promised to models, per worker and ranked over all of a kind.

A model is promised its weights, tables, workspace and the least KV that it can be served with. KV beyond that
is lent by the worker, so no model is evicted for more KV.

If models take turns, a worker may host more than fit. Its promise then binds it towards models in turn,
pinned ones, which are always in turn, and for the little that all others keep. So a hosted model must fit
beside the pinned ones and what the others keep: then every turn can come.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hearth.core.types import Hold, WorkerId
from hearth.policy.fleet.profile import MAX_STAGES, Footprint, ModelProfile, Promise
from hearth.policy.fleet.ranking import Ranking

#: The members on their own, for code that runs for every event: a lookup in the enum costs as much as a call.
RETAINED, WARM, PAUSED, BUSY, PINNED = Hold
_ABOVE_RETAINED = RETAINED + 1
#: Workers with room that are sorted; more are found sooner by walking over a ranking.
MAX_SORTED = 128


@dataclass(slots=True)
class Promises:
    """Bytes of one worker's budget, by the hold of the replicas that they are promised to.

    Mutable; a worker's own are written only by `Fleet.reindex`.
    """

    budget_bytes: int
    shares_workspace: bool = True
    #: Promised to replicas of a hold or a firmer one; the last entry, of none, is 0.
    own_bytes_from: list[int] = field(default_factory=lambda: [0] * (len(Hold) + 1))
    #: The largest workspace of these replicas.
    workspace_bytes_from: list[int] = field(default_factory=lambda: [0] * (len(Hold) + 1))
    #: By size of a shared workspace: how many replicas were promised it.
    workspaces_by_hold: list[dict[int, int]] = field(default_factory=lambda: [{} for _ in Hold])
    #: Of the own bytes, what replicas keep out of turn.
    standing_bytes_by_hold: list[int] = field(default_factory=lambda: [0] * len(Hold))
    turns_by_hold: list[dict[int, int]] = field(default_factory=lambda: [{} for _ in Hold])

    def add(self, promise: Promise, hold: Hold) -> None:
        promise = self.booked(promise)
        self.standing_bytes_by_hold[hold] += promise.standing_bytes
        _add_one(self.workspaces_by_hold[hold], promise.workspace_bytes)
        _add_one(self.turns_by_hold[hold], promise.own_bytes - promise.standing_bytes)
        self._sum_up(promise.own_bytes, hold)

    def release(self, promise: Promise, hold: Hold) -> None:
        promise = self.booked(promise)
        self.standing_bytes_by_hold[hold] -= promise.standing_bytes
        _remove_one(self.workspaces_by_hold[hold], promise.workspace_bytes)
        _remove_one(self.turns_by_hold[hold], promise.own_bytes - promise.standing_bytes)
        self._sum_up(-promise.own_bytes, hold)

    def _sum_up(self, more_bytes: int, hold: Hold) -> None:
        workspace_bytes = self.workspace_bytes_from[hold + 1]
        for at in range(hold, -1, -1):
            self.own_bytes_from[at] += more_bytes
            for size in self.workspaces_by_hold[at]:
                if size > workspace_bytes:
                    workspace_bytes = size
            self.workspace_bytes_from[at] = workspace_bytes

    def copy(self) -> Promises:
        return Promises(
            self.budget_bytes,
            self.shares_workspace,
            self.own_bytes_from.copy(),
            self.workspace_bytes_from.copy(),
            workspaces_by_hold=[sizes.copy() for sizes in self.workspaces_by_hold],
            standing_bytes_by_hold=self.standing_bytes_by_hold.copy(),
            turns_by_hold=[sizes.copy() for sizes in self.turns_by_hold],
        )

    @property
    def free_bytes(self) -> int:
        """Bytes that are not promised; models may use them anyway. Negative if models must take turns."""
        return self.budget_bytes - self.own_bytes_from[0] - self.workspace_bytes_from[0]

    def freeable_bytes(self, most: Hold) -> int:
        return self.budget_bytes - self.own_bytes_from[most + 1] - self.workspace_bytes_from[most + 1]

    @property
    def turn_bytes(self) -> int:
        """Bytes for one model in turn, without idle replicas and workspace; not less than it can have."""
        standing_bytes = self.standing_bytes_by_hold[Hold.WARM + 1 : Hold.PINNED]
        return self.budget_bytes - self.own_bytes_from[Hold.PINNED] - sum(standing_bytes)

    def has_room(self, footprint: Footprint, without: Hold | None = None) -> bool:
        promise, first = self.booked(footprint.promise), _first_above(without)
        workspace_bytes = self.workspace_bytes_from[first]
        if promise.workspace_bytes > workspace_bytes:
            workspace_bytes = promise.workspace_bytes
        return promise.own_bytes + self.own_bytes_from[first] + workspace_bytes <= self.budget_bytes

    @property
    def must_take_turns(self) -> bool:
        """True if replicas with requests, and pinned ones, do not all fit together."""
        return self.freeable_bytes(Hold.WARM) < 0

    @property
    def can_all_take_turns(self) -> bool:
        """True if every replica fits in its turn, while all others but pinned ones are out of turn."""
        return self._turn_bytes() <= self.budget_bytes

    def can_take_turns(self, footprint: Footprint, without: Hold | None = None) -> bool:
        """True if a model and all replicas with a hold above `without` fit, each in its turn."""
        return self._turn_bytes(footprint, above=without) <= self.budget_bytes

    def _turn_bytes(self, footprint: Footprint | None = None, above: Hold | None = None) -> int:
        first, promise = _first_above(above), Promise(0, 0)
        if footprint is not None:
            promise = self.booked(footprint.promise)
        largest_bytes = max(
            promise.own_bytes - promise.standing_bytes, _largest(self.turns_by_hold[first : Hold.PINNED])
        )
        return (
            self.own_bytes_from[Hold.PINNED]
            + sum(self.standing_bytes_by_hold[first : Hold.PINNED])
            + promise.standing_bytes
            + largest_bytes
            + max(promise.workspace_bytes, self.workspace_bytes_from[first])
        )

    def booked(self, promise: Promise) -> Promise:
        """Return a promise as this worker keeps it: with its own workspace if none can be shared."""
        return promise if self.shares_workspace else promise.unshared

    @property
    def utilisation(self) -> float:
        used_bytes = self.own_bytes_from[_ABOVE_RETAINED] + self.workspace_bytes_from[_ABOVE_RETAINED]
        return min(1.0, used_bytes / self.budget_bytes) if self.budget_bytes else 1.0


def _first_above(hold: Hold | None) -> int:
    return 0 if hold is None else hold + 1


def _largest(sizes_by_hold: Sequence[dict[int, int]]) -> int:
    largest = 0
    for sizes in sizes_by_hold:
        if sizes:
            largest = max(largest, max(sizes))
    return largest


def _add_one(num_by_size: dict[int, int], size: int) -> None:
    num_by_size[size] = num_by_size.get(size, 0) + 1


def _remove_one(num_by_size: dict[int, int], size: int) -> None:
    if num_by_size[size] == 1:
        del num_by_size[size]
    else:
        num_by_size[size] -= 1


class CapacityIndex:
    """Workers of one kind by the bytes that they have or could have. Mutable; written only by the fleet."""

    def __init__(self) -> None:
        self.promises: dict[WorkerId, Promises] = {}
        self.free: Ranking[WorkerId, int] = Ranking()
        self.retained: Ranking[WorkerId, int] = Ranking()
        self.idle: Ranking[WorkerId, int] = Ranking()
        self.unpinned: Ranking[WorkerId, int] = Ranking()
        self.budget: Ranking[WorkerId, int] = Ranking()
        #: Workers by the bytes that are free without replicas of a hold up to this one; None: with all.
        self.without: Mapping[Hold | None, Ranking[WorkerId, int]] = {
            None: self.free,
            Hold.RETAINED: self.retained,
            Hold.WARM: self.idle,
            Hold.BUSY: self.unpinned,
        }
        #: Workers without a drain, by upper limits of what a model may need to be loaded there now, and to
        #: have other models drained for it.
        self.open: Ranking[WorkerId, int] = Ranking()
        self.drainable: Ranking[WorkerId, int] = Ranking()

    def put(self, name: WorkerId, promises: Promises) -> None:
        self.promises[name] = promises
        self.free.put(name, promises.free_bytes)
        self.retained.put(name, promises.freeable_bytes(RETAINED))
        self.idle.put(name, promises.freeable_bytes(WARM))
        self.unpinned.put(name, promises.freeable_bytes(BUSY))
        self.budget.put(name, promises.budget_bytes)

    def drop(self, name: WorkerId) -> None:
        del self.promises[name]
        for ranking in (*self.rankings, self.open, self.drainable):
            ranking.drop(name)

    def rank_fitting(
        self, footprint: Footprint, most: Hold | None, *, roomiest_first: bool
    ) -> Iterator[WorkerId]:
        """Return workers with room for a model without replicas of a hold up to `most`; None: with all.

        Some may lack the workspace. Not to be continued after a change.
        """
        ranking, own_bytes = self.without[most], footprint.promise.own_bytes
        return ranking.down_to_rank(own_bytes) if roomiest_first else ranking.from_rank(own_bytes)

    def roomiest_first(
        self, ranking: Ranking[WorkerId, int], limit: Ranking[WorkerId, int], num_bytes: int
    ) -> Iterator[WorkerId]:
        """Return workers in falling order of one ranking whose rank in another is high enough.

        Not to be continued after a change.
        """
        few = limit.few_from_rank(num_bytes, MAX_SORTED)
        if few is not None:
            return iter(ranking.sort(few, from_rank=0, highest_first=True))
        return (name for name in ranking.down_to_rank(0) if limit.has_rank(name, num_bytes))

    @property
    def rankings(self) -> tuple[Ranking[WorkerId, int], ...]:
        return self.free, self.retained, self.idle, self.unpinned, self.budget


class FleetCapacity:
    def __init__(self) -> None:
        self.by_kind: dict[str, CapacityIndex] = {}

    def put(self, kind: str, name: WorkerId, promises: Promises) -> None:
        index = self.by_kind.get(kind)
        if index is None:
            index = self.by_kind[kind] = CapacityIndex()
        index.put(name, promises)

    def drop(self, kind: str, name: WorkerId) -> None:
        index = self.by_kind[kind]
        index.drop(name)
        if not len(index.budget):
            del self.by_kind[kind]

    def find_suited(self, profile: ModelProfile) -> Iterator[tuple[CapacityIndex, Footprint]]:
        for kind, index in self.by_kind.items():
            footprint = profile.footprints.get(kind)
            if footprint is not None:
                yield index, footprint

    def must_stage(self, profile: ModelProfile) -> bool:
        """True if no worker can ever hold a model whole, and some may hold stages of it."""
        if not profile.stages:
            return False
        is_suited = False
        for kind, index in self.by_kind.items():
            if (footprint := profile.footprints.get(kind)) is not None:
                if (index.budget.highest or 0) >= footprint.least_bytes:
                    return False
                is_suited = True
        return is_suited

    def least_need(self, profile: ModelProfile, kind: str) -> Footprint:
        """Return what a worker of a kind must hold at least to run a model, or a stage of it."""
        if kind in profile.stages and self.must_stage(profile):
            return profile.stages[kind].smallest(MAX_STAGES)
        return profile.footprints[kind]

    def smallest_bytes(self, profile: ModelProfile, kind: str) -> float:
        """Return the least budget with which a worker of a kind can hold a model, or a stage of it."""
        footprints = [profile.footprints[kind]] if kind in profile.footprints else []
        if kind in profile.stages:
            footprints.append(profile.stages[kind].smallest(MAX_STAGES))
        return min((one.least_bytes for one in footprints), default=math.inf)

    def least_bytes(self, profile: ModelProfile) -> int:
        """Return the least bytes that a model, or any stage of one that must be split, needs for itself."""
        if self.must_stage(profile):
            return min(sizes.smallest(MAX_STAGES).promise.own_bytes for sizes in profile.stages.values())
        return min((one.promise.own_bytes for one in profile.footprints.values()), default=0)

    def has_fitting(self, profile: ModelProfile, most: Hold) -> bool:
        for index, footprint in self.find_suited(profile):
            most_bytes = index.without[most].highest or 0
            if most_bytes >= footprint.least_bytes:
                return True
            if most_bytes < footprint.promise.own_bytes:
                continue
            names = index.rank_fitting(footprint, most, roomiest_first=True)
            if any(index.promises[name].has_room(footprint, most) for name in names):
                return True
        return False
