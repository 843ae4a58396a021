"""A model on a simulated worker, the orders for it, and the facts that its worker reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hearth.core.sizes import StepLimits, mixed_sizes
from hearth.core.types import Hold, ModelId, Pace, RequestId, Rung
from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.batch.kv_pressure import PressureWatch
from hearth.policy.batch.plan import Admission
from hearth.policy.batch.step_sharing import MAX_HOLD_S
from hearth.policy.fleet.events import CancelRun, Event, Evict, LoadModel, SetHold
from hearth.policy.fleet.footprint import PAGE_BYTES
from hearth.policy.fleet.profile import ModelProfile
from hearth.policy.memory.kv_range import KvRange
from hearth.sim.profile import ShapeProfile
from hearth.sim.stepped_engine import SteppedEngine


@dataclass(frozen=True, slots=True)
class HostOrder:
    load: LoadModel
    profile: ModelProfile
    shape: ShapeProfile
    max_context: int
    hops_s: float = 0.0  #: of a step's way through all stages and back
    begin_bytes: int = 0  #: of the model, those before what the worker has of it

    def in_pipeline(self) -> HostOrder:
        """Return the order for what the worker has of a model: a stage, if a pipeline runs it."""
        load, pipeline = self.load, self.load.pipeline
        if pipeline is None:
            return self
        member = next(one for one in pipeline.members if one.worker == load.worker)
        num_layers, total = member.end - member.begin, pipeline.members[-1].end
        stage_bytes = -(-self.profile.num_bytes * num_layers // total)
        shares = [(one.end - one.begin) / total for one in pipeline.members]
        shape = self.shape.in_stages(shares, num_layers / total, self.hops_s)
        begin_bytes = self.profile.num_bytes * member.begin // total
        profile = replace(self.profile, num_bytes=stage_bytes)
        return replace(self, profile=profile, shape=shape, begin_bytes=begin_bytes)

    @property
    def is_stage(self) -> bool:
        return self.load.pipeline is not None

    def tables_bytes(self, sink_bytes: int) -> int:
        """Return what the model keeps besides weights and KV."""
        load = self.load
        if not self.is_stage:
            return load.promise.standing_bytes - sink_bytes
        weights_bytes = -(-self.profile.num_bytes // PAGE_BYTES) * PAGE_BYTES
        return load.promise.own_bytes - load.kv_floor_bytes - weights_bytes

    def new_engine(self, limits: StepLimits, max_step_s: float) -> SteppedEngine:
        block_bytes = self.shape.kv_bytes_per_token * limits.block_tokens
        batch_limits = BatchLimits(
            limits.max_batch_tokens, limits.max_seqs, self.max_context, mixed_sizes(limits)
        )
        kv_bytes = self.load.max_kv_bytes
        kv = KvRange(block_bytes, PAGE_BYTES, max(2, kv_bytes // block_bytes))
        floor_blocks = max(1, self.load.kv_floor_bytes // block_bytes - 1)
        return SteppedEngine(self.shape, batch_limits, kv, limits.block_tokens, floor_blocks, max_step_s)


@dataclass(frozen=True, slots=True)
class StartOrder:
    request_id: RequestId
    model: ModelId
    num_prompt_tokens: int
    num_output_tokens: int
    pace: Pace
    arrived_s: float
    num_sent: int  #: tokens that lost workers have sent
    conversation: int | None = None
    kv_s: float = 0.0  #: when the KV that it had elsewhere has come; 0: it is computed again


WorkerOrder = HostOrder | StartOrder | Evict | SetHold | CancelRun


@dataclass(frozen=True, slots=True)
class TokensSent:
    at_s: Sequence[float]
    request_ids: tuple[RequestId, ...]
    model: ModelId  #: as its worker hosts it


@dataclass(frozen=True, slots=True)
class RequestsStarted:
    """Requests were admitted to a step that began now, for the first time or after a preemption."""

    now_s: float
    admissions: tuple[Admission, ...]


@dataclass(frozen=True, slots=True)
class Paused:
    request_ids: tuple[RequestId, ...]


WorkerFact = Event | TokensSent | RequestsStarted | Paused


@dataclass(frozen=True, slots=True)
class LoadUnderWay:
    began_s: float
    end_s: float
    num_bytes: int
    is_front: bool = False  #: a prefetch of some missing bytes before its turn
    rung: Rung = Rung.HOST  #: whose bytes it waited for
    shared_bytes: int = 0  #: of `num_bytes`, those that a stage beside the model has brought

    @property
    def moved_bytes(self) -> int:
        return max(0, self.num_bytes - self.shared_bytes)

    @property
    def follow_s(self) -> float:
        """When a step that follows the load layer by layer may begin; infinite: none may."""
        return math.inf if self.is_front else max(self.began_s, self.end_s - MAX_HOLD_S)


@dataclass(slots=True)
class SteppedModel:
    order: HostOrder
    engine: SteppedEngine
    is_assembled: bool = False  #: its engine exists: since its first load
    is_returning: bool = False  #: it was evicted and nothing was loaded since
    hold: Hold = Hold.WARM  #: while it has no requests
    load: LoadUnderWay | None = None
    requests: dict[RequestId, StartOrder] = field(default_factory=dict)
    num_cold: int = 0  #: requests that came while it was not all loaded, since its last load
    watch: PressureWatch = field(default_factory=PressureWatch)
