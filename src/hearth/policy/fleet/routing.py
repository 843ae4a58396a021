"""Where a request goes, or a model is loaded: the cheapest worker (F7). Moves nothing.

    cost_s = queue_weight * queue_s + load_weight * load_s + packing_s * (1 - utilisation) + evict_s

`queue_s` is what a request loses to those before it. It starts at once where a slot is free, but shares the
device: with its own model's batch, taken as a part of its own run as large as the part of slots in use; and
with the other busy models of the worker, which take turns with it for as long as they, or it, run. How long
that is, running averages say. `load_s` is the time that the bytes take which are not on the worker's device,
from the rungs that have them (T6), `evict_s` what it is expected to cost to have those back that must go
(T2), all of them together.

A free slot is always taken before a model is loaded a second time, so replicas compete with replicas, and
workers without the model with each other. Of these, whoever need not evict comes first, then who evicts
retained models, then warm ones; the cost decides among equals. Workers that still have bytes of the model
from before compete with the first of these, also if they have to evict retained models for it, as long as
that costs less than the bytes save: so models settle where they suit. At most `MAX_OPTIONS` are looked at:
those that have most of the model, those with the least room that suffices, which pack well, and those with
the most, which are likely to be idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from itertools import chain, islice

from hearth.policy.fleet.affinity import missing_bytes
from hearth.policy.fleet.capacity import (
    CapacityIndex,
    EvictionPlan,
    idle_bytes,
    pinned_names,
    plan_evictions,
    shortage,
    size,
)
from hearth.policy.fleet.events import Footprint, ModelProfile, Option
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.ranking import Ranking
from hearth.policy.fleet.replica import Model, Replica, Worker
from hearth.types import Hold, WorkerId

#: Workers that are considered for one request.
MAX_OPTIONS = 8
#: Other workers that are shown beside the replicas when one of them has a free slot.
MAX_BESIDE = 2


@dataclass(frozen=True, slots=True)
class FreeReplica:
    """A replica that takes one more request."""

    replica: Replica
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A worker for a new replica."""

    worker: Worker
    footprint: Footprint
    room: EvictionPlan
    options: tuple[Option, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    """Workers whose room is for those who came before. Mutable; written by `waiting.py`, within a turn."""

    workers: set[WorkerId] = field(default_factory=set)
    #: By kind of device: workers that could give so many bytes, were all unpinned models gone.
    bytes_by_kind: dict[str, int] = field(default_factory=dict)

    def put(self, fleet: Fleet, profile: ModelProfile) -> None:
        """All workers that could ever hold the model."""
        for kind in fleet.capacity_by_kind:
            if (footprint := profile.footprints.get(kind)) is not None:
                least = footprint.least_bytes
                self.bytes_by_kind[kind] = min(least, self.bytes_by_kind.get(kind, least))

    def holds_all(self, fleet: Fleet) -> bool:
        """No worker is left for anybody else."""
        return len(self.workers) >= len(fleet.workers) or all(
            self.holds_kind(kind, rooms) for kind, rooms in fleet.capacity_by_kind.items()
        )

    def holds_kind(self, kind: str, rooms: CapacityIndex) -> bool:
        return kind in self.bytes_by_kind and self.bytes_by_kind[kind] <= (rooms.unpinned.lowest or 0)

    def __contains__(self, worker: Worker) -> bool:
        num_bytes = self.bytes_by_kind.get(worker.kind)
        is_kept = num_bytes is not None and num_bytes <= worker.budget_bytes - worker.held_bytes[Hold.PINNED]
        return is_kept or worker.name in self.workers


def choose_slot(fleet: Fleet, model: Model) -> FreeReplica | None:
    """None: no replica has a free slot."""
    replicas = [model.replicas[name] for name in islice(model.open, MAX_OPTIONS)]
    if not replicas:
        return None
    options = [_option(fleet, model, replica.worker) for replica in replicas]
    best = min(range(len(options)), key=lambda at: (options[at].cost_s, options[at].worker))
    num_beside = min(MAX_BESIDE, MAX_OPTIONS - len(options))
    beside = _beside(fleet, model, {option.worker for option in options}, num_beside)
    return FreeReplica(replicas[best], (*options, *beside))


def choose_place(
    fleet: Fleet, model: Model, *, may_evict_warm: bool = True, reserved: Reserved | None = None
) -> Place | None:
    """None: no worker that does not have it yet has room, or could make it, and is not reserved."""
    profile, reserved = model.profile, reserved or Reserved()
    if profile is None or not _has_room(fleet, profile):
        return None
    barred = model.replicas.keys()
    place = _choose(fleet, model, profile, barred | model.failed_on.keys(), reserved, may_evict_warm)
    if place is None and model.failed_on and not model.usable:
        place = _choose(fleet, model, profile, barred, reserved, may_evict_warm)
    return place


def _choose(
    fleet: Fleet,
    model: Model,
    profile: ModelProfile,
    barred: Set[WorkerId],
    reserved: Reserved,
    may_evict_warm: bool,
) -> Place | None:
    for candidates, most in _classes(fleet, profile, barred, reserved, may_evict_warm):
        if not candidates:
            continue
        rooms = _settled(fleet, model, profile, barred, reserved, most)
        for name in islice((name for name in candidates if name not in rooms), MAX_OPTIONS - len(rooms)):
            rooms[name] = _planned(fleet, profile, fleet.workers[name])
        options = [_option(fleet, model, fleet.workers[name], room=room) for name, room in rooms.items()]
        best = min(options, key=lambda option: (option.cost_s, option.worker))
        worker = fleet.workers[best.worker]
        beside = _beside(fleet, model, rooms.keys(), MAX_OPTIONS - len(options))
        footprint = profile.footprints[worker.kind]
        return Place(worker, footprint, rooms[best.worker], (*options, *beside))
    return None


def _settled(
    fleet: Fleet,
    model: Model,
    profile: ModelProfile,
    barred: Set[WorkerId],
    reserved: Reserved,
    most: Hold,
) -> dict[WorkerId, EvictionPlan]:
    """Some that have bytes of the model and could take it, with room that costs less than the bytes save.

    They evict models that are held at most so.
    """
    all_s = fleet.estimates.load_s(profile.num_bytes, model.bytes_by_rung)
    rooms: dict[WorkerId, EvictionPlan] = {}
    for name in islice(model.retired.down_to_rank(1), MAX_OPTIONS // 2):
        worker = fleet.workers[name]
        footprint = profile.footprints.get(worker.kind)
        has_room = footprint is not None and footprint.least_bytes <= idle_bytes(worker, most)
        if not has_room or name in barred or worker in reserved:
            continue
        room = _planned(fleet, profile, worker)
        saved_s = all_s - fleet.estimates.load_s(missing_bytes(model, worker), model.bytes_by_rung)
        if not room.victims or room.evict_s < fleet.config.load_weight * saved_s:
            rooms[name] = room
    return rooms


def _planned(fleet: Fleet, profile: ModelProfile, worker: Worker) -> EvictionPlan:
    room = plan_evictions(worker, profile.footprints[worker.kind], fleet.estimates, fleet.now_s)
    assert room is not None, f"worker `{worker.name}` is ranked by room it has not: {worker.free_bytes=}"
    return room


def could_fit(fleet: Fleet, profile: ModelProfile) -> bool:
    """Whether some worker would have room if everything unpinned went."""
    return any(
        footprint.least_bytes <= (rooms.unpinned.highest or 0) for rooms, footprint in _rooms(fleet, profile)
    )


def _has_room(fleet: Fleet, profile: ModelProfile) -> bool:
    return any(
        footprint.least_bytes <= (rooms.idle.highest or 0) for rooms, footprint in _rooms(fleet, profile)
    )


def misfit(fleet: Fleet, profile: ModelProfile) -> str | None:
    """Why no worker could ever hold the model, for people; None if one could, or there is no worker yet."""
    if not fleet.workers:
        return None
    texts = []
    for kind, rooms in fleet.capacity_by_kind.items():
        budget_bytes = rooms.budget.highest or 0
        footprint = profile.footprints.get(kind)
        if footprint is None:
            texts.append(f"it cannot run on `{kind}`")
        elif footprint.least_bytes <= budget_bytes:
            return None
        else:
            texts.append(
                f"on `{kind}` it needs {size(footprint.least_bytes)} ({size(footprint.fixed_bytes)} for "
                f"weights and workspace, {size(footprint.min_kv_bytes)} for KV), the largest budget of a "
                f"worker: {size(budget_bytes)}"
            )
    advice = "give workers more memory, or deploy it quantised or with a shorter context"
    return f"model `{profile.model}` fits no worker: {'; '.join(texts)}; {advice}"


def pinned_out(fleet: Fleet, profile: ModelProfile) -> str | None:
    """Why what is pinned leaves no room for the model, for people; None if a worker could make some."""
    if could_fit(fleet, profile):
        return None
    texts = []
    for rooms, footprint in _rooms(fleet, profile):
        roomiest = next(rooms.unpinned.down_to_rank(0), None)
        if roomiest is not None:
            worker = fleet.workers[roomiest]
            free_bytes = worker.budget_bytes - worker.held_bytes[Hold.PINNED]
            texts.append(
                f"it needs {size(footprint.least_bytes)}, at most {size(free_bytes)} of "
                f"{size(worker.budget_bytes)} can be freed, on worker `{roomiest}`{pinned_names(worker)}"
            )
    advice = "unpin a model with `hearth stop NAME` or a finite keep_alive, or give workers more memory"
    return f"model `{profile.model}` has no room beside pinned ones: {'; '.join(texts)}; {advice}"


def is_failed_everywhere(fleet: Fleet, model: Model) -> bool:
    """Whether it has failed on every worker that could hold it."""
    if model.profile is None:
        return False
    for rooms, footprint in _rooms(fleet, model.profile):
        suited = rooms.unpinned.from_rank(footprint.least_bytes)
        if any(name not in model.failed_on for name in suited):
            return False
    return True


def _rooms(fleet: Fleet, profile: ModelProfile) -> Iterator[tuple[CapacityIndex, Footprint]]:
    for kind, rooms in fleet.capacity_by_kind.items():
        footprint = profile.footprints.get(kind)
        if footprint is not None:
            yield rooms, footprint


def _classes(
    fleet: Fleet, profile: ModelProfile, barred: Set[WorkerId], reserved: Reserved, may_evict_warm: bool
) -> Iterator[tuple[list[WorkerId], Hold]]:
    """Workers that could take the model: first those that lose nothing by it, last those that lose most.

    Each time with what may go on a worker that has bytes of the model: warm ones only if nobody has room
    without.
    """
    pairs = [
        (rooms, footprint.least_bytes)
        for kind, rooms in fleet.capacity_by_kind.items()
        if (footprint := profile.footprints.get(kind)) is not None and not reserved.holds_kind(kind, rooms)
    ]

    def suited(needs: Iterable[tuple[Ranking[WorkerId], int]]) -> list[WorkerId]:
        """A few that nobody bars, of at least the rank that is needed: tightest and roomiest ones."""
        found: dict[WorkerId, None] = {}
        for ranking, rank in needs:
            if (ranking.highest or 0) < rank:
                continue
            for names in (ranking.from_rank(rank), ranking.down_to_rank(rank)):
                others = (n for n in names if n not in barred and fleet.workers[n] not in reserved)
                found.update(dict.fromkeys(islice(others, MAX_OPTIONS // 2)))
        return list(islice(found, MAX_OPTIONS))

    yield suited((rooms.free, least) for rooms, least in pairs), Hold.RETAINED
    yield suited((rooms.retained, least) for rooms, least in pairs), Hold.RETAINED
    if may_evict_warm:
        yield suited((rooms.idle, least) for rooms, least in pairs), Hold.WARM


def _option(
    fleet: Fleet,
    model: Model,
    worker: Worker,
    *,
    obstacle: str | None = None,
    room: EvictionPlan | None = None,
) -> Option:
    config = fleet.config
    queue_s = _queue_s(fleet, model, worker)
    missing = missing_bytes(model, worker)
    load_s = fleet.estimates.load_s(missing, model.bytes_by_rung)
    evict_s = 0.0 if room is None else room.evict_s
    idle_share = 1.0 - worker.utilisation
    cost_s = config.queue_weight * queue_s + config.load_weight * load_s + config.packing_s * idle_share
    cost_s += evict_s
    return Option(worker.name, queue_s, load_s, worker.utilisation, cost_s, obstacle, evict_s, missing)


def _queue_s(fleet: Fleet, model: Model, worker: Worker) -> float:
    estimates = fleet.estimates
    own_s = estimates.run_s(model.name)
    replica = worker.busy.get(model.name)
    queue_s = 0.0 if replica is None else own_s * len(replica.running) / worker.max_seqs
    for other in worker.busy:
        if other != model.name:
            queue_s += min(own_s, estimates.run_s(other))
    return queue_s


def _beside(fleet: Fleet, model: Model, shown: Iterable[WorkerId], max_options: int) -> Iterator[Option]:
    """Workers that were not chosen from, with the reason: other replicas, then those with most room."""
    done = set(shown)
    roomiest = chain.from_iterable(rooms.idle.down_to_rank(0) for rooms in fleet.capacity_by_kind.values())
    names = (name for name in chain(model.replicas, roomiest) if name not in done)
    for name in islice(names, max_options):
        done.add(name)
        worker = fleet.workers[name]
        yield _option(fleet, model, worker, obstacle=_obstacle(model, worker))


def _obstacle(model: Model, worker: Worker) -> str:
    replica = worker.replicas.get(model.name)
    if replica is not None:
        if replica.is_stale:
            return "holds an older version, which still runs"
        if replica.drain is not None:
            return f"makes room for `{replica.drain.model.name}`"
        if len(replica.running) >= worker.max_seqs:
            return f"all {worker.max_seqs} slots are in use"
        return "has more requests than others with a free slot"
    footprint = None if model.profile is None else model.profile.footprints.get(worker.kind)
    if footprint is None:
        return f"it cannot run on `{worker.kind}`"
    if worker.name in model.failed_on:
        return "it failed here before"
    if model.open:
        return shortage(worker, footprint) or "a free slot elsewhere comes before a second replica"
    return shortage(worker, footprint) or "would lose more, or is no better than those considered"
