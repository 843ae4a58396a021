"""The step loop of a worker: orders in, turns and steps of busy models, facts out. Opens no socket.

One thread runs it and owns all engines. Others post what they have into its inbox: orders of the gateway and
news of models that are opened and loaded. With nothing to do it sleeps there, at most until a turn may end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import assert_never

from hearth.core.errors import ServiceError
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
    Shutdown,
    SnapshotLooked,
    SnapshotMade,
    StartRequest,
    Welcome,
)
from hearth.core.types import AdapterId, ModelId, SnapshotOutcome, TurnEnd
from hearth.policy.batch.step_sharing import StepSharing
from hearth.policy.turns.turn_policy import BeginTurn, EndTurn
from hearth.system import garbage
from hearth.worker.adapter_load import AdapterNews
from hearth.worker.adapters import FailedRuns
from hearth.worker.failure import Failure, ModelBroke, blame, failure_of
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosted_models import HostedModels
from hearth.worker.hosting_state import ServedModel
from hearth.worker.model_load import (
    EngineReady,
    FirstStepsUncaptured,
    FrontLoaded,
    HostingNews,
    HostPrefetched,
    ModelFound,
    SnapshotDiscarded,
)
from hearth.worker.report import Reports
from hearth.worker.runs import CheckedRequest, Runs
from hearth.worker.runtime import HostingResources
from hearth.worker.snapshot_maker import SnapshotMaker, SnapshotWritten
from hearth.worker.weights_transfer import AlmostLoaded, ModelBroken, Progressed, WeightsLoaded

log = logging.getLogger(__name__)


class DeviceLost(Exception):
    """Every model in this process is lost."""


@dataclass(frozen=True, slots=True)
class ModelNews:
    """News of a hosted model."""

    hosting: int  #: which stay of the model they are of: those of an earlier one are stale
    model: ModelId
    news: HostingNews


@dataclass(frozen=True, slots=True)
class NewsOfAdapter:
    """News of an adapter that was asked for."""

    adapter: AdapterId
    news: AdapterNews


Message = Order | ModelNews | NewsOfAdapter | CheckedRequest | SnapshotWritten
Inbox = SimpleQueue[Message]


class WorkerLoop:
    """Mutable; `run` is called by one thread, which owns all of it."""

    def __init__(self, resources: HostingResources, inbox: Inbox, send: Callable[[Fact], None]) -> None:
        """`send` may block: then no step is made."""
        self._inbox, self._send = inbox, send
        self._sharing = StepSharing()
        self._models = HostedModels(
            resources,
            lambda hosting, model, news: inbox.put(ModelNews(hosting, model, news)),
            lambda adapter, news: inbox.put(NewsOfAdapter(adapter, news)),
        )
        self._hosted = self._models.hosted
        self._turns = self._models.turns
        self._adapters = self._models.adapters
        self._reports = Reports(
            *(self._models.reclaimer, self._hosted, self._turns, self._adapters),
            is_unstaged=lambda: resources.lease_client.is_unstaged,
            torch_limit=resources.torch_limit,
            lacks_kept_graphs=resources.snapshots is not None and resources.snapshots.lacks_graphs,
        )
        self._maker = self._snapshot_maker(resources)
        self._runs = Runs(self._models, resources.first_tokens, self._load_in_turn, inbox.put, send)
        #: Those that may step now, between the look for them and the step: what is dropped must not be here.
        self._ready: dict[ModelId, ServedModel] = {}

    def run(self) -> None:
        """Work until it is told to shut down. Raises DeviceLost, and OSError when nobody listens any more."""
        while self._take_orders():
            self._step()

    def _take_orders(self) -> bool:
        """Carry out what has come, sleeping while no model is busy; False at the end."""
        while (message := self._next_message()) is not None:
            if isinstance(message, Shutdown):
                return False
            self._models.look_again()
            self._turns.look_again()
            self._handle(message)
            del message  # it may hold the engine of a model that is dropped while this sleeps
            self._load_deferred()
            self._serve_adapters()
        return True

    def _next_message(self) -> Message | None:
        """Return what has come, sleeping while no model is ready; None: one is, and nothing has come."""
        while self._inbox.empty():
            if self._turns.is_settled() and self._is_any_ready():
                return None
            self._take_turns()
            self._load_deferred()  # adapters that are in their way may be in use no more
            self._serve_adapters()
            if not self._look_ahead():
                continue
            if self._is_any_ready():
                return None
            if (broke := self._models.hopeless()) is not None:
                if not self._give_up_adapter(broke.model):
                    self._fail(broke.model, failure_of(broke.error))
                continue
            if self._advance_snapshot():
                continue
            self._tell_residency(is_due=True)  # before it sleeps
            try:
                return self._inbox.get(timeout=self._timeout_s())
            except Empty:  # a turn may end now, or nobody has asked for long enough
                if self._may_collect():
                    garbage.collect()
        return self._inbox.get()

    def _is_any_ready(self) -> bool:
        self._ready = self._models.ready()
        return bool(self._ready)

    def _timeout_s(self) -> float | None:
        """Return how long to sleep at most."""
        quiet_s = None if self._maker is None or self._runs else self._maker.timeout_s()
        waits_s = (self._turns.timeout_s(), quiet_s, garbage.QUIET_S if self._may_collect() else None)
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)

    def _may_collect(self) -> bool:
        """Return True if garbage should be looked for, as soon as nothing has come for a while."""
        return not self._runs and garbage.is_due()

    def _step(self) -> None:
        """Make one step of the model that is next. If that breaks, the model leaves and the others go on."""
        ready, self._ready = self._ready, {}
        urgent = [model for model, served in ready.items() if served.engine.batcher.has_newcomer]
        computed = [model for model in urgent if len(ready) > 1 and ready[model].engine.computes_first_tokens]
        model = self._sharing.next(ready, urgent, computed)
        began_s = time.perf_counter()
        try:
            outcome = self._models.step(model, ready[model])
        except Exception as error:  # whatever it is, it is one model's alone, or `_fail` says otherwise
            broken, failure = blame(model, error)
        else:
            self._runs.tell_step(model, outcome, time.perf_counter() - began_s)
            try:
                self._models.settle(model, ready[model], outcome)
            except Exception as error:  # as above
                broken, failure = blame(model, error)
            else:
                self._stepped(model, time.perf_counter() - began_s)
                return
        del ready  # the last of it besides the worker's own
        self._fail(broken, failure)  # if it is another one, this one tries again

    def _stepped(self, model: ModelId, step_s: float) -> None:
        """Go on after a step that was told, and whose books are finished."""
        if self._maker is not None:
            self._maker.saw_request()
        self._sharing.stepped(model, step_s)
        self._tell_residency(is_due=False)
        self._load_deferred()
        if self._models.is_stuck:
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
                self._models.set_hold(model, hold)
            case ForgetAdapter(adapter):
                self._adapters.forget(adapter)
            case MakeSnapshot():
                self._make_snapshot(message)
            case StartRequest():
                self._start(message)
            case CancelRequest(run):
                self._runs.cancel(run)
            case Ping(number):
                self._send(self._reports.pong(number))
            case CheckedRequest():
                self._runs.take_checked(message)
            case ModelNews():
                self._take_news(message)
            case NewsOfAdapter(adapter, news):
                self._take_adapter_news(adapter, news)
            case SnapshotWritten():
                self._snapshot_written(message)
            case Welcome() | Shutdown():
                raise ServiceError(f"a worker at work is not told {type(message).__name__}")
            case _:
                assert_never(message)

    def _retire(self, model: ModelId) -> None:
        """Retire a model; one that has just failed is gone already."""
        if model in self._hosted:
            self._forget_requests(model)
            self._try(model, lambda: self._models.retire(model))

    def _drop(self, model: ModelId) -> None:
        """Have all of a model go, also of a retired one; one that is unknown has nothing."""
        self._forget_requests(model)
        self._models.drop(model)

    def _forget_requests(self, model: ModelId) -> None:
        self._runs.cancel_all(model)
        self._sharing.forget(model)

    def _start(self, order: StartRequest) -> None:
        hosted = self._hosted.get(order.model)
        if hosted is None:
            reason = f"`{order.model}` is not on this worker; it was dropped or has failed"
            self._send(RunFailed(order.run, ServiceError.label, reason))
            return
        if self._maker is not None:
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
                for order in hosted.waiting:
                    self._runs.want_turn(order)
            case EngineReady():
                if news.look is not None:
                    outcome, reason, lacks = news.look.outcome, news.look.reason, news.look.lacks_adapters
                    self._send(SnapshotLooked(model, hosted.order.hosting, outcome, reason, lacks))
                self._try(model, lambda: self._models.engine_ready(hosted, news))
                self._runs.begin_waiting(hosted)
            case HostPrefetched():
                hosted.prefetched(news)
            case FrontLoaded():
                self._try(model, lambda: self._models.front_loaded(hosted, news))
                self._runs.begin_waiting(hosted)
            case Progressed(num_bytes, num_layers):
                self._send(LoadProgress(model, hosted.order.hosting, num_bytes, num_layers))
            case AlmostLoaded():
                hosted.almost_loaded()
            case WeightsLoaded():
                self._try(model, lambda: self._models.weights_loaded(hosted, news))
            case ModelBroken(failure):
                self._fail(model, failure)
            case FirstStepsUncaptured():
                self._reports.num_uncaptured_starts += 1
            case _:
                assert_never(news)

    def _load_deferred(self) -> None:
        """Load the models that found no place and may find one now."""
        for hosted in self._models.deferred():
            if self._hosted.get(hosted.model) is hosted:  # else one before it made it fail
                self._load(hosted)

    def _load(self, hosted: HostedModel) -> None:
        """Load what a model lacks, if it is known yet, and have the requests that waited for it begin."""
        self._tell_loaded(self._start_load(hosted))
        self._runs.begin_waiting(hosted)

    def _start_load(self, hosted: HostedModel) -> ModelLoaded | None:
        """Load what a model lacks, if it is known yet and does not come already; if nothing is, say so."""
        if hosted.is_loaded or hosted.is_loading:
            return None
        return self._attempt(hosted.model, lambda: self._models.load(hosted))

    def _load_in_turn(self, hosted: HostedModel) -> None:
        """Load what a model lacks, unless it has to wait for its turn."""
        self._try(hosted.model, lambda: self._models.load_in_turn(hosted))

    def _try(self, model: ModelId, act: Callable[[], ModelLoaded | None]) -> None:
        """Do something for a model, and tell if all of it is there then."""
        self._tell_loaded(self._attempt(model, act))

    def _attempt(self, model: ModelId, act: Callable[[], ModelLoaded | None]) -> ModelLoaded | None:
        """Do something for a model; whatever breaks is one model's alone, or `_fail` says otherwise."""
        try:
            return act()
        except Exception as error:  # as above
            broken, failure = blame(model, error)
        self._fail(broken, failure)
        if broken == model:
            return None
        # It was to give way for this one, which has no place yet.
        return self._attempt(model, lambda: self._models.load(self._hosted[model]))

    def _tell_loaded(self, loaded: ModelLoaded | None) -> None:
        if loaded is not None:
            self._send(loaded)
            self._tell_residency(is_due=True)
            self._runs.set_unchecked_aside(self._hosted[loaded.model])

    def _tell_residency(self, *, is_due: bool) -> None:
        if (fact := self._reports.residency(is_due=is_due)) is not None:
            self._send(fact)

    # Turns.

    def _take_turns(self) -> None:
        """Have turns end and begin, as the policy decides now.

        Those that begin are loaded before the last steps of those that end are waited for: bytes cross
        meanwhile, but for those that go where such a step still reads or writes.
        """
        while changes := self._turns.decide():
            ends = {change.model: change.why for change in changes if isinstance(change, EndTurn)}
            begins = [change.model for change in changes if isinstance(change, BeginTurn)]
            for hosted in self._hosted_of(ends):
                self._models.turn_over(hosted)
            loaded = {hosted.model: self._start_load(hosted) for hosted in self._hosted_of(begins)}
            for hosted in self._hosted_of(ends):
                self._end_turn(hosted, ends[hosted.model])
            for hosted in self._hosted_of(begins):
                self._tell_turn(hosted, None)
                self._tell_loaded(loaded[hosted.model])
                self._runs.begin_waiting(hosted)
            self._adapters.look_again()

    def _look_ahead(self) -> bool:
        """Have models come nearer that wait for their turn; False: one broke, so look at all again."""
        try:
            self._models.look_ahead()
        except ModelBroke as error:  # it was to forget an adapter that gave way
            self._fail(*blame(error.model, error))
            return False
        return True

    def _hosted_of(self, models: Iterable[ModelId]) -> Iterator[HostedModel]:
        """Yield those of the models that have not failed meanwhile."""
        return (hosted for model in models if (hosted := self._hosted.get(model)) is not None)

    def _end_turn(self, hosted: HostedModel, why: TurnEnd) -> None:
        began_s = time.perf_counter()
        try:
            outcome = self._models.rest(hosted)
        except Exception as error:  # whatever it is, it is one model's alone, or `_fail` says otherwise
            self._fail(*blame(hosted.model, error))
            return
        self._runs.tell_step(hosted.model, outcome, time.perf_counter() - began_s)
        self._tell_turn(hosted, why)

    def _tell_turn(self, hosted: HostedModel, ended: TurnEnd | None) -> None:
        num_requests = len(self._runs.of(hosted.model))
        self._send(ModelTurn(hosted.model, hosted.order.hosting, ended, num_requests))

    # Adapters.

    def _serve_adapters(self) -> None:
        """Have adapters come that requests wait for, and those requests start whose adapter is there."""
        while self._adapters.is_due:
            try:
                self._runs.start_adapted()  # first: an adapter that nobody uses would give way to the next
                for failed in self._adapters.advance():
                    self._fail_runs(failed)
                self._runs.start_adapted()
            except ModelBroke as error:  # one that was to give way, or to be told of an adapter
                self._fail(*blame(error.model, error))
                self._adapters.look_again()
                continue
            return

    def _give_up_adapter(self, short: ModelId) -> bool:
        """Have the youngest adapter in use give way, with its requests, to a model that is stuck.

        False: none is in use.
        """
        try:
            failed = self._adapters.give_up(short)
        except ModelBroke as error:  # it was to forget the adapter; its own room may do
            self._fail(*blame(error.model, error))
            return True
        if failed is not None:
            self._fail_runs(failed)
        return failed is not None

    def _take_adapter_news(self, adapter: AdapterId, news: AdapterNews) -> None:
        try:
            told = self._adapters.take_news(adapter, news)
        except ModelBroke as error:  # it was to be told where its adapter is, or to forget it
            self._fail(*blame(error.model, error))
            self._take_adapter_news(adapter, news)  # which others wait for, and were not told
            return
        match told:
            case AdapterLoaded() as loaded:
                self._send(loaded)
            case FailedRuns() as failed:
                self._fail_runs(failed)

    def _fail_runs(self, failed: FailedRuns) -> None:
        """End requests whose adapter cannot be had; others of their model are not affected."""
        if failed.failure.is_fatal:
            raise DeviceLost(f"the device is lost, under an adapter: {failed.failure.reason}")
        for run in failed.runs:
            self._runs.fail(run, failed.failure.label, failed.failure.reason)

    # Snapshots.

    def _snapshot_maker(self, resources: HostingResources) -> SnapshotMaker | None:
        if resources.snapshots is None:
            return None
        return SnapshotMaker(
            *(resources.snapshots, resources.device, self._hosted),
            rates=self._models.reclaimer.reload_costs.measured_rates,
            threads=resources.loader.threads,
            post=self._inbox.put,
        )

    def _make_snapshot(self, order: MakeSnapshot) -> None:
        if self._maker is None:
            failure = "its worker keeps none, its log says why"
            self._send(SnapshotMade(order.model, order.hosting, failure=failure))
        else:
            self._maker.order(order)

    def _advance_snapshot(self) -> bool:
        """Do a little for a snapshot that was ordered, if nobody has requests; False: there is none to do."""
        if self._maker is None or self._runs:
            return False
        try:
            facts = self._maker.advance()
        except ModelBroke as broke:
            self._fail(broke.model, failure_of(broke.error))
            return True
        for fact in facts or ():
            self._send(fact)
        return facts is not None

    def _snapshot_written(self, news: SnapshotWritten) -> None:
        if self._maker is not None:
            self._maker.written(news)
            self._models.limit_torch()
        self._send(news.made)

    # Failures.

    def _fail(self, model: ModelId, failure: Failure) -> None:
        """Have a model leave, and the others go on. Raises DeviceLost where they cannot."""
        log.error(
            "model_failed model=%s label=%s reason=%s%s",
            *(model, failure.label, failure.reason, failure.trace and "\n" + failure.trace),
        )
        if failure.is_fatal:
            raise DeviceLost(f"the device is lost, under `{model}`: {failure.reason}")
        hosted = self._hosted.get(model)
        self._drop(model)
        if hosted is not None:  # else it is retired, and nobody has to be told
            self._send(HostingFailed(model, hosted.order.hosting, failure.label, failure.reason))
