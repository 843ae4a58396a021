"""Simulated workers under a brain: an event happens to them first, then the brain's orders are carried out.

Raises AssertionError where an order is impossible, or a request ends twice. Knows no clock, and does not
choose what happens: `simulator.py` does by times, tests by moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from bench.fleet.worker import SimulatedReplica, SimulatedWorker
from hearth.core.types import ModelId, RequestId, WorkerId, model_of
from hearth.policy.fleet.events import (
    Action,
    CancelRun,
    Dispatch,
    End,
    Event,
    Evict,
    LoadModel,
    ModelDeployed,
    ModelFailed,
    ModelReady,
    ModelRemoved,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    SetHold,
    SetTimer,
    TimerFired,
    TurnBegan,
    TurnEnded,
    WorkerJoined,
    WorkerLost,
)
from hearth.policy.fleet.profile import ModelProfile

#: Decides what follows from an event; `step` over a fleet, perhaps timed or recorded.
Brain = Callable[[Event], list[Action]]


@dataclass(slots=True)
class SimulatedRequest:
    """A request that has not ended. Mutable; written only by the cluster."""

    model: ModelId
    digest: str  #: of the version that was deployed when it arrived
    worker: WorkerId | None = None  #: None while it waits
    hosted: ModelId | None = None  #: its model, as that worker hosts it
    num_dispatches: int = 0


class SimulatedCluster:
    """All simulated workers and the requests that they serve. Mutable; written by `tell` alone."""

    def __init__(self, brain: Brain, *, takes_turns: bool = False) -> None:
        self._brain, self._takes_turns = brain, takes_turns
        self.workers: dict[WorkerId, SimulatedWorker] = {}
        self.profiles: dict[ModelId, ModelProfile] = {}
        #: By model and kind of worker: how many different versions were deployed.
        self.versions: Counter[tuple[ModelId, str]] = Counter()
        #: Arrived and not ended.
        self.requests: dict[RequestId, SimulatedRequest] = {}
        self.num_arrived = self.num_ended = 0
        #: The last time ordered that has not come yet.
        self.timer_s: float | None = None

    def tell(self, event: Event) -> list[Action]:
        """Have an event happen, and carry out all that the brain orders; return the orders."""
        self._happen(event)
        actions = self._brain(event)
        for action in actions:
            self._carry_out(action, event.now_s)
        return actions

    def replica(self, worker: WorkerId, model: ModelId) -> SimulatedReplica | None:
        """Return a hosted model; None if it was evicted, or its worker lost."""
        known = self.workers.get(worker)
        return None if known is None else known.replicas.get(model)

    def check(self) -> None:
        """Raise AssertionError if a worker's books are wrong. Walks over everything: for tests."""
        for worker in self.workers.values():
            worker.check()
            for model, replica in worker.replicas.items():
                for request_id in replica.running:
                    request = self.requests[request_id]
                    assert (request.worker, request.hosted) == (worker.name, model), (
                        f"{request_id=} {request}"
                    )
        assert self.num_arrived == self.num_ended + len(self.requests)

    def _happen(self, event: Event) -> None:
        """Follow an event; what lost workers say late changes nothing."""
        match event:
            case ModelDeployed(_, profile):
                self._deploy(profile)
            case ModelRemoved(_, model):
                self.profiles.pop(model, None)
            case WorkerJoined(_, name, kind, budget_bytes, shares_workspace):
                self.workers[name] = SimulatedWorker(
                    name,
                    kind,
                    budget_bytes,
                    shares_workspace=shares_workspace,
                    takes_turns=self._takes_turns,
                )
            case WorkerLost(_, name):
                self._lose(name)
            case RequestArrived(_, request_id, model):
                deployed = self.profiles.get(model)
                digest = "" if deployed is None else deployed.digest
                self.requests[request_id] = SimulatedRequest(model, digest)
                self.num_arrived += 1
            case RequestFinished(_, request_id, _, how) if request_id in self.requests:
                request = self.requests[request_id]
                if how is not End.STOPPED and request.worker is not None:
                    self.workers[request.worker].finish_run(request_id, request.hosted or request.model)
                self._end(request_id)
            case RequestCancelled(_, request_id) if request_id in self.requests:
                self._end(request_id)
            case ModelReady(_, name, model, uses) if self.replica(name, model) is not None:
                self.workers[name].finish_load(model, uses)
            case ModelFailed(_, name, model) if (failed := self.replica(name, model)) is not None:
                self._release(self.workers[name].fail(model))
                self._cut_off(model, failed)
            case TurnBegan(_, name, model) if self.replica(name, model) is not None:
                self.workers[name].begin_turn(model, event.now_s)
            case TurnEnded(_, name, model) if self.replica(name, model) is not None:
                self.workers[name].end_turn(model)
            case TimerFired():
                self.timer_s = None
            case _:
                pass

    def _deploy(self, profile: ModelProfile) -> None:
        name, before = profile.model, self.profiles.get(profile.model)
        for kind in {*profile.footprints, *(kind for model, kind in self.versions if model == name)}:
            version = profile.digest, profile.footprints.get(kind), profile.stages.get(kind)
            if (
                before is None
                or (before.digest, before.footprints.get(kind), before.stages.get(kind)) != version
            ):
                self.versions[name, kind] += 1
        self.profiles[name] = profile

    def _lose(self, name: WorkerId) -> None:
        worker = self.workers.pop(name, None)
        for model, replica in worker.replicas.items() if worker is not None else ():
            self._release(list(replica.running))
            self._cut_off(model, replica)

    def _cut_off(self, model: ModelId, lost: SimulatedReplica) -> None:
        """Have the requests of a pipeline wait again that has lost a member."""
        for member in () if lost.pipeline is None else lost.pipeline.members:
            if (replica := self.replica(member.worker, model)) is not None:
                self._release(list(replica.running))
                replica.running.clear()

    def _release(self, requests: list[RequestId]) -> None:
        """Have requests wait again; those whose clients are gone are known no longer."""
        for request_id in requests:
            if request_id in self.requests:
                self.requests[request_id].worker = None

    def _end(self, request_id: RequestId) -> SimulatedRequest:
        request = self.requests.pop(request_id)  # Raises at the second end.
        self.num_ended += 1
        return request

    def _carry_out(self, action: Action, now_s: float) -> None:
        match action:
            case LoadModel(model, name):
                worker, deployed = self.workers[name], model_of(model)
                worker.load(action, self.profiles[deployed], self.versions[deployed, worker.kind], now_s)
            case Evict(_, name):
                self.workers[name].evict(action)
            case SetHold(_, name):
                self.workers[name].set_hold(action)
            case Dispatch():
                self._dispatch(action, now_s)
            case Reject(request_id):
                request = self._end(request_id)
                if request.worker is not None:
                    self.workers[request.worker].cancel(request_id, request.hosted or request.model)
            case CancelRun(request_id, name):
                (model,) = (m for m, one in self.workers[name].replicas.items() if request_id in one.running)
                self.workers[name].cancel(request_id, model)
                self._release([request_id])
            case SetTimer(at_s):
                assert at_s > now_s, f"{at_s=} {now_s=}"
                self.timer_s = at_s

    def _dispatch(self, order: Dispatch, now_s: float) -> None:
        request, worker = self.requests[order.request_id], self.workers[order.worker]
        model, deployed = order.model, model_of(order.model)
        assert request.model == deployed, f"not a request for it: {order}"
        assert request.worker is None, f"twice: {order}"
        assert worker.replicas[model].version == self.versions[deployed, worker.kind], f"old version: {order}"
        assert request.digest == self.profiles[deployed].digest, f"another model: {order}"
        assert order.waited_s >= 0.0, f"{order.waited_s=}"
        request.worker, request.hosted = order.worker, model
        request.num_dispatches += 1
        worker.run(order.request_id, model, now_s)
