"""The models on all workers, as `hearth ps` shows them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hearth.core.types import Hold, ModelId, WorkerId
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.records import Replica


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
    max_seqs: int = 1  #: requests that it runs at a time


def list_residents(fleet: Fleet, now_s: float) -> list[Resident]:
    replicas = sorted(fleet.replicas(), key=lambda replica: (replica.worker.name, replica.model.name))
    return [_describe_resident(replica, now_s) for replica in replicas]


def _describe_resident(replica: Replica, now_s: float) -> Resident:
    state = _describe_state(replica, now_s)
    return Resident(
        model=replica.model.name,
        worker=replica.worker.name,
        state=state,
        num_bytes=replica.promise.own_bytes + replica.promise.workspace_bytes,
        loaded_bytes=replica.loaded_bytes,
        total_bytes=replica.total_bytes,
        num_running=len(replica.running),
        expires_s=replica.expires_s if state is State.WARM else None,
        is_pin_refused=replica.is_pin_refused,
        max_seqs=replica.max_seqs,
    )


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
