"""Anything that may happen to a service with simulated workers, chosen by numbers and checked each time.

The workers are those of `hearth.sim`, which carry out orders and raise if one is impossible. A world does not
choose what happens: `move` is told, by a kind of event and a number.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from hypothesis import strategies as st

from bench.fleet.cluster import SimulatedCluster
from bench.fleet.worker import SimulatedReplica
from hearth.core.types import LOCAL, Hold, ModelId, NodeId, RequestId, Rung, TurnEnd, WorkerId, model_of
from hearth.policy.fleet.audit import audit
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    ComputedPrompt,
    DemandForecast,
    DeviceReported,
    Dispatch,
    End,
    Event,
    Evict,
    LinkMeasured,
    LoadModel,
    LoadProgressed,
    ModelDeployed,
    ModelFailed,
    ModelReady,
    ModelRemoved,
    ModelStopped,
    NodeDraining,
    NodeLost,
    PressureReported,
    Prewarming,
    Reject,
    RejectReason,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    ResidencyReported,
    RungUse,
    StagesMeasured,
    TimerFired,
    TurnBegan,
    TurnEnded,
    WhileLoading,
    WorkerJoined,
    WorkerLost,
)
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.prefixes import PrefixDigest
from hearth.policy.fleet.profile import Footprint, ModelProfile, PartBytes, StageSizes
from hearth.policy.fleet.residents import State, list_residents

T = TypeVar("T")
KEEP_ALIVES_S = (None, None, None, 0.0, 5.0, math.inf)
MODELS = tuple(ModelId(f"m{n}") for n in range(6))
NODES = (LOCAL, NodeId("n1"), NodeId("n2"))


def profile(
    model: str,
    fixed_bytes: int = 30,
    min_kv_bytes: int = 5,
    max_kv_bytes: int = 10,
    *,
    keep_alive_s: float = 10.0,
    is_pinned: bool = False,
    weight: float = 1.0,
    digest: str = "",
    workspace_bytes: int = 0,
    sink_bytes: int = 0,
    max_seqs: int = 2,
    min_replicas: int = 0,
    max_replicas: int | None = None,
    kinds: Sequence[str] = ("cuda", "cpu"),
) -> ModelProfile:
    """A model of so many bytes of weights; `workspace_bytes` come on top."""
    footprint = Footprint(
        fixed_bytes=fixed_bytes + workspace_bytes,
        min_kv_bytes=min_kv_bytes,
        max_kv_bytes=max_kv_bytes,
        workspace_bytes=workspace_bytes,
        sink_bytes=sink_bytes,
        max_seqs=max_seqs,
    )
    return ModelProfile(
        model=ModelId(model),
        num_bytes=fixed_bytes,
        footprints=dict.fromkeys(kinds, footprint),
        keep_alive_s=keep_alive_s,
        is_pinned=is_pinned or min_replicas > 0,
        weight=weight,
        digest=digest,
        min_replicas=min_replicas,
        max_replicas=max_replicas,
    )


def staged(
    model: str,
    num_layers: int = 12,
    *,
    workspace_bytes: int = 0,
    max_seqs: int = 4,
    kinds: Sequence[str] = ("cuda", "cpu"),
    keep_alive_s: float = 10.0,
    is_pinned: bool = False,
    digest: str = "",
    may_drop: bool = False,
    kv_token_bytes: int = 0,
) -> ModelProfile:
    """A model of layers of 10 bytes, with 3 for the embedding and 3 for the head."""
    parts = PartBytes(layer_bytes=10, first_bytes=3, last_bytes=3)
    whole = profile(
        model,
        parts.of(num_layers, is_first=True, is_last=True),
        2 * num_layers,
        5 * num_layers,
        workspace_bytes=workspace_bytes,
        max_seqs=max_seqs,
        kinds=kinds,
        keep_alive_s=keep_alive_s,
        is_pinned=is_pinned,
        digest=digest,
    )
    sizes = StageSizes(
        num_layers=num_layers,
        stored=parts,
        placed=parts,
        spare_bytes=0,
        unit_bytes=1,
        kv_layer_bytes=1,
        kv_unit_bytes=1,
        num_lost_blocks=0,
        workspace_bytes=workspace_bytes,
        tables_bytes=0,
        context_blocks=1,
        max_seqs=max_seqs,
    )
    footprint = replace(whole.footprints[kinds[0]], kv_token_bytes=kv_token_bytes)
    footprints = dict.fromkeys(kinds, footprint)
    return replace(whole, footprints=footprints, stages=dict.fromkeys(kinds, sizes), may_drop=may_drop)


class World:
    """Mutable. `events` and `actions` keep what was said, step by step."""

    def __init__(self, config: BrainConfig) -> None:
        self.fleet = Fleet(config)
        self.cluster = SimulatedCluster(self._decide, takes_turns=config.takes_turns)
        self.now_s = 0.0
        self.events: list[Event] = []
        self.actions: list[list[Action]] = []
        self._num_ids = 0

    def tell(self, event: Event) -> list[Action]:
        """Have an event happen, and check all that must be true after it."""
        pinned = {
            (resident.model, resident.worker)
            for resident in list_residents(self.fleet, event.now_s)
            if resident.state is State.PINNED
            and (resident.layers is None or not isinstance(event, WorkerLost | ModelFailed | NodeDraining))
        }
        usable = {(name, on) for name, model in self.fleet.models.items() for on in model.usable}
        actions = self.cluster.tell(event)
        self._check_loads(usable, pinned, actions)
        if not isinstance(event, ModelDeployed | ModelRemoved | ModelStopped):
            is_undone = isinstance(event, NodeDraining) and not event.is_draining
            self._check_pinned_stay(pinned, actions, may_move=is_undone)
        for action in actions:
            if isinstance(action, Dispatch):
                _check_options(action)
            elif isinstance(action, Reject):
                _check_retry(action)
        audit(self.fleet)
        self.cluster.check()
        self._check_holds()
        assert self.fleet.queues.num_running + self.fleet.queues.num_waiting == len(self.cluster.requests)
        return actions

    def _decide(self, event: Event) -> list[Action]:
        actions = step(self.fleet, event)
        self.events.append(event)
        self.actions.append(actions)
        return actions

    def _check_pinned_stay(
        self, pinned: set[tuple[ModelId, WorkerId]], actions: list[Action], *, may_move: bool
    ) -> None:
        """`may_move`: a node that is had back has the oldest replicas again, so that a newer one may go."""
        gone = {(action.model, action.worker) for action in actions if isinstance(action, Evict)}
        gone -= {(action.model, action.worker) for action in actions if isinstance(action, LoadModel)}
        # A request that was sent in this very step may have unpinned its model.
        still_pinned = {name for name, model in self.fleet.models.items() if model.is_pinned}
        if may_move:
            still_pinned -= {
                name
                for name, model in self.fleet.models.items()
                if sum(one.has_pin for one in model.replicas.values()) == model.num_pinned
            }
        assert not [model for model, _ in gone & pinned if model in still_pinned], f"{gone & pinned}"

    def _check_loads(
        self,
        usable: set[tuple[ModelId, WorkerId]],
        pinned: set[tuple[ModelId, WorkerId]],
        actions: list[Action],
    ) -> None:
        """Models are loaded only where they may run, and not beyond their `max_replicas`.

        `usable`: the replicas that took requests before, `pinned` those with a pin. A drain that is given up
        may bring one back, also in the same step, if the replica gets a pin.
        """
        loaded = {(one.model, one.worker) for one in actions if isinstance(one, LoadModel)}
        for name, on in loaded:
            model = self.fleet.models[model_of(name)]
            assert model.profile is not None
            assert self.fleet.workers[on].kind in model.profile.footprints, f"{name} may not run on {on}"
            if name != model.name:
                continue
            new_pins = {
                one for one in model.usable if model.replicas[one].has_pin and (name, one) not in pinned
            }
            back = {one for one in new_pins if (name, one) not in loaded}
            num_replicas = sum((name, one) in usable | loaded for one in model.usable if one not in back)
            assert num_replicas <= (model.profile.max_replicas or num_replicas), f"{name}: {num_replicas}"

    def _check_holds(self) -> None:
        """Every worker holds its idle models as the brain does, and runs what the brain thinks it runs."""
        for name, worker in self.cluster.workers.items():
            known = self.fleet.workers[name].replicas
            assert worker.replicas.keys() == known.keys(), f"{worker.replicas.keys()=} {known.keys()=}"
            for model, replica in worker.replicas.items():
                hold = known[model].hold
                same = (Hold.PAUSED, Hold.BUSY, replica.hold)
                assert known[model].stages or hold in same, f"{model} on {name}: {hold=} {replica.hold=}"
                assert replica.is_in_turn is known[model].is_in_turn, f"{model} on {name}"
                is_first = known[model].worker.name == name
                running = known[model].running.keys() if is_first else set()
                assert replica.running.keys() == running, f"{model} on {name}"

    def new_id(self, what: str) -> str:
        self._num_ids += 1
        return f"{what}{self._num_ids}"

    # What may happen. Each takes a number to choose by, and does nothing where it cannot happen.

    def move(self, kind: str, number: int) -> None:
        MOVES[kind](self, number)

    def deploy(self, number: int) -> None:
        model = MODELS[number % len(MODELS)]
        is_pinned = number % 7 == 0
        keep_alive_s = (0.0, 3.0, 20.0, math.inf)[number // 7 % 4]
        fixed_bytes = (10, 30, 45, 90, 120)[number // 28 % 5]
        digest = f"digest {number // 140 % 2}"
        min_replicas = (0, 0, 0, 2)[number // 17 % 4]
        deployed = profile(
            model,
            fixed_bytes,
            keep_alive_s=keep_alive_s,
            is_pinned=is_pinned,
            digest=digest,
            workspace_bytes=(0, 0, 8, 20)[number // 280 % 4],
            sink_bytes=number // 1120 % 5,
            max_seqs=1 + number // 13 % 3,
            min_replicas=min_replicas,
            max_replicas=(None, max(1, min_replicas), None, 3)[number // 19 % 4],
            kinds=(("cuda", "cpu"), ("cuda", "cpu"), ("cuda",))[number // 23 % 3],
        )
        if fixed_bytes == 120 and number // 29 % 3:
            sizes = staged(model, 8 + number // 29 % 7, workspace_bytes=(0, 5)[number // 280 % 2])
            deployed = replace(
                deployed, num_bytes=sizes.num_bytes, footprints=sizes.footprints, stages=sizes.stages
            )
        self.tell(ModelDeployed(self.now_s, deployed))

    def remove(self, number: int) -> None:
        self.tell(ModelRemoved(self.now_s, MODELS[number % len(MODELS)]))

    def stop(self, number: int) -> None:
        self.tell(ModelStopped(self.now_s, MODELS[number % len(MODELS)], is_freed=number % 2 == 0))

    def join(self, number: int) -> None:
        if len(self.cluster.workers) < 4:
            name = WorkerId(self.new_id("w"))
            kind = ("cuda", "cuda", "cpu")[number % 3]
            budget_bytes = (100, 100, 60)[number // 3 % 3]
            most, present = self.fleet.most_by_node, self.fleet.num_workers_by_node
            lacking = [node for node, num in most.items() if present[node] < num]
            node = lacking[0] if lacking else NODES[number // 9 % len(NODES)]  # a lost one is replaced first
            self.tell(WorkerJoined(self.now_s, name, kind, budget_bytes, kind == "cuda", node))

    def lose(self, number: int) -> None:
        """A worker is lost in a step of one of its models, or of one that has just left, or between steps."""
        if name := _pick(sorted(self.cluster.workers), number):
            ready = sorted(m for m, one in self.fleet.workers[name].replicas.items() if one.is_ready)
            culprit = _pick([None, *ready, MODELS[number % len(MODELS)]], number // 5)
            requests = dict(self.fleet.queues.requests)
            num_losses = {request_id: request.num_losses for request_id, request in requests.items()}
            in_step = None if number % 2 else tuple(sorted(requests)[:: 1 + number // 7 % 3])
            lost = WorkerLost(self.now_s, name, culprit, number % 3 == 0, in_step=in_step)
            actions = self.tell(lost)
            for request_id, request in requests.items():
                is_elsewhere = culprit is not None and model_of(culprit) != request.model.name
                if is_elsewhere or (in_step is not None and request_id not in in_step):
                    assert request.num_losses == num_losses[request_id], f"charged for {lost}: {request}"
            for action in actions:
                if culprit is not None and isinstance(action, Reject):
                    model = requests[action.request_id].model
                    is_deadly = model.failure is not None and model.failure.is_deadly  # held back before
                    assert (
                        is_deadly
                        or model.name == model_of(culprit)
                        or action.reason is not RejectReason.WORKERS_LOST
                    ), f"{action}"

    def lose_node(self, number: int) -> None:
        """A node is lost with all its workers, and no request or model is to blame."""
        node = NODES[1:][number % 2]
        requests = dict(self.fleet.queues.requests)
        num_losses = {request_id: request.num_losses for request_id, request in requests.items()}
        there = [name for name, one in self.fleet.workers.items() if one.node == node]
        for name in there:
            self.tell(WorkerLost(self.now_s, name, reason="was cut off", is_with_node=True))
        self.tell(NodeLost(self.now_s, node))
        assert {request_id: request.num_losses for request_id, request in requests.items()} == num_losses
        assert not any(node in model.residency for model in self.fleet.models.values())
        assert node not in self.fleet.draining

    def drain_node(self, number: int) -> None:
        node, is_draining = NODES[number % len(NODES)], number // len(NODES) % 3 == 0
        actions = self.tell(NodeDraining(self.now_s, node, is_draining))
        if is_draining:
            there = {name for name, one in self.fleet.workers.items() if one.node == node}
            taken = {one.worker for one in actions if isinstance(one, Dispatch | LoadModel)}
            assert not there & taken, f"{node} is being drained: {actions}"

    def measure_link(self, number: int) -> None:
        source, target = NODES[number % 3], NODES[(number + 1 + number // 3 % 2) % 3]
        self.tell(LinkMeasured(self.now_s, source, target, 1e6 * (1 + number % 100), 0.001))

    def measure_stages(self, number: int) -> None:
        staged = [
            (model, name, pipeline)
            for name, worker in self.cluster.workers.items()
            for model, replica in worker.replicas.items()
            if (pipeline := replica.pipeline) is not None and pipeline.members[0].worker == name
        ]
        if chosen := _pick(sorted(staged, key=lambda one: one[:2]), number):
            model, name, pipeline = chosen
            stage_s = tuple(1.0 + number // (at + 1) % 5 for at in range(len(pipeline.members)))
            self.tell(StagesMeasured(self.now_s, name, model, stage_s))

    def arrive(self, number: int) -> None:
        model = MODELS[number % len(MODELS)]
        keep_alive_s = KEEP_ALIVES_S[number // len(MODELS) % len(KEEP_ALIVES_S)]
        request_id = RequestId(self.new_id("r"))
        is_batch = number // len(MODELS) // len(KEEP_ALIVES_S) % 3 == 1
        prefixes = tuple(PrefixDigest(f"{number % 4}-{at}") for at in range(number % 5))
        self.tell(
            RequestArrived(
                self.now_s,
                request_id,
                model,
                10,
                None,
                keep_alive_s,
                is_batch=is_batch,
                prefixes=prefixes,
            )
        )

    def finish(self, number: int) -> None:
        if request_id := _pick(self._running(), number):
            how = (End.DONE, End.DONE, End.FAILED, End.STOPPED)[number % 4]
            prompt = ComputedPrompt(number % 300, number % 7 / 10) if number % 3 else None
            self.tell(RequestFinished(self.now_s, request_id, 5, how, prompt))

    def cancel(self, number: int) -> None:
        if request_id := _pick(sorted(self.cluster.requests), number):
            self.tell(RequestCancelled(self.now_s, request_id))

    def ready(self, number: int) -> None:
        if chosen := _pick(self._loading(), number):
            model, name = chosen
            num_bytes = self.cluster.workers[name].replicas[model].missing_bytes
            use = RungUse((Rung.HOST, Rung.DISK)[number % 2], num_bytes, 0.5 + number % 3)
            self.tell(ModelReady(self.now_s, name, model, (use,), 1.0))

    def progress(self, number: int) -> None:
        if chosen := _pick(self._loading(), number):
            self.tell(LoadProgressed(self.now_s, chosen[1], chosen[0], number % 40))

    def press(self, number: int) -> None:
        """All replicas of a model report how much KV they need of room for 100 tokens each."""
        ready = [one for one in self.fleet.replicas() if one.is_ready]
        names = {one.model.name for one in ready}
        if chosen := MODELS[0] if MODELS[0] in names and number % 2 else _pick(sorted(names), number):
            for one in [one for one in ready if one.model.name == chosen]:
                demand_tokens = (0, 50, 90, 150, 250)[number // 7 % 5]
                self.tell(PressureReported(self.now_s, one.worker.name, chosen, demand_tokens, 100))

    def forecast(self, number: int) -> None:
        rates = tuple((0.0, 0.05, 0.3, 5.0)[number // by % 4] for by in (6, 24, 96))
        model = MODELS[number % len(MODELS)]
        self.tell(DemandForecast(self.now_s, model, 5.0, rates, tuple(2 * per_s for per_s in rates)))

    def begin_turn(self, number: int) -> None:
        if chosen := _pick(self._next_in_turn(), number):
            self.tell(TurnBegan(self.now_s, chosen[1], chosen[0]))

    def end_turn(self, number: int) -> None:
        if chosen := _pick(self._in_turn(), number):
            self._end_turn(*chosen)

    def _end_turn(self, model: ModelId, name: WorkerId) -> None:
        has_requests = bool(self.cluster.workers[name].replicas[model].running)
        self.tell(TurnEnded(self.now_s, name, model, TurnEnd.TIME if has_requests else TurnEnd.IDLE))

    def fail(self, number: int) -> None:
        workers = self.cluster.workers.items()
        if chosen := _pick(sorted((model, name) for name, one in workers for model in one.replicas), number):
            model, name = chosen
            is_cut_off = number % 3 == 0 and self._replica(chosen).pipeline is not None
            replica = self.fleet.workers[name].replicas[model]
            known, was_ready = replica.model, replica.is_ready
            failure, failed_on = known.failure, list(known.failed_on)
            self.tell(ModelFailed(self.now_s, name, model, "broken", is_cut_off))
            if is_cut_off and was_ready:
                assert (known.failure, list(known.failed_on)) == (failure, failed_on)

    def report(self, number: int) -> None:
        bytes_by_rung = {Rung.HOST: number % 50, Rung.DISK: number // 50 % 100}
        node = NODES[number // 6 % len(NODES)]
        self.tell(ResidencyReported(self.now_s, MODELS[number % len(MODELS)], bytes_by_rung, node))

    def report_device(self, number: int) -> None:
        """A worker says what it has, or anything else of what it has or had, and of a model it never had."""
        if name := _pick(sorted(self.cluster.workers), number):
            worker = self.cluster.workers[name]
            if number % 2:
                self.tell(DeviceReported(self.now_s, name, worker.count_device_bytes()))
                return
            shares = {model: (number * (at + 7)) % 60 for at, model in enumerate(MODELS)}
            there = sorted({*worker.replicas, *worker.device.weights, MODELS[number % len(MODELS)]})
            bytes_by_model = {one: shares[model_of(one)] for one in there if shares[model_of(one)] % 5}
            self.tell(DeviceReported(self.now_s, name, bytes_by_model))

    def wait(self, number: int) -> None:
        """Time passes, at most until the timer."""
        until_s = self.now_s + (0.1, 1.0, 4.0)[number % 3]
        timer_s = self.cluster.timer_s
        if timer_s is not None and timer_s <= until_s:
            self.fire()
        else:
            self.now_s = until_s

    def fire(self) -> None:
        assert self.cluster.timer_s is not None
        self.now_s = self.cluster.timer_s
        self.tell(TimerFired(self.now_s))

    def lag(self, _: int) -> None:
        """What a lost worker, or one that was told to drop a model, had said before it knew."""
        self.tell(ModelReady(self.now_s, WorkerId("w0"), MODELS[0], (), 1.0))
        self.tell(RequestFinished(self.now_s, RequestId("r0"), 1))
        self.tell(RequestCancelled(self.now_s, RequestId("r0")))
        self.tell(LoadProgressed(self.now_s, WorkerId("w0"), MODELS[0], 1))
        self.tell(TurnBegan(self.now_s, WorkerId("w0"), MODELS[0]))
        self.tell(TurnEnded(self.now_s, WorkerId("w0"), MODELS[0], TurnEnd.TIME))
        self.tell(WorkerLost(self.now_s, WorkerId("w0")))
        self.tell(DeviceReported(self.now_s, WorkerId("w0"), {MODELS[0]: 5, ModelId("gone"): 5}))

    def come_to_rest(self) -> None:
        """Lost workers are replaced, loads end, requests finish, turns come, until nothing can happen."""
        for _ in range(1000):
            if self.fleet.draining:
                self.tell(NodeDraining(self.now_s, next(iter(self.fleet.draining)), is_draining=False))
            elif not self.fleet.is_complete:
                self.join(0)
            elif self._loading():
                self.ready(0)
            elif self._running():
                self.finish(0)
            elif idle := [one for one in self._in_turn() if not self._replica(one).running]:
                self._end_turn(*idle[0])
            elif self._next_in_turn():
                self.begin_turn(0)
            elif self.cluster.timer_s is not None:
                self.fire()
            else:
                self._check_pinned_have_turns()
                return
        raise AssertionError("it never comes to rest")

    def _loading(self) -> list[tuple[ModelId, WorkerId]]:
        return sorted(
            (model, name)
            for name, worker in self.cluster.workers.items()
            for model, replica in worker.replicas.items()
            if replica.is_loading
        )

    def _running(self) -> list[RequestId]:
        """Requests that may finish: where models take turns, those of models that are in turn."""
        return sorted(
            request_id
            for worker in self.cluster.workers.values()
            for replica in worker.replicas.values()
            for request_id in replica.running
            if replica.is_in_turn
        )

    def _next_in_turn(self) -> list[tuple[ModelId, WorkerId]]:
        """Models that want a turn and have room for it; no pinned one waits for another one's end."""
        return sorted(
            (model, name)
            for name, worker in self.cluster.workers.items()
            for model, replica in worker.replicas.items()
            if replica.wants_turn and worker.can_begin_turn(model)
        )

    def _in_turn(self) -> list[tuple[ModelId, WorkerId]]:
        """Models whose turn may end. Pipelines take none."""
        return sorted(
            (model, name)
            for name, worker in self.cluster.workers.items()
            for model, replica in worker.replicas.items()
            if worker.takes_turns and replica.is_in_turn and replica.hold is not Hold.PINNED
            if replica.pipeline is None
        )

    def _replica(self, model_on_worker: tuple[ModelId, WorkerId]) -> SimulatedReplica:
        model, name = model_on_worker
        return self.cluster.workers[name].replicas[model]

    def _check_pinned_have_turns(self) -> None:
        for name, worker in self.cluster.workers.items():
            for model, replica in worker.replicas.items():
                assert replica.hold is not Hold.PINNED or replica.is_in_turn, f"{model} on {name}"


