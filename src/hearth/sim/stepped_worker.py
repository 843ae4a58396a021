"""A simulated worker that makes every step, over plain numbers and a virtual clock.

Whose turn it is, who gives way for weights and KV, whose step is next and what is in it is decided by the
code of a live worker (`policy/turns`, `policy/memory`, `policy/batch`). This only carries it out: a step
takes as long as a measured profile says, a load as long as its missing bytes. As on a live worker a step is
launched before the one before it is taken in, and orders and news wait until a call of an engine has ended.
Calls that only decode are jumped over. Where a thousand workers are wanted, and requests may be no more than
a drawn time, there is `worker.py`.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from hearth.policy.batch.batcher import BatchLimits, DecodeRun
from hearth.policy.batch.step_sharing import BusyModel, StepReadiness, StepSharing
from hearth.policy.fleet.events import (
    CancelRun,
    DeviceReported,
    Event,
    Evict,
    LoadModel,
    ModelProfile,
    ModelReady,
    RequestFinished,
    RungUse,
    SetHold,
    TurnBegan,
    TurnEnded,
)
from hearth.policy.fleet.footprint import PAGE_BYTES
from hearth.policy.memory.eviction import Tail, plan_takes
from hearth.policy.memory.kv_range import KvRange
from hearth.policy.memory.reclaim import (
    ClearKv,
    DropTable,
    GrowKv,
    KvView,
    Orders,
    PlaceTable,
    ReclaimOrder,
    ReclaimPolicy,
    SpillTable,
    TablesView,
    TakeWeights,
    carry_out,
)
from hearth.policy.memory.reload_cost import DeviceReloadCosts
from hearth.policy.turns.turn_policy import BeginTurn, EndTurn, TurnPolicy, TurnRules, WeightsView
from hearth.sim.device import DeviceMemory
from hearth.sim.profile import Profile, ShapeProfile
from hearth.sim.stepped_engine import Flight, SteppedEngine
from hearth.sizes import StepLimits
from hearth.types import Hold, ModelId, Pace, RequestId, Rung, WorkerId

#: Engines of evicted models that are kept for their return, as on a live worker.
MAX_RETIRED = 16
_NO_TABLES = TablesView({}, {}, ())


@dataclass(frozen=True, slots=True)
class HostOrder:
    """Host a model: the brain's order, with what a live worker finds in the model's files."""

    load: LoadModel
    profile: ModelProfile
    shape: ShapeProfile
    max_context: int


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Run a request to the end of its answer."""

    request_id: RequestId
    model: ModelId
    num_prompt_tokens: int
    num_output_tokens: int
    pace: Pace
    arrived_s: float
    num_sent: int  #: tokens that workers which are gone have sent


WorkerOrder = HostOrder | StartOrder | Evict | SetHold | CancelRun


@dataclass(frozen=True, slots=True)
class TokensSent:
    """Requests of a model got a token each, at each of these times."""

    at_s: Sequence[float]
    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class Paused:
    """Requests of a model wait, because its turn ended."""

    request_ids: tuple[RequestId, ...]


#: What the brain is told, and what only a report of the simulation needs.
WorkerFact = Event | TokensSent | Paused


