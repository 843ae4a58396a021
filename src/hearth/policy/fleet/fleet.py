"""The state of the brain: waiting and running requests, and what each model holds of each worker.

Decides nothing. Every lookup that a decision needs is an index, so that no event costs a walk over all
workers or models. `reindex` carries a change of a replica into all of these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeVar

from hearth.core.types import Hold, ModelId, NodeId, RequestId, WorkerId, model_of
from hearth.policy.fleet.capacity import BUSY, PINNED, RETAINED, WARM, FleetCapacity, Promises
from hearth.policy.fleet.demand import price_spare
from hearth.policy.fleet.device_bytes import forget_worker, rank_retired
from hearth.policy.fleet.estimates import Estimates
from hearth.policy.fleet.events import BrainConfig, RequestArrived, WorkerJoined
from hearth.policy.fleet.gpu_time import GpuTime
from hearth.policy.fleet.holds import Expiries, HoldNotices
from hearth.policy.fleet.prewarm_budget import PrewarmBudget
from hearth.policy.fleet.profile import ModelProfile
from hearth.policy.fleet.queues import RequestQueues
from hearth.policy.fleet.ranking import Ranking
from hearth.policy.fleet.records import Drain, Model, Replacement, Replica, Request, Worker
from hearth.policy.memory.reload_cost import ReloadCosts

#: How long requests wait for a worker that is being replaced, at most: starting one takes 0.3 s.
REPLACED_S = 1.0

Name = TypeVar("Name", ModelId, WorkerId)


class Fleet:
    """All books of the brain. Mutable; written only by `step`."""

    def __init__(self, config: BrainConfig) -> None:
        self.config = config
        self.estimates = Estimates(ReloadCosts(config.priors))
        self.now_s = -math.inf
        self.step_number = 0
        self.models: dict[ModelId, Model] = {}
        self.workers: dict[WorkerId, Worker] = {}
        self.capacity = FleetCapacity()
        self.queues = RequestQueues(config.patience_s, self.capacity)
        self.drains: Mapping[ModelId, Drain] = self.queues.drains
        self.expiries = Expiries()
        self.notices = HoldNotices()
        self.gpu_time = GpuTime()
        #: Deployed as pinned, not stopped, and on too few workers: to be loaded unasked.
        self.unplaced: dict[ModelId, Model] = {}
        #: Replicas that cannot be pinned, because others would have no room for their turns.
        self.refused_pins: dict[Replica, None] = {}
        #: Workers that were drained in vain, and until when they are not drained or reserved, in order.
        self.resting: dict[WorkerId, float] = {}
        #: No pipeline is formed before this: one was cut off, and the loss of a worker may come next.
        self.no_pipeline_until_s = -math.inf
        #: Models that were ready on a lost worker which is being replaced, and where, in order.
        self.replaced: dict[ModelId, Replacement] = {}
        #: Models that began to load on several workers, and when these may form a pipeline, in order.
        self.gathering: dict[ModelId, float] = {}
        #: Pipelines of workers that load the whole model, by the name that they are hosted under.
        self.loading_pipelines: dict[ModelId, Replica] = {}
        #: Models with groups of replicas that gave up layers, or whose layers come back.
        self.dropped: dict[ModelId, Model] = {}
        #: Models with a forecast, by when it is looked at next.
        self.forecasts_due: Ranking[ModelId, float] = Ranking()
        self.prewarm_budget = PrewarmBudget()
        self.draining: dict[NodeId, None] = {}
        self.num_workers_by_node: Counter[NodeId] = Counter()
        #: The most workers that were up at a time, or are expected: a lost one is replaced.
        self.most_by_node: dict[NodeId, int] = {}
        self._unranked: dict[WorkerId, Worker] = {}  #: ranked by their room when it matters
        #: When the first waiting model without a drain stops reserving room, or awaiting a worker.
        self.kept_until_s = math.inf
        self.timer_s: float | None = None
        self.next_scaling_s = math.inf  #: when machines may be added or given back next
        self.num_added = 0

    @property
    def is_complete(self) -> bool:
        """False while a worker starts or is being replaced."""
        return 0 < sum(self.most_by_node.values()) == len(self.workers)

    def drained_workers(self) -> Iterator[Worker]:
        """Return the workers of drained nodes, which may be had back."""
        return (one for one in self.workers.values() if one.is_draining) if self.draining else iter(())

    def may_return(self, profile: ModelProfile) -> bool:
        """True if a drained worker could hold a model or a stage of it."""
        needs = ((one, self.capacity.smallest_bytes(profile, one.kind)) for one in self.drained_workers())
        return any(num_bytes <= worker.promises.budget_bytes for worker, num_bytes in needs)

    def advance(self, now_s: float) -> None:
        """Begin a step. Time never goes back; warm replicas expire."""
        self.step_number += 1
        if now_s > self.now_s:
            self.now_s = now_s
        while (replica := self.expiries.pop_due(self.now_s)) is not None:
            self.reindex(replica)
        while self.resting and next(iter(self.resting.values())) <= self.now_s:
            del self.resting[next(iter(self.resting))]
            self.queues.must_serve = True
        while self.replaced and next(iter(self.replaced.values())).until_s <= self.now_s:
            del self.replaced[next(iter(self.replaced))]

    def replicas(self) -> Iterator[Replica]:
        for worker in self.workers.values():
            yield from (one for one in worker.replicas.values() if one.worker is worker)

    def served_by(self, replica: Replica) -> Model | None:
        """Return the model whose requests a replica runs; None: it was removed."""
        return self.models.get(model_of(replica.model.name)) if replica.is_temporary else replica.model

    def pipelines_of(self, model: Model) -> list[Replica]:
        """Return the pipelines of workers that load a model."""
        pipelines = self.loading_pipelines.values()
        return [one for one in pipelines if model_of(one.model.name) == model.name]

    # Workers and replicas.

    def join(self, event: WorkerJoined) -> None:
        assert event.worker not in self.workers, f"joined twice: worker `{event.worker}`"
        promises = Promises(event.budget_bytes, event.shares_workspace)
        worker = Worker(event.worker, event.kind, promises, node=event.node, gpu=event.gpu)
        worker.runs_stages, worker.device_share = event.runs_stages, event.device_share
        worker.is_draining, worker.used_s = event.node in self.draining, self.now_s
        self.workers[worker.name] = worker
        self.num_workers_by_node[worker.node] += 1
        num_workers = self.num_workers_by_node[worker.node]
        self.most_by_node[worker.node] = max(self.most_by_node.get(worker.node, 0), num_workers)
        if not worker.is_draining:
            self.capacity.put(worker.kind, worker.name, worker.promises)
        self.rank_room(worker)
        self._note_workers()

    def expect(self, node: NodeId, num_workers: int) -> None:
        """Wait for that many workers of a node, or only for those that are up."""
        num_workers = max(num_workers, self.num_workers_by_node[node])
        if num_workers:
            self.most_by_node[node] = num_workers
        else:
            self.most_by_node.pop(node, None)
        self.queues.must_serve |= bool(self.replaced)

    def lose(
        self, worker: Worker, suspects: Collection[Replica], in_step: Collection[RequestId] | None
    ) -> list[Request]:
        """Remove a worker and its replicas; return its requests, which wait again, in order of arrival.

        The loss counts against requests of `suspects`, and of these against those `in_step` if that is known.
        """
        requests = [request for replica in worker.replicas.values() for request in replica.running.values()]
        requests.sort(key=lambda request: request.number)
        for request in requests:
            was_at_work = in_step is None or request.request_id in in_step
            self.requeue(request, is_at_fault=was_at_work and request.replica in suspects)
        for replica in list(worker.replicas.values()):
            self.remove(replica)
        for model in worker.failed.values():
            del model.failed_on[worker.name]
        forget_worker(worker)
        if worker.drain is not None:
            self.end_drain(worker.drain)
        self.resting.pop(worker.name, None)
        self.no_pipeline_until_s = -math.inf
        del self.workers[worker.name]
        self.num_workers_by_node[worker.node] -= 1
        if not self.num_workers_by_node[worker.node]:
            del self.num_workers_by_node[worker.node]
        if not worker.is_draining:
            self.capacity.drop(worker.kind, worker.name)
        self._note_workers()
        return requests

    def _note_workers(self) -> None:
        self.queues.rerank(self.models)
        self.queues.must_serve = True

    def drain_node(self, node: NodeId, *, is_draining: bool) -> None:
        """Stop placing anything on a node, or begin again. What runs there may finish."""
        if is_draining:
            self.draining[node] = None
        else:
            self.draining.pop(node, None)
        for worker in self.workers.values():
            if worker.node == node and worker.is_draining is not is_draining:
                if worker.drain is not None:
                    self.end_drain(worker.drain)
                worker.is_draining = is_draining
                if is_draining:
                    self.capacity.drop(worker.kind, worker.name)
                else:
                    self.capacity.put(worker.kind, worker.name, worker.promises)
                    self.rank_room(worker)
                for replica in list(worker.replicas.values()):
                    self.reindex(replica)
        self._note_workers()

    def starts_workers(self, node: NodeId) -> bool:
        return self.most_by_node.get(node, 0) > self.num_workers_by_node[node]

    def await_successor(self, node: NodeId, models: Iterable[ModelId]) -> None:
        """Let requests for models of a lost worker wait for the next worker of its node, for a moment."""
        if self.starts_workers(node):
            for name in models:
                self.replaced.pop(name, None)
                self.replaced[name] = Replacement(node, self.now_s + REPLACED_S)

    def lose_node(self, node: NodeId) -> None:
        """Forget a node whose workers are lost. It is not waited for."""
        self.most_by_node.pop(node, None)
        self.draining.pop(node, None)
        self.estimates.forget_node(node)
        for model in self.models.values():
            if node in model.residency:
                model.report(node, None)

    def add(self, replica: Replica) -> None:
        model, worker = replica.model, replica.worker
        assert worker.name not in model.replicas, f"`{model.name}` is on worker `{worker.name}` already"
        replica.number = self.num_added = self.num_added + 1
        replica.idle_since_s = replica.turn_changed_s = worker.used_s = self.now_s
        replica.is_in_turn = bool(replica.stages) or not self.config.takes_turns
        model.replicas[worker.name] = worker.replicas[model.name] = replica
        for stage in replica.stages[1:]:
            assert model.name not in stage.worker.replicas, (
                f"`{model.name}` is on `{stage.worker.name}` already"
            )
            stage.worker.used_s, stage.worker.replicas[model.name] = self.now_s, replica
            rank_retired(model, stage.worker)
        rank_retired(model, worker)
        if replica.is_temporary:
            self.models[model.name], self.loading_pipelines[model.name] = model, replica
        self.reindex(replica)

    def remove(self, replica: Replica) -> None:
        """Remove an idle replica, and its model if that was removed and this was the last one."""
        assert not replica.running, f"`{replica.model.name}` still runs {len(replica.running)} requests"
        model, worker = replica.model, replica.worker
        del model.replicas[worker.name]
        for one in replica.workers:
            del one.replicas[model.name]
            rank_retired(model, one)
        self.loading_pipelines.pop(model.name, None)
        if not model.replicas:
            model.named_keep_alive_s = None
        self.reindex(replica)
        if len(model.replicas) == 1:
            (last,) = model.replicas.values()
            last.spare = None
            self.reindex(last)
        if model.profile is None and not model.replicas:
            del self.models[model.name]
        if (whole := model_of(model.name)) not in self.models:
            self.gpu_time.forget(whole)

    def reindex(self, replica: Replica) -> None:
        model = replica.model
        if not (model.is_pinned or replica.has_pin or self.refused_pins):  # the common case
            self.update_indexes(replica)
            return
        self._reindex_one(replica)
        if model.replicas and model.is_pinned:  # Another one may be the oldest now.
            for other in list(model.replicas.values()):
                self._update_pin(other)
                if other.hold is not other.hold_at(self.now_s):
                    self._reindex_one(other)
        self.update_unplaced(model)

    def reindex_model(self, model: Model) -> None:
        for replica in list(model.replicas.values()):
            self.reindex(replica)

    def update_unplaced(self, model: Model) -> None:
        is_wanted = model.profile is not None and model.profile.is_pinned and not model.is_stopped
        replicas = model.replicas.values()
        staying = (one for one in replicas if not one.is_stale and not one.is_on_draining_node)
        if is_wanted and sum(one.num_replaced for one in staying) < model.num_pinned:
            self.unplaced[model.name] = model
        else:
            self.unplaced.pop(model.name, None)

    def _update_pin(self, replica: Replica) -> None:
        model, worker = replica.model, replica.worker
        is_wanted = worker.replicas.get(model.name) is replica and replica in model.pinned_replicas
        if is_wanted and not replica.has_pin:
            replica.has_pin = not self.config.takes_turns or self.with_pin(replica).can_all_take_turns
        elif not is_wanted:
            replica.has_pin = False
        if is_wanted and not replica.has_pin:
            self.refused_pins[replica] = None
        else:
            self.refused_pins.pop(replica, None)
            replica.is_pin_refused = False

    def with_pin(self, replica: Replica) -> Promises:
        promises = replica.worker.promises.copy()
        if replica.hold is not None:
            promises.release(replica.promise, replica.hold)
        promises.add(replica.promise, PINNED)
        return promises

    def _reindex_one(self, replica: Replica) -> None:
        self._update_pin(replica)
        self.update_indexes(replica)

    def update_indexes(self, replica: Replica) -> None:
        """Carry a replica into the books, without a decision about its pin."""
        model, worker = replica.model, replica.worker
        is_there = worker.replicas.get(model.name) is replica
        hold = replica.hold_at(self.now_s) if is_there else None
        is_changed = hold is not replica.hold
        if is_changed:
            self._change_hold(replica, hold)
            self.notices.put(replica)
        self.expiries.put(replica)
        is_usable = is_there and replica.takes_requests
        if is_usable is not (worker.name in model.usable):
            if model.waiting:
                self.queues.must_serve = True
            _enter(model.usable, worker.name, replica, is_in=is_usable)
        is_loading = is_usable and not replica.is_ready
        if is_loading or model.loading:
            _enter(model.loading, worker.name, replica, is_in=is_loading)
        num_running = len(replica.running)
        if is_usable and num_running < replica.max_seqs:
            model.with_free_slot.put(worker.name, replica.load)
        else:
            model.with_free_slot.drop(worker.name)
        is_busy = is_there and num_running > 0
        for one in replica.workers:
            if is_busy is not (model.name in one.busy):
                _enter(one.busy, model.name, replica, is_in=is_busy)
            if is_changed:
                self.rank_room(one)
        self.queues.line_up(model)

    def begin_drain(self, drain: Drain) -> None:
        for replica in drain.victims:
            replica.drain = drain
        self.queues.begin_drain(drain)
        for worker in drain.workers:
            worker.drain = drain
            self.rank_room(worker)

    def end_drain(self, drain: Drain) -> None:
        """End a drain. Its victims take requests again."""
        for replica in drain.victims:
            replica.drain = None
        self.queues.end_drain(drain)
        for worker in drain.workers:
            worker.drain = None
            self.rank_room(worker)
        for replica in drain.victims:
            if replica.hold is not None:
                self.reindex(replica)

    def rank_room(self, worker: Worker) -> None:
        """Note that the room which a worker could have, a load there or its drain has changed."""
        self._unranked[worker.name] = worker
        if worker.drain is not None:
            self.queues.changed_drains[worker.drain.model.name] = worker.drain

    def rank_workers(self) -> None:
        """Rank workers by the room that they could have. Call it before these ranks are read."""
        while self._unranked:
            name, worker = self._unranked.popitem()
            if self.workers.get(name) is worker and not worker.is_draining:
                self._rank_worker(worker)

    def _rank_worker(self, worker: Worker) -> None:
        index, promises = self.capacity.by_kind[worker.kind], worker.promises
        if worker.drain is not None:
            index.open.drop(worker.name)
            index.drainable.drop(worker.name)
            return
        if self.config.takes_turns:
            index.open.put(worker.name, promises.turn_bytes)
            index.drainable.put(worker.name, promises.freeable_bytes(BUSY))
            return
        loading = (one for one in worker.busy.values() if not one.is_ready and one.hold is not PINNED)
        loading_bytes = sum(one.promise_on(worker).own_bytes for one in loading)
        index.open.put(worker.name, promises.freeable_bytes(WARM))
        index.drainable.put(worker.name, promises.freeable_bytes(BUSY) - loading_bytes)

    def _change_hold(self, replica: Replica, hold: Hold | None) -> None:
        """Move the promise of a replica to another hold; None: it is promised nothing any more."""
        before = replica.hold
        for worker in replica.workers if replica.stages else (replica.worker,):
            promise = replica.promise_on(worker)
            if before is not None:
                worker.promises.release(promise, before)
            if hold is not None:
                worker.promises.add(promise, hold)
            if not worker.is_draining:
                self.capacity.put(worker.kind, worker.name, worker.promises)
        is_less = before is not None and hold is not None and hold < before
        if hold is None or (is_less and (before is PINNED or hold <= WARM)):
            self.queues.must_serve = True  # More can be freed than before.
        if hold is PINNED:
            self.queues.must_refuse = True
        replica.hold = hold
        for worker in replica.workers:
            self.gpu_time.note(worker, self.now_s)

    # Requests.

    def accept(self, event: RequestArrived, model: Model) -> Request:
        """Queue a new request, if only for a moment; `line_up` and perhaps `must_serve` follow."""
        request = self.queues.accept(event, model, self.now_s)
        if model.is_stopped:
            model.is_stopped = False
            self.update_unplaced(model)
        self.queues.enqueue(request, self.now_s, self.step_number)
        return request

    def start(self, request: Request, replica: Replica) -> None:
        model = request.model
        assert replica.has_free_slot, f"no slot for `{request.request_id}`"
        self.queues.dequeue(request)
        request.replica, request.started_s, replica.spare = replica, self.now_s, None
        if replica.prewarmed is not None:
            self.prewarm_budget.give_back(replica.prewarmed, self.now_s)
            replica.prewarmed = None
        if request.adapter is not None:
            replica.worker.adapters.use(request.adapter.adapter)
        replica.num_prompt_tokens += request.num_prompt_tokens
        replica.prompts_until_s = max(replica.prompts_until_s, self.now_s) + self.prompt_s(request, replica)
        replica.prefixes.use(request.prefixes)
        self.queues.await_turn(request, is_waiting=not replica.is_in_turn)
        first = model.first_waiting
        if self.queues.for_room and request.queued_step < self.step_number:
            self.queues.must_serve = True  # Models for room may have waited longer than those behind it.
        if first is not None and first.overdue_s(self.config.patience_s) <= self.now_s:
            self.queues.must_serve = True  # An overdue request is the first now.
        replica.running[request.request_id] = request
        self.gpu_time.start(request, self.now_s)
        if replica.stop is not None and request.number >= replica.stop.number:
            replica.stop = None
        if replica.notified_hold is RETAINED:
            replica.notified_hold = WARM  # Its worker concludes that from the request.
        if request.keep_alive_s is not None and request.keep_alive_s != model.named_keep_alive_s:
            model.named_keep_alive_s = request.keep_alive_s
            self.reindex_model(model)
        else:
            self.reindex(replica)
        if replica.is_temporary:
            self.reindex(replica)
            self.queues.line_up(model)

    def end(self, request: Request) -> None:
        self.queues.remove(request)
        if request.replica is not None:
            self._stop_running(request, request.replica)
        else:
            # Behind others of its model it kept no room or slot from any request, so its end frees none; what
            # does, and the end of a request's patience, is followed by a serve of its own.
            if request.model.first_waiting is request and self._kept_room_from_any(request):
                self.queues.must_serve = True
            self.queues.dequeue(request)
            self.queues.line_up(request.model)

    def _kept_room_from_any(self, request: Request) -> bool:
        """False if a request waited for room behind all others, and no timer is due because of it.

        Most are refused at once, because the queue is full: then the models were served a moment ago.
        """
        queues, name = self.queues, request.model.name
        if queues.for_slot or self.unplaced or name in self.drains or name in self.replaced:
            return True
        kept_until_s = request.overdue_s(self.config.patience_s) + self.config.max_drain_s
        return queues.for_room.highest != request.place or self.kept_until_s == kept_until_s

    def requeue(self, request: Request, *, is_at_fault: bool) -> None:
        """Return a request to its place in the queue. `is_at_fault`: its own step lost the replica."""
        assert request.replica is not None, f"waits already: `{request.request_id}`"
        self._stop_running(request, request.replica)
        request.replica = None
        request.num_losses += is_at_fault
        self.queues.enqueue(request, self.now_s, self.step_number)
        self.queues.line_up(request.model)
        self.queues.must_serve = True

    def change_turn(self, replica: Replica, *, is_in_turn: bool) -> None:
        replica.is_in_turn, replica.turn_changed_s = is_in_turn, self.now_s
        if is_in_turn:
            replica.has_had_turn = True
            for request in replica.running.values():
                if request.awaits_turn:
                    self.queues.await_turn(request, is_waiting=False)
                    request.started_s = self.now_s
        self.reindex(replica)

    def prompt_s(self, request: Request, replica: Replica) -> float:
        """Return how long a replica takes for what it has not cached of a prompt."""
        num_tokens = request.num_prompt_tokens - replica.prefixes.count_cached(request.prefixes)
        return self.estimates.least_prompt_s(request.model.name, num_tokens)

    def _stop_running(self, request: Request, replica: Replica) -> None:
        self.queues.await_turn(request, is_waiting=False)
        del replica.running[request.request_id]
        self.gpu_time.stop(request, self.now_s)
        replica.num_prompt_tokens -= request.num_prompt_tokens
        if replica.is_ready and not replica.running:
            replica.prompts_until_s = self.now_s
        replica.worker.used_s = self.now_s
        for stage in replica.stages:
            stage.worker.used_s = self.now_s
        self.note_idle(replica)

    def note_idle(self, replica: Replica) -> None:
        """Note that a request on a replica, or its load without requests, has ended.

        Of the idle replicas of a model, all but the one used last are spare, unless another one is busy or
        pinned: then all of them.
        """
        model, replica.idle_since_s = replica.model, self.now_s
        is_usable = model.usable.get(replica.worker.name) is replica
        is_packed = self.config.first_token_s is not None
        if not replica.running and is_usable and len(model.usable) > 1:
            others = [one for one in model.usable.values() if one is not replica]
            if staying := [one for one in others if one.running or one.has_pin]:
                replica.spare = price_spare(replica, staying, self.estimates, self.now_s, is_packed=is_packed)
            else:
                for other in others:
                    if other.spare is None:
                        other.spare = price_spare(
                            other, (replica,), self.estimates, self.now_s, is_packed=is_packed
                        )
                        self.reindex(other)
        self.reindex(replica)


def _enter(books: dict[Name, Replica], name: Name, replica: Replica, *, is_in: bool) -> None:
    if is_in:
        books[name] = replica
    else:
        books.pop(name, None)
