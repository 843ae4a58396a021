"""Checks invariants of a fleet between two steps. Walks over everything."""

from __future__ import annotations

import math
from itertools import islice, pairwise

from hearth.core.types import Hold
from hearth.policy.fleet.capacity import CapacityIndex, Promises
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.profile import MIN_STAGES, Promise
from hearth.policy.fleet.records import Model, Replica, Worker, share_for_batch


def audit(fleet: Fleet) -> None:
    """Raise AssertionError if the books contradict each other. For tests, and for idle moments."""
    for worker in fleet.workers.values():
        _check_worker(fleet, worker)
    for model in fleet.models.values():
        _check_model(fleet, model)
    for replica in fleet.replicas():
        if replica.stages:
            _check_pipeline(fleet, replica)
    temporary = {one.model.name: one for one in fleet.replicas() if one.is_temporary}
    assert fleet.loading_pipelines == temporary, f"{fleet.loading_pipelines.keys()} {temporary.keys()}"
    _check_requests(fleet)
    _check_expiries(fleet)
    _check_gpu_time(fleet)
    for name, drain in fleet.drains.items():
        assert name in fleet.queues.for_room, f"a drain for `{name}`, which does not wait for room"
        for worker in drain.workers:
            assert fleet.workers.get(worker.name) is worker, f"a drain for `{name}` on a lost worker"
            assert worker.drain is drain, f"two drains on worker `{worker.name}`"
            assert worker.name not in fleet.resting, f"worker `{worker.name}` rests from drains"
    assert fleet.resting.keys() <= fleet.workers.keys(), f"lost workers rest: {fleet.resting}"


def _check_requests(fleet: Fleet) -> None:
    num_waiting = sum(request.replica is None for request in fleet.queues.requests.values())
    num_queued = sum(len(model.waiting) for model in fleet.models.values())
    assert num_waiting == num_queued == fleet.queues.num_waiting, (
        f"{num_waiting=} {num_queued=} {fleet.queues.num_waiting=}"
    )
    num_running = sum(len(replica.running) for replica in fleet.replicas())
    assert num_running == fleet.queues.num_running, f"{num_running=} {fleet.queues.num_running=}"
    num_of_models = sum(model.num_requests for model in fleet.models.values())
    assert num_of_models == len(fleet.queues.requests), f"{num_of_models=} {len(fleet.queues.requests)=}"
    running = [request for replica in fleet.replicas() for request in replica.running.values()]
    num_awaiting = sum(request.awaits_turn for request in running)
    assert num_awaiting == fleet.queues.num_awaiting_turn, f"{num_awaiting=} {fleet.queues=}"
    queued = {*fleet.queues.for_room, *fleet.queues.for_slot}
    waiting = {name for name, model in fleet.models.items() if model.waiting}
    assert queued == waiting, f"{sorted(queued)=} {sorted(waiting)=}"


def _check_gpu_time(fleet: Fleet) -> None:
    holding = [
        worker
        for worker in fleet.workers.values()
        if any(one.hold not in (None, Hold.RETAINED) for one in worker.replicas.values())
    ]
    assert fleet.gpu_time.num_held == len(holding), f"{fleet.gpu_time.num_held=} {holding=}"
    shares = sum(time.share for time in fleet.gpu_time.by_model.values())
    held = sum(worker.device_share for worker in holding)
    assert math.isclose(shares, held, abs_tol=1e-6), f"{shares=} {held=}"
    num_running = sum(time.num_running for time in fleet.gpu_time.by_model.values())
    assert num_running == fleet.queues.num_running, f"{num_running=} {fleet.queues.num_running=}"


def _check_expiries(fleet: Fleet) -> None:
    warm = [replica.expires_s for replica in fleet.replicas() if replica.hold is Hold.WARM]
    if warm:
        timer_s = math.inf if fleet.timer_s is None else fleet.timer_s
        assert timer_s <= min(warm), f"noticed too late: {timer_s=} {min(warm)=}"


