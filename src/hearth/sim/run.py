"""A service in virtual time, to the last token: the brain and the policies of workers, and what a profile measured.

    requests of a trace -> brain -> orders -> SteppedWorker -> facts -> brain -> ...

Nothing is drawn at random and nothing is decided here: a run with the same trace, setting and profile is the
same run. Each one is checked: every request ends exactly once, and every worker's books are in order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import assert_never

from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    CancelRun,
    Dispatch,
    Event,
    Evict,
    Footprint,
    LoadModel,
    ModelDeployed,
    ModelProfile,
    Promise,
    Reject,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    SetHold,
    SetTimer,
    TimerFired,
    TurnBegan,
    WorkerJoined,
    WorkerLost,
)
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.footprint import PAGE_BYTES
from hearth.policy.turns.turn_policy import TurnRules
from hearth.sim.answers import Answer
from hearth.sim.profile import Profile, ShapeProfile
from hearth.sim.stepped_worker import Host, Paused, Start, SteppedWorker, TokensSent, WorkerFact
from hearth.sizes import StepLimits
from hearth.types import ModelId, Pace, RequestId, WorkerId

#: What engines take beside weights and KV, in whole pages: as for models of 1 to 8 billion parameters.
WORKSPACE_BYTES, TABLES_BYTES = 544 << 20, 16 << 20
KIND = "cuda"


class Policy(StrEnum):
    """How models that do not fit together share a worker."""

    TURNS = "turns"
    DRAIN = "drain"  #: a busy model ends first
    ONE_AT_A_TIME = "one-at-a-time"  #: in order of arrival, each model alone


@dataclass(frozen=True, slots=True)
class SimulationSetting:
    """A service to be simulated."""

    shapes: Mapping[ModelId, str]  #: the shape of each model, as the profile names it
    memory_bytes: int  #: of each worker
    num_workers: int = 1
    policy: Policy = Policy.TURNS
    context: int = 2048
    limits: StepLimits = StepLimits(max_batch_tokens=4096, max_seqs=256, block_tokens=16)
    pace: Pace = field(default_factory=Pace)
    rules: TurnRules = field(default_factory=TurnRules)
    max_queue: int = 512
    keep_alive_s: float = 300.0


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request of a trace, for one of the models."""

    arrival_s: float
    model: ModelId
    num_prompt_tokens: int
    num_output_tokens: int


class _HostAll:
    """A brain for one worker that hosts every model at once. Mutable, by nobody."""

    def __init__(self) -> None:
        self._profiles: list[ModelProfile] = []

    def __call__(self, event: Event) -> list[Action]:
        match event:
            case ModelDeployed(_, profile):
                self._profiles.append(profile)
            case WorkerJoined(_, name):
                return [
                    LoadModel(
                        one.model, name, one.footprints[KIND].min_kv_bytes, one.footprints[KIND].max_kv_bytes
                    )
                    for one in self._profiles
                ]
            case RequestArrived(_, request_id, model):
                return [Dispatch(request_id, model, WorkerId("worker-0"), None, 0.0, ())]
        return []


