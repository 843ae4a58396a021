"""Records what the service does: metrics, timelines and log lines. Decides nothing and sends nothing.

The observer receives every event of the brain with its actions, and the few facts that are no events: details
of loads, steps, tokens, ends of requests. What follows from events and actions is derived from them, so a
simulation is measured like the service.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from hearth.control.observe.charges import Charges
from hearth.control.observe.explanation import explain
from hearth.control.observe.load_log import LoadLog, LoadLogs
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.model_metrics import ModelSeries
from hearth.control.observe.timeline import Timeline, Timelines
from hearth.control.observe.views import Explanation
from hearth.control.requests.active_request import ActiveRequest
from hearth.core.messages import AdapterLoaded, KvMoved, LoadProgress, ModelLoaded, StepDone
from hearth.core.types import (
    FinishReason,
    ModelId,
    Pipeline,
    RequestId,
    Transport,
    WorkerId,
    model_of,
    name_of,
    node_of,
)
from hearth.policy.fleet import events
from hearth.policy.fleet.events import Action, Event
from hearth.policy.fleet.gpu_time import GpuTime

log = logging.getLogger(__name__)


class Observer:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        takes_turns: bool = False,
        between_nodes: Transport = Transport.TLS,
    ) -> None:
        """`takes_turns`: models that do not fit together do. `between_nodes`: as in `explain`."""
        self._metrics, self._takes_turns, self._between_nodes = metrics, takes_turns, between_nodes
        self._in_turn: set[tuple[WorkerId, ModelId]] = set()
        self._pipelines: dict[tuple[WorkerId, ModelId], Pipeline] = {}  #: by each member
        self._loads = LoadLogs()
        self._active: dict[RequestId, Timeline] = {}
        self._series: dict[RequestId, ModelSeries] = {}
        self._charges = Charges(metrics)
        self.recent = Timelines()
        self._prewarms: dict[ModelId, tuple[float, events.Prewarm]] = {}  #: since its last request
        self._is_closing = False

    def begin(self, timeline: Timeline) -> None:
        """Follow a request. Call it before the brain is told of its arrival."""
        self._active[timeline.request_id] = timeline
        self._series[timeline.request_id] = self._metrics.models.take(timeline.model)
        self.recent.add(timeline)

    def explain(
        self, request_id: str, now_s: float, may_see: Callable[[Timeline], bool]
    ) -> Explanation | None:
        timeline = self.recent.find(request_id, may_see)
        return None if timeline is None else explain(timeline, now_s, self._between_nodes)

    def close(self) -> None:
        """From now on, a worker that leaves is not counted as lost."""
        self._is_closing = True

    # The brain's events and orders.

    def observe(self, event: Event, actions: Sequence[Action]) -> None:
        match event:
            case events.RequestArrived():
                if not any(_rejects(action, event.request_id) for action in actions):
                    self._series[event.request_id].num_prompt_tokens += event.num_prompt_tokens
                if (prewarmed := self._prewarms.pop(event.model, None)) is not None:
                    at_s, order = prewarmed
                    text = f"{describe_prewarm(order)} {event.now_s - at_s:.1f} s before, for a forecast"
                    self._active[event.request_id].mark(event.now_s, "prewarm", text)
            case events.ModelRemoved(_, model):
                self._metrics.models.remove(model)
                self._prewarms.pop(model, None)
            case events.ModelReady():
                self._model_ready(event)
            case events.ModelFailed():
                self._model_failed(event)
            case events.TurnBegan(now_s, worker, model):
                self._turn_began(now_s, worker, model)
            case events.TurnEnded():
                self._turn_ended(event)
            case events.DeviceReported():
                self._loads.reported(event.worker, event.bytes_by_model)
            case events.PressureReported(_, worker, model, demand_tokens, room_tokens):
                if demand_tokens > room_tokens:
                    text = "kv_pressure model=%s worker=%s demand_tokens=%d room_tokens=%d"
                    log.info(text, model, worker, demand_tokens, room_tokens)
            case events.WorkerLost():
                self._worker_lost(event)
            case _:
                pass  # its actions tell the rest
        for action in actions:
            self._ordered(event.now_s, action)

    def _ordered(self, now_s: float, action: Action) -> None:
        match action:
            case events.Dispatch():
                self._dispatched(now_s, action)
            case events.LoadModel(model, worker, kv_floor_bytes):
                log.info("model_loading model=%s worker=%s kv_floor_bytes=%d", model, worker, kv_floor_bytes)
                self._in_turn.discard((worker, model))
                self._loads.begin(worker, model, now_s, awaits_turn=self._takes_turns)
                if action.pipeline is not None:
                    self._pipelines[worker, model] = action.pipeline
            case events.MoveKv(request_id):
                if not action.is_moved:
                    self._metrics.kv_recomputed.inc()
                self._active[request_id].mark(now_s, "kv", describe_kv_move(action))
            case events.RefusePin(model, worker, message):
                log.warning("pin_refused model=%s worker=%s reason=%s", model, worker, message)
                self._metrics.fallbacks.labels("unpinned").inc()
            case events.Prewarm():
                self._prewarms[action.model] = now_s, action
                log.info(
                    "model_prewarmed model=%s did=`%s` expected_per_s=%.4g cost_s=%.3f",
                    action.model,
                    describe_prewarm(action),
                    action.expected_per_s,
                    action.cost_s,
                )
            case events.Evict(model, worker, cost_s, is_freed):
                self._pipelines.pop((worker, model), None)
                name = "model_evicted" if is_freed else "model_retired"
                log.info("%s model=%s worker=%s cost_s=%.3f", name, model, worker, cost_s)
                if self._loads.end(worker, model) is not None and not is_freed:
                    self._metrics.evictions.inc()
            case _:
                pass  # `ended` records a rejected request

    def _dispatched(self, now_s: float, order: events.Dispatch) -> None:
        timeline = self._active[order.request_id]
        load = self._loads.awaited(order.worker, order.model, now_s)
        num_moves = timeline.num_moves
        timeline.placed(now_s, order.worker, order.why, order.options, load, order.model)
        cached_tokens = [one.cached_tokens for one in order.options if one.worker == order.worker]
        self._metrics.routed_tokens.inc(sum(cached_tokens))
        pipeline = self._pipelines.get((order.worker, order.model))
        if pipeline is not None:
            timeline.mark(now_s, "staged", f"{pipeline.name}: {pipeline.described}")
        elif self._takes_turns and (order.worker, order.model) not in self._in_turn:
            in_turn = sorted(model for worker, model in self._in_turn if worker == order.worker)
            timeline.turn_ended(now_s, in_turn=in_turn)
        if order.why is events.Why.SWITCHED:
            self._metrics.switches.inc()
        elif order.why in (events.Why.DROPPED, events.Why.RESTORED):
            self._metrics.drop_moves.labels(order.why).inc()
        if len(timeline.stays) == 1:
            self._metrics.queue.observe(now_s - timeline.arrived_s)
        elif timeline.num_moves == num_moves:
            self._metrics.resumes.inc()

    def _turn_began(self, now_s: float, worker: WorkerId, model: ModelId) -> None:
        self._in_turn.add((worker, model))
        if (load := self._loads.get(worker, model)) is not None:
            load.turn_began(now_s)
        for timeline in self._on_worker(worker, model):
            if (pause_s := timeline.turn_began(now_s)) is not None:
                self._metrics.pause.observe(pause_s)

    def _turn_ended(self, ended: events.TurnEnded) -> None:
        self._in_turn.discard((ended.worker, ended.model))
        if (series := self._metrics.models.find(ended.model)) is not None:
            series.turns[ended.why] += 1
        for timeline in self._on_worker(ended.worker, ended.model):
            num_before = timeline.num_pauses
            timeline.turn_ended(ended.now_s, ended.why)
            self._metrics.pauses.inc(timeline.num_pauses - num_before)

    def _model_ready(self, ready: events.ModelReady) -> None:
        self._metrics.loaded(ready)
        load = self._loads.get(ready.worker, ready.model)
        reused_bytes = 0 if load is None or load.loaded is None else load.loaded.reused_bytes
        # Models that take turns return several times a second.
        level = logging.DEBUG if load is not None and load.is_again else logging.INFO
        log.log(
            level,
            "model_ready model=%s worker=%s load_s=%.3f reused_bytes=%d rungs=%s",
            ready.model,
            ready.worker,
            ready.total_s,
            reused_bytes,
            ",".join(f"{use.rung}:{use.num_bytes}" for use in ready.rungs),
        )

    def _model_failed(self, failed: events.ModelFailed) -> None:
        log.error("model_failed model=%s worker=%s reason=%s", failed.model, failed.worker, failed.reason)
        pipeline = self._pipelines.pop((failed.worker, failed.model), None)
        first = failed.worker if pipeline is None else pipeline.members[0].worker
        load = self._loads.end(failed.worker, failed.model)
        if load is None:
            return
        load.fail(failed.now_s, failed.reason)
        if load.was_ready:  # its requests continue elsewhere; those of a first load end with it
            what = failed.reason if failed.is_cut_off else f"broke under `{failed.model}`"
            for timeline in list(self._on_worker(first, failed.model)):
                timeline.lost(failed.now_s, failed.worker, what)

    def _worker_lost(self, lost: events.WorkerLost) -> None:
        if not self._is_closing:
            level = logging.INFO if lost.is_with_node else logging.ERROR  # the loss of a node is a warning
            log.log(
                level, "worker_lost worker=%s model=%s reason=`%s`", lost.worker, lost.culprit, lost.reason
            )
            self._metrics.workers_lost.inc()
        self._loads.lose(lost.worker)
        self._in_turn = {key for key in self._in_turn if key[0] != lost.worker}
        timelines = list(self._on_worker(lost.worker))
        for worker, model in [key for key in self._pipelines if key[0] == lost.worker]:
            first = self._pipelines.pop((worker, model)).members[0].worker
            if first != worker:
                timelines += self._on_worker(first, model)
        for timeline in timelines:
            timeline.lost(lost.now_s, lost.worker, f"{lost.reason}{_in_whose_step(lost, timeline)}")

    def _on_worker(self, worker: WorkerId, model: ModelId | None = None) -> Iterator[Timeline]:
        for timeline in self._active.values():
            if timeline.worker == worker and model in (None, timeline.hosted):
                yield timeline

    # Facts that are no events of the brain.

    def waits(self, request_id: RequestId, reason: str) -> None:
        self._active[request_id].waits_for = reason

    def load_progressed(self, now_s: float, worker: WorkerId, progress: LoadProgress) -> None:
        if (load := self._running_load(now_s, worker, progress.model)) is not None:
            load.progressed(now_s, progress.num_layers)

    def load_ended(self, now_s: float, worker: WorkerId, loaded: ModelLoaded) -> None:
        """Note the details of a load, before the brain is told that the model is ready."""
        if (load := self._running_load(now_s, worker, loaded.model)) is not None:
            load.succeed(now_s, loaded)
            self._loads.mark_whole(worker, loaded.model)
        self._metrics.reused_bytes.inc(loaded.reused_bytes)
        for use in loaded.rungs:
            if use.source:
                names = name_of(use.source), name_of(node_of(worker))
                self._metrics.peer_bytes.labels(*names).inc(use.num_bytes)
        if loaded.is_widened:
            self._metrics.fallbacks.labels("float32").inc()

    def adapter_loaded(self, now_s: float, loaded: AdapterLoaded, waited: Sequence[RequestId]) -> None:
        self._metrics.adapter_loaded(loaded)
        for request_id in waited:
            self._active[request_id].adapter_loaded(now_s, loaded)

    def kv_moved(self, now_s: float, request_id: RequestId, moved: KvMoved) -> None:
        self._metrics.kv_bytes.inc(moved.num_bytes)
        told = f"{moved.num_tokens} tokens, {moved.num_bytes / 1e6:.3f} MB in {moved.seconds:.3f} s"
        self._active[request_id].mark(now_s, "kv_moved", told)

    def _running_load(self, now_s: float, worker: WorkerId, model: ModelId) -> LoadLog | None:
        load = self._loads.get(worker, model)
        if load is None or load.ended_s is None:
            return load
        # Weights were evicted while a request was on its way there.
        load = self._loads.begin_again(worker, model, now_s)
        for timeline in self._on_worker(worker, model):
            if not timeline.is_started:
                timeline.load = load
        return load

    def stepped(
        self, now_s: float, step: StepDone, requests: Mapping[int, ActiveRequest], num_tokens: int
    ) -> None:
        """Note a step that ended now and made `num_tokens`. `requests`: those on workers, by run."""
        began_s = now_s - step.step_s
        for run in step.preempted:  # before the step; it may have been admitted again
            self._metrics.preemptions.inc()
            if run in requests:
                self._active[requests[run].request_id].preempted(began_s)
        for admitted in step.admitted:
            if admitted.run in requests:
                timeline = self._active[requests[admitted.run].request_id]
                timeline.started(began_s, admitted.num_cached_tokens, admitted.waited_s)
        if (series := self._metrics.models.find(model_of(step.model))) is not None:
            series.num_output_tokens += num_tokens
            series.busy_s += step.busy_s
        self._metrics.step.observe(step.step_s)

    def charge(self, time: GpuTime, now_s: float) -> None:
        self._charges.charge(time, now_s)

    def made_late_text(self, models: Sequence[ModelId]) -> None:
        """Note tokens, by their models, whose text was made after their step was delivered."""
        for model in models:
            if (series := self._metrics.models.find(model)) is not None:
                series.num_output_tokens += 1
        self._metrics.late_text_tokens.inc(len(models))

    def delivered(self, now_s: float, request_id: RequestId) -> None:
        timeline = self._active[request_id]
        if timeline.last_token_s is None:
            self._series[request_id].first_token.observe(now_s - timeline.arrived_s)
        else:
            self._series[request_id].inter_token.observe(now_s - timeline.last_token_s)
        timeline.token(now_s)

    def ended(self, now_s: float, request_id: RequestId, outcome: str, error: str | None) -> None:
        """Note the end of a request; `outcome`: a finish reason, `cancelled`, or the label of an error."""
        timeline, series = self._active.pop(request_id), self._series.pop(request_id)
        timeline.ended(now_s, outcome, error)
        is_answered = error is None and outcome != FinishReason.CANCELLED
        series.requests[outcome] += 1
        if is_answered:
            series.whole.observe(now_s - timeline.arrived_s)
        if not timeline.pace.tokens_per_s:
            return  # batch requests have no pace
        num_late = timeline.num_late_tokens
        self._metrics.tokens_on_time.inc(timeline.num_output_tokens - num_late)
        self._metrics.tokens_late.inc(num_late)
        if is_answered:
            # A request of no tokens is due when its first token would be.
            is_late = now_s > timeline.paced.due_s if timeline.last_token_s is None else num_late > 0
            (self._metrics.requests_late if is_late else self._metrics.requests_on_time).inc()


def _in_whose_step(lost: events.WorkerLost, timeline: Timeline) -> str:
    if lost.culprit is None:
        return ""
    if lost.culprit != timeline.hosted:
        return " in a step of another model, not counted against it,"
    if lost.in_step is not None and timeline.request_id not in lost.in_step:
        return " in a step of its model without it, not counted against it,"
    return " in a step of its model"


def describe_prewarm(order: events.Prewarm) -> str:
    where = f"into host memory of {name_of(node_of(order.worker))}" if order.to_host else f"on {order.worker}"
    return f"{'would have been loaded' if order.is_advice else 'loaded'} {where}"


def describe_kv_move(order: events.MoveKv) -> str:
    """Say what is done with the KV of a request that moves, and why."""
    if order.move_s is None:
        why = f"a link to {order.target} is not measured yet, or too much moves at once"
        return f"computed again on {order.target}, in {order.prompt_s:.3f} s: {why}"
    moved = f"{order.num_bytes / 1e6:.3f} MB from {', '.join(order.senders)} in {order.move_s:.3f} s"
    if order.is_moved:
        return f"moved to {order.target}: {moved}, computed again in {order.prompt_s:.3f} s"
    again = f"computed again on {order.target}, in {order.prompt_s:.3f} s"
    if order.move_s < order.prompt_s:
        return f"{again}: as much KV as may move at a time does already"
    return f"{again}: {moved}"


def _rejects(action: Action, request_id: RequestId) -> bool:
    return isinstance(action, events.Reject) and action.request_id == request_id
