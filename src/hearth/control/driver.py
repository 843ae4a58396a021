"""The live driver of the brain: turns what happens into events and what is ordered into messages to workers.

All decisions are the brain's. Everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import assert_never

from hearth import errors, messages
from hearth.control.active_request import ActiveRequest
from hearth.control.crash import end_process
from hearth.control.fact_decoder import DecodedFact, DecodedToken
from hearth.control.journal import Journal
from hearth.control.link import WorkerLink
from hearth.control.loads import Loads
from hearth.control.metrics import Metrics
from hearth.control.pools import Pools
from hearth.control.timeline import LoadLog
from hearth.errors import HearthError
from hearth.messages import HostModel, Ping, StartRequest, WorkerHello
from hearth.policy.fleet import events
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import Action, Event, RejectReason
from hearth.policy.fleet.fleet import Fleet
from hearth.types import FinishReason, ModelId, RequestId, WorkerId

log = logging.getLogger(__name__)

#: Pings with such numbers are of somebody who looks; the supervisor counts its own from 1.
FIRST_LOOK = 1 << 32
#: What a rejected request is told, as an error.
_ERRORS: dict[RejectReason, type[HearthError]] = {
    RejectReason.UNKNOWN_MODEL: errors.UnknownModel,
    RejectReason.NEVER_FITS: errors.NoCapacity,
    RejectReason.PINNED_OUT: errors.NoCapacity,
    RejectReason.LOAD_FAILED: errors.StoreError,
    RejectReason.WORKERS_LOST: errors.WorkersLost,
    RejectReason.MODEL_REMOVED: errors.UnknownModel,
}


class Driver:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        fleet: Fleet,
        journal: Journal,
        metrics: Metrics,
        host_order: Callable[[ModelId, int, int, int], HostModel],
        max_seqs: int,
    ) -> None:
        """`host_order`: what a worker is told to host a model: number of this stay, floor and most of KV."""
        self.fleet = fleet
        self._journal, self._metrics = journal, metrics
        self._host_order, self._max_seqs = host_order, max_seqs
        self._loop = asyncio.get_running_loop()
        self._numbers, self._looks = itertools.count(1), itertools.count(FIRST_LOOK)
        #: Requests that have not ended, and those of them that are on a worker.
        self.requests: dict[RequestId, ActiveRequest] = {}
        self.runs: dict[int, ActiveRequest] = {}
        self._links: dict[WorkerId, WorkerLink] = {}
        self._loads = Loads()
        #: Why a model failed last, as the label of an error, until it is loaded or deployed anew.
        self._failures: dict[ModelId, str] = {}
        self.pools = Pools()
        self.is_closing = False  #: workers leave because they were told to
        self._timer: asyncio.TimerHandle | None = None
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        #: Somebody who wants to know that a load has ended or a model has left.
        self.on_residency: Callable[[], None] = lambda: None

    @property
    def now_s(self) -> float:
        return time.monotonic()  # the loop's own clock counts whole milliseconds

    # Requests.

    def start(self, live: ActiveRequest, max_tokens: int | None, keep_alive_s: float | None) -> None:
        """Take a request. Raises HearthError if it is refused at once."""
        self.requests[live.request_id] = live
        self._idle.clear()
        self.post(
            events.RequestArrived(
                *(self.now_s, live.request_id, live.model, len(live.prompt), max_tokens, keep_alive_s),
                digest=live.digest,
            )
        )

    def cancel(self, request_id: RequestId) -> None:
        """Whoever asked is gone. Ending twice is harmless."""
        live = self.requests.get(request_id)
        if live is not None:
            live.is_complete = True
            self.post(events.RequestCancelled(self.now_s, request_id))
            self._end(live, FinishReason.CANCELLED)

    def fail_all(self, error: HearthError) -> None:
        for live in list(self.requests.values()):
            self.post(events.RequestCancelled(self.now_s, live.request_id))
            self._fail(live, error)

    async def idle(self) -> None:
        """Until no request is left."""
        await self._idle.wait()

    # Workers.

    def joined(self, link: WorkerLink, hello: WorkerHello) -> None:
        self._links[hello.worker] = link
        self.post(
            events.WorkerJoined(self.now_s, hello.worker, hello.kind, hello.budget_bytes, self._max_seqs)
        )

    async def look(self, patience_s: float) -> None:
        """Have workers tell what is in their pools after all orders; one in a long step may not."""
        number = next(self._looks)
        answers = self.pools.answers(self._links, number)
        for link in self._links.values():
            link.send(Ping(number))
        try:
            if answers:
                await asyncio.wait(answers, timeout=patience_s)
        finally:
            self.pools.end_look(number)

    def hear(self, heard: DecodedFact) -> None:
        """Something that a worker said, in order; or it is gone."""
        try:
            self._hear(heard)
        except Exception as error:  # books that are half changed would leave requests without an end
            end_process("driver", error)

    def _hear(self, heard: DecodedFact) -> None:
        heard.link.consumed(heard.num_bytes)
        worker, fact = heard.link.worker, heard.fact
        if worker is None or self._links.get(worker) is not heard.link:
            return
        now_s = self.now_s
        match fact:
            case None:
                self._lost(worker)
            case messages.StepDone():
                self._stepped(now_s, fact, heard.said)
                for live in heard.broken:
                    self._broke(now_s, live)
            case messages.RunFailed():
                self._run_failed(now_s, fact)
            case messages.LoadProgress() | messages.ModelLoaded() | messages.HostingFailed():
                load = self._loads.get(worker, fact.model)
                if load is not None and load.hosting == fact.hosting:  # else it was evicted meanwhile
                    self._hear_of_load(now_s, worker, load, fact)
            case messages.DeviceResidency(bytes_by_model):
                self._loads.told(worker, bytes_by_model)
                self.post(events.DeviceReported(now_s, worker, bytes_by_model))
            case messages.Pong():
                self.pools.told(worker, fact, now_s)
            case messages.WorkerHello():
                heard.link.abort()
            case _:
                assert_never(fact)

    # Events and actions.

    def post(self, event: Event) -> None:
        actions: list[Action] = []
        try:
            actions = step(self.fleet, event)
        finally:  # The event that breaks the brain is the one that somebody will look for.
            self._journal.record(event, actions)
        if isinstance(event, events.ModelRemoved):
            self._failures.pop(event.model, None)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case events.Dispatch():
                self._dispatch(action)
            case events.LoadModel(model, worker, kv_floor_bytes, max_kv_bytes):
                log.info("model_loading model=%s worker=%s kv_floor_bytes=%d", model, worker, kv_floor_bytes)
                hosting = next(self._numbers)
                self._loads.begin(worker, model, hosting, self.now_s)
                self._send(worker, self._host_order(model, hosting, kv_floor_bytes, max_kv_bytes))
            case events.Evict():
                self._evict(action)
            case events.SetHold(model, worker, hold):
                self._send(worker, messages.HoldModel(model, hold))
            case events.Reject():
                self._reject(action)
            case events.CancelRun(request_id, worker):
                live = self.requests.get(request_id)
                if live is not None and live.run is not None:
                    self._send(worker, messages.CancelRequest(live.run))
            case events.SetTimer(at_s):
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_later(max(0.0, at_s - self.now_s), self._fire)
            case _:
                assert_never(action)

    def _evict(self, order: events.Evict) -> None:
        model, worker = order.model, order.worker
        what = "model_evicted" if order.is_freed else "model_retired"
        log.info("%s model=%s worker=%s cost_s=%.3f", what, model, worker, order.cost_s)
        if self._loads.end(worker, model) and not order.is_freed:
            self._metrics.evictions.inc()
        self._send(worker, messages.DropModel(model) if order.is_freed else messages.RetireModel(model))
        self.on_residency()

    def _fire(self) -> None:
        self._timer = None
        self.post(events.TimerFired(self.now_s))

    def _send(self, worker: WorkerId, order: messages.Order) -> None:
        link = self._links.get(worker)
        if link is not None:
            link.send(order)

    def _dispatch(self, order: events.Dispatch) -> None:
        live = self.requests[order.request_id]
        if live.run is not None:
            self.runs.pop(live.run, None)
        live.run, live.worker = next(self._numbers), order.worker
        self.runs[live.run] = live
        load = self._loads.awaited(order.worker, order.model, self.now_s)
        live.timeline.placed(self.now_s, order.worker, order.why, order.options, load)
        if len(live.timeline.stays) == 1:
            self._metrics.queue.observe(self.now_s - live.timeline.arrived_s)
        else:
            self._metrics.resumes.inc()
        self._send(
            order.worker,
            StartRequest(live.run, order.model, live.prompt, tuple(live.emitted), live.sampling, live.guide),
        )

    def _reject(self, order: events.Reject) -> None:
        live = self.requests.get(order.request_id)
        if live is None:
            return
        if order.reason is RejectReason.QUEUE_FULL:
            error: HearthError = errors.Overloaded(order.message, order.retry_s or 1.0)
        elif order.reason is RejectReason.LOAD_FAILED:
            error = errors.error_of(self._failures.get(live.model, ""), order.message)
        else:
            error = _ERRORS[order.reason](order.message)
        self._fail(live, error)

    # What workers report.

    def _stepped(self, now_s: float, step_done: messages.StepDone, said: list[DecodedToken]) -> None:
        began_s = now_s - step_done.step_s
        for run in step_done.preempted:  # before the step; who was may have been admitted again for it
            self._metrics.preemptions.inc()
            if run in self.runs:
                self.runs[run].timeline.preempted(began_s)
        for admitted in step_done.admitted:
            live = self.runs.get(admitted.run)
            if live is not None:  # it is told when its first step is launched
                live.timeline.started(began_s, admitted.num_cached_tokens, admitted.waited_s)
                live.stream.num_cached_tokens = live.timeline.num_cached_tokens
        for one in said:
            self._deliver(now_s, one, step_done)
        self._metrics.output_tokens.inc(len(said))
        self._metrics.step.observe(step_done.step_s)

    def _deliver(self, now_s: float, said: DecodedToken, step_done: messages.StepDone) -> None:
        live, piece = said.live, said.piece
        if live.request_id not in self.requests:
            return  # cancelled a moment ago
        timeline = live.timeline
        if timeline.last_token_s is None:
            self._metrics.first_token.observe(now_s - timeline.arrived_s)
        else:
            self._metrics.inter_token.observe(now_s - timeline.last_token_s)
        timeline.token(now_s)
        live.stream.put((piece,))
        if piece.finish_reason is None:
            return
        if live.run in step_done.finished:
            self.post(events.RequestFinished(now_s, live.request_id, timeline.num_output_tokens))
        else:  # a stop string, which the worker knows nothing of
            num_tokens = timeline.num_output_tokens
            self.post(events.RequestFinished(now_s, live.request_id, num_tokens, events.End.STOPPED))
        self._end(live, piece.finish_reason)

    def _broke(self, now_s: float, live: ActiveRequest) -> None:
        if live.request_id in self.requests:
            self.post(events.RequestCancelled(now_s, live.request_id))
            reason = f"the text of request {live.request_id} cannot be made of its tokens; see the log"
            self._fail(live, errors.EngineFailed(reason))

    def _run_failed(self, now_s: float, failed: messages.RunFailed) -> None:
        live = self.runs.get(failed.run)
        if live is None:
            return
        num_tokens = live.timeline.num_output_tokens
        self.post(events.RequestFinished(now_s, live.request_id, num_tokens, events.End.FAILED))
        self._fail(live, errors.error_of(failed.label, failed.reason))

    def _hear_of_load(
        self,
        now_s: float,
        worker: WorkerId,
        load: LoadLog,
        fact: messages.LoadProgress | messages.ModelLoaded | messages.HostingFailed,
    ) -> None:
        if load.ended_s is not None and not isinstance(fact, messages.HostingFailed):
            load = self._loads_again(now_s, worker, fact.model)
        match fact:
            case messages.LoadProgress():
                load.progressed(now_s, fact.num_layers)
                self.post(events.LoadProgressed(now_s, worker, fact.model, fact.num_bytes))
            case messages.ModelLoaded():
                self._loaded(now_s, worker, load, fact)
            case messages.HostingFailed():
                self._failed(now_s, worker, load, fact)

    def _loads_again(self, now_s: float, worker: WorkerId, model: ModelId) -> LoadLog:
        """Weights were taken while a request was on its way there: the load is for those that wait."""
        load = self._loads.begin_again(worker, model, now_s)
        for live in self.runs.values():
            if live.worker == worker and live.model == model and live.timeline.stays[-1].started_s is None:
                live.timeline.load = load
        return load

    def _loaded(self, now_s: float, worker: WorkerId, load: LoadLog, loaded: messages.ModelLoaded) -> None:
        load.end(now_s, loaded)
        self._loads.landed(worker, loaded.model)
        self._failures.pop(loaded.model, None)
        self._metrics.loaded(loaded)
        rungs = tuple(events.RungUse(use.rung, use.num_bytes, use.seconds) for use in loaded.rungs)
        log.info(
            "model_ready model=%s worker=%s load_s=%.3f reused_bytes=%d rungs=%s",
            *(loaded.model, worker, loaded.total_s, loaded.reused_bytes),
            ",".join(f"{use.rung}:{use.num_bytes}" for use in rungs),
        )
        self.post(events.ModelReady(now_s, worker, loaded.model, rungs, loaded.total_s))
        self.on_residency()

    def _failed(self, now_s: float, worker: WorkerId, load: LoadLog, failed: messages.HostingFailed) -> None:
        log.error("model_failed model=%s worker=%s reason=%s", failed.model, worker, failed.reason)
        self._failures[failed.model] = failed.label
        self._loads.end(worker, failed.model)
        if load.ended_s is None:
            load.ended_s, load.failure = now_s, failed.reason
        if load.was_ready:  # its requests go on elsewhere; those of a first load end with it
            self._leave_worker(now_s, worker, "broke", failed.model)
        self.post(events.ModelFailed(now_s, worker, failed.model, failed.reason))

    def _lost(self, worker: WorkerId) -> None:
        now_s = self.now_s
        if not self.is_closing:
            log.error("worker_lost worker=%s", worker)
            self._metrics.workers_lost.inc()
        del self._links[worker]
        self.pools.lost(worker)
        self._loads.lose(worker)
        self._leave_worker(now_s, worker, "died")
        self.post(events.WorkerLost(now_s, worker))

    def _leave_worker(self, now_s: float, worker: WorkerId, how: str, model: ModelId | None = None) -> None:
        """All its requests, or those of one model, are not on it any more and may go on elsewhere."""
        for live in [live for live in self.runs.values() if live.worker == worker]:
            if model is None or live.model == model:
                assert live.run is not None, f"{live.request_id=}"
                del self.runs[live.run]
                live.run = live.worker = None
                live.timeline.lost(now_s, worker, how if model is None else f"{how} under `{model}`")

    # Ends.

    def _fail(self, live: ActiveRequest, error: HearthError) -> None:
        live.is_complete = True
        live.stream.fail(error)
        self._end(live, error.label, str(error))

    def _end(self, live: ActiveRequest, outcome: str, error: str | None = None) -> None:
        if self.requests.pop(live.request_id, None) is None:
            return
        if live.run is not None:
            self.runs.pop(live.run, None)
        live.timeline.ended(self.now_s, outcome, error)
        self._metrics.requests.labels(outcome).inc()
        if not self.requests:
            self._idle.set()
