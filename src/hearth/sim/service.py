"""A service in virtual time, to the last token: the real brain, and workers that make every step.

    arrivals -> brain -> orders -> `SteppedWorker` -> facts -> brain -> ...

Deterministic, and decides nothing itself. Raises AssertionError unless every request ends exactly once.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import assert_never

from hearth.core.errors import ConfigError
from hearth.core.types import ModelId, NodeId, Pipeline, RequestId, Rung, WorkerId, model_of
from hearth.policy.fleet.audit import audit
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    Action,
    AddWorkers,
    BrainConfig,
    CancelRun,
    ComputedPrompt,
    Dispatch,
    Event,
    Evict,
    LinkMeasured,
    LoadModel,
    ModelDeployed,
    ModelReady,
    MoveKv,
    Prewarm,
    RefusePin,
    Reject,
    ReleaseWorkers,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    ResidencyReported,
    SetHold,
    SetTimer,
    TimerFired,
    TurnBegan,
    WhileLoading,
    WorkerJoined,
    WorkerLost,
)
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.prefixes import LENGTHS, PrefixDigest
from hearth.policy.fleet.profile import ModelProfile
from hearth.policy.fleet.records import Worker
from hearth.policy.memory.reload_cost import PRIOR_BYTES_PER_S
from hearth.sim.network import SimulatedNetwork, Transfers
from hearth.sim.profile import Profile
from hearth.sim.setting import KIND, TYPICAL, OnTime, Policy, SimulationSetting
from hearth.sim.stepped_model import (
    HostOrder,
    Paused,
    RequestsStarted,
    StartOrder,
    TokensSent,
    WorkerFact,
    WorkerOrder,
)
from hearth.sim.stepped_worker import SteppedWorker
from hearth.sim.traces import TracedRequest

#: The brain has seen such a prompt of each model before.
KNOWN_PROMPT_TOKENS = 1024


@dataclass(slots=True)
class SimulatedAnswer:
    request_id: RequestId
    model: ModelId
    arrived_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    conversation: int | None = None
    num_cached_tokens: int = 0  #: of its prompt, when it started
    token_s: list[float] = field(default_factory=list)  #: when each token was sent
    placed: tuple[WorkerId, ModelId] | None = None  #: where it runs; None: nowhere
    is_admitted: bool = False  #: there; before, the worker may still send tokens of an earlier run
    started_s: float | None = None  #: when the step began that first had tokens of it; None: none had yet
    num_pauses: int = 0  #: turns of its model that ended meanwhile
    ended_s: float | None = None  #: None: it has not ended
    why_not: str | None = None  #: why it was refused or cancelled; None: it was not

    @property
    def is_whole(self) -> bool:
        return len(self.token_s) == self.num_output_tokens

    @property
    def computed_prompt(self) -> ComputedPrompt:
        assert self.started_s is not None, f"not started: {self}"
        num_tokens = self.num_prompt_tokens - self.num_cached_tokens
        return ComputedPrompt(num_tokens, self.token_s[0] - self.started_s)

    @property
    def first_token_s(self) -> float:
        return self.token_s[0] - self.arrived_s

    @property
    def completion_s(self) -> float:
        assert self.ended_s is not None, f"not ended: {self}"
        return self.ended_s - self.arrived_s

    @property
    def longest_pause_s(self) -> float:
        return max((after - before for before, after in pairwise(self.token_s)), default=0.0)

    def count_on_time(self, on_time: OnTime) -> int:
        """Return how many tokens were on time: token i is due i / rate after the first."""
        due_s, tokens_per_s = self.arrived_s + on_time.first_token_s, on_time.tokens_per_s
        return sum(at_s <= due_s + index / tokens_per_s for index, at_s in enumerate(self.token_s))

    def is_late(self, on_time: OnTime) -> bool:
        """True if any token was late or never came."""
        return self.count_on_time(on_time) < self.num_output_tokens


class _Gate:
    """Admits requests of one model at a time, in order of arrival. Mutable; written by its service."""

    def __init__(self) -> None:
        self._outside: dict[RequestId, RequestArrived] = {}
        self._inside: set[RequestId] = set()
        self._model: ModelId | None = None  #: of all that are inside

    def arrived(self, event: RequestArrived) -> None:
        self._outside[event.request_id] = event

    def ended(self, request_id: RequestId) -> None:
        self._inside.discard(request_id)
        self._outside.pop(request_id, None)

    def let_in(self) -> list[RequestArrived]:
        """Return the requests to admit now: the first ones in a row for one model, that of those inside if
        any."""
        let_in = []
        for event in list(self._outside.values()):
            if self._inside and event.model != self._model:
                break
            self._model = event.model
            self._inside.add(event.request_id)
            let_in.append(self._outside.pop(event.request_id))
        return let_in


class SimulatedService:
    def __init__(
        self,
        setting: SimulationSetting,
        profile: Profile,
        watch: Callable[[WorkerFact], None] | None = None,
    ) -> None:
        self.setting, self.profile, self._watch = setting, profile, watch
        takes_turns = setting.policy is Policy.TURNS
        gain_s = setting.staged_start_gain_s
        while_loading = None if gain_s is None else WhileLoading(min_gain_s=gain_s)
        self.fleet = Fleet(
            BrainConfig(
                max_queue=setting.max_queue,
                takes_turns=takes_turns,
                while_loading=while_loading,
                first_token_s=setting.first_token_s,
                prewarming=setting.prewarming,
                priors=_known_speeds(setting.transfers, profile),
            )
        )
        self.fleet.estimates.reload.demand.by_last_use = setting.evicts_by_last_use
        self.workers: dict[WorkerId, SteppedWorker] = {}
        self.given_back: list[SteppedWorker] = []
        self.gpu_s = 0.0  #: devices were held until the last answer ended
        self.gpu_s_by_model: dict[ModelId, float] = {}  #: its share of that
        self.gpu_s_by_key: dict[str, float] = {}  #: of requests with an API key
        self.idle_gpu_s = 0.0  #: of that, by models without a running request
        self.answers: dict[RequestId, SimulatedAnswer] = {}
        self.now_s = 0.0
        self.num_prewarmed = 0  #: orders to load a model ahead, or to keep it
        self.num_kv_moves = 0  #: requests that moved with their KV
        self.turns_s: list[float] = []  #: when each began
        self.load_ends: list[tuple[float, Rung | None]] = []  #: and where bytes came from, if any did
        self.held: list[tuple[float, int]] = [(0.0, 0)]  #: devices since each time
        self.num_open = 0  #: requests that have not ended
        self._gate = _Gate() if setting.policy is Policy.ONE_AT_A_TIME else None
        self._profiles: dict[ModelId, ModelProfile] = {}
        self._kv_s: dict[RequestId, float] = {}  #: when KV has come, of requests that move next
        self.network = SimulatedNetwork(setting.transfers, TYPICAL.num_layers)
        self.network.demand.by_last_use = setting.evicts_by_last_use
        #: (time, number, what): an event that happens, or a worker that has something to do.
        self._queue: list[tuple[float, int, Event | WorkerId]] = []
        self._num_queued = 0
        self._timer_s: float | None = None
        for model, shape in setting.shapes.items():
            known = setting.model_profile(model, profile.shape(shape))
            self._tell(ModelDeployed(0.0, known))
            prompt_s = profile.shape(shape).step_s(KNOWN_PROMPT_TOKENS, 1, KNOWN_PROMPT_TOKENS)
            self.fleet.estimates.computed(model, ComputedPrompt(KNOWN_PROMPT_TOKENS, prompt_s))
            if setting.transfers.host_bytes < math.inf:
                self.network.begin_with(model, setting.nodes, known.num_bytes)
            for node in setting.nodes:
                self._tell(ResidencyReported(0.0, model, self._residency(model, node), node))
        for number in range(setting.num_workers):
            name, node = WorkerId(f"worker-{number}"), setting.node_of(number)
            self._tell(WorkerJoined(0.0, name, KIND, setting.memory_bytes, node=node))

    def ask(self, requests: Iterable[TracedRequest]) -> None:
        """Schedule requests at their times, each for the model that its tenant names.

        One that is longer than the context is cut: its prompt to leave room for a token, then its answer.
        """
        context = self.setting.context
        for request in requests:
            if request.tenant not in self.setting.shapes:
                known = ", ".join(f"`{model}`" for model in list(self.setting.shapes)[:8])
                raise ConfigError(
                    f"a request is for `{request.tenant}`, which is none of the models: {known}; map the "
                    "tenants of a trace to models with `Trace.mapped`"
                )
            request_id, model = RequestId(f"request-{len(self.answers)}"), ModelId(request.tenant)
            num_prompt = min(request.num_input_tokens, context - 1)
            num_output = min(request.num_output_tokens, context - num_prompt)
            answer = SimulatedAnswer(
                request_id, model, request.arrival_s, num_prompt, num_output, request.conversation
            )
            self.answers[request_id] = answer
            self.num_open += 1
            # All that it is on its way for, there and back, comes before the brain hears of it.
            at_s = request.arrival_s + self.profile.request_s
            is_batch = self.setting.pace.is_batch
            self.schedule(
                RequestArrived(
                    at_s,
                    request_id,
                    model,
                    num_prompt,
                    num_output,
                    is_batch=is_batch,
                    prefixes=self._prefixes(answer),
                    key=request.key,
                )
            )

    def _prefixes(self, answer: SimulatedAnswer) -> tuple[PrefixDigest, ...]:
        if answer.conversation is None or self.setting.num_workers < 2:
            return ()
        num_digests = bisect_right(LENGTHS, answer.num_prompt_tokens)
        return tuple(PrefixDigest(f"{answer.conversation}-{at}") for at in range(num_digests))

    def schedule(self, event: Event) -> None:
        self._push(event.now_s, event)

    @property
    def most_host_bytes(self) -> int:
        """Weights in host memory, on the machine with most. Without a limit, the first has all."""
        if self._is_host_limited:
            return int(self.network.most_host_bytes)
        return sum(profile.num_bytes for profile in self._profiles.values())

    def run(self) -> None:
        while self.num_open:
            assert self._queue, f"requests wait for nothing: {self._open()[:5]}"
            at_s, _, what = heapq.heappop(self._queue)
            if isinstance(what, str):
                self._advance(what, at_s)
            elif not isinstance(what, TimerFired) or what.now_s == self._timer_s:
                self.now_s = at_s
                self._happen(what)
        gpu_time = self.fleet.gpu_time
        self.gpu_s = gpu_time.total_s(self.now_s)
        times = {name: gpu_time.model(name, self.now_s) for name in list(gpu_time.by_model)}
        self.gpu_s_by_model = {name: time.held_s for name, time in times.items()}
        self.gpu_s_by_key = {key: gpu_s for key, gpu_s in gpu_time.by_key.items() if key is not None}
        self.idle_gpu_s = sum(time.idle_s for time in times.values())
        while self._queue:
            at_s, _, what = heapq.heappop(self._queue)
            if isinstance(what, str):
                self._advance(what, at_s)

    def check(self) -> None:
        assert self.num_open == len(self._open()), f"{self.num_open=} {self._open()[:5]}"
        audit(self.fleet)
        running = list[RequestId]()
        for worker in self.workers.values():
            worker.check()
            running += worker.requests()
        assert len(running) == len(set(running)), f"on two workers: {running}"
        assert self.num_open or not running, f"ended, and still on a worker: {running}"

    def _open(self) -> list[SimulatedAnswer]:
        return [answer for answer in self.answers.values() if answer.ended_s is None]

    def _push(self, at_s: float, what: Event | WorkerId) -> None:
        self._num_queued += 1
        heapq.heappush(self._queue, (at_s, self._num_queued, what))

    # Workers.

    def _advance(self, name: WorkerId, at_s: float) -> None:
        worker = self.workers.get(name)
        if worker is None or worker.next_s != at_s:
            return
        self.now_s = at_s
        for fact in worker.advance(at_s):
            if self._watch is not None:
                self._watch(fact)
            self._take_fact(fact, name)
        self._push_worker(worker)

    def _push_worker(self, worker: SteppedWorker) -> None:
        if worker.next_s < math.inf:
            self._push(worker.next_s, worker.name)

    def _take_fact(self, fact: WorkerFact, worker: WorkerId) -> None:
        match fact:
            case TokensSent(at_s, request_ids, model):
                for request_id in request_ids:
                    answer = self.answers[request_id]
                    if answer.placed != (worker, model) or not answer.is_admitted:
                        pass  # it has left, and these tokens are made again
                    elif answer.ended_s is None:
                        answer.token_s += at_s
                    else:  # its client has gone, which the worker had not heard yet
                        answer.token_s += at_s[: bisect_right(at_s, answer.ended_s)]
            case RequestsStarted(now_s, admissions):
                for admission in admissions:
                    answer = self.answers[admission.request_id]
                    answer.is_admitted = True
                    if answer.started_s is None:
                        answer.started_s, answer.num_cached_tokens = now_s, admission.num_cached_tokens
            case Paused(request_ids):
                for request_id in request_ids:
                    self.answers[request_id].num_pauses += 1
            case RequestFinished(_, request_id) if self.answers[request_id].ended_s is not None:
                pass  # its client has gone meanwhile
            case RequestFinished(_, request_id) if not self.answers[request_id].is_whole:
                pass  # it had left
            case RequestFinished(_, request_id):
                self._happen(replace(fact, prompt=self.answers[request_id].computed_prompt))
            case _:
                self._happen(fact)

    # The brain.

    def _happen(self, event: Event) -> None:
        if isinstance(event, RequestArrived) and self.answers[event.request_id].ended_s is not None:
            return  # its client has gone while it was on its way
        if isinstance(event, ResidencyReported):  # whatever is there by now
            event = replace(event, bytes_by_rung=self._residency(event.model, event.node))
        if self._gate is None:
            self._tell(event)
            return
        if isinstance(event, RequestArrived):
            self._gate.arrived(event)
        else:
            self._tell(event)
        while arrivals := self._gate.let_in():
            for arrival in arrivals:
                self._tell(replace(arrival, now_s=self.now_s))

    def _tell(self, event: Event) -> None:
        self._follow(event)
        actions = step(self.fleet, event)
        self._fetch(actions)
        for action in actions:
            self._carry_out(action)
        if (num_held := self.fleet.gpu_time.num_held) != self.held[-1][1]:
            self.held.append((self.now_s, num_held))
        if self.setting.gives_back:
            idle = [name for name, worker in self.fleet.workers.items() if worker.is_retained]
            for name in idle:
                if name in self.fleet.workers:  # else the step that followed another has given it back
                    self._give_back(name)

    def _give_back(self, name: WorkerId) -> None:
        worker = self.fleet.workers[name]
        self.given_back.append(self.workers[name])
        self._tell(WorkerLost(self.now_s, name, is_with_node=True))
        number = len(self.workers) + len(self.given_back)
        budget_bytes = self.setting.memory_bytes
        self._tell(
            WorkerJoined(self.now_s, WorkerId(f"worker-{number}"), KIND, budget_bytes, node=worker.node)
        )

    def _follow(self, event: Event) -> None:
        match event:
            case ModelDeployed(_, profile):
                self._profiles[profile.model] = profile
            case WorkerJoined(_, name, _, budget_bytes):
                worker = self.workers[name] = SteppedWorker(
                    name,
                    budget_bytes,
                    self.profile,
                    self.setting.limits,
                    self.setting.max_step_s,
                    rules=self.setting.rules if self.fleet.config.takes_turns else None,
                    source=self._source,
                    frees_idle=self.setting.frees_idle,
                )
                worker.reclaimer.costs.demand.by_last_use = self.setting.evicts_by_last_use
            case WorkerLost(_, name):
                if name in self.fleet.workers:
                    hosting = self.fleet.workers[name]
                    for model in hosting.replicas:
                        self._release(model_of(model), hosting)
                if (lost := self.workers.pop(name, None)) is not None:
                    for fact in lost.sent_by(self.now_s):
                        self._take_fact(fact, name)
            case RequestFinished(_, request_id):
                assert self.answers[request_id].is_whole, f"{self.answers[request_id]}"
                self._end(request_id)
            case RequestCancelled(_, request_id) if self.answers[request_id].ended_s is None:
                self._end(request_id, "cancelled")
            case RequestArrived(now_s, _, model):
                self.network.asked(model, now_s)
            case TurnBegan():
                self.turns_s.append(event.now_s)
            case ModelReady(now_s, _, _, rungs):
                self.load_ends.append((now_s, rungs[0].rung if rungs else None))
            case TimerFired():
                self._timer_s = None
            case _:
                pass

    def _end(self, request_id: RequestId, why_not: str | None = None) -> None:
        answer = self.answers[request_id]
        assert answer.ended_s is None, f"ended twice: {answer}"
        answer.ended_s, answer.why_not = max([self.now_s, *answer.token_s[-1:]]), why_not
        self.num_open -= 1
        if self._gate is not None:
            self._gate.ended(request_id)

    def _carry_out(self, action: Action) -> None:
        match action:
            case LoadModel(model, name):
                deployed, context = model_of(model), self.setting.context
                shape, profile = self.profile.shape(self.setting.shapes[deployed]), self._profiles[deployed]
                self._post(name, HostOrder(action, profile, shape, context, self._hops_s(action.pipeline)))
            case Dispatch(request_id, model, name):
                answer = self.answers[request_id]
                answer.placed, answer.is_admitted = (name, model), False
                start = StartOrder(
                    request_id,
                    model,
                    answer.num_prompt_tokens,
                    answer.num_output_tokens,
                    pace=self.setting.pace,
                    arrived_s=answer.arrived_s,
                    num_sent=len(answer.token_s),
                    conversation=answer.conversation,
                    kv_s=self._kv_s.pop(request_id, 0.0),
                )
                self._post(name, start)
            case MoveKv(request_id):
                if action.is_moved and action.move_s is not None:
                    self._kv_s[request_id] = self.now_s + action.move_s
                    self.num_kv_moves += 1
            case CancelRun(request_id, name):
                self._post(name, action)
                self._leave(self.answers[request_id], name)
            case Evict(model, name):
                self._post(name, action)
                if model_of(model) == model and model in self.fleet.models:
                    self._release(model, self.fleet.workers[name])
            case SetHold(_, name):
                self._post(name, action)
            case Reject(request_id, reason):
                self._end(request_id, reason)
            case SetTimer(at_s):
                self._timer_s = at_s
                self.schedule(TimerFired(at_s))
            case Prewarm():
                self.num_prewarmed += 1
            case RefusePin() | AddWorkers() | ReleaseWorkers():
                pass  # its machines are given
            case _:
                assert_never(action)

    def _hops_s(self, pipeline: Pipeline | None) -> float:
        """Return how long a step is on its way through all stages of a pipeline and back."""
        members = () if pipeline is None else pipeline.members
        nodes = [self.fleet.workers[one.worker].node for one in members]
        hops = zip(nodes, [*nodes[1:], *nodes[:1]], strict=True)
        return sum(self.profile.hop_s if one == next_ else self.profile.node_hop_s for one, next_ in hops)

    def _leave(self, answer: SimulatedAnswer, worker: WorkerId) -> None:
        """Have a request leave a worker with the tokens that were sent by now."""
        if answer.ended_s is None and answer.placed is not None and answer.is_admitted:
            for fact in self.workers[worker].sent_by(self.now_s):
                if answer.request_id in fact.request_ids and answer.placed == (worker, fact.model):
                    answer.token_s += fact.at_s
        if answer.ended_s is None:
            answer.placed = None

    def _fetch(self, actions: Iterable[Action]) -> None:
        """Begin to bring models to machines that are to load them."""
        lacking: dict[ModelId, dict[NodeId, int]] = {}
        for action in actions:
            match action:
                case LoadModel() | Prewarm(to_host=True, is_advice=False):
                    model, node = model_of(action.model), self.fleet.workers[action.worker].node
                    needed_bytes = self._profiles[model].num_bytes
                    if self._is_host_limited:  # the device may still have the beginning
                        needed_bytes -= self.workers[action.worker].reclaimer.device.count_bytes(model)
                    if self.network.find(model, node, self.now_s, needed_bytes) is not None:
                        self.network.keep(model, node)
                    elif needed_bytes > 0:
                        lacking.setdefault(model, {})[node] = needed_bytes
        for model, nodes in lacking.items():
            self._bring(model, list(nodes), max(nodes.values()))

    def _bring(self, model: ModelId, nodes: Sequence[NodeId], num_bytes: int) -> None:
        for node, one in self.network.fetch(model, nodes, num_bytes, self.now_s).items():
            self.schedule(ResidencyReported(one.arrived_s, model, {}, node))
            if one.source is not None:
                bytes_per_s = num_bytes / (one.arrived_s - one.began_s)
                self.schedule(LinkMeasured(one.arrived_s, one.source, node, bytes_per_s, 0.0))
        for left, node in self.network.left:
            self.schedule(ResidencyReported(self.now_s, left, {}, node))
        self.network.left.clear()

    @property
    def _is_host_limited(self) -> bool:
        return self.setting.transfers.host_bytes < math.inf

    def _source(self, order: HostOrder, num_bytes: int) -> tuple[float, Rung]:
        """Return when the machine of a worker has what the worker loads in host memory, and where from."""
        load = order.load
        model, node = model_of(load.model), self.fleet.workers[load.worker].node
        whole_bytes = self._profiles[model].num_bytes
        num_bytes = min(num_bytes, whole_bytes) if load.pipeline is None else whole_bytes
        fetched = self.network.find(model, node, self.now_s, num_bytes)
        if fetched is None:
            self._bring(model, [node], num_bytes)
            fetched = self.network.find(model, node, self.now_s)
        assert fetched is not None, f"not fetched: {load}"
        if load.pipeline is None:
            return fetched.arrived_s, fetched.rung
        members = load.pipeline.members
        own, total = next(one for one in members if one.worker == load.worker), members[-1].end
        return fetched.stage_s(own.begin / total, own.end / total), fetched.rung

    def _release(self, model: ModelId, worker: Worker) -> None:
        """Note that a worker has no replica of a model any more."""
        keep_s, replicas = self.setting.transfers.keep_s, self.fleet.models[model].replicas.values()
        is_needed = any(
            one.node == worker.node and one is not worker for replica in replicas for one in replica.workers
        )
        if not is_needed and keep_s < math.inf:
            until_s = self.now_s + keep_s
            self.network.keep(model, worker.node, until_s)
            self.schedule(ResidencyReported(until_s, model, {}, worker.node))

    def _residency(self, model: ModelId, node: NodeId) -> dict[Rung, int]:
        num_bytes, residency = self._profiles[model].num_bytes, dict[Rung, int]()
        if host_bytes := self.network.host_bytes_of(model, node, self.now_s):
            residency[Rung.HOST] = int(min(num_bytes, host_bytes))
        if residency or self.setting.transfers.disk_bytes_per_s is not None:
            residency[Rung.DISK] = num_bytes
        return residency

    def _post(self, name: WorkerId, order: WorkerOrder) -> None:
        worker = self.workers[name]
        worker.post(order, self.now_s)
        self._push_worker(worker)


def _known_speeds(transfers: Transfers, profile: Profile) -> dict[Rung, float]:
    """Return the speeds of rungs that a brain knows which has run for a while."""
    return {
        **PRIOR_BYTES_PER_S,
        Rung.HOST: profile.bytes_per_s[Rung.HOST],
        Rung.DISK: transfers.disk_bytes_per_s or PRIOR_BYTES_PER_S[Rung.DISK],
        Rung.PEER: transfers.link_bytes_per_s,
    }
