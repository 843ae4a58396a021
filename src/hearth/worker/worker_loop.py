"""The step loop of a worker: orders in, turns and steps of models, facts out.

One thread runs it and owns all engines. Other threads post to its inbox: orders of the gateway, and news of
models that are looked up and loaded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from queue import Empty
from typing import assert_never

from hearth.core.errors import ServiceError, StageLost
from hearth.core.messages import (
    AdapterLoaded,
    CancelRequest,
    DropModel,
    Fact,
    ForgetAdapter,
    HoldModel,
    HostingFailed,
    HostModel,
    LoadProgress,
    MakeSnapshot,
    ModelLoaded,
    ModelTurn,
    Order,
    Ping,
    PrepareModel,
    RetireModel,
    RunFailed,
    SendKv,
    Shutdown,
    SnapshotLooked,
    StartRequest,
    Welcome,
)
from hearth.core.types import AdapterId, ModelId, SnapshotOutcome, TurnEnd
from hearth.engine.stage_messages import (
    KvMessage,
    MemberMessage,
    StageAdapterFailed,
    StageAdapterReady,
    StageKvSend,
)
from hearth.policy.turns.turn_policy import BeginTurn, EndTurn
from hearth.system import garbage
from hearth.system.spin import SpinningQueue
from hearth.worker.adapter_load import AdapterNews
from hearth.worker.adapters import FailedRuns, is_own
from hearth.worker.failure import Failure, ModelBroke, blame, failure_of
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosted_models import HostedModels
from hearth.worker.hosting_state import ServedModel
from hearth.worker.kv_moves import KvArrived, KvMoves
from hearth.worker.model_load import (
    EngineReady,
    FirstStepsUncaptured,
    FrontLoaded,
    HostingNews,
    HostPrefetched,
    ModelFound,
    SnapshotDiscarded,
)
from hearth.worker.pressure import PressureReports
from hearth.worker.report import Reports
from hearth.worker.runs import CheckedRequest, Runs
from hearth.worker.runtime import HostingResources
from hearth.worker.snapshot_maker import SnapshotMaker, SnapshotWritten
from hearth.worker.stage_adapters import StageAdapters
from hearth.worker.stage_member import MemberTold, ResultArrived, StageArrived
from hearth.worker.steps import ModelSteps
from hearth.worker.weights_transfer import AlmostLoaded, ModelBroken, Progressed, WeightsLoaded

log = logging.getLogger(__name__)


class DeviceLost(Exception):
    """The device's context is broken: every model in this process is lost."""


@dataclass(frozen=True, slots=True)
class ModelNews:
    hosting: int  #: the stay; news of an earlier one are stale
    model: ModelId
    news: HostingNews


@dataclass(frozen=True, slots=True)
class NewsOfAdapter:
    adapter: AdapterId
    news: AdapterNews


Message = Order | ModelNews | NewsOfAdapter | CheckedRequest | SnapshotWritten | KvArrived
Inbox = SpinningQueue[Message]


class LoopState(Enum):
    MESSAGE = auto()  #: a message has come: it is handled before anything else
    STEP = auto()  #: a model has its turn, weights and KV for a step
    RECHECK = auto()  #: a model failed, or a snapshot advanced: messages first, then look at all models again
    IDLE = auto()  #: nothing can advance until a message comes, a turn may end or a snapshot is due