class Simulation:
    """All of a simulated service. Mutable; one caller."""

    def __init__(self, setting: SimulationSetting, profile: Profile) -> None:
        self.setting, self.profile = setting, profile
        self.now_s = 0.0
        self.answers: dict[RequestId, Answer] = {}
        self.workers: dict[WorkerId, SteppedWorker] = {}
        self.num_turns = self.num_pauses = 0
        self._num_open = 0  #: requests that have not ended
        if setting.policy is Policy.TURNS:
            self._brain: Callable[[Event], list[Action]] = _HostAll()
        else:
            fleet = Fleet(BrainConfig(max_queue=setting.max_queue))
            self._brain = lambda event: step(fleet, event)
        self._profiles: dict[ModelId, ModelProfile] = {}
        #: (time, number, what): an event that happens, or a worker that has something to do.
        self._queue: list[tuple[float, int, Event | WorkerId]] = []
        self._num_queued = 0
        self._timer_s: float | None = None
        for model, shape in setting.shapes.items():
            self._tell(ModelDeployed(0.0, self._model_profile(model, profile.shape(shape))))
        for number in range(setting.num_workers):
            self._tell(
                WorkerJoined(
                    0.0, WorkerId(f"worker-{number}"), KIND, setting.memory_bytes, setting.limits.max_seqs
                )
            )

    def add(self, requests: Iterable[ModelRequest]) -> None:
        """Have requests arrive at their times."""
        for request in requests:
            request_id = RequestId(f"request-{len(self.answers)}")
            num_prompt = min(request.num_prompt_tokens, self.setting.context - 1)
            num_output = max(1, min(request.num_output_tokens, self.setting.context - num_prompt))
            self.answers[request_id] = Answer(
                request_id, request.model, request.arrival_s, max(1, num_prompt), num_output
            )
            self._num_open += 1
            self.schedule(
                RequestArrived(request.arrival_s, request_id, request.model, num_prompt, num_output)
            )

    def schedule(self, event: Event) -> None:
        """Have an event happen at its time."""
        self._push(event.now_s, event)

    def run(self) -> None:
        """Let things happen until every request has ended."""
        while self._num_open:
            assert self._queue, f"{self._num_open} requests wait for nothing: {self._open()[:5]}"
            at_s, _, what = heapq.heappop(self._queue)
            if isinstance(what, str):
                worker = self.workers.get(what)
                if worker is None or worker.next_s != at_s:
                    continue
                self.now_s = at_s
                self._advance(worker)
            elif isinstance(what, TimerFired) and what.now_s != self._timer_s:
                continue
            else:
                self.now_s = at_s
                self._tell(what)

    def check(self) -> None:
        """Raise AssertionError if a request did not end, or books of a worker are wrong."""
        assert not self._open(), f"not ended: {self._open()[:5]}"
        for worker in self.workers.values():
            worker.check()

    def _open(self) -> list[Answer]:
        return [answer for answer in self.answers.values() if answer.ended_s is None]

    def _push(self, at_s: float, what: Event | WorkerId) -> None:
        self._num_queued += 1
        heapq.heappush(self._queue, (at_s, self._num_queued, what))

    def _push_worker(self, worker: SteppedWorker) -> None:
        if worker.next_s < math.inf:
            self._push(worker.next_s, worker.name)

    def _advance(self, worker: SteppedWorker) -> None:
        facts = worker.advance(self.now_s)
        for fact in facts:
            self._take_fact(fact)
        self._push_worker(worker)

    def _take_fact(self, fact: WorkerFact) -> None:
        match fact:
            case TokensSent(at_s, request_ids):
                for request_id in request_ids:
                    self.answers[request_id].token_s += at_s
            case Paused(_, request_ids):
                for request_id in request_ids:
                    self.answers[request_id].num_pauses += 1
                self.num_pauses += len(request_ids)
            case _:
                self._tell(fact)

    # The brain.

    def _tell(self, event: Event) -> None:
        """Have an event happen, and carry out all that the brain orders."""
        self._happen(event)
        for action in self._brain(event):
            self._carry_out(action)

    def _happen(self, event: Event) -> None:
        match event:
            case ModelDeployed(_, profile):
                self._profiles[profile.model] = profile
            case WorkerJoined(_, name, _, budget_bytes):
                self.workers[name] = SteppedWorker(
                    *(name, budget_bytes, self.profile, self.setting.limits),
                    takes_turns=self.setting.policy is Policy.TURNS,
                    rules=self.setting.rules,
                )
            case WorkerLost(_, name):
                self.workers.pop(name, None)
            case RequestFinished(_, request_id):
                assert self.answers[request_id].is_whole, f"{self.answers[request_id]}"
                self._end(request_id)
            case RequestCancelled(_, request_id):
                if self.answers[request_id].ended_s is None:
                    self._end(request_id, "cancelled")
            case TurnBegan():
                self.num_turns += 1
            case TimerFired():
                self._timer_s = None
            case _:
                pass

    def _end(self, request_id: RequestId, why_not: str | None = None) -> None:
        answer = self.answers[request_id]
        assert answer.ended_s is None, f"ended twice: {answer}"
        answer.ended_s, answer.why_not = self.now_s, why_not
        self._num_open -= 1

    def _carry_out(self, action: Action) -> None:
        match action:
            case LoadModel(model, name):
                profile = self._profiles[model]
                shape = self.profile.shape(self.setting.shapes[model])
                promise = self._promise(profile.footprints[KIND], shape)
                self._post(name, Host(action, profile, promise, shape, self.setting.context))
            case Dispatch(request_id, model, name):
                answer = self.answers[request_id]
                self._post(
                    name,
                    Start(
                        request_id,
                        model,
                        answer.num_prompt_tokens,
                        answer.num_output_tokens,
                        self.setting.pace,
                        answer.arrived_s,
                        len(answer.token_s),
                    ),
                )
            case Evict(_, name) | SetHold(_, name) | CancelRun(_, name):
                self._post(name, action)
            case Reject(request_id, reason):
                self._end(request_id, reason)
            case SetTimer(at_s):
                self._timer_s = at_s
                self.schedule(TimerFired(at_s))
            case _:
                assert_never(action)

    def _post(self, name: WorkerId, order: Host | Start | Evict | SetHold | CancelRun) -> None:
        worker = self.workers[name]
        worker.post(order, self.now_s)
        self._push_worker(worker)

    # Models.

    def _model_profile(self, model: ModelId, shape: ShapeProfile) -> ModelProfile:
        block_bytes = shape.kv_bytes_per_token * self.setting.limits.block_tokens
        num_blocks = 1 + self.setting.limits.num_blocks(self.setting.context)
        most_blocks = 1 + self.setting.limits.max_seqs * (num_blocks - 1)
        footprint = Footprint(
            fixed_bytes=_up_to_page(shape.weights_bytes) + WORKSPACE_BYTES + TABLES_BYTES,
            min_kv_bytes=_up_to_page(num_blocks * block_bytes),
            max_kv_bytes=_up_to_page(most_blocks * block_bytes),
            workspace_bytes=WORKSPACE_BYTES,
            tables_bytes=TABLES_BYTES,
        )
        return ModelProfile(
            model, shape.weights_bytes, {KIND: footprint}, self.setting.keep_alive_s, digest=model
        )

    def _promise(self, footprint: Footprint, shape: ShapeProfile) -> Promise:
        sink_bytes = _up_to_page(shape.kv_bytes_per_token * self.setting.limits.block_tokens)
        promise = footprint.promise
        return Promise(promise.own_bytes, promise.workspace_bytes, TABLES_BYTES + sink_bytes)


def _up_to_page(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def simulate(requests: Sequence[ModelRequest], setting: SimulationSetting, profile: Profile) -> Simulation:
    """Run all requests to their end; return what became of them."""
    simulation = Simulation(setting, profile)
    simulation.add(requests)
    simulation.run()
    simulation.check()
    return simulation