def _check_options(action: Dispatch) -> None:
    """A request goes to one of the workers that were considered, which are few and named once."""
    names = [option.worker for option in action.options]
    possible = [option.worker for option in action.options if option.obstacle is None]
    assert action.worker in possible, f"{action}"
    assert len(set(names)) == len(names) <= 8, f"{action}"


def _check_retry(action: Reject) -> None:
    """Whoever is told when to come back is told a time that clients heed; a full queue always tells one."""
    assert action.reason is not RejectReason.QUEUE_FULL or action.retry_s is not None, f"{action}"
    assert action.retry_s is None or 1.0 <= action.retry_s <= 60.0, f"{action}"


def _pick(choices: list[T], number: int) -> T | None:
    return choices[number % len(choices)] if choices else None


MOVES: dict[str, Callable[[World, int], None]] = {
    "arrive": World.arrive,
    "finish": World.finish,
    "ready": World.ready,
    "wait": World.wait,
    "cancel": World.cancel,
    "progress": World.progress,
    "report": World.report,
    "report_device": World.report_device,
    "press": World.press,
    "forecast": World.forecast,
    "begin_turn": World.begin_turn,
    "end_turn": World.end_turn,
    "fail": World.fail,
    "join": World.join,
    "lose": World.lose,
    "lose_node": World.lose_node,
    "drain_node": World.drain_node,
    "measure_link": World.measure_link,
    "measure_stages": World.measure_stages,
    "deploy": World.deploy,
    "remove": World.remove,
    "stop": World.stop,
    "lag": World.lag,
}