@dataclass(frozen=True, slots=True)
class _Load:
    """Bytes of a model on their way."""

    began_s: float
    end_s: float
    num_bytes: int
    is_front: bool = False  #: some of those that it lacks, before its turn


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an engine: it launches a step, and ends with the step before."""

    model: ModelId
    began_s: float
    end_s: float
    awaited: Flight | None


@dataclass(frozen=True, slots=True)
class _JumpedCall:
    """A call whose steps only decode."""

    model: ModelId
    began_s: float
    end_s: float
    flight_end_s: float  #: of the step that it launches
    step_s: float


@dataclass(frozen=True, slots=True)
class _Jump:
    """Calls one after the other whose steps only decode: they are skipped as soon as they are over.

    An order that comes meanwhile cuts off those that have not begun.
    """

    ready: Sequence[ModelId]  #: those that share the device meanwhile
    calls: list[_JumpedCall]

    @property
    def end_s(self) -> float:
        return self.calls[-1].end_s

    def cut(self, now_s: float) -> None:
        """Leave out the calls that begin later."""
        del self.calls[bisect_left(self.calls, now_s, key=lambda call: call.end_s) + 1 :]


@dataclass(slots=True)
class _Hosted:
    """A hosted model. Mutable; written by its worker."""

    order: HostOrder
    engine: SteppedEngine
    is_assembled: bool = False  #: its engine is there, as it is from its first load on
    hold: Hold = Hold.WARM  #: while it has no requests
    load: _Load | None = None
    requests: dict[RequestId, StartOrder] = field(default_factory=dict)


class SteppedWorker:
    """Hosted models on one device, and what they do. Mutable; one driver posts orders and advances it."""

    def __init__(
        self,
        name: WorkerId,
        budget_bytes: int,
        profile: Profile,
        limits: StepLimits,
        rules: TurnRules | None,
    ) -> None:
        """`rules`: None if no turns are taken."""
        self.name = name
        self.device = DeviceMemory(budget_bytes, PAGE_BYTES)
        self.hosted: dict[ModelId, _Hosted] = {}
        self.turns = None if rules is None else TurnPolicy(budget_bytes, rules=rules)
        self.bytes_moved = 0
        self.bus_s = 0.0  #: time in which bytes were on their way
        self.step_s = 0.0  #: time in which steps ran
        self.num_loads = self.num_steps = self.num_preempted = 0
        self._profile, self._limits = profile, limits
        self._costs = DeviceReloadCosts()
        self._reclaim = ReclaimPolicy(self, keeps_addresses=True)
        self._readiness, self._sharing = StepReadiness(), StepSharing()
        #: Engines of evicted models that wait for their return.
        self._retired: dict[ModelId, SteppedEngine] = {}
        self._inbox: deque[WorkerOrder] = deque()
        self._running: _Call | _Jump | None = None
        self._device_free_s = 0.0  #: when the last step that was launched is over
        self._bus_free_s = 0.0
        self._now_s = 0.0
        self._facts: list[WorkerFact] = []

    # The driver's side.

    @property
    def next_s(self) -> float:
        """When something happens next; infinite: never, unless it is told something."""
        if self._running is not None:
            return self._running.end_s
        if self._inbox:
            return self._now_s
        return self._news_s()

    def _news_s(self) -> float:
        """Return when a load ends, or turns have to be decided, without anybody's doing."""
        load_ends = [one.load.end_s for one in self.hosted.values() if one.load is not None]
        wake_s = math.inf if self.turns is None else max(self._now_s, self.turns.wake_s)
        return min([wake_s, *load_ends])

    def post(self, order: WorkerOrder, now_s: float) -> None:
        """Give an order, to be carried out as soon as no step is under way."""
        self._now_s = now_s
        self._inbox.append(order)
        if isinstance(self._running, _Jump):
            self._running.cut(now_s)

    def advance(self, now_s: float) -> list[WorkerFact]:
        """Have everything happen that is due by now; return it."""
        self._now_s = now_s
        if self._running is None or self._running.end_s <= now_s:
            self._end_running()
            for model, hosted in list(self.hosted.items()):
                if hosted.load is not None and hosted.load.end_s <= now_s:
                    self._end_load(model, hosted)
            while self._inbox:
                self._readiness.look_again()
                self._handle(self._inbox.popleft())
            self._take_turns()
            for model in self._reclaim.deferred():
                self._bring(model, self.hosted[model])
            self._bring_front()
            self._begin_step()
        facts, self._facts = self._facts, []
        return facts

    def sent_by(self, now_s: float) -> list[TokensSent]:
        """Return the tokens of a jump under way that were sent by now; the worker is lost with the rest."""
        if not isinstance(self._running, _Jump):
            return []
        self._running.cut(now_s)
        sent = [call for call in self._running.calls if call.end_s <= now_s]
        return [
            TokensSent([call.end_s], self.hosted[call.model].engine.batcher.decode_run(0).request_ids)
            for call in sent
        ]

    def check(self) -> None:
        """Raise AssertionError if more lies on the device than there is, or a promise is broken."""
        assert self.device.free_bytes >= 0, f"`{self.name}`: {self.device.free_bytes=}"
        if self.turns is not None:
            bound_bytes = self.turns.bound_bytes()
            assert bound_bytes <= self.device.budget_bytes, f"`{self.name}`: {bound_bytes=}"
        for model, hosted in self.hosted.items():
            hosted.engine.batcher.check()
            is_busy = hosted.engine.has_work
            assert is_busy == bool(hosted.requests), f"`{model}` on `{self.name}`: {hosted.requests.keys()}"

    def requests(self) -> list[RequestId]:
        """Return the requests that are here."""
        return [request_id for hosted in self.hosted.values() for request_id in hosted.requests]

    # Orders.

    def _handle(self, order: WorkerOrder) -> None:
        match order:
            case HostOrder():
                self._host(order)
            case Evict():
                self._evict(order)
            case SetHold(model, _, hold):
                self._set_hold(model, hold)
            case StartOrder():
                self._start(order)
            case CancelRun(request_id):
                self._cancel(request_id)
            case _:
                assert_never(order)

    def _host(self, order: HostOrder) -> None:
        model = order.load.model
        assert model not in self.hosted, f"hosted twice: {order.load}"
        self._costs.hosted(model, order.profile.weight)
        engine = self._retired.pop(model, None)
        hosted = _Hosted(order, engine or self._new_engine(order), is_assembled=engine is not None)
        self.hosted[model] = hosted
        if self.turns is None:
            self._bring(model, hosted)
        else:
            self.turns.hosted(model, order.load.promise)

    def _new_engine(self, order: HostOrder) -> SteppedEngine:
        block_tokens, load = self._limits.block_tokens, order.load
        block_bytes = order.shape.kv_bytes_per_token * block_tokens
        limits = BatchLimits(self._limits.max_batch_tokens, self._limits.max_seqs, order.max_context)
        kv = KvRange(block_bytes, PAGE_BYTES, max(2, load.max_kv_bytes // block_bytes))
        floor_blocks = max(1, load.kv_floor_bytes // block_bytes - 1)
        return SteppedEngine(order.shape, limits, kv, block_tokens, floor_blocks)

    def _evict(self, order: Evict) -> None:
        model = order.model
        if (hosted := self.hosted.pop(model, None)) is not None:
            assert not hosted.requests, f"evicted while busy: {order}"
            self._retire(model, hosted)
        if order.is_freed:
            self.device.drop(model)
            self._retired.pop(model, None)
            self._reclaim.forget(model)
            self._costs.forget(model)
        self._reclaim.room_may_have_come()

    def _retire(self, model: ModelId, hosted: _Hosted) -> None:
        """Take back all memory of an idle model but its weights."""
        if hosted.load is not None:
            self.device.truncate(model, self.device.count_bytes(model) - hosted.load.num_bytes)
        if (awaited := hosted.engine.flush()) is not None:
            hosted.engine.take_in(awaited)
        hosted.engine.clear_all()
        self.device.free_other(model)
        self._reclaim.stop_deferring(model)
        self._sharing.forget(model)
        if self.turns is not None:
            self.turns.forget(model)
        if hosted.is_assembled:
            self._retired[model] = hosted.engine
            if len(self._retired) > MAX_RETIRED:
                self._retired.pop(next(iter(self._retired)))

    def _set_hold(self, model: ModelId, hold: Hold) -> None:
        self.hosted[model].hold = hold
        if self.turns is not None:
            self.turns.pin(model, self._now_s, is_pinned=hold is Hold.PINNED)
        self._reclaim.room_may_have_come()

    def _start(self, start: StartOrder) -> None:
        model, now_s = start.model, self._now_s
        hosted = self.hosted[model]
        hosted.requests[start.request_id] = start
        hosted.engine.add(start.request_id, start.num_prompt_tokens, start.num_output_tokens, start.num_sent)
        self._costs.asked(model, now_s)
        if hosted.hold is Hold.RETAINED:
            hosted.hold = Hold.WARM
        if self.turns is not None:
            age_s = now_s - start.arrived_s
            self.turns.arrived(model, start.request_id, start.pace, now_s, age_s, start.num_sent)
        elif hosted.load is None and self._is_incomplete(model):
            self._bring(model, hosted)

    def _cancel(self, request_id: RequestId) -> None:
        """End a request now; one that has ended meanwhile is no matter."""
        for model, hosted in self.hosted.items():
            if hosted.requests.pop(request_id, None) is not None:
                hosted.engine.batcher.cancel(request_id)
                if self.turns is not None:
                    self.turns.ended(model, request_id)
                self._reclaim.room_may_have_come()

    # Turns.

    def _take_turns(self) -> None:
        """Have turns end and begin, as the policy decides now."""
        if self.turns is None:
            return
        while changes := self.turns.decide(self._now_s, self._weights_view):
            for change in changes:
                hosted = self.hosted[change.model]
                match change:
                    case BeginTurn(model):
                        self._facts.append(TurnBegan(self._now_s, self.name, model))
                        if hosted.load is None and self._is_incomplete(model):
                            self._bring(model, hosted)
                    case EndTurn(model, why):
                        self._take_in(model, hosted.engine.flush())
                        self._reclaim.stop_deferring(model)
                        self._reclaim.room_may_have_come()
                        self._facts.append(TurnEnded(self._now_s, self.name, model, why))
                        if hosted.requests:
                            self._facts.append(Paused(tuple(hosted.requests)))
                    case _:
                        assert_never(change)

    def _weights_view(self, model: ModelId) -> WeightsView:
        """Return how long a model takes to load, by what its bytes took before."""
        hosted = self.hosted[model]
        byte_s = self._costs.load_s_per_byte(model)
        missing_bytes = self._missing_bytes(model) if hosted.load is None else hosted.load.num_bytes
        if hosted.load is not None or self._is_incomplete(model):
            missing_bytes = max(1, missing_bytes)
        return WeightsView(missing_bytes * byte_s, hosted.order.profile.num_bytes * byte_s)

    def _is_in_turn(self, model: ModelId) -> bool:
        return self.turns is None or self.turns.is_in_turn(model)

    # Loads.

    def _missing_bytes(self, model: ModelId) -> int:
        """Return how many bytes of a hosted model's weights have no place."""
        num_bytes = self.device.rounded(self.hosted[model].order.profile.num_bytes)
        return num_bytes - self.device.count_bytes(model)

    def _is_incomplete(self, model: ModelId) -> bool:
        """True if a hosted model that is not being loaded has to be before it can step."""
        hosted = self.hosted[model]
        return not hosted.is_assembled or not hosted.engine.is_placed or self._missing_bytes(model) > 0

    def _bring(self, model: ModelId, hosted: _Hosted) -> None:
        """Give a model its place, for which others may have to give way, and load what is missing."""
        profile, promise, engine = hosted.order.profile, hosted.order.load.promise, hosted.engine
        there_bytes = self.device.place_weights(model, profile.digest, profile.num_bytes)
        was_placed = engine.is_placed
        engine.place_sink()
        tables_bytes = promise.standing_bytes - engine.kv.sink_pages * PAGE_BYTES
        self.device.place_other(model, tables_bytes + engine.kv_bytes, promise.workspace_bytes)
        lack_bytes = self._run(self._reclaim.make_room(model, lambda: max(0, -self.device.free_bytes)))
        if lack_bytes:  # a model is being loaded whose turn is over
            is_any_loading = any(one.load is not None for one in self.hosted.values())
            is_deferred = self._reclaim.defer(model, is_any_loading=is_any_loading)
            assert is_deferred, f"`{self.name}` cannot keep its promise to `{model}`: {lack_bytes=}"
            self.device.truncate(model, there_bytes)
            if not was_placed:
                engine.clear_all()
                self.device.free_other(model)
            return
        num_bytes = self.device.count_bytes(model) - there_bytes
        # What others gave up may be read by a step until that is over.
        begin_s = max(self._now_s, self._bus_free_s, self._device_free_s)
        self._bus_free_s = begin_s + num_bytes / self._profile.bytes_per_s[Rung.HOST]
        first_s = 0.0 if hosted.is_assembled else self._profile.assemble_s
        end_s = max(self._bus_free_s, self._now_s + first_s) + self._profile.switch_s
        hosted.load = _Load(begin_s, end_s, num_bytes)

    def _bring_front(self) -> None:
        """Have the first bytes of the next in line cross before its turn, where others cost less."""
        if self.turns is None or any(one.load is not None for one in self.hosted.values()):
            return
        model = self.turns.early(self._now_s, lambda name: self._missing_bytes(name) > 0)
        if model is None:
            return
        missing_bytes, cost_s_per_byte = self._missing_bytes(model), self._price(model, Hold.PAUSED)
        lack_bytes = self.turns.front_bytes(missing_bytes, missing_bytes) - self.device.free_bytes
        if lack_bytes > 0:
            self._run(self._reclaim.make_room_early(model, lack_bytes, cost_s_per_byte))
        if front_bytes := self.turns.front_bytes(missing_bytes, self.device.free_bytes):
            hosted = self.hosted[model]
            profile = hosted.order.profile
            num_bytes = self.device.place_front(model, profile.digest, profile.num_bytes, front_bytes)
            begin_s = max(self._now_s, self._bus_free_s)
            self._bus_free_s = begin_s + num_bytes / self._profile.bytes_per_s[Rung.HOST]
            hosted.load = _Load(begin_s, self._bus_free_s, num_bytes, is_front=True)

    def _end_load(self, model: ModelId, hosted: _Hosted) -> None:
        load = hosted.load
        assert load is not None, f"`{model}` is not being loaded"
        hosted.load = None
        seconds = load.num_bytes / self._profile.bytes_per_s[Rung.HOST]
        self.bytes_moved += load.num_bytes
        self.bus_s += seconds
        self._costs.moved(Rung.HOST, load.num_bytes, seconds)
        self._costs.loaded(model, {Rung.HOST: load.num_bytes})
        self._reclaim.room_may_have_come()
        if load.is_front:
            if self._is_in_turn(model):  # as it is now
                self._bring(model, hosted)
            return
        hosted.is_assembled = True
        self.num_loads += 1
        if self.turns is not None:
            self.turns.loaded(model, self._now_s)
        use = RungUse(Rung.HOST, load.num_bytes, seconds)
        self._facts.append(ModelReady(self._now_s, self.name, model, (use,), self._now_s - load.began_s))
        self._facts.append(DeviceReported(self._now_s, self.name, self._device_bytes()))

    def _device_bytes(self) -> dict[ModelId, int]:
        """Return how many bytes of each model are there, hosted or evicted."""
        coming = {name: one.load.num_bytes for name, one in self.hosted.items() if one.load is not None}
        there = {name: self.device.count_bytes(name) - coming.get(name, 0) for name in self.device.weights}
        return {name: num_bytes for name, num_bytes in there.items() if num_bytes}

    # Steps.

    def _begin_step(self) -> None:
        """Call the engine of the model that is next, if any has something to compute."""
        while ready := self._readiness.ready(self._busy(), self._reclaim.generation):
            if (jump := self._plan_jump(ready)) is not None:
                self._running = jump
                return
            model, now_s = self._sharing.next(ready), self._now_s
            engine = self.hosted[model].engine
            self._run(self._reclaim.before_step(model, engine.elastic, engine.kv_use()))
            begin_s = max(now_s, self._device_free_s)
            call = engine.launch(begin_s)
            if (launched := call.launched) is not None:
                self._note_step(launched.end_s, launched.end_s - begin_s)
            if call.awaited is not None or launched is not None:
                end_s = now_s if call.awaited is None else max(now_s, call.awaited.end_s)
                self._running = _Call(model, now_s, end_s, call.awaited)
                return
            self._sharing.stepped(model, 0.0)
            if not self._settle(model, has_ended=False):
                self._readiness.starved(model, self._reclaim.generation)

    def _plan_jump(self, ready: Sequence[ModelId]) -> _Jump | None:
        """Return the calls until anything but decoding can happen; None: the next one has to be planned.

        Whoever waits for a turn may get it after any call.
        """
        turns = self.turns
        if turns is not None and any(turns.wants_turn(m) and not turns.is_in_turn(m) for m in self.hosted):
            return None
        engines = {model: self.hosted[model].engine for model in ready}
        share_bytes = self.device.free_bytes // len(engines)
        runs, flight_ends_s = dict[ModelId, DecodeRun](), dict[ModelId, float]()
        for model, engine in engines.items():
            if engine.flight is None:
                return None
            runs[model], flight_ends_s[model] = engine.decode_run(share_bytes), engine.flight.end_s
            if not runs[model].num_steps:
                return None
        sharing = copy.deepcopy(self._sharing) if len(ready) > 1 else None
        num_calls, calls = dict.fromkeys(ready, 0), list[_JumpedCall]()
        now_s, news_s, device_free_s = self._now_s, self._news_s(), self._device_free_s
        while now_s < news_s:
            model = ready[0] if sharing is None else sharing.next(ready)
            run, num_before = runs[model], num_calls[model]
            if num_before == run.num_steps:
                break
            num_rows = len(run.request_ids)
            context_tokens = run.context_tokens + num_before * num_rows
            step_s = engines[model].shape.step_s(num_rows, num_rows, context_tokens)
            device_free_s = max(now_s, device_free_s) + step_s
            end_s = max(now_s, flight_ends_s[model])
            calls.append(_JumpedCall(model, now_s, end_s, device_free_s, step_s))
            flight_ends_s[model] = device_free_s
            if sharing is not None:
                sharing.stepped(model, end_s - now_s)
            num_calls[model] += 1
            now_s = end_s
        return _Jump(ready, calls) if calls else None

    def _end_running(self) -> None:
        """Take in what runs and is over now, if anything does."""
        running, self._running = self._running, None
        match running:
            case None:
                pass
            case _Call():
                self._end_call(running)
            case _Jump():
                self._end_jump(running)
            case _:
                assert_never(running)

    def _end_call(self, call: _Call) -> None:
        self._sharing.stepped(call.model, call.end_s - call.began_s)
        self._take_in(call.model, call.awaited)

    def _take_in(self, model: ModelId, awaited: Flight | None) -> None:
        """Send the tokens of a step that was waited for, and end requests."""
        hosted = self.hosted[model]
        emissions = [] if awaited is None else hosted.engine.take_in(awaited).emissions
        if awaited is not None:
            self._send(model, [max(self._now_s, awaited.end_s)], tuple(one.request_id for one in emissions))
        ended = [one.request_id for one in emissions if one.finish_reason is not None]
        for request_id in ended:
            start = hosted.requests.pop(request_id)
            if self.turns is not None:
                self.turns.ended(model, request_id)
            self._facts.append(RequestFinished(self._now_s, request_id, start.num_output_tokens))
        self._settle(model, has_ended=bool(ended))

    def _end_jump(self, jump: _Jump) -> None:
        calls_by_model: dict[ModelId, list[_JumpedCall]] = {}
        self._sharing.next(jump.ready)  # those who are ready stay the same
        for call in jump.calls:
            self._sharing.stepped(call.model, call.end_s - call.began_s)
            self._note_step(call.flight_end_s, call.step_s)
            calls_by_model.setdefault(call.model, []).append(call)
        for model, calls in calls_by_model.items():
            engine = self.hosted[model].engine
            before_bytes, request_ids = engine.kv_bytes, engine.batcher.decode_run(0).request_ids
            engine.skip(len(calls), self.device.free_bytes, calls[-1].flight_end_s)
            self.device.resize_other(model, engine.kv_bytes - before_bytes)
            self._send(model, [call.end_s for call in calls], request_ids)

    def _note_step(self, end_s: float, step_s: float) -> None:
        self._device_free_s = end_s
        self.num_steps += 1
        self.step_s += step_s

    def _send(self, model: ModelId, at_s: Sequence[float], request_ids: tuple[RequestId, ...]) -> None:
        """Note that requests got a token each at each of these times."""
        if request_ids:
            self._facts.append(TokensSent(at_s, request_ids))
            if self.turns is not None:
                self.turns.sent(model, request_ids * len(at_s), at_s[-1])

    def _settle(self, model: ModelId, *, has_ended: bool) -> bool:
        """Take back the KV that a model has not used for long, or does not use now that it is idle.

        Returns whether requests were preempted since it was called last.
        """
        engine = self.hosted[model].engine
        num_preempted = len(engine.batcher.take_preempted())
        self.num_preempted += num_preempted
        self._run(
            self._reclaim.after_step(
                *(model, engine.elastic, engine.kv_use()),
                has_work=engine.has_work,
                has_let_go=has_ended or num_preempted > 0,
            )
        )
        return num_preempted > 0

    def _busy(self) -> list[BusyModel]:
        return [
            BusyModel(model, hosted.load is None and not self._is_incomplete(model), can_follow_load=False)
            for model, hosted in self.hosted.items()
            if hosted.engine.has_work and self._is_in_turn(model)
        ]

    # What the policy of memory reads: `ModelBooks`.

    def models(self) -> list[ModelId]:
        return [model for model, hosted in self.hosted.items() if hosted.is_assembled]

    def kv_of(self, model: ModelId) -> KvView:
        engine, hold = self.hosted[model].engine, self._hold(model)
        blocks, is_paused = engine.batcher.blocks, hold is Hold.PAUSED
        return KvView(
            hold=hold,
            has_work=engine.has_work,
            block_bytes=engine.kv.block_bytes,
            floor_blocks=0 if is_paused else blocks.floor_blocks,
            max_blocks=engine.kv.max_blocks - 1,  # the sink is no block of the book
            num_blocks=blocks.num_blocks,
            num_available=blocks.num_available,
            reserve_blocks=0 if is_paused else engine.elastic.reserve_blocks(engine.batcher.num_running),
            due_in_s=self._due_in_s(model) if is_paused else 0.0,
        )

    def extents(self, model: ModelId) -> list[range]:
        return self.hosted[model].engine.extents()

    def cached_to_spare(self, model: ModelId) -> int:
        return self.hosted[model].engine.batcher.cached_to_spare()

    def tables_of(self, _: ModelId) -> TablesView:
        return _NO_TABLES

    def _hold(self, model: ModelId) -> Hold:
        """Return how the weights and KV of a model are held now."""
        hosted = self.hosted.get(model)
        if hosted is None:
            return Hold.RETAINED
        if hosted.hold is Hold.PINNED:
            return Hold.PINNED
        is_loading = hosted.load is not None and not hosted.load.is_front
        if is_loading or (hosted.requests and self._is_in_turn(model)):
            return Hold.BUSY
        return Hold.PAUSED if hosted.requests else hosted.hold

    def _due_in_s(self, model: ModelId) -> float:
        """Return in how many seconds a model that waits for its turn has to have it."""
        due_s = math.inf if self.turns is None else self.turns.due_s(model)
        return 0.0 if math.isinf(due_s) else max(0.0, due_s - self._now_s)

    # What it orders.

    def _run(self, orders: Orders) -> int:
        return carry_out(orders, self._act)

    def _act(self, order: ReclaimOrder) -> int:
        match order:
            case GrowKv(model, num_blocks, _):
                engine = self.hosted[model].engine
                before_bytes = engine.kv_bytes
                num_got = engine.grow(num_blocks, self.device.free_bytes)
                self.device.resize_other(model, engine.kv_bytes - before_bytes)
                return num_got
            case ClearKv():
                return self._clear(order)
            case TakeWeights():
                return self._take(order)
            case PlaceTable() | SpillTable() | DropTable():
                raise AssertionError(f"no request of a simulation needs a table: {order}")
            case _:
                assert_never(order)

    def _clear(self, order: ClearKv) -> int:
        engine = self.hosted[order.model].engine
        if not order.may_forget and engine.batcher.blocks.cached_among(order.extent):
            return 0
        before_bytes = engine.kv_bytes
        if not engine.clear(order.extent, may_preempt=order.may_preempt, keeps_floor=order.keeps_floor):
            return 0
        self.device.resize_other(order.model, engine.kv_bytes - before_bytes)
        return len(order.extent)

    def _take(self, order: TakeWeights) -> int:
        """Take weights as a pool does, cheapest first; return how many bytes came free."""
        coming = {self._reclaim.placing, *(name for name, one in self.hosted.items() if one.load is not None)}
        tails = [
            Tail(model, hold, cost, weights.tail)
            for model, weights in self.device.weights.items()
            if (hold := self._hold(model)) <= order.most
            and model not in coming
            and (cost := self._price(model, hold)) < order.below_s_per_byte
        ]
        before_bytes = self.device.free_bytes
        for take in plan_takes(tails, order.num_bytes):
            self.device.take_units(take.model, take.num_units)
        return self.device.free_bytes - before_bytes

    def _price(self, model: ModelId, hold: Hold) -> float:
        """Return the reload cost of a byte."""
        if hold is Hold.PAUSED:
            return self._costs.paused_cost_s_per_byte(model, self._due_in_s(model))
        return self._costs.cost_s_per_byte(model, self._now_s)