class WorkerLoop:
    """Mutable; `run` is called by one thread, which owns everything here."""

    def __init__(self, resources: HostingResources, inbox: Inbox, send: Callable[[Fact], None]) -> None:
        """`send` may block; no step runs meanwhile."""
        self._inbox, self._send = inbox, send
        self._models = HostedModels(
            resources,
            lambda hosting, model, news: inbox.put(ModelNews(hosting, model, news)),
            lambda adapter, news: inbox.put(NewsOfAdapter(adapter, news)),
        )
        self._steps = ModelSteps(self._models)
        self._hosted = self._models.hosted
        self._turns = self._models.turns
        self._adapters = self._models.adapters
        self._reports = Reports(self._models, resources)
        self._pressure = PressureReports(self._models)
        self._maker = SnapshotMaker(
            resources.snapshots,
            resources.device,
            self._hosted,
            rates=self._models.reclaimer.reload_costs.measured_rates,
            threads=resources.loader.threads,
            post=inbox.put,
        )
        self._stage_adapters = StageAdapters(self._models)
        self._kv_moves = KvMoves(self._models, resources.connections, inbox.put)
        self._runs = Runs(
            self._models,
            self._stage_adapters,
            self._kv_moves,
            resources.first_tokens,
            self._load_in_turn,
            inbox.put,
            send,
        )
        #: Models that may step, from the check to the step. Nothing else may hold a dropped engine.
        self._ready: dict[ModelId, ServedModel] = {}

    def run(self) -> None:
        """Work until told to shut down. Raises DeviceLost, and OSError once the gateway is gone."""
        is_running = True
        while is_running:
            match self._next_state():
                case LoopState.STEP:
                    self._step()
                case LoopState.MESSAGE:
                    is_running = self._take_message()
                case LoopState.IDLE:
                    is_running = self._take_message(is_idle=True)
                case LoopState.RECHECK:
                    pass

    def _next_state(self) -> LoopState:
        if not self._inbox.empty():
            return LoopState.MESSAGE
        if self._turns.is_settled() and self._is_any_ready():
            return LoopState.STEP
        self._take_turns()
        self._load_deferred()  # adapters in their way may be out of use by now
        self._serve_adapters()
        if not self._prefetch():
            return LoopState.RECHECK
        if self._is_any_ready():
            return LoopState.STEP
        if self._end_deadlock() or self._advance_snapshot():
            return LoopState.RECHECK
        self._send_residency(is_due=True)
        for report in self._pressure.idle():
            self._send(report)
        return LoopState.IDLE

    def _take_message(self, *, is_idle: bool = False) -> bool:
        """Handle the next message, sleeping until it comes or a deadline passes; False: shut down.

        `is_idle`: nothing can advance before it comes.
        """
        try:
            message = self._inbox.get(timeout=self._timeout_s() if self._inbox.empty() else None)
        except Empty:  # a turn may end, a snapshot be made, or garbage be collected
            if self._may_collect():
                garbage.collect()
            return True
        if isinstance(message, Shutdown):
            return False
        self._steps.recheck()
        self._turns.recheck()
        self._handle(message)
        if is_idle and isinstance(message, ModelNews):
            self._step_prepared(message.model)
        del message  # it may hold the engine of a model that is dropped below
        self._load_deferred()
        self._serve_adapters()
        return True

    def _end_deadlock(self) -> bool:
        """Fail a model that can never get its KV, or an adapter in its favour; False: there is none."""
        if (broke := self._steps.hopeless()) is None:
            return False
        if not self._give_up_adapter(broke.model):
            self._fail(broke.model, failure_of(broke.error))
        return True

    def _is_any_ready(self) -> bool:
        self._ready = self._steps.ready()
        return bool(self._ready)

    def _timeout_s(self) -> float | None:
        quiet_s = None if self._runs else self._maker.timeout_s()
        waits_s = (self._turns.timeout_s(), quiet_s, garbage.QUIET_S if self._may_collect() else None)
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def _may_collect(self) -> bool:
        return not self._runs and garbage.is_due()

    def _step_prepared(self, model: ModelId) -> None:
        """Run a step of a pipeline that waited for the last message alone, before anything else is checked.

        A device is idle until then, and this takes a third of the time of `_next_state` and `_step`.
        """
        hosted = self._hosted.get(model)
        if hosted is not None and hosted.is_step_prepared and hosted.served is not None:
            self._ready = {model: hosted.served}
            self._step(is_prepared=True)

    def _step(self, *, is_prepared: bool = False) -> None:
        ready, self._ready = self._ready, {}
        model = next(iter(ready)) if is_prepared else self._steps.next(ready)
        began_s = time.perf_counter()
        try:
            outcome = self._steps.step(model, ready[model], is_prepared=is_prepared)
        except Exception as error:  # it concerns one model, or `_fail` raises
            broken, failure = blame(model, error)
        else:
            self._runs.send_step(model, outcome, time.perf_counter() - began_s)
            try:
                self._steps.settle(model, ready[model], outcome)
            except Exception as error:  # as above
                broken, failure = blame(model, error)
            else:
                self._stepped(model, time.perf_counter() - began_s)
                return
        del ready  # the last reference besides the worker's own
        self._fail(broken, failure)  # if another model is to blame, this one steps again

    def _stepped(self, model: ModelId, step_s: float) -> None:
        self._maker.saw_request()
        self._steps.stepped(model, step_s)
        self._send_residency(is_due=False)
        if (report := self._pressure.stepped(model)) is not None:
            self._send(report)
        self._load_deferred()
        if self._steps.is_stuck:
            self._give_up_adapter(model)
        self._serve_adapters()

    # Orders.

    def _handle(self, message: Message) -> None:
        match message:
            case PrepareModel():
                self._models.prepare(message)
            case HostModel(model):
                self._try(model, lambda: self._models.host(message))
            case RetireModel(model):
                self._retire(model)
            case DropModel(model):
                self._drop(model)
            case HoldModel(model, hold):
                self._try(model, lambda: self._models.set_hold(model, hold))
            case ForgetAdapter(adapter):
                self._adapters.forget(adapter)
            case MakeSnapshot():
                if (refused := self._maker.order(message)) is not None:
                    self._send(refused)
            case StartRequest():
                self._start(message)
            case SendKv(model):
                if (hosted := self._hosted.get(model)) is not None:
                    self._try(model, partial(self._kv_moves.send_first, hosted, message))
            case CancelRequest(run):
                self._runs.cancel(run)
            case Ping(number):
                self._wait_for_stages()
                self._send(self._reports.pong(number))
            case CheckedRequest():
                self._runs.take_checked(message)
            case KvArrived():
                self._take_kv(message)
            case ModelNews():
                self._take_news(message)
            case NewsOfAdapter(adapter, news):
                self._take_adapter_news(adapter, news)
            case SnapshotWritten():
                self._maker.written(message)
                self._models.limit_torch()
                self._send(message.made)
            case Welcome() | Shutdown():
                raise ServiceError(f"unexpected message: {type(message).__name__}")
            case _:
                assert_never(message)

    def _retire(self, model: ModelId) -> None:
        if model in self._hosted:
            self._forget_requests(model)
            self._try(model, lambda: self._models.retire(model))

    def _drop(self, model: ModelId) -> None:
        self._forget_requests(model)
        self._models.drop(model)

    def _forget_requests(self, model: ModelId) -> None:
        self._runs.cancel_all(model)
        self._stage_adapters.forget(model)
        self._steps.forget(model)

    def _start(self, order: StartRequest) -> None:
        hosted = self._hosted.get(order.model)
        if hosted is None:
            reason = f"`{order.model}` is not on this worker: it was dropped, or it failed"
            self._send(RunFailed(order.run, ServiceError.label, reason))
            return
        self._maker.saw_request()
        self._runs.start(order, hosted)

    # News of models, and their loads.

    def _take_news(self, message: ModelNews) -> None:
        model, news, hosted = message.model, message.news, self._hosted.get(message.model)
        if hosted is None:
            return
        if isinstance(news, SnapshotDiscarded):  # it may have been restored in an earlier stay
            outcome = SnapshotOutcome.DISCARDED
            self._send(SnapshotLooked(model, hosted.order.hosting, outcome, news.reason))
            return
        if hosted.order.hosting != message.hosting:
            return
        match news:
            case ModelFound():
                self._try(model, lambda: self._models.found(hosted, news))
                for order in hosted.pending.queued:
                    self._runs.want_turn(order)
            case EngineReady():
                if news.look is not None:
                    outcome, reason, lacks = news.look.outcome, news.look.reason, news.look.lacks_adapters
                    self._send(SnapshotLooked(model, hosted.order.hosting, outcome, reason, lacks))
                self._try(model, lambda: self._models.engine_ready(hosted, news))
                self._start_stage(hosted)
                self._runs.begin_queued(hosted)
            case HostPrefetched():
                hosted.prefetch.reached_host(news)
            case FrontLoaded():
                self._try(model, lambda: self._models.front_loaded(hosted, news))
                self._runs.begin_queued(hosted)
            case Progressed(num_bytes, num_layers):
                self._send(LoadProgress(model, hosted.order.hosting, num_bytes, num_layers))
            case AlmostLoaded():
                if (load := hosted.load_under_way) is not None:
                    load.is_almost_loaded = True
            case WeightsLoaded():
                self._try(model, lambda: self._models.weights_loaded(hosted, news))
            case ModelBroken(failure):
                self._fail(model, failure)
            case FirstStepsUncaptured():
                self._reports.num_uncaptured_starts += 1
            case StageArrived():
                if hosted.member is not None:
                    self._maker.saw_request()
                    hosted.member.take(news)
                    self._inbox.expect_more(hosted.member.spin)
            case ResultArrived():  # that it may step again was noted with the message
                if hosted.member is not None:
                    self._inbox.expect_more(hosted.member.spin)
                    if hosted.pending.held:  # maybe without a step
                        self._try(model, hosted.member.check)
            case MemberTold(told):
                self._take_told(hosted, told)
            case _:
                assert_never(news)

    def _start_stage(self, hosted: HostedModel) -> None:
        """Let a later stage run, if it is one and has not failed."""
        while hosted.later_stage is not None and self._hosted.get(hosted.model) is hosted:
            try:
                self._models.start_stage(hosted, hosted.later_stage)
            except Exception as error:  # it concerns one model, or `_fail` raises
                self._fail(*blame(hosted.model, error))
            else:
                return

    def _take_stage_kv(self, hosted: HostedModel, message: KvMessage) -> None:
        while hosted.served is not None and self._hosted.get(hosted.model) is hosted:
            try:
                self._models.reclaimer.take_stage_kv(hosted, message)
            except Exception as error:  # it concerns one model, or `_fail` raises
                self._fail(*blame(hosted.model, error))
            else:
                return

    def _take_kv(self, arrived: KvArrived) -> None:
        hosted = self._hosted.get(arrived.model)
        while hosted is not None and self._hosted.get(arrived.model) is hosted:
            try:
                self._runs.take_kv(arrived, hosted)
            except Exception as error:  # it concerns one model, or `_fail` raises
                self._fail(*blame(arrived.model, error))
            else:
                return

    def _wait_for_stages(self) -> None:
        """Wait for steps of pipelines on this device. No step may follow that waits for one that hangs."""
        for model, hosted in list(self._hosted.items()):
            if hosted.member is not None and (served := hosted.served) is not None:
                self._try(model, partial(served.engine.note_done, waits=True))

    def _load_deferred(self) -> None:
        for hosted in self._hosted_of(self._models.reclaimer.policy.deferred()):
            self._send_loaded(self._start_load(hosted))
            self._start_stage(hosted)
            self._runs.begin_queued(hosted)

    def _start_load(self, hosted: HostedModel) -> ModelLoaded | None:
        """Load what a model lacks, unless that is under way. Returns the news if nothing is missing."""
        if hosted.is_loaded or hosted.is_loading:
            return None
        return self._attempt(hosted.model, lambda: self._models.load(hosted))

    def _load_in_turn(self, hosted: HostedModel) -> None:
        self._try(hosted.model, lambda: self._models.load_in_turn(hosted))

    def _try(self, model: ModelId, act: Callable[[], ModelLoaded | None]) -> None:
        self._send_loaded(self._attempt(model, act))

    def _attempt(self, model: ModelId, act: Callable[[], ModelLoaded | None]) -> ModelLoaded | None:
        """Do something for a model. An error fails that model alone, or the one that gave way for it."""
        try:
            return act()
        except Exception as error:  # as above
            broken, failure = blame(model, error)
        self._fail(broken, failure)
        if broken == model:
            return None
        # Another model failed while giving way; this one has no place yet.
        return self._attempt(model, lambda: self._models.load(self._hosted[model]))

    def _send_loaded(self, loaded: ModelLoaded | None) -> None:
        if loaded is not None:
            self._send(loaded)
            self._send_residency(is_due=True)
            self._runs.set_unchecked_aside(self._hosted[loaded.model])

    def _send_residency(self, *, is_due: bool) -> None:
        if (fact := self._reports.residency(is_due=is_due)) is not None:
            self._send(fact)

    # Turns.

    def _take_turns(self) -> None:
        while changes := self._turns.decide():
            ends = {change.model: change.why for change in changes if isinstance(change, EndTurn)}
            begins = [change.model for change in changes if isinstance(change, BeginTurn)]
            for hosted in self._hosted_of(ends):
                self._models.turn_over(hosted)
            loaded = {hosted.model: self._start_load(hosted) for hosted in self._hosted_of(begins)}
            for hosted in self._hosted_of(ends):
                self._end_turn(hosted, ends[hosted.model])
            for hosted in self._hosted_of(begins):
                self._send_turn(hosted, None)
                self._send_loaded(loaded[hosted.model])
                self._runs.begin_queued(hosted)
            self._adapters.recheck()

    def _prefetch(self) -> bool:
        """Prefetch models that wait for their turn; False: a model failed, so check all again."""
        try:
            self._models.prefetch()
        except ModelBroke as error:  # while it gave up an adapter
            self._fail(*blame(error.model, error))
            return False
        return True

    def _hosted_of(self, models: Iterable[ModelId]) -> Iterator[HostedModel]:
        return (hosted for model in models if (hosted := self._hosted.get(model)) is not None)

    def _end_turn(self, hosted: HostedModel, why: TurnEnd) -> None:
        began_s = time.perf_counter()
        try:
            outcome = self._steps.flush(hosted)
        except Exception as error:  # it concerns one model, or `_fail` raises
            self._fail(*blame(hosted.model, error))
            return
        self._runs.send_step(hosted.model, outcome, time.perf_counter() - began_s)
        self._send_turn(hosted, why)

    def _send_turn(self, hosted: HostedModel, ended: TurnEnd | None) -> None:
        num_requests = len(self._runs.of(hosted.model))
        self._send(ModelTurn(hosted.model, hosted.order.hosting, ended, num_requests))

    # Adapters.

    def _serve_adapters(self) -> None:
        while self._adapters.is_due:
            try:
                self._start_adapted()  # first: an adapter without requests could be evicted for the next
                for failed in self._adapters.advance():
                    self._fail_runs(failed)
                self._start_adapted()
            except ModelBroke as error:  # while it gave way, or added an adapter
                self._fail(*blame(error.model, error))
                self._adapters.recheck()
                continue
            return

    def _start_adapted(self) -> None:
        self._runs.start_adapted()
        self._stage_adapters.advance()

    def _take_told(self, hosted: HostedModel, message: MemberMessage) -> None:
        if isinstance(message, KvMessage):
            self._take_stage_kv(hosted, message)
            return
        if isinstance(message, StageKvSend):
            self._try(hosted.model, partial(self._kv_moves.send, hosted, message))
            return
        if hosted.later_stage is not None:
            self._stage_adapters.take(hosted, message)
            return
        match message:
            case StageAdapterReady(run=run):
                self._runs.adapter_confirmed(run)
            case StageAdapterFailed(run=run, label=label, reason=reason):
                self._runs.adapter_failed(run, label, reason)

    def _give_up_adapter(self, short: ModelId) -> bool:
        """Fail the requests of the youngest adapter in use; False: none is in use."""
        try:
            failed = self._adapters.give_up(short)
        except ModelBroke as error:  # while it gave up the adapter; its own memory may suffice
            self._fail(*blame(error.model, error))
            return True
        if failed is not None:
            self._fail_runs(failed)
        return failed is not None

    def _take_adapter_news(self, adapter: AdapterId, news: AdapterNews) -> None:
        try:
            told = self._adapters.take_news(adapter, news)
        except ModelBroke as error:  # while it added or removed the adapter
            self._fail(*blame(error.model, error))
            self._take_adapter_news(adapter, news)  # other models still have to be told
            return
        match told:
            case AdapterLoaded() as loaded:
                self._send(loaded)
            case FailedRuns() as failed:
                self._fail_runs(failed)

    def _fail_runs(self, failed: FailedRuns) -> None:
        if failed.failure.is_fatal:
            raise DeviceLost(f"the device failed while loading an adapter: {failed.failure.reason}")
        for run in failed.runs:
            if is_own(run):
                self._runs.fail(run, failed.failure.label, failed.failure.reason)
            else:
                self._stage_adapters.fail(run, failed.failure)

    # Snapshots.

    def _advance_snapshot(self) -> bool:
        if self._runs:
            return False
        try:
            facts = self._maker.advance()
        except ModelBroke as broke:
            self._fail(broke.model, failure_of(broke.error))
            return True
        for fact in facts or ():
            self._send(fact)
        return facts is not None

    # Failures.

    def _fail(self, model: ModelId, failure: Failure) -> None:
        """Drop a model, and go on with the others. Raises DeviceLost if they are lost, too."""
        trace = failure.trace and "\n" + failure.trace
        log.error("model_failed model=%s label=%s reason=%s%s", model, failure.label, failure.reason, trace)
        if failure.is_fatal:
            raise DeviceLost(f"the device failed while running `{model}`: {failure.reason}")
        hosted = self._hosted.get(model)
        if hosted is not None:  # else it is retired, and the gateway does not track it
            # First: other members that it cuts off must not be heard before. Orders come after the drop.
            is_cut_off = failure.label == StageLost.label
            self._send(HostingFailed(model, hosted.order.hosting, failure.label, failure.reason, is_cut_off))
        self._drop(model)