#: A pipeline is formed of any workers that load a model at once.
ALWAYS = WhileLoading(min_gain_s=-math.inf)
#: What happens often comes more often.
KINDS = [
    *MOVES,
    *["arrive"] * 6,
    *["finish"] * 3,
    *["ready"] * 3,
    *["begin_turn"] * 3,
    *["wait"] * 2,
    *["press"] * 3,
]
MANY_MOVES = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 10_000)), max_size=150)
CONFIGS = st.builds(
    BrainConfig,
    max_queue=st.sampled_from([0, 2, 512]),
    patience_s=st.sampled_from([0.0, 2.0]),
    max_drain_s=st.sampled_from([1.0, 30.0]),
    max_resumes=st.sampled_from([0, 3]),
    takes_turns=st.booleans(),
    while_loading=st.sampled_from([None, ALWAYS]),
    first_token_s=st.sampled_from([None, 0.0, 1.0]),
    prewarming=st.sampled_from([None, None, Prewarming(0.5), Prewarming(0.5, is_advice=True)]),
)
Moves = Sequence[tuple[str, int]]


def draw_moves(seed: int) -> Moves:
    """Moves of a life so long that most things have happened in it."""
    choose = random.Random(seed)
    return [(choose.choice(KINDS), choose.randrange(10_000)) for _ in range(120)]


LONG_LIVES = st.builds(draw_moves, st.integers(0, 2**32))


def begun(config: BrainConfig) -> World:
    """A world with three workers and six models: one needs two of the workers, one may drop layers."""
    world = World(config)
    for number in (0, 1, 9):
        world.join(number)
    for number in (1, 32, 61, 88, 5):  # Models of 10 to 45 bytes, and one that is pinned.
        world.deploy(number)
    world.tell(ModelDeployed(0.0, staged(MODELS[3])))
    dropping = staged(MODELS[0], 2, max_seqs=4, may_drop=True, kv_token_bytes=1, is_pinned=True)
    world.tell(ModelDeployed(0.0, replace(dropping, min_replicas=2, max_replicas=2)))
    return world


def played(config: BrainConfig, moves: Moves) -> World:
    """The same after some moves."""
    world = begun(config)
    for kind, number in moves:
        world.move(kind, number)
    return world
