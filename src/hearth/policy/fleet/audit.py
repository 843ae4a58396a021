"""What must be true of a fleet at any time. Changes nothing; walks over everything."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hearth.policy.fleet.capacity import CapacityIndex
from hearth.policy.fleet.replica import Model, Worker
from hearth.types import Hold

if TYPE_CHECKING:
    from hearth.policy.fleet.fleet import Fleet


def audit(fleet: Fleet) -> None:
    """Raise if the books contradict each other."""
    for worker in fleet.workers.values():
        _worker(fleet, worker)
    for model in fleet.models.values():
        _model(fleet, model)
    _requests(fleet)
    _expiries(fleet)
    for name, drain in fleet.drains.items():
        assert name in fleet.room_queue, f"a drain for `{name}`, which does not wait for room"
        assert fleet.workers.get(drain.worker.name) is drain.worker, f"a drain for `{name}` on a lost worker"
        assert drain.worker.drain is drain, f"two drains on worker `{drain.worker.name}`"


def _requests(fleet: Fleet) -> None:
    num_waiting = sum(request.replica is None for request in fleet.requests.values())
    num_queued = sum(len(model.waiting) for model in fleet.models.values())
    assert num_waiting == num_queued == fleet.num_waiting, (
        f"{num_waiting=} {num_queued=} {fleet.num_waiting=}"
    )
    num_running = sum(len(replica.running) for replica in fleet.replicas())
    assert num_running == fleet.num_running, f"{num_running=} {fleet.num_running=}"
    queued = {*fleet.room_queue, *fleet.slot_queue}
    waiting = {name for name, model in fleet.models.items() if model.waiting}
    assert queued == waiting, f"{sorted(queued)=} {sorted(waiting)=}"


def _expiries(fleet: Fleet) -> None:
    warm = [replica.expires_s for replica in fleet.replicas() if replica.hold is Hold.WARM]
    if warm:
        timer_s = math.inf if fleet.timer_s is None else fleet.timer_s
        assert timer_s <= min(warm), f"noticed too late: {timer_s=} {min(warm)=}"


def _worker(fleet: Fleet, worker: Worker) -> None:
    held_bytes = [0] * len(Hold)
    for replica in worker.replicas.values():
        hold = replica.hold_at(fleet.now_s)
        assert replica.hold is hold, f"`{replica.model.name}` on `{worker.name}`: {replica.hold=} {hold=}"
        assert replica.model.replicas[worker.name] is replica, f"not its model's: `{replica.model.name}`"
        assert len(replica.running) <= worker.max_seqs, f"{len(replica.running)=} {worker.max_seqs=}"
        assert replica.drain is None or replica.drain is worker.drain, f"lost drain: `{replica.model.name}`"
        assert hold in (Hold.BUSY, replica.told), f"not told: `{replica.model.name}`: {hold=} {replica.told=}"
        held_bytes[hold] += replica.num_bytes
    assert held_bytes == worker.held_bytes, f"{held_bytes=} {worker.held_bytes=}"
    assert worker.free_bytes >= 0, f"worker `{worker.name}` is beyond its budget: {worker.free_bytes=}"
    for name, model in worker.resident.items():
        assert model is fleet.models.get(name), f"bytes of a model that is gone: `{name}`"
        assert worker.name in model.resident, f"`{name}` does not know of its bytes on `{worker.name}`"
    busy = {name for name, replica in worker.replicas.items() if replica.running}
    assert worker.busy.keys() == busy, f"{sorted(worker.busy)=} {sorted(busy)=}"
    expected, rooms = CapacityIndex(), fleet.capacity_by_kind[worker.kind]
    expected.put(worker)
    for ranking, right in zip(rooms.rankings, expected.rankings, strict=True):
        assert ranking.rank(worker.name) == right.highest, f"{ranking.rank(worker.name)=} {right.highest=}"
    assert worker.drain is None or fleet.drains[worker.drain.model.name] is worker.drain


def _model(fleet: Fleet, model: Model) -> None:
    name = model.name
    usable = {n: r for n, r in model.replicas.items() if not r.is_stale and r.drain is None}
    assert model.usable == usable, f"`{name}`: {sorted(model.usable)=} {sorted(usable)=}"
    loading = {n for n, replica in usable.items() if not replica.is_ready}
    assert model.loading.keys() == loading, f"`{name}`: {sorted(model.loading)=} {sorted(loading)=}"
    assert model.profile is not None or model.replicas, f"removed, but still here: `{name}`"
    assert model.profile is not None or not model.waiting, f"removed, but waited for: `{name}`"
    is_open = {n: len(r.running) for n, r in usable.items() if len(r.running) < r.worker.max_seqs}
    ranks = {n: model.open.rank(n) for n in model.open}
    assert ranks == is_open, f"`{name}`: {ranks=} {is_open=}"
    assert list(model.waiting) == sorted(model.waiting), f"out of order: `{name}`: {list(model.waiting)}"
    assert not (model.waiting and is_open), f"`{name}` waits beside a free slot: {is_open}"
    queue = (fleet.slot_queue if usable else fleet.room_queue) if model.waiting else None
    assert model.queue is queue, f"`{name}` stands in the wrong queue"
    if model.queue is not None:
        assert model.queue.rank(name) == next(iter(model.waiting)), f"`{name}` stands in the wrong place"
    for worker, num_bytes in model.resident.items():
        assert model.profile is not None, f"bytes of a removed model: `{name}` on `{worker}`"
        assert 0 < num_bytes <= model.profile.num_bytes, f"`{name}` on `{worker}`: {num_bytes=}"
        assert name in fleet.workers[worker].resident, f"`{worker}` does not know of its bytes of `{name}`"
    retired = {n: num_bytes for n, num_bytes in model.resident.items() if n not in model.replicas}
    ranks = {n: model.retired.rank(n) for n in model.retired}
    assert ranks == retired, f"`{name}`: {ranks=} {retired=}"
