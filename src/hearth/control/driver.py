"""The live driver of the brain: turns facts and requests into events, and actions into orders to workers.

All decisions are the brain's. Everything here runs on the event loop.

Tokens first, books later: requests that end in a step are told to brain, journal and observer only after the
step's tokens were sent. Every other event is posted behind those, so the brain sees events in order.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from hearth.control.journal import Journal
from hearth.control.observe.observer import Observer
from hearth.control.observe.pool_reports import PoolReports
from hearth.control.requests.active_request import ActiveRequest, ActiveRequests
from hearth.control.requests.fact_decoder import DecodedFact, DecodedLate, DecodedTexts, DecodedToken
from hearth.control.snapshots import Snapshots
from hearth.core import errors, messages
from hearth.core.errors import HearthError
from hearth.core.types import (
    AdapterId,
    FinishReason,
    ModelId,
    NodeId,
    RequestId,
    WorkerId,
    kind_of,
    node_of,
)
from hearth.node.link import FrameLink
from hearth.policy.fleet import events
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import Action, Event, RejectReason
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.prefixes import PrefixDigest, digest_prefixes
from hearth.policy.fleet.routing import explain_wait
from hearth.system.crash import end_process

#: Less KV says little about the speed at which it moves.
MIN_MEASURED_BYTES = 1 << 24
#: By so much of it the time of a stage must differ to be news.
STAGE_CHANGE = 0.1

_ERRORS: dict[RejectReason, type[HearthError]] = {
    RejectReason.UNKNOWN_MODEL: errors.UnknownModel,
    RejectReason.NEVER_FITS: errors.NoCapacity,
    RejectReason.PINNED_OUT: errors.NoCapacity,
    RejectReason.LOAD_FAILED: errors.StoreError,
    RejectReason.WORKERS_LOST: errors.WorkersLost,
    RejectReason.MODEL_REMOVED: errors.UnknownModel,
}

#: Makes the order to host a model, from the brain's action, the number of the stay and the worker's pool.
HostOrder = Callable[[events.LoadModel, int, str], messages.HostModel]
#: Makes an order for a worker of a node, in a pool; None: the model does not run there.
PrepareOrder = Callable[[NodeId, str], messages.PrepareModel | None]
#: Returns the orders for the models that a new worker prepares for, likewise.
PrepareOrders = Callable[[NodeId, str], list[messages.PrepareModel]]
#: Called with every event and its actions, before they are carried out.
Sink = Callable[[Event, Sequence[Action]], None]


@dataclass(frozen=True, slots=True)
class HostingStay:
    worker: WorkerId
    hosting: int


@dataclass(frozen=True, slots=True)
class _FinishedRequest:
    at_s: float
    request: ActiveRequest
    reason: FinishReason
    how: events.End


class Driver:
    """Owns the fleet. Mutable; used on the event loop alone."""

    def __init__(
        self,
        fleet: Fleet,
        journal: Journal,
        observer: Observer,
        pools: PoolReports,
        snapshots: Snapshots,
        host_order: HostOrder,
        prepare_orders: PrepareOrders,
        device_share: Callable[[WorkerId], float] = lambda _: 1.0,
    ) -> None:
        """`device_share`: a worker's, of its device."""
        self.fleet = fleet
        self.requests = ActiveRequests()
        self._journal, self._observer, self._pools, self._snapshots = journal, observer, pools, snapshots
        self._host_order, self._prepare_orders = host_order, prepare_orders
        self._device_share = device_share
        self._sinks: list[Sink] = [observer.observe]
        self._links: dict[WorkerId, FrameLink] = {}
        #: The number of each stay of a model on a worker. Facts of an earlier stay have another number.
        self._hostings: dict[tuple[WorkerId, ModelId], int] = {}
        self._answered: set[tuple[WorkerId, ModelId]] = set()  #: stays in which tokens were made
        #: Times of stages that the brain was told, by first worker.
        self._stage_s: dict[tuple[WorkerId, ModelId], tuple[float, ...]] = {}
        self._numbers = itertools.count(1)
        #: Why a model failed last, as the label of an error, until it is removed. Requests are refused for it
        #: until the model has served one.
        self._failures: dict[ModelId, str] = {}
        self._lost_nodes: set[NodeId] = set()  #: whose workers have not all been booked as lost
        self._timer: asyncio.TimerHandle | None = None
        self._finished: deque[_FinishedRequest] = deque()  #: each is in `requests` until it is booked

    @property
    def now_s(self) -> float:
        return time.monotonic()  # the loop's own clock counts whole milliseconds

    def close(self) -> None:
        """Stop the timer. Call it before the journal is closed."""
        self.book_finished()
        if self._timer is not None:
            self._timer.cancel()

    def add_sink(self, sink: Sink) -> None:
        self._sinks.append(sink)

    # Requests.

    def start(self, request: ActiveRequest, keep_alive_s: float | None) -> None:
        """Take a request. If it is refused at once, its stream has an error when this returns."""
        self.book_finished()
        self.requests.add(request)
        order = request.adapter
        adapter = None if order is None else events.WantedAdapter(order.adapter, request.adapter_bytes)
        prefixes: tuple[PrefixDigest, ...] = ()
        if len(self.fleet.workers) > 1:  # else there is no choice among replicas
            adapter_id = None if order is None else order.adapter
            prefixes = digest_prefixes(request.prompt, request.salt, request.digest or "", adapter_id)
        self.post(
            events.RequestArrived(
                now_s=self.now_s,
                request_id=request.request_id,
                model=request.model,
                num_prompt_tokens=len(request.prompt),
                max_tokens=request.sampling.max_tokens,
                keep_alive_s=keep_alive_s,
                digest=request.digest,
                is_batch=request.pace.is_batch,
                adapter=adapter,
                prefixes=prefixes,
                key=request.key,
            )
        )
        if (reason := explain_wait(self.fleet, request.request_id)) is not None:
            self._observer.waits(request.request_id, reason)

    def cancel(self, request_id: RequestId) -> None:
        """End a request whose client is gone. Cancelling twice is harmless."""
        self.book_finished()
        request = self.requests.by_id.get(request_id)
        if request is not None:
            request.is_complete = True
            self.post(events.RequestCancelled(self.now_s, request_id))
            self._end(self.now_s, request, FinishReason.CANCELLED)

    def fail_all(self, error: HearthError) -> None:
        self.book_finished()
        for request in list(self.requests.by_id.values()):
            self.post(events.RequestCancelled(self.now_s, request.request_id))
            self._fail(request, error)

    def _fail(self, request: ActiveRequest, error: HearthError) -> None:
        request.is_complete = True
        request.stream.fail(error)
        self._end(self.now_s, request, error.label, str(error))

    def _end(self, at_s: float, request: ActiveRequest, outcome: str, error: str | None = None) -> None:
        if self.requests.end(request):
            self._observer.ended(at_s, request.request_id, outcome, error)

    def book_finished(self) -> None:
        """Tell the brain of all requests that have ended, before any other event."""
        if self._finished:
            try:
                self._book_all_finished()
            except Exception as error:  # as in `post`
                end_process("driver", error)

    def _book_all_finished(self) -> None:
        with self._journal.flushing_once():
            while self._finished:
                one = self._finished.popleft()
                request, num_tokens = one.request, len(one.request.emitted)
                self._post(
                    events.RequestFinished(
                        one.at_s, request.request_id, num_tokens, one.how, request.computed_prompt
                    )
                )
                self._end(one.at_s, request, one.reason)

    # Events and actions.

    def post(self, event: Event) -> None:
        """Tell the brain what happened and carry out its actions. An exception ends the process."""
        try:
            self.book_finished()
            self._post(event)
        except Exception as error:  # half-changed books would leave requests without an end
            end_process("driver", error)

    def _post(self, event: Event) -> None:
        actions: list[Action] = []
        try:
            actions = step(self.fleet, event)
        finally:  # record also the event that breaks the brain
            self._journal.record(event, actions)
        if self._journal.must_rotate:
            self._journal.rotate(self.fleet)
        if isinstance(event, events.ModelRemoved):
            self._failures.pop(event.model, None)
            self._snapshots.removed(event.model)
        for sink in self._sinks:
            sink(event, actions)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case events.Dispatch():
                self._dispatch(action)
            case events.LoadModel(model, worker):
                hosting = self._hostings[worker, model] = next(self._numbers)
                self._answered.discard((worker, model))
                self._stage_s.pop((worker, model), None)
                self._send(worker, self._host_order(action, hosting, self.fleet.workers[worker].kind))
            case events.Evict(model, worker, _, is_freed):
                self._hostings.pop((worker, model), None)
                self._snapshots.left(worker, model)
                self.requests.detach(worker, model)  # those of a pipeline that has lost a member
                self._send(worker, messages.DropModel(model) if is_freed else messages.RetireModel(model))
            case events.SetHold(model, worker, hold):
                self._send(worker, messages.HoldModel(model, hold))
            case events.RefusePin() | events.Prewarm():
                pass  # the observer tells people, `KeeperReports` the keeper
            case events.AddWorkers() | events.ReleaseWorkers():
                pass  # orders to Ray: `RayProcess` is a sink
            case events.Reject():
                self._reject(action)
            case events.CancelRun(request_id, worker):
                request = self.requests.by_id.get(request_id)
                if request is not None and request.run is not None:
                    self._send(worker, messages.CancelRequest(request.run))
                    self.requests.end_run(request)
            case events.MoveKv():
                self._move_kv(action)
            case events.SetTimer(at_s):
                if self._timer is not None:
                    self._timer.cancel()
                delay_s = max(0.0, at_s - self.now_s)
                self._timer = asyncio.get_running_loop().call_later(delay_s, self._fire)
            case _:
                assert_never(action)

    def _move_kv(self, order: events.MoveKv) -> None:
        request = self.requests.by_id.get(order.request_id)
        if order.is_moved and request is not None and (run := request.run) is not None:
            request.kv = messages.KvMove(run, order.senders, order.wait_s)
            self._send(order.senders[0], messages.SendKv(order.model, run, order.target))

    def _dispatch(self, order: events.Dispatch) -> None:
        request = self.requests.by_id[order.request_id]
        if request.is_complete:
            return  # its last token came before it left another worker, and is about to be delivered
        run = self.requests.start_run(request, order.worker, order.model)
        self._send(
            order.worker,
            messages.StartRequest(
                run=run,
                model=order.model,
                prompt=request.prompt,
                output=tuple(request.emitted),
                sampling=request.sampling,
                salt=request.salt,
                guide=request.guide,
                pace=request.pace,
                age_s=self.now_s - request.arrived_s,
                pooling=request.pooling,
                adapter=request.adapter,
                kv=request.kv,
            ),
        )
        request.kv = None

    def _reject(self, order: events.Reject) -> None:
        request = self.requests.by_id.get(order.request_id)
        if request is None:
            return
        if order.reason is RejectReason.QUEUE_FULL:
            error: HearthError = errors.Overloaded(order.message, order.retry_s or 1.0)
        elif order.reason is RejectReason.LOAD_FAILED:
            error = errors.error_of(self._failures.get(request.model, ""), order.message)
        else:
            error = _ERRORS[order.reason](order.message)
        if order.retry_s is not None:
            error.retry_s = order.retry_s
        self._fail(request, error)

    def _fire(self) -> None:
        self._timer = None
        self.post(events.TimerFired(self.now_s))

    def _send(self, worker: WorkerId, order: messages.Order) -> None:
        link = self._links.get(worker)
        if link is not None:
            link.send(order)

    def ready_stays(self, model: ModelId) -> list[HostingStay]:
        """Return the stay of a replica that is loaded, or those of its stages; empty: none is loaded."""
        for replica in self.fleet.replicas():
            if replica.model.name == model and replica.is_ready:
                workers = [worker.name for worker in replica.workers]
                return [HostingStay(worker, self._hostings[worker, model]) for worker in workers]
        return []

    # Workers.

    def prepare(self, order_for: PrepareOrder) -> None:
        for worker in self._links:
            pool = self.fleet.workers[worker].kind
            if kind_of(pool) == "cuda":  # a CPU runs no kernels that are compiled
                order = order_for(node_of(worker), pool)
                if order is not None:
                    self._send(worker, order)

    def forget_adapter(self, adapter: AdapterId) -> None:
        for worker in self._links:
            self._send(worker, messages.ForgetAdapter(adapter))

    def adapters_deployed(self) -> None:
        self._snapshots.adapters_deployed()

    def joined(self, link: FrameLink, hello: messages.WorkerHello, pool: str) -> None:
        self._links[hello.worker] = link
        self._pools.joined(hello.worker, link)
        self._snapshots.joined(hello.worker, link)
        self.post(
            events.WorkerJoined(
                now_s=self.now_s,
                worker=hello.worker,
                kind=pool,
                budget_bytes=hello.budget_bytes,
                shares_workspace=hello.shares_workspace,
                node=node_of(hello.worker),
                gpu=hello.gpu,
                runs_stages=hello.version == messages.VERSION,
                device_share=self._device_share(hello.worker),
            )
        )
        if hello.kind == "cuda":  # as in `prepare`
            for order in self._prepare_orders(node_of(hello.worker), pool):
                link.send(order)

    def receive(self, decoded: DecodedFact | DecodedLate) -> None:
        """Take a worker's next fact, the end of its connection, or late text, in the order sent."""
        self.book_finished()
        try:
            if isinstance(decoded, DecodedLate):
                self._receive_late(decoded)
            else:
                self._receive(decoded)
        except Exception as error:  # half-changed books would leave requests without an end
            end_process("driver", error)

    def _receive(self, decoded: DecodedFact) -> None:
        decoded.link.consumed(decoded.num_bytes)
        worker, fact = decoded.link.worker, decoded.fact
        if worker is None or self._links.get(worker) is not decoded.link:
            return
        now_s = self.now_s
        match fact:
            case None:
                self._worker_lost(now_s, worker, decoded.link)
            case messages.StepDone():
                self._stepped(now_s, worker, fact, decoded)
            case messages.RunFailed():
                self._run_failed(now_s, worker, fact)
            case messages.KvMoved(run=run):
                if (request := self.requests.on(worker, run)) is not None:
                    self._observer.kv_moved(now_s, request.request_id, fact)
                if (
                    fact.is_on_node and fact.num_bytes >= MIN_MEASURED_BYTES
                ):  # other ways are measured by loads
                    node, bytes_per_s = node_of(worker), fact.num_bytes / fact.seconds
                    self.post(events.LinkMeasured(now_s, node, node, bytes_per_s, 0.0))
            case messages.LoadProgress() | messages.ModelLoaded() | messages.HostingFailed():
                if self._hostings.get((worker, fact.model)) == fact.hosting:  # else it was evicted meanwhile
                    self._load_changed(now_s, worker, fact)
            case messages.SnapshotLooked() | messages.SnapshotProgress() | messages.SnapshotMade():
                if fact.model in self.fleet.models or not isinstance(fact, messages.SnapshotLooked):
                    is_current = self._hostings.get((worker, fact.model)) == fact.hosting
                    self._snapshots.receive(worker, fact, is_current=is_current)
            case messages.AdapterLoaded(runs=runs):
                self._observer.adapter_loaded(now_s, fact, self._request_ids(worker, runs))
            case messages.ModelTurn(model, hosting, why):
                if self._hostings.get((worker, model)) == hosting:
                    began, ended = events.TurnBegan, events.TurnEnded
                    self.post(
                        began(now_s, worker, model) if why is None else ended(now_s, worker, model, why)
                    )
            case messages.ModelPressure(model, hosting, demand_tokens, room_tokens):
                if self._hostings.get((worker, model)) == hosting:
                    self.post(events.PressureReported(now_s, worker, model, demand_tokens, room_tokens))
            case messages.DeviceResidency(bytes_by_model):
                self.post(events.DeviceReported(now_s, worker, bytes_by_model))
            case messages.Pong():
                self._pools.received(worker, fact, now_s)
                self._observer.charge(self.fleet.gpu_time, now_s)
                self._note_stages(now_s, worker, fact)
            case messages.WorkerEnded():
                decoded.link.ended = decoded.link.ended or fact  # of a released node it is known why
            case messages.WorkerHello():
                decoded.link.abort()
            case _:
                assert_never(fact)

    def _receive_late(self, decoded: DecodedLate) -> None:
        worker = decoded.link.worker
        if worker is not None and self._links.get(worker) is decoded.link:
            self._observer.made_late_text([token.request.model for token in decoded.texts.tokens])
            self._deliver_all(self.now_s, decoded.texts)

    def _stepped(
        self, now_s: float, worker: WorkerId, step_done: messages.StepDone, decoded: DecodedFact
    ) -> None:
        if step_done.tokens:
            self._answered.add((worker, step_done.model))
        for admitted in step_done.admitted:
            if (request := self.requests.on(worker, admitted.run)) is not None:
                request.admitted(now_s - step_done.step_s, admitted.num_cached_tokens)
        for run, reading in step_done.readings.items():
            if (request := self.requests.on(worker, run)) is not None:
                request.stream.reading = reading
        self._observer.stepped(now_s, step_done, self.requests.by_run, len(decoded.texts.tokens))
        self._deliver_all(now_s, decoded.texts)

    def _deliver_all(self, now_s: float, texts: DecodedTexts) -> None:
        for token in texts.tokens:
            self._deliver(now_s, token)
        for request in texts.ended:
            self._prompt_done(now_s, request)
        for request in texts.broken:
            self._text_broke(now_s, request)
        if self._finished:
            # The tasks of these streams come first, and the loop sends what they write behind them.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self.book_finished)

    def _deliver(self, now_s: float, token: DecodedToken) -> None:
        request, delta = token.request, token.delta
        if request.request_id not in self.requests.by_id:
            return  # cancelled a moment ago
        request.delivered(now_s)
        self._observer.delivered(now_s, request.request_id)
        request.stream.put((delta,))
        if delta.finish_reason is not None:
            how = events.End.DONE if token.is_run_over else events.End.STOPPED
            self._finished.append(_FinishedRequest(now_s, request, delta.finish_reason, how))

    def _prompt_done(self, now_s: float, request: ActiveRequest) -> None:
        reason = request.end_without_tokens
        assert reason is not None, f"{request.request_id} has tokens"
        if request.request_id in self.requests.by_id:  # else cancelled a moment ago
            request.stream.end(reason)
            self._finished.append(_FinishedRequest(now_s, request, reason, events.End.DONE))

    def _text_broke(self, now_s: float, request: ActiveRequest) -> None:
        if request.request_id in self.requests.by_id:
            self.post(events.RequestCancelled(now_s, request.request_id))
            reason = f"the text of request {request.request_id} cannot be made of its tokens; see the log"
            self._fail(request, errors.EngineFailed(reason))

    def _run_failed(self, now_s: float, worker: WorkerId, failed: messages.RunFailed) -> None:
        request = self.requests.on(worker, failed.run)
        if request is not None:
            num_tokens = len(request.emitted)
            self.post(events.RequestFinished(now_s, request.request_id, num_tokens, events.End.FAILED))
            self._fail(request, errors.error_of(failed.label, failed.reason))

    def _load_changed(
        self,
        now_s: float,
        worker: WorkerId,
        fact: messages.LoadProgress | messages.ModelLoaded | messages.HostingFailed,
    ) -> None:
        match fact:
            case messages.LoadProgress(model):
                self._observer.load_progressed(now_s, worker, fact)
                self.post(events.LoadProgressed(now_s, worker, model, fact.num_bytes))
            case messages.ModelLoaded(model):
                self._observer.load_ended(now_s, worker, fact)
                is_stage = bool(self.fleet.workers[worker].replicas[model].stages)
                rungs = tuple(
                    events.RungUse(use.rung, use.num_bytes, use.seconds)
                    for use in messages.sum_by_rung(fact.rungs).values()
                )
                self.post(
                    events.ModelReady(
                        now_s, worker, model, rungs, fact.total_s, fact.ahead_bytes, fact.shared_bytes
                    )
                )
                self._snapshots.loaded(worker, model, fact.hosting, is_stage=is_stage)
            case messages.HostingFailed(model):
                self._failures[model] = fact.label
                del self._hostings[worker, model]
                self._snapshots.left(worker, model)
                self.requests.detach(worker, model)
                self.post(events.ModelFailed(now_s, worker, model, fact.reason, fact.is_cut_off))

    def _note_stages(self, now_s: float, worker: WorkerId, pong: messages.Pong) -> None:
        """Tell the brain how long stages take, if it is new."""
        for use in pong.models:
            if use.pipeline is None or not (stage_s := use.pipeline.stage_s):
                continue
            known = self._stage_s.get((worker, use.model), ())
            if len(known) != len(stage_s) or any(map(_differ, known, stage_s)):
                self._stage_s[worker, use.model] = stage_s
                self.post(events.StagesMeasured(now_s, worker, use.model, stage_s))

    def _worker_lost(self, now_s: float, worker: WorkerId, link: FrameLink) -> None:
        del self._links[worker]
        self._pools.lost(worker)
        self._snapshots.lost(worker)
        for key in [key for key in self._hostings if key[0] == worker]:
            del self._hostings[key]
        ending = link.ending()
        culprit = ending.model
        in_step = None
        if ending.runs is not None:  # of a stage, those of requests on the first member
            requests = map(self.requests.by_run.get, ending.runs)
            in_step = tuple(one.request_id for one in requests if one is not None)
        self.requests.detach(worker)
        has_answered = (worker, culprit) in self._answered
        self._answered = {stay for stay in self._answered if stay[0] != worker}
        self._stage_s = {stay: known for stay, known in self._stage_s.items() if stay[0] != worker}
        self.post(
            events.WorkerLost(
                now_s=now_s,
                worker=worker,
                culprit=culprit,
                has_answered=has_answered,
                reason=ending.reason,
                in_step=in_step,
                is_with_node=ending.is_with_node,
            )
        )
        self._post_lost_nodes()

    def expect_workers(self, node: NodeId, num_workers: int) -> None:
        """Refuse no request for lack of room while workers of a node start; 0: wait only for those up."""
        if max(num_workers, self.fleet.num_workers_by_node[node]) != self.fleet.most_by_node.get(node, 0):
            self.post(events.WorkersExpected(self.now_s, node, num_workers))

    def node_lost(self, node: NodeId) -> None:
        """Tell the brain of a lost node, after all its workers."""
        self._lost_nodes.add(node)
        self._post_lost_nodes()

    def _post_lost_nodes(self) -> None:
        for node in self._lost_nodes - {node_of(worker) for worker in self._links}:
            self._lost_nodes.discard(node)
            self.post(events.NodeLost(self.now_s, node))

    def _request_ids(self, worker: WorkerId, runs: Sequence[int]) -> tuple[RequestId, ...]:
        requests = (self.requests.on(worker, run) for run in runs)
        return tuple(request.request_id for request in requests if request is not None)


def _differ(known_s: float, stage_s: float) -> bool:
    return abs(stage_s - known_s) > STAGE_CHANGE * known_s
