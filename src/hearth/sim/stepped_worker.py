"""A simulated worker that makes every step, in virtual time.

Turns, evictions, batches and the order of steps are decided by the code of a live worker (`policy/turns`,
`policy/memory`, `policy/batch`). A step takes as long as a measured profile says, a load as long as its
missing bytes. A step is launched before the one before it is committed, and orders wait until a call of an
engine has ended. Calls that only decode are skipped.

The first worker of a pipeline makes its steps, through all stages, as soon as its own weights are loaded. The
other workers only have the memory, and their devices are free. They are taken to have as much room for KV as
the first one, so simulate a pipeline on workers that have nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from hearth.core.sizes import StepLimits
from hearth.core.types import Hold, ModelId, RequestId, WorkerId, model_of
from hearth.policy.batch.step_sharing import BusyModel, StepReadiness, StepSharing
from hearth.policy.fleet.events import (
    CancelRun,
    DeviceReported,
    Evict,
    ModelReady,
    PressureReported,
    RequestFinished,
    SetHold,
    TurnBegan,
    TurnEnded,
)
from hearth.policy.turns.turn_policy import BeginTurn, EndTurn, TurnPolicy, TurnRules, WeightsView
from hearth.sim.jump import Jump, JumpedCall, plan_jump
from hearth.sim.profile import Profile
from hearth.sim.reclaimer import SimulatedReclaimer
from hearth.sim.stepped_engine import Flight, SteppedEngine
from hearth.sim.stepped_loads import Source, SteppedLoads, in_host_memory
from hearth.sim.stepped_model import (
    HostOrder,
    LoadUnderWay,
    Paused,
    RequestsStarted,
    StartOrder,
    SteppedModel,
    TokensSent,
    WorkerFact,
    WorkerOrder,
)

#: Engines of evicted models that are kept for their return, as on a live worker.
MAX_RETIRED = 16


@dataclass(frozen=True, slots=True)
class _Call:
    model: ModelId
    began_s: float
    end_s: float
    awaited: Flight | None


class SteppedWorker:
    """Hosted models on one device. Mutable; one driver posts orders and advances it."""

    def __init__(
        self,
        name: WorkerId,
        budget_bytes: int,
        profile: Profile,
        limits: StepLimits,
        max_step_s: float,
        rules: TurnRules | None,
        source: Source = in_host_memory,
        *,
        frees_idle: bool = False,
    ) -> None:
        """`frees_idle`: weights of retained models leave the device at once."""
        self.name = name
        self.hosted: dict[ModelId, SteppedModel] = {}
        self.turns = None if rules is None else TurnPolicy(budget_bytes, rules=rules)
        self.reclaimer = SimulatedReclaimer(budget_bytes, self.hosted, self.turns)
        self.loads = SteppedLoads(profile, self.hosted, self.turns, self.reclaimer, self._complete, source)
        self.step_s = 0.0  #: time in which steps ran
        self.num_steps = self.num_preempted = 0
        self._profile, self._limits, self._max_step_s = profile, limits, max_step_s
        self._frees_idle = frees_idle
        self._readiness, self._sharing = StepReadiness(), StepSharing()
        self._retired: dict[ModelId, SteppedEngine] = {}
        self._inbox: deque[WorkerOrder] = deque()
        self._arriving: list[StartOrder] = []  #: whose KV has yet to come
        self._running: _Call | Jump | None = None
        self._device_free_s = 0.0  #: when the last step that was launched is over
        self._flushed_s = 0.0  #: when the last step of a model whose turn has ended is over
        self._is_asleep = True  #: there was nothing to do at the last advance
        self._awake_s = 0.0  #: when it wakes up for the first order since
        self._now_s = 0.0
        self._facts: list[WorkerFact] = []

    @property
    def next_s(self) -> float:
        """When something happens next; infinite: not before an order."""
        if self._running is not None:
            return self._running.end_s
        if self._inbox:
            return max(self._now_s, self._awake_s)
        return self._news_s()

    def _news_s(self) -> float:
        wake_s = math.inf if self.turns is None else max(self._now_s, self.turns.wake_s)
        kv_s = min((one.kv_s for one in self._arriving), default=math.inf)
        return min(wake_s, kv_s, self.loads.next_s(self._now_s))

    def post(self, order: WorkerOrder, now_s: float) -> None:
        """Give an order, to be carried out when no call is running."""
        self._now_s = now_s
        if self._is_asleep:
            self._is_asleep, self._awake_s = False, now_s + self._profile.wake_s
        self._inbox.append(order)
        if isinstance(self._running, Jump):
            self._running.cut(now_s)

    def advance(self, now_s: float) -> list[WorkerFact]:
        self._now_s = self.reclaimer.books.now_s = now_s
        if self._running is None or self._running.end_s <= now_s:
            self._end_running()
            for model, hosted in list(self.hosted.items()):
                if (load := hosted.load) is not None and load.end_s <= now_s:
                    self.loads.end(model, load)
                    if load.is_front and self._is_in_turn(model):
                        self._load(model)
            while self._inbox:
                self._readiness.recheck()
                self._handle(self._inbox.popleft())
            for start in [one for one in self._arriving if one.kv_s <= now_s]:
                self._arriving.remove(start)
                self._readiness.recheck()
                self._start(start)
            self._take_turns()
            for model in self.reclaimer.policy.deferred():
                self._load(model)
            self.loads.begin_front(now_s)
            self._begin_step()
        facts, self._facts = self._facts, []
        return facts

    def sent_by(self, now_s: float) -> list[TokensSent]:
        """Return the tokens of the present jump that were sent by now.

        For a worker that is lost, or a request that leaves.
        """
        calls = self._running.calls if isinstance(self._running, Jump) else []
        return [
            TokensSent([call.end_s], call.request_ids, call.model) for call in calls if call.end_s <= now_s
        ]

    def check(self) -> None:
        device = self.reclaimer.device
        assert device.free_bytes >= 0, f"`{self.name}`: {device.free_bytes=}"
        if self.turns is not None:
            bound_bytes = self.turns.memory.bound_bytes()
            assert bound_bytes <= device.budget_bytes, f"`{self.name}`: {bound_bytes=}"
        for model, hosted in self.hosted.items():
            hosted.engine.batcher.check()
            is_busy = hosted.engine.has_work
            assert is_busy == bool(hosted.requests), f"`{model}` on `{self.name}`: {hosted.requests.keys()}"

    def requests(self) -> list[RequestId]:
        running = [request_id for hosted in self.hosted.values() for request_id in hosted.requests]
        return [*running, *(one.request_id for one in self._arriving)]

    # Orders.

    def _handle(self, order: WorkerOrder) -> None:
        match order:
            case HostOrder():
                self._host(order)
            case Evict():
                self._evict(order)
            case SetHold(model, _, hold):
                self._set_hold(model, hold)
            case StartOrder() if order.kv_s > self._now_s:
                self._arriving.append(order)
            case StartOrder():
                self._start(order)
            case CancelRun(request_id):
                self._cancel(request_id)
            case _:
                assert_never(order)

    def _host(self, order: HostOrder) -> None:
        model = order.load.model
        assert model not in self.hosted, f"hosted twice: {order.load}"
        self.reclaimer.costs.hosted(model, order.profile.weight)
        engine = self._retired.pop(model, None)
        if order.is_stage:  # of which each pipeline has its own
            engine, order = None, order.in_pipeline()
        is_known = engine is not None
        self.hosted[model] = SteppedModel(
            order, engine or order.new_engine(self._limits, self._max_step_s), is_known, is_known
        )
        if self.turns is None:
            self._load(model)
        else:
            self.turns.hosted(model, order.load.promise)
            if order.is_stage:  # always in turn
                self.turns.pin(model, self._now_s, is_pinned=True)
            if order.load.is_ahead:
                self._load_ahead(model)

    def _evict(self, order: Evict) -> None:
        model = order.model
        if model in self.hosted and self.hosted[model].order.is_stage:
            for request_id in list(self.hosted[model].requests):  # another member is lost
                self._cancel(request_id)
        if (hosted := self.hosted.pop(model, None)) is not None:
            assert not hosted.requests, f"evicted while busy: {order}"
            self.loads.cancel(hosted, self._now_s)
            self._retire(model, hosted)
        if order.is_freed:
            self.reclaimer.drop(model)
            self._retired.pop(model, None)

    def _retire(self, model: ModelId, hosted: SteppedModel) -> None:
        if (awaited := hosted.engine.flush()) is not None:
            hosted.engine.take_in(awaited)
        self.reclaimer.retire(model, hosted)
        self._sharing.forget(model)
        if self.turns is not None:
            self.turns.forget(model)
        if hosted.is_assembled and not hosted.order.is_stage:
            self._retired[model] = hosted.engine
            if len(self._retired) > MAX_RETIRED:
                self._retired.pop(next(iter(self._retired)))

    def _set_hold(self, model: ModelId, hold: Hold) -> None:
        hosted = self.hosted[model]
        was_retained, hosted.hold = hosted.hold is Hold.RETAINED, hold
        if self.turns is not None:
            is_pinned = hold is Hold.PINNED or hosted.order.is_stage
            self.turns.pin(model, self._now_s, is_pinned=is_pinned)
        if self._frees_idle and hold is Hold.RETAINED and not hosted.requests and hosted.load is None:
            self.reclaimer.device.truncate(model, 0)
            self._facts.append(DeviceReported(self._now_s, self.name, self.reclaimer.count_device_bytes()))
        self.reclaimer.policy.note_freed()
        if was_retained and hold is Hold.WARM:
            self._load_ahead(model)

    def _load_ahead(self, model: ModelId) -> None:
        if self.turns is not None and not self.loads.is_loaded(model):
            self.turns.awaited(model, self._now_s)
        if self._is_in_turn(model):
            self._load(model)

    def _start(self, start: StartOrder) -> None:
        model, now_s = start.model, self._now_s
        hosted = self.hosted[model]
        hosted.requests[start.request_id] = start
        hosted.num_cold += not self.loads.is_loaded(model)
        has_kv = start.kv_s > 0.0 and self._is_in_turn(model)
        if has_kv:
            self.reclaimer.make_kv_room(model, start.num_prompt_tokens + start.num_sent)
        hosted.engine.add(
            start.request_id,
            start.num_prompt_tokens,
            start.num_output_tokens,
            num_sent=start.num_sent,
            pace=start.pace,
            arrived_s=start.arrived_s,
            now_s=now_s,
            conversation=start.conversation,
            has_kv=has_kv,
        )
        self.reclaimer.costs.asked(model, now_s)
        if hosted.hold is Hold.RETAINED:
            hosted.hold = Hold.WARM
        if self.turns is not None:
            age_s = now_s - start.arrived_s
            self.turns.arrived(model, start.request_id, start.pace, now_s, age_s, start.num_sent)
        else:
            self._load(model)

    def _cancel(self, request_id: RequestId) -> None:
        """End a request now. Ignores one that has ended meanwhile."""
        self._arriving = [one for one in self._arriving if one.request_id != request_id]
        for model, hosted in self.hosted.items():
            if hosted.requests.pop(request_id, None) is not None:
                hosted.engine.batcher.cancel(request_id)
                if self.turns is not None:
                    self.turns.ended(model, request_id)
                self.reclaimer.policy.note_freed()

    # Turns.

    def _take_turns(self) -> None:
        if self.turns is None:
            return
        while changes := self.turns.decide(self._now_s, self._weights_view):
            for change in changes:
                hosted = self.hosted[change.model]
                match change:
                    case BeginTurn(model):
                        self._facts.append(TurnBegan(self._now_s, self.name, model))
                        self._load(model)
                    case EndTurn(model, why):
                        if (awaited := hosted.engine.flush()) is not None:
                            self._flushed_s = awaited.end_s
                        self._take_in(model, awaited)
                        self.reclaimer.policy.stop_deferring(model)
                        self.reclaimer.policy.note_freed()
                        self._facts.append(TurnEnded(self._now_s, self.name, model, why))
                        if hosted.requests:
                            self._facts.append(Paused(tuple(hosted.requests)))
                    case _:
                        assert_never(change)
        assert self.turns.wake_s > self._now_s, f"the timer is not in the future: {self.turns.wake_s=}"

    def _weights_view(self, model: ModelId) -> WeightsView:
        hosted = self.hosted[model]
        byte_s = self.reclaimer.costs.load_s_per_byte(model)
        missing_bytes = self.reclaimer.missing_bytes(model) if hosted.load is None else hosted.load.num_bytes
        if not self.loads.is_loaded(model):
            missing_bytes = max(1, missing_bytes)
        return WeightsView(missing_bytes * byte_s, hosted.order.profile.num_bytes * byte_s)

    def _is_in_turn(self, model: ModelId) -> bool:
        return self.turns is None or self.turns.is_in_turn(model)

    # Loads.

    def _load(self, model: ModelId) -> None:
        self.loads.begin(model, self._now_s, self._flushed_s)

    def _complete(self, model: ModelId, load: LoadUnderWay) -> None:
        hosted = self.hosted[model]
        hosted.is_assembled, hosted.is_returning = True, False
        if self.turns is not None:
            self.turns.loaded(model, self._now_s)
        whole = model_of(model)
        if whole != model and whole in self.hosted and not self.loads.is_loaded(whole):
            if self.turns is not None:
                self.turns.awaited(whole, self._now_s)
            if self._is_in_turn(whole):
                self._load(whole)
        uses = self.loads.uses_of(load)
        self._facts.append(ModelReady(self._now_s, self.name, model, uses, self._now_s - load.began_s))
        self._facts.append(DeviceReported(self._now_s, self.name, self.reclaimer.count_device_bytes()))

    # Steps.

    def _begin_step(self) -> None:
        while ready := self._readiness.ready(self._busy(), self.reclaimer.policy.generation):
            if (jump := self._plan_jump(ready)) is not None:
                self._running = jump
                return
            urgent = [model for model in ready if self.hosted[model].engine.batcher.has_newcomer]
            now_s = self._now_s
            computed = [model for model in urgent if self.hosted[model].engine.computes_first_tokens(now_s)]
            model = self._sharing.next(ready, urgent, computed)
            self.reclaimer.before_step(model)
            hosted = self.hosted[model]
            # A step that follows a load ends with it at the earliest, and blocks the thread until then.
            load_end_s = None if hosted.load is None else hosted.load.end_s
            follow_s = None if load_end_s is None else load_end_s + self._profile.begin_s
            call = hosted.engine.launch(now_s, self._device_free_s, follow_s, self.loads.least)
            if (launched := call.launched) is not None:
                self._note_step(launched.end_s, launched.seconds.step_s)
                if admissions := launched.plan.admissions:
                    self._facts.append(RequestsStarted(now_s, tuple(admissions)))
            if call.awaited is not None or launched is not None:
                awaited_s = now_s if call.awaited is None else call.awaited.end_s
                end_s = max(load_end_s or now_s, awaited_s, now_s + call.launch_s)
                self._running = _Call(model, now_s, end_s, call.awaited)
                return
            self._sharing.stepped(model, 0.0)
            if not self._settle(model, has_ended=False):
                self._readiness.starved(model, self.reclaimer.policy.generation)

        self._is_asleep = not self.loads.is_any_under_way

    def _plan_jump(self, ready: Sequence[ModelId]) -> Jump | None:
        """Return the calls to skip; None while a model waits for a turn, which any of them may begin."""
        turns, engines = self.turns, {model: self.hosted[model].engine for model in ready}
        if not all(engine.only_decodes for engine in engines.values()):
            return None
        if turns is not None and any(turns.wants_turn(m) and not turns.is_in_turn(m) for m in self.hosted):
            return None
        return plan_jump(
            engines=engines,
            sharing=self._sharing,
            free_bytes=self.reclaimer.device.free_bytes,
            now_s=self._now_s,
            until_s=self._news_s(),
            device_free_s=self._device_free_s,
            least=self.loads.least,
        )

    def _end_running(self) -> None:
        running, self._running = self._running, None
        match running:
            case None:
                pass
            case _Call():
                self._sharing.stepped(running.model, running.end_s - running.began_s)
                self._take_in(running.model, running.awaited)
            case Jump():
                self._end_jump(running)
            case _:
                assert_never(running)

    def _take_in(self, model: ModelId, awaited: Flight | None) -> None:
        hosted = self.hosted[model]
        ended = list[RequestId]()
        if awaited is not None:
            committed = hosted.engine.take_in(awaited)
            ended += committed.finished
            self._send(model, [max(self._now_s, awaited.end_s)], tuple(committed.request_ids))
        for request_id in ended:
            start = hosted.requests.pop(request_id)
            if self.turns is not None:
                self.turns.ended(model, request_id)
            self._facts.append(RequestFinished(self._now_s, request_id, start.num_output_tokens))
        self._settle(model, has_ended=bool(ended))

    def _end_jump(self, jump: Jump) -> None:
        calls_by_model: dict[ModelId, list[JumpedCall]] = {}
        self._sharing.next(jump.ready)
        for call in jump.calls:
            self._sharing.stepped(call.model, call.end_s - call.began_s)
            self._note_step(call.flight_end_s, call.seconds.step_s)
            calls_by_model.setdefault(call.model, []).append(call)
        for model, calls in calls_by_model.items():
            self.reclaimer.skip(model, [call.seconds for call in calls], calls[-1].flight_end_s)
            self._send(model, [call.end_s for call in calls], calls[-1].request_ids)
            self._report_pressure(model)

    def _note_step(self, end_s: float, step_s: float) -> None:
        self._device_free_s = end_s
        self.num_steps += 1
        self.step_s += step_s

    def _send(self, model: ModelId, at_s: Sequence[float], request_ids: tuple[RequestId, ...]) -> None:
        if request_ids:
            self._facts.append(TokensSent(at_s, request_ids, model))
            if self.turns is not None:
                self.turns.sent(model, request_ids * len(at_s), at_s[-1])

    def _settle(self, model: ModelId, *, has_ended: bool) -> bool:
        """Take back unused KV of a model; return whether requests were preempted since the last call."""
        num_preempted = len(self.hosted[model].engine.batcher.take_preempted())
        self.num_preempted += num_preempted
        self.reclaimer.after_step(model, has_let_go=has_ended or num_preempted > 0)
        self._report_pressure(model)
        return num_preempted > 0

    def _report_pressure(self, model: ModelId) -> None:
        hosted, room_blocks = self.hosted[model], partial(self.reclaimer.room_blocks, model)
        if (pressure := hosted.watch.look(hosted.engine.batcher, room_blocks, self._now_s)) is not None:
            tokens = pressure.demand_tokens, pressure.room_tokens
            self._facts.append(PressureReported(self._now_s, self.name, model, *tokens))

    def _busy(self) -> list[BusyModel]:
        return [
            BusyModel(model, self.loads.is_loaded(model), self.loads.can_be_followed(model, self._now_s))
            for model, hosted in self.hosted.items()
            if hosted.engine.has_work and self._is_in_turn(model)
        ]
