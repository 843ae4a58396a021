"""The models on all workers, as `hearth ps` shows them: of a pipeline, each stage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from hearth.core.types import Hold, ModelId, Transport, WorkerId, transport_between
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import Replica, Worker


class State(StrEnum):
    LOADING = "loading"
    WAITING = "waiting"  #: for its first turn; nothing is loaded yet
    PAUSED = "paused"  #: with requests, until its next turn
    BUSY = "busy"
    WARM = "warm"
    RETAINED = "retained"
    PINNED = "pinned"


@dataclass(frozen=True, slots=True)
class Resident:
    model: ModelId
    worker: WorkerId
    state: State
    num_bytes: int  #: of device memory that it is promised, KV included
    loaded_bytes: int
    total_bytes: int
    num_running: int
    expires_s: float | None  #: when a warm one becomes retained; None: it is not warm
    is_pin_refused: bool = False  #: it should be pinned, and others would have no room
    demand_tokens: int = 0  #: of KV, a second from now; only the first stage of a pipeline knows
    room_tokens: int = 0  #: of KV that it can have; 0: unknown
    is_dropped: bool = False  #: it gave up layers for KV
    max_seqs: int = 1  #: requests that it runs at a time
    layers: tuple[int, int] | None = None  #: of a stage: the first, and the first behind it; None: all
    transport: Transport | None = (
        None  #: of hidden states to this stage; None: it is the first, or the model whole
    )


def list_residents(fleet: Fleet, now_s: float) -> list[Resident]:
    hosted = [(worker, replica) for replica in fleet.replicas() for worker in replica.workers]
    hosted.sort(key=lambda pair: (pair[0].name, pair[1].model.name))
    return [_describe_resident(replica, worker, now_s) for worker, replica in hosted]


def _describe_resident(replica: Replica, worker: Worker, now_s: float) -> Resident:
    state, promise = _describe_state(replica, now_s), replica.promise_on(worker)
    stage = replica.stage_on(worker)
    part = replica if stage is None else stage
    return Resident(
        model=replica.model.name,
        worker=worker.name,
        state=state,
        num_bytes=promise.own_bytes + promise.workspace_bytes,
        loaded_bytes=part.loaded_bytes,
        total_bytes=part.total_bytes,
        num_running=len(replica.running),
        expires_s=replica.expires_s if state is State.WARM else None,
        is_pin_refused=replica.is_pin_refused,
        demand_tokens=replica.demand_tokens if worker is replica.worker else 0,
        room_tokens=replica.room_tokens if worker is replica.worker else 0,
        is_dropped=replica.is_dropped,
        max_seqs=replica.max_seqs,
        layers=None if stage is None else (stage.begin, stage.end),
        transport=_describe_transport(replica, worker),
    )


def _describe_transport(replica: Replica, worker: Worker) -> Transport | None:
    for before, after in pairwise(replica.workers):
        if after is worker:
            return transport_between(before.name, before.gpu, after.name, after.gpu)
    return None


def _describe_state(replica: Replica, now_s: float) -> State:
    if not replica.is_ready and replica.is_in_turn:
        return State.LOADING
    match replica.hold:
        case Hold.PINNED:
            return State.PINNED
        case Hold.BUSY:
            return State.BUSY
        case Hold.PAUSED:
            return State.PAUSED if replica.is_ready else State.WAITING
        case Hold.WARM if now_s < replica.expires_s:
            return State.WARM
        case _:
            return State.RETAINED