def _check_worker(fleet: Fleet, worker: Worker) -> None:
    promises = Promises(worker.promises.budget_bytes, worker.promises.shares_workspace)
    for replica in worker.replicas.values():
        hold = replica.hold_at(fleet.now_s)
        assert replica.hold is hold, f"`{replica.model.name}` on `{worker.name}`: {replica.hold=} {hold=}"
        first = replica.worker.name
        assert replica.model.replicas[first] is replica, f"not its model's: `{replica.model.name}`"
        assert worker in replica.workers, f"not a member: `{replica.model.name}` on `{worker.name}`"
        assert len(replica.running) <= replica.max_seqs, f"{len(replica.running)=} {replica.max_seqs=}"
        drains = [one.drain for one in replica.workers]
        assert replica.drain is None or replica.drain in drains, f"lost drain: `{replica.model.name}`"
        notified = replica.notified_hold
        told = (Hold.PAUSED, Hold.BUSY, notified)
        assert replica.stages or hold in told, f"not notified: `{replica.model.name}`: {hold=} {notified=}"
        is_refused = replica in fleet.refused_pins
        assert replica.has_pin or is_refused is (replica in replica.model.pinned_replicas), f"{replica.hold=}"
        promises.add(replica.promise_on(worker), hold)
    assert promises == worker.promises, f"{promises=} {worker.promises=}"
    if fleet.config.takes_turns:
        _check_turns(worker)
    else:
        assert promises.free_bytes >= 0, f"worker `{worker.name}` is beyond its budget: {promises=}"
    for name, model in worker.resident_models.items():
        assert model is fleet.models.get(name), f"bytes of a model that is gone: `{name}`"
        assert worker.name in model.resident_bytes, f"`{name}` does not know of its bytes on `{worker.name}`"
    busy = {name for name, replica in worker.replicas.items() if replica.running}
    assert worker.busy.keys() == busy, f"{sorted(worker.busy)=} {sorted(busy)=}"
    assert worker.is_draining is (worker.node in fleet.draining), f"{worker.name=} {fleet.draining=}"
    expected, index = CapacityIndex(), fleet.capacity.by_kind.get(worker.kind, CapacityIndex())
    if not worker.is_draining:
        expected.put(worker.name, promises)
    for ranking, right in zip(index.rankings, expected.rankings, strict=True):
        assert ranking.rank(worker.name) == right.highest, f"{ranking.rank(worker.name)=} {right.highest=}"
    assert worker.drain is None or fleet.drains[worker.drain.model.name] is worker.drain


def _check_pipeline(fleet: Fleet, replica: Replica) -> None:
    name, stages = replica.model.name, replica.stages
    first, workers = stages[0], [stage.worker.name for stage in stages]
    assert (first.worker, first.promise) == (replica.worker, replica.promise), f"`{name}`: {workers}"
    assert len(stages) >= MIN_STAGES, f"no pipeline: `{name}` on {workers}"
    assert workers == sorted(set(workers)), f"out of order, or twice: `{name}` on {workers}"
    assert len({stage.worker.kind for stage in stages}) == 1, f"in several pools: `{name}` on {workers}"
    assert replica.is_in_turn, f"out of turn: `{name}` on {workers}"
    ends = [0, *(stage.end for stage in stages)]
    assert [stage.begin for stage in stages] == ends[:-1], f"layers of `{name}`: {ends}"
    assert all(begin < end for begin, end in pairwise(ends)), f"layers of `{name}`: {ends}"
    profile = replica.model.profile
    if profile is not None and not replica.is_stale:
        num_layers = profile.stages[first.worker.kind].num_layers
        assert ends[-1] == num_layers, f"layers of `{name}`: {ends}"
    assert replica.is_ready is all(stage.is_ready for stage in stages), f"`{name}` on {workers}"
    for stage in stages:
        own_bytes, standing_bytes = stage.promise.own_bytes, stage.promise.standing_bytes
        assert own_bytes == standing_bytes, f"`{name}` on `{stage.worker.name}` takes turns: {stage.promise}"
        assert fleet.workers.get(stage.worker.name) is stage.worker, f"`{name}` on lost {stage.worker.name}"
        assert stage.worker.replicas.get(name) is replica, f"`{stage.worker.name}` does not know of `{name}`"


