"""A little world for the brain to govern: workers that load, run and die, and models that come and go.

It carries out orders as the service does and raises if one of them is impossible. It does not choose what
happens: `move` is told, by a kind of event and a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from hearth.policy.fleet.audit import audit
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    CancelRun,
    DeviceReported,
    Dispatch,
    End,
    Event,
    Evict,
    Footprint,
    LoadModel,
    LoadProgressed,
    ModelDeployed,
    ModelFailed,
    ModelProfile,
    ModelReady,
    ModelRemoved,
    ModelStopped,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    ResidencyReported,
    RungUse,
    SetHold,
    SetTimer,
    State,
    TimerFired,
    WorkerJoined,
    WorkerLost,
)
from hearth.policy.fleet.fleet import Fleet
from hearth.types import Hold, ModelId, RequestId, Rung, WorkerId

T = TypeVar("T")
KEEP_ALIVES_S = (None, None, None, 0.0, 5.0, math.inf)
MODELS = tuple(ModelId(f"m{n}") for n in range(6))


@dataclass(slots=True)
class HostedModel:
    """Mutable; written only by `World`."""

    num_bytes: int  #: promised
    version: int
    is_ready: bool = False
    hold: Hold = Hold.WARM  #: as the worker sees it while it has no requests


@dataclass(slots=True)
class HostWorker:
    """Mutable; written only by `World`."""

    kind: str
    budget_bytes: int
    max_seqs: int
    models: dict[ModelId, HostedModel] = field(default_factory=dict)
    #: Evicted, but nobody has needed their bytes yet.
    retired: set[ModelId] = field(default_factory=set)
    #: By request: its model.
    runs: dict[RequestId, ModelId] = field(default_factory=dict)

    def num_running(self, model: ModelId) -> int:
        return sum(running == model for running in self.runs.values())

    @property
    def used_bytes(self) -> int:
        return sum(model.num_bytes for model in self.models.values())


def profile(
    model: str,
    fixed_bytes: int = 30,
    min_kv_bytes: int = 5,
    max_kv_bytes: int = 10,
    *,
    keep_alive_s: float = 10.0,
    is_pinned: bool = False,
    weight: float = 1.0,
    digest: str = "",
) -> ModelProfile:
    footprint = Footprint(fixed_bytes, min_kv_bytes, max_kv_bytes)
    footprints = {"cuda": footprint, "cpu": footprint}
    return ModelProfile(ModelId(model), fixed_bytes, footprints, keep_alive_s, is_pinned, weight, digest)


class World:
    """Mutable. `events` and `actions` keep what was said, turn by turn."""

    def __init__(self, config: BrainConfig) -> None:
        self.fleet = Fleet(config)
        self.now_s = 0.0
        self.workers: dict[WorkerId, HostWorker] = {}
        self.profiles: dict[ModelId, ModelProfile] = {}
        self.versions: dict[ModelId, int] = {}
        #: Accepted and not ended, by request: its model.
        self.requests: dict[RequestId, ModelId] = {}
        #: By request: the digest of the model that it was meant for.
        self.digests: dict[RequestId, str] = {}
        self.num_accepted = 0
        self.num_ended = 0
        self.timer_s: float | None = None
        self.events: list[Event] = []
        self.actions: list[list[Action]] = []
        self._num_ids = 0

    def tell(self, event: Event) -> list[Action]:
        """One turn: the brain hears of it, and its orders are carried out and checked."""
        untouchable = {
            (resident.model, resident.worker)
            for resident in self.fleet.residents(event.now_s)
            if resident.state is State.PINNED
        }
        if isinstance(event, RequestArrived):
            self.requests[event.request_id] = event.model
            deployed = self.profiles.get(event.model)
            self.digests[event.request_id] = "" if deployed is None else deployed.digest
            self.num_accepted += 1
        actions = step(self.fleet, event)
        self.events.append(event)
        self.actions.append(actions)
        for action in actions:
            self._carry_out(action)
        if not isinstance(event, ModelDeployed | ModelRemoved | ModelStopped):
            gone = {(action.model, action.worker) for action in actions if isinstance(action, Evict)}
            # A request that was sent in this very turn may have unpinned its model.
            pinned = {name for name, model in self.fleet.models.items() if model.is_pinned}
            assert not [model for model, _ in gone & untouchable if model in pinned], f"{gone & untouchable}"
        audit(self.fleet)
        self._check_holds()
        assert self.fleet.queues.num_running + self.fleet.queues.num_waiting == len(self.requests)
        return actions

    def _carry_out(self, action: Action) -> None:
        match action:
            case LoadModel(model, name, kv_floor_bytes, max_kv_bytes):
                worker = self.workers[name]
                footprint = self.profiles[model].footprints[worker.kind]
                assert model not in worker.models, f"loaded twice on one worker: {action}"
                assert footprint.min_kv_bytes == kv_floor_bytes <= max_kv_bytes, f"{action} {footprint}"
                assert max_kv_bytes <= footprint.max_kv_bytes, f"{action} {footprint}"
                self._check_no_other_load(model)
                worker.models[model] = HostedModel(footprint.least_bytes, self.versions[model])
                worker.retired.discard(model)
                assert worker.used_bytes <= worker.budget_bytes, f"beyond the budget: {action}"
            case Evict(model, name, cost_s, is_freed):
                worker = self.workers[name]
                assert worker.num_running(model) == 0, f"evicted while busy: {action}"
                assert cost_s >= 0.0, f"{cost_s=}"
                assert is_freed or model in worker.models, f"evicted twice: {action}"
                worker.models.pop(model, None)
                if is_freed:
                    worker.retired.discard(model)
                else:
                    worker.retired.add(model)
            case SetHold(model, name, hold):
                hosted = self.workers[name].models[model]
                assert hold not in (Hold.BUSY, hosted.hold), f"needless: {action}"
                hosted.hold = hold
            case Dispatch(request_id, model, name, _, waited_s, options):
                worker = self.workers[name]
                assert self.requests[request_id] == model, f"not a request for it: {action}"
                assert not any(request_id in other.runs for other in self.workers.values()), (
                    f"twice: {action}"
                )
                assert worker.models[model].version == self.versions[model], f"old version: {action}"
                assert self.digests[request_id] == self.profiles[model].digest, f"another model: {action}"
                assert worker.num_running(model) < worker.max_seqs, f"no slot: {action}"
                assert waited_s >= 0.0, f"{waited_s=}"
                assert name in [option.worker for option in options if option.obstacle is None], f"{action}"
                assert len({option.worker for option in options}) == len(options) <= 8, f"{action}"
                worker.runs[request_id] = model
                if worker.models[model].hold is Hold.RETAINED:
                    worker.models[model].hold = Hold.WARM
            case Reject(request_id):
                for worker in self.workers.values():
                    worker.runs.pop(request_id, None)
                self.end(request_id)
            case CancelRun(request_id, name):
                del self.workers[name].runs[request_id]
            case SetTimer(at_s):
                assert at_s > self.now_s, f"{at_s=} {self.now_s=}"
                self.timer_s = at_s

    def _check_holds(self) -> None:
        """Every worker sees its idle models as the brain does."""
        for name, worker in self.workers.items():
            for model, hosted in worker.models.items():
                hold = self.fleet.workers[name].replicas[model].hold
                assert hold in (Hold.BUSY, hosted.hold), f"{model} on {name}: {hold=} {hosted.hold=}"

    def _check_no_other_load(self, model: ModelId) -> None:
        for worker in self.workers.values():
            hosted = worker.models.get(model)
            is_loading = hosted is not None and not hosted.is_ready
            assert not (is_loading and hosted is not None and hosted.version == self.versions[model]), (
                f"loaded twice at a time: {model}"
            )

    def end(self, request_id: RequestId) -> None:
        del self.requests[request_id]  # Raises at the second end.
        self.num_ended += 1

    def new_id(self, what: str) -> str:
        self._num_ids += 1
        return f"{what}{self._num_ids}"

    # What may happen. Each takes a number to choose by, and does nothing where it cannot happen.

    def move(self, kind: str, number: int) -> None:
        MOVES[kind](self, number)

    def deploy(self, number: int) -> None:
        model = MODELS[number % len(MODELS)]
        is_pinned = number % 7 == 0
        keep_alive_s = (0.0, 3.0, 20.0, math.inf)[number // 7 % 4]
        fixed_bytes = (10, 30, 45, 90, 120)[number // 28 % 5]
        digest = f"digest {number // 140 % 2}"
        deployed = profile(model, fixed_bytes, keep_alive_s=keep_alive_s, is_pinned=is_pinned, digest=digest)
        before = self.profiles.get(model)
        is_same = before is not None and (before.digest, before.footprints) == (digest, deployed.footprints)
        if not is_same:
            self.versions[model] = self.versions.get(model, 0) + 1
        self.profiles[model] = deployed
        self.tell(ModelDeployed(self.now_s, deployed))

    def remove(self, number: int) -> None:
        model = MODELS[number % len(MODELS)]
        self.profiles.pop(model, None)
        self.tell(ModelRemoved(self.now_s, model))

    def stop(self, number: int) -> None:
        self.tell(ModelStopped(self.now_s, MODELS[number % len(MODELS)], is_freed=number % 2 == 0))

    def join(self, number: int) -> None:
        if len(self.workers) < 4:
            name = WorkerId(self.new_id("w"))
            kind = ("cuda", "cuda", "cpu")[number % 3]
            budget_bytes = (100, 100, 60)[number // 3 % 3]
            self.workers[name] = HostWorker(kind, budget_bytes, max_seqs=1 + number // 9 % 3)
            worker = self.workers[name]
            self.tell(WorkerJoined(self.now_s, name, kind, budget_bytes, worker.max_seqs))

    def lose(self, number: int) -> None:
        if name := _pick(sorted(self.workers), number):
            del self.workers[name]
            self.tell(WorkerLost(self.now_s, name))

    def arrive(self, number: int) -> None:
        model = MODELS[number % len(MODELS)]
        keep_alive_s = KEEP_ALIVES_S[number // len(MODELS) % len(KEEP_ALIVES_S)]
        request_id = RequestId(self.new_id("r"))
        self.tell(RequestArrived(self.now_s, request_id, model, 10, None, keep_alive_s))

    def finish(self, number: int) -> None:
        runs = sorted((run, name) for name, worker in self.workers.items() for run in worker.runs)
        if chosen := _pick(runs, number):
            request_id, name = chosen
            how = (End.DONE, End.DONE, End.FAILED, End.STOPPED)[number % 4]
            if how is not End.STOPPED:
                del self.workers[name].runs[request_id]
            self.end(request_id)
            self.tell(RequestFinished(self.now_s, request_id, 5, how))

    def cancel(self, number: int) -> None:
        if request_id := _pick(sorted(self.requests), number):
            self.end(request_id)
            self.tell(RequestCancelled(self.now_s, request_id))

    def ready(self, number: int) -> None:
        if chosen := _pick(self._loading(), number):
            model, name = chosen
            hosted = self.workers[name].models[model]
            hosted.is_ready = True
            use = RungUse((Rung.HOST, Rung.DISK)[number % 2], hosted.num_bytes, 0.5 + number % 3)
            self.tell(ModelReady(self.now_s, name, model, (use,), 1.0))

    def progress(self, number: int) -> None:
        if chosen := _pick(self._loading(), number):
            self.tell(LoadProgressed(self.now_s, chosen[1], chosen[0], number % 40))

    def fail(self, number: int) -> None:
        hosted = sorted((model, name) for name, worker in self.workers.items() for model in worker.models)
        if chosen := _pick(hosted, number):
            model, name = chosen
            worker = self.workers[name]
            del worker.models[model]
            worker.runs = {run: running for run, running in worker.runs.items() if running != model}
            self.tell(ModelFailed(self.now_s, name, model, "broken"))

    def report(self, number: int) -> None:
        bytes_by_rung = {Rung.HOST: number % 50, Rung.DISK: number // 50 % 100}
        self.tell(ResidencyReported(self.now_s, MODELS[number % len(MODELS)], bytes_by_rung))

    def report_device(self, number: int) -> None:
        """Of every model that a worker has or had, some part is still there; and of one that it never had."""
        if name := _pick(sorted(self.workers), number):
            worker = self.workers[name]
            shares = {model: (number * (at + 7)) % 60 for at, model in enumerate(MODELS)}
            there = sorted({*worker.models, *worker.retired, MODELS[number % len(MODELS)]})
            bytes_by_model = {model: shares[model] for model in there if shares[model] % 5}
            self.tell(DeviceReported(self.now_s, name, bytes_by_model))

    def wait(self, number: int) -> None:
        """Time passes, at most until the timer."""
        until_s = self.now_s + (0.1, 1.0, 4.0)[number % 3]
        if self.timer_s is not None and self.timer_s <= until_s:
            self.fire()
        else:
            self.now_s = until_s

    def fire(self) -> None:
        assert self.timer_s is not None
        self.now_s, self.timer_s = self.timer_s, None
        self.tell(TimerFired(self.now_s))

    def lag(self, _: int) -> None:
        """What a lost worker, or one that was told to drop a model, had said before it knew."""
        self.tell(ModelReady(self.now_s, WorkerId("w0"), MODELS[0], (), 1.0))
        self.tell(RequestFinished(self.now_s, RequestId("r0"), 1))
        self.tell(RequestCancelled(self.now_s, RequestId("r0")))
        self.tell(LoadProgressed(self.now_s, WorkerId("w0"), MODELS[0], 1))
        self.tell(WorkerLost(self.now_s, WorkerId("w0")))
        self.tell(DeviceReported(self.now_s, WorkerId("w0"), {MODELS[0]: 5, ModelId("gone"): 5}))

    def settle_down(self) -> None:
        """Lost workers are replaced, loads end, requests finish, timers fire, until nothing can happen."""
        for _ in range(1000):
            if not self.fleet.is_complete:
                self.join(0)
            elif self._loading():
                self.ready(0)
            elif any(worker.runs for worker in self.workers.values()):
                self.finish(0)
            elif self.timer_s is not None:
                self.fire()
            else:
                return
        raise AssertionError("it never comes to rest")

    def _loading(self) -> list[tuple[ModelId, WorkerId]]:
        return sorted(
            (model, name)
            for name, worker in self.workers.items()
            for model, hosted in worker.models.items()
            if not hosted.is_ready
        )


def _pick(choices: list[T], number: int) -> T | None:
    return choices[number % len(choices)] if choices else None


MOVES: dict[str, Callable[[World, int], None]] = {
    "arrive": World.arrive,
    "finish": World.finish,
    "ready": World.ready,
    "wait": World.wait,
    "cancel": World.cancel,
    "progress": World.progress,
    "report": World.report,
    "report_device": World.report_device,
    "fail": World.fail,
    "join": World.join,
    "lose": World.lose,
    "deploy": World.deploy,
    "remove": World.remove,
    "stop": World.stop,
    "lag": World.lag,
}
