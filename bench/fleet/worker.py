"""A coarse simulated worker: carries out the brain's orders on a device that is only numbers. Knows no clock.

An order that no worker could carry out raises AssertionError: a model beyond the budget, one evicted under
its requests, a request without a slot. Whose weights give way is decided by the code that decides it on a
real worker (`policy/memory/reclaim.py`, `byte_eviction.py`, `reload_cost.py`). The caller says when a load
ends, when a request is done and, where models take turns, whose turn it is. KV beyond a promise and single
steps are not simulated: for that there is `stepped_worker.py`, on the same device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hearth.core.types import Hold, ModelId, Pipeline, RequestId, WorkerId, model_of
from hearth.policy.fleet.events import Evict, LoadModel, RungUse, SetHold
from hearth.policy.fleet.profile import Footprint, ModelProfile, Promise
from hearth.policy.memory.byte_eviction import TAKEABLE, Tail, effective_hold, plan_takes
from hearth.policy.memory.device_eviction import KvView, TablesView
from hearth.policy.memory.reclaim import ReclaimPolicy
from hearth.policy.memory.reclaim_orders import ReclaimOrder, TakeWeights, carry_out
from hearth.policy.memory.reload_cost import DeviceReloadCosts
from hearth.sim.device import DeviceMemory


class _NoKv:
    """The books of KV on a worker whose models have just the KV that they are promised: none can give any."""

    def models(self) -> tuple[ModelId, ...]:
        return ()

    def kv_of(self, model: ModelId) -> KvView:
        raise AssertionError(f"`{model}` has no KV beyond its promise")

    def growth_bytes(self, model: ModelId, num_blocks: int) -> int:
        raise AssertionError(f"`{model}` has no KV beyond its promise: {num_blocks=}")

    def extents(self, model: ModelId) -> tuple[range, ...]:
        return ()

    def cached_to_spare(self, model: ModelId) -> int:
        return 0

    def tables_of(self, model: ModelId) -> TablesView:
        raise AssertionError(f"`{model}` has no tables")


NO_KV = _NoKv()


@dataclass(slots=True)
class SimulatedReplica:
    """A hosted model. Mutable; written only by its worker."""

    profile: ModelProfile
    version: int  #: of the deployment that it was loaded for
    promise: Promise
    load_number: int  #: of its last load on this worker
    missing_bytes: int  #: of its weights: their place is kept, and the load under way brings them
    is_loading: bool = True
    is_ready: bool = False  #: it was loaded once
    is_in_turn: bool = True
    is_awaited: bool = False  #: it is loaded behind a stage of it, also without requests
    has_had_turn: bool = False  #: or has one
    hold: Hold = Hold.WARM  #: while it has no requests
    running: dict[RequestId, None] = field(default_factory=dict)
    pipeline: Pipeline | None = None  #: that the worker is a member of; None: it has the whole model

    @property
    def current_hold(self) -> Hold:
        """How the replica is held now, with its requests."""
        has_requests, is_loading = bool(self.running), self.is_loading
        return effective_hold(
            self.hold, is_loading=is_loading, has_requests=has_requests, has_turn=self.is_in_turn
        )

    @property
    def wants_turn(self) -> bool:
        """True if the replica is to have its turn, and has none."""
        return not self.is_in_turn and (bool(self.running) or self.is_awaited or self.hold is Hold.PINNED)

    @property
    def owed(self) -> Promise:
        """The promise that binds the worker now: out of turn a replica keeps a little, once it has had it."""
        if self.is_in_turn:
            return self.promise
        if not self.has_had_turn:
            return Promise(0, 0)
        return Promise(self.promise.standing_bytes, self.promise.workspace_bytes)


class SimulatedWorker:
    """Hosted models on one device. Mutable; written only by whoever drives it."""

    def __init__(
        self,
        name: WorkerId,
        kind: str,
        budget_bytes: int,
        *,
        shares_workspace: bool = True,
        takes_turns: bool = False,
    ) -> None:
        self.name, self.shares_workspace, self.takes_turns = name, shares_workspace, takes_turns
        self.kind = kind
        self.device = DeviceMemory(budget_bytes)
        self.replicas: dict[ModelId, SimulatedReplica] = {}
        self._costs = DeviceReloadCosts()
        self._policy = ReclaimPolicy(NO_KV, keeps_addresses=True)
        self._num_loads = 0

    @property
    def promised_bytes(self) -> int:
        """Bytes owed to all hosted models: what each has for itself, and the largest of what they share."""
        return self._add_up([replica.owed for replica in self.replicas.values()])

    def can_begin_turn(self, model: ModelId) -> bool:
        """True if a model out of turn has room for its turn beside those in turn."""
        others = [replica.owed for name, replica in self.replicas.items() if name != model]
        return self._add_up([*others, self.replicas[model].promise]) <= self.device.budget_bytes

    def _add_up(self, promises: Sequence[Promise]) -> int:
        workspace_bytes = max((promise.workspace_bytes for promise in promises), default=0)
        return workspace_bytes + sum(promise.own_bytes for promise in promises)

    # Orders.

    def load(self, order: LoadModel, profile: ModelProfile, version: int, now_s: float) -> SimulatedReplica:
        """Host a model, and begin to load what is missing of it."""
        model, footprint = order.model, profile.footprints[self.kind]
        if order.pipeline is not None:
            profile, footprint = self._stage_of(order, order.pipeline, profile)
        promise = footprint.promise if self.shares_workspace else footprint.promise.unshared
        assert model not in self.replicas, f"loaded twice on one worker: {order}"
        assert footprint.min_kv_bytes == order.kv_floor_bytes <= order.max_kv_bytes, f"{order} {footprint}"
        assert order.max_kv_bytes <= footprint.max_kv_bytes, f"{order} {footprint}"
        self._costs.hosted(model, profile.weight)
        replica = SimulatedReplica(profile, version, promise, load_number=0, missing_bytes=0)
        replica.pipeline = order.pipeline
        replica.is_awaited = any(model_of(one) == model for one in self.replicas)
        self.replicas[model] = replica
        if self.takes_turns and order.pipeline is None:
            replica.is_loading = replica.is_in_turn = False
            return replica
        self.device.place_other(model, promise.own_bytes - profile.num_bytes, promise.workspace_bytes)
        assert self.promised_bytes <= self.device.budget_bytes, f"beyond the budget: {order}"
        self._begin_load(model, replica, now_s)
        return replica

    def _stage_of(
        self, order: LoadModel, pipeline: Pipeline, profile: ModelProfile
    ) -> tuple[ModelProfile, Footprint]:
        """Return the part of a model that this worker has in a pipeline, and its memory."""
        (member,) = [one for one in pipeline.members if one.worker == self.name]
        sizes = profile.stages[self.kind]
        num_layers, is_first = member.end - member.begin, member.begin == 0
        is_last = member.end == sizes.num_layers
        footprint = sizes.footprint(num_layers, is_first=is_first, is_last=is_last)
        num_blocks = order.kv_floor_bytes // sizes.block_bytes(num_layers) - 1
        assert pipeline.num_blocks <= num_blocks, f"{order} {num_blocks=}"
        assert footprint.promise == order.promise, f"{order} {footprint}"
        num_bytes = sizes.stored.of(num_layers, is_first=is_first, is_last=is_last)
        return replace(profile, num_bytes=num_bytes, digest=f"{profile.digest} {member.begin}"), footprint

    def begin_turn(self, model: ModelId, now_s: float) -> None:
        """Give a model all that it is promised, and begin to load what is missing of it."""
        replica = self.replicas[model]
        assert replica.wants_turn, f"needless turn: {model=}"
        assert self.can_begin_turn(model), f"no room for its turn: {model=}"
        replica.is_in_turn = replica.has_had_turn = True
        promise, profile = replica.promise, replica.profile
        self.device.place_other(model, promise.own_bytes - profile.num_bytes, promise.workspace_bytes)
        weights = self.device.weights.get(model)
        is_whole = weights is not None and weights.digest == profile.digest
        if replica.is_ready and is_whole and self.device.count_bytes(model) == profile.num_bytes:
            self._make_room(model, now_s)
        else:
            self._begin_load(model, replica, now_s)

    def end_turn(self, model: ModelId) -> None:
        """Leave a model what it keeps out of turn, and its weights until somebody needs the room."""
        replica = self.replicas[model]
        assert replica.is_in_turn, f"not in turn: {model=}"
        assert replica.hold is not Hold.PINNED, f"a pinned model never gives way: {model=}"
        replica.is_in_turn = False
        if replica.is_loading:
            self.device.truncate(model, self.device.count_bytes(model) - replica.missing_bytes)
            replica.is_loading, replica.missing_bytes = False, 0
        self.device.place_other(model, replica.promise.standing_bytes, replica.promise.workspace_bytes)

    def evict(self, order: Evict) -> None:
        """Host a model no longer; its weights stay until somebody needs their place, unless it is freed."""
        replica = self.replicas.pop(order.model, None)
        assert replica is not None or order.is_freed, f"evicted twice: {order}"
        assert replica is None or not replica.running, f"evicted while busy: {order}"
        assert order.cost_s >= 0.0, f"{order.cost_s=}"
        if order.is_freed:
            self._forget(order.model)
        elif replica is not None:
            self.device.free_other(order.model)
            there_bytes = self.device.count_bytes(order.model) - replica.missing_bytes
            self.device.truncate(order.model, there_bytes)

    def set_hold(self, order: SetHold) -> None:
        """Hold a model otherwise while it has no requests."""
        replica = self.replicas[order.model]
        assert order.hold not in (Hold.BUSY, replica.hold), f"needless: {order}"
        replica.hold = order.hold

    def run(self, request_id: RequestId, model: ModelId, now_s: float) -> SimulatedReplica:
        """Give a request a slot; if others took weights of its model, load them again."""
        replica = self.replicas[model]
        max_seqs = replica.profile.footprints[self.kind].max_seqs
        assert len(replica.running) < max_seqs, f"no slot: {request_id=} {model=}"
        replica.running[request_id] = None
        if replica.hold is Hold.RETAINED:
            replica.hold = Hold.WARM
        self._costs.asked(model, now_s)
        is_partial = self.device.count_bytes(model) < replica.profile.num_bytes
        if replica.is_in_turn and not replica.is_loading and is_partial:
            self._begin_load(model, replica, now_s)
        return replica

    def cancel(self, request_id: RequestId, model: ModelId) -> None:
        """Free the slot of a request that is no longer wanted."""
        del self.replicas[model].running[request_id]

    # Facts, at the times that the driver chooses.

    def finish_load(self, model: ModelId, uses: Sequence[RungUse]) -> None:
        """Have all weights of a model there, the missing ones from these rungs."""
        replica = self.replicas[model]
        replica.is_loading, replica.is_ready, replica.missing_bytes = False, True, 0
        replica.is_awaited = False
        bytes_by_rung = {use.rung: use.num_bytes for use in uses}
        busy_s_by_rung = {use.rung: use.seconds for use in uses}
        self._costs.learn_load(model, bytes_by_rung, busy_s_by_rung, sum(busy_s_by_rung.values()))

    def finish_run(self, request_id: RequestId, model: ModelId) -> None:
        """Free the slot of a request that is done."""
        del self.replicas[model].running[request_id]

    def fail(self, model: ModelId) -> list[RequestId]:
        """Lose a model with all its memory; return the requests that it had."""
        replica = self.replicas.pop(model)
        self._forget(model)
        return list(replica.running)

    def count_device_bytes(self) -> dict[ModelId, int]:
        """Return how many bytes of each model are there, hosted or evicted, as a worker reports them."""
        bytes_by_model = {}
        for model in self.device.weights:
            replica = self.replicas.get(model)
            missing_bytes = 0 if replica is None else replica.missing_bytes
            bytes_by_model[model] = self.device.count_bytes(model) - missing_bytes
        return {model: num_bytes for model, num_bytes in bytes_by_model.items() if num_bytes}

    def check(self) -> None:
        """Raise AssertionError if more is promised, or lies on the device, than there is."""
        assert self.promised_bytes <= self.device.budget_bytes, f"`{self.name}`: {self.promised_bytes=}"
        assert self.device.free_bytes >= 0, f"`{self.name}`: {self.device.free_bytes=}"
        for model, replica in self.replicas.items():
            weights_bytes = self.device.count_bytes(model)
            is_partial = weights_bytes < replica.profile.num_bytes
            assert 0 <= replica.missing_bytes <= weights_bytes, f"`{model}` on `{self.name}`: {replica}"
            assert not (is_partial and replica.is_loading), f"`{model}` on `{self.name}` lost what it loads"

    def _begin_load(self, model: ModelId, replica: SimulatedReplica, now_s: float) -> None:
        """Give all weights of a model a place, for which others may have to give way."""
        profile = replica.profile
        there_bytes = self.device.place_weights(model, profile.digest, profile.num_bytes)
        self._num_loads += 1
        replica.is_loading, replica.load_number = True, self._num_loads
        replica.missing_bytes = profile.num_bytes - there_bytes
        self._make_room(model, now_s)

    def _make_room(self, model: ModelId, now_s: float) -> None:
        """Have idle models give way until the model has its place, by the policy that real workers run."""
        orders = self._policy.make_room(model, lambda: max(0, -self.device.free_bytes))
        missing_bytes = carry_out(orders, lambda order: self._carry_out(order, now_s))
        assert not missing_bytes, f"`{self.name}` cannot keep its promises: {missing_bytes=}"

    def _carry_out(self, order: ReclaimOrder, now_s: float) -> int:
        """Take weights as a pool does, cheapest first; return how many bytes came free."""
        assert isinstance(order, TakeWeights), f"a simulated worker has no KV beyond its promise: {order}"
        tails = []
        for model, weights in self.device.weights.items():
            replica = self.replicas.get(model)
            hold = Hold.RETAINED if replica is None else replica.current_hold
            is_stage = replica is not None and replica.pipeline is not None  # keeps all of its memory
            if hold in TAKEABLE and model != self._policy.placing and not is_stage:
                tails.append(Tail(model, hold, self._costs.cost_s_per_byte(model, now_s), weights.tail))
        before_bytes = self.device.free_bytes
        for take in plan_takes(tails, order.num_bytes):
            self.device.take_units(take.model, take.num_units)
        return self.device.free_bytes - before_bytes

    def _forget(self, model: ModelId) -> None:
        """Drop all bytes of a model, and what was learnt of it: another of its name may differ."""
        self.device.drop(model)
        self._costs.forget(model)