def _check_turns(worker: Worker) -> None:
    bound = Promises(worker.promises.budget_bytes, worker.promises.shares_workspace)
    for replica in worker.replicas.values():
        promise = replica.promise_on(worker)
        if replica.is_in_turn:
            bound.add(promise, Hold.BUSY)
        elif replica.has_had_turn:
            workspace_bytes = promise.workspace_bytes if bound.shares_workspace else 0
            bound.add(Promise(promise.standing_bytes, workspace_bytes), Hold.PAUSED)
    assert bound.free_bytes >= 0, f"turns on worker `{worker.name}` are beyond its budget: {bound=}"
    promises = worker.promises
    assert promises.can_all_take_turns, f"no turn for some on worker `{worker.name}`: {promises=}"


def _check_model(fleet: Fleet, model: Model) -> None:
    name = model.name
    usable = {n: r for n, r in model.replicas.items() if r.takes_requests}
    assert model.usable == usable, f"`{name}`: {sorted(model.usable)=} {sorted(usable)=}"
    loading = {n for n, replica in usable.items() if not replica.is_ready}
    assert model.loading.keys() == loading, f"`{name}`: {sorted(model.loading)=} {sorted(loading)=}"
    assert model.profile is not None or model.replicas, f"removed, but still here: `{name}`"
    assert model.profile is not None or not model.waiting, f"removed, but waited for: `{name}`"
    is_open = {n: r.load for n, r in usable.items() if r.has_free_slot}
    ranks = {n: model.with_free_slot.rank(n) for n in model.with_free_slot}
    assert ranks == is_open, f"`{name}`: {ranks=} {is_open=}"
    places = [request.place for request in model.waiting.values()]
    assert places == sorted(places), f"out of order: `{name}`: {places}"
    for request in islice(model.waiting.values(), 1):
        is_free = [n for n in is_open if usable[n].has_slot_for(request, fleet.now_s)]
        assert request.is_batch or not is_free, f"`{name}` waits beside a free slot: {is_open}"
        most = [share_for_batch(usable[n].max_seqs) for n in is_open]
        assert all(num >= one for num, one in zip(is_open.values(), most, strict=True)), f"{name} {is_open=}"
        for pipeline in fleet.pipelines_of(model) if request.adapter is None else ():
            has_slot = pipeline.takes_requests and pipeline.has_slot_for(request, fleet.now_s)
            assert request.is_batch or not has_slot, f"`{name}` waits beside a free pipeline"
    queue = (fleet.queues.for_slot if usable else fleet.queues.for_room) if model.waiting else None
    assert model.queue is queue, f"`{name}` stands in the wrong queue"
    if model.queue is not None:
        assert model.queue.rank(name) == places[0], f"`{name}` stands in the wrong place"
    for worker, num_bytes in model.resident_bytes.items():
        assert model.profile is not None, f"bytes of a removed model: `{name}` on `{worker}`"
        assert 0 < num_bytes <= model.profile.num_bytes, f"`{name}` on `{worker}`: {num_bytes=}"
        assert name in fleet.workers[worker].resident_models, (
            f"`{worker}` does not know of its bytes of `{name}`"
        )
    known = model.resident_bytes.items()
    retired = {n: num_bytes for n, num_bytes in known if name not in fleet.workers[n].replicas}
    ranks = {n: model.retired.rank(n) for n in model.retired}
    assert ranks == retired, f"`{name}`: {ranks=} {retired=}"
