"""The setting of a simulation: models, workers and how models share them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hearth.core.errors import ConfigError
from hearth.core.sizes import (
    Dimensions,
    StepLimits,
    StepSize,
    WantedLimits,
    run_bytes,
    table_buffers,
    workspace_bytes,
)
from hearth.core.types import LOCAL, ModelId, NodeId, Pace
from hearth.policy.batch.step_limits import step_limits
from hearth.policy.fleet.events import Prewarming
from hearth.policy.fleet.footprint import PAGE_BYTES
from hearth.policy.fleet.profile import Footprint, ModelProfile, PartBytes, StageSizes
from hearth.policy.turns.turn_policy import TurnRules
from hearth.sim.network import Transfers
from hearth.sim.profile import ShapeProfile

#: Limits, workspace and tables of every engine are those of this model, Llama-3.2-3B.
TYPICAL = Dimensions(
    num_layers=28,
    num_heads=24,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=3072,
    embed_size=3072,
    intermediate_size=8192,
    vocab_size=128256,
    rope_dim=128,
    is_gated=True,
    is_parallel=False,
)
TYPICAL_DTYPE = "bfloat16"
#: The kind of all simulated devices: memory is mapped by pages, and one workspace serves all models.
KIND = "cuda"
DEFAULT_MAX_STEP_S = 0.1
_MODELS = re.compile(r"([^*,\s]+)(?:\*([1-9]\d*))?")


class Policy(StrEnum):
    TURNS = "turns"  #: by time
    DRAIN = "drain"  #: who waits too long has a busy model end first
    ONE_AT_A_TIME = "one-at-a-time"  #: in order of arrival, one model alone


@dataclass(frozen=True, slots=True)
class OnTime:
    first_token_s: float = 1.0  #: after the arrival
    tokens_per_s: float = 10.0  #: from then on


@dataclass(frozen=True, slots=True)
class SimulationSetting:
    shapes: Mapping[ModelId, str]  #: the shape of each model, as a profile names it
    memory_bytes: int  #: of each worker
    num_workers: int = 1
    num_nodes: int = 1  #: machines; workers are spread over them evenly
    transfers: Transfers = field(default_factory=Transfers)
    #: A device whose models are all retained goes to others, and an empty one is there in its place.
    gives_back: bool = False
    device_hour_price: float | None = None
    policy: Policy = Policy.TURNS
    context: int = 2048
    wanted_limits: WantedLimits = field(default_factory=lambda: WantedLimits(None, None, block_tokens=16))
    max_step_s: float = DEFAULT_MAX_STEP_S  #: as `PromptAllowance` has it
    pace: Pace = field(default_factory=Pace)  #: of all requests
    rules: TurnRules = field(default_factory=TurnRules)
    on_time: OnTime = field(default_factory=OnTime)
    max_queue: int = 512
    keep_alive_s: float = 300.0
    staged_start_gain_s: float | None = None  #: as `service.staged_start_gain`
    first_token_s: float | None = None  #: as `BrainConfig.first_token_s`
    prewarming: Prewarming | None = None  #: as `BrainConfig.prewarming`
    may_drop: bool = False  #: as `drop` of a model
    #: Of systems to compare with: a model takes a whole device; has it all the time; its weights leave the
    #: device when it is idle for `keep_alive_s`; idle models are evicted by their last use alone.
    is_exclusive: bool = False
    is_static: bool = False
    frees_idle: bool = False
    evicts_by_last_use: bool = False

    @property
    def nodes(self) -> list[NodeId]:
        return [LOCAL, *(NodeId(f"node-{number}") for number in range(1, self.num_nodes))]

    def node_of(self, worker: int) -> NodeId:
        return self.nodes[worker * self.num_nodes // self.num_workers]

    @property
    def limits(self) -> StepLimits:
        return step_limits(self.wanted_limits, TYPICAL, TYPICAL_DTYPE, KIND, self.memory_bytes)

    def model_profile(self, model: ModelId, shape: ShapeProfile) -> ModelProfile:
        limits = self.limits
        size = StepSize.of(limits, KIND)
        shared_bytes = _in_pages(workspace_bytes(TYPICAL, TYPICAL.layers, TYPICAL_DTYPE, size))
        tables_bytes = _in_pages(run_bytes(table_buffers(TYPICAL, limits, self.context)))
        block_bytes = shape.kv_bytes_per_token * limits.block_tokens
        context_blocks = limits.num_blocks(self.context)
        fixed_bytes = _in_pages(shape.weights_bytes) + shared_bytes + tables_bytes
        min_kv_bytes = _in_pages((1 + context_blocks) * block_bytes)
        max_kv_bytes = _in_pages((1 + limits.max_seqs * context_blocks) * block_bytes)
        if self.is_exclusive:
            min_kv_bytes = max(min_kv_bytes, (self.memory_bytes - fixed_bytes) // PAGE_BYTES * PAGE_BYTES)
            max_kv_bytes = max(max_kv_bytes, min_kv_bytes)
        footprint = Footprint(
            fixed_bytes=fixed_bytes,
            min_kv_bytes=min_kv_bytes,
            max_kv_bytes=max_kv_bytes,
            workspace_bytes=shared_bytes,
            tables_bytes=tables_bytes,
            sink_bytes=_in_pages(block_bytes),
            max_seqs=limits.max_seqs,
            kv_token_bytes=shape.kv_bytes_per_token,
        )
        num_layers = TYPICAL.num_layers
        parts = PartBytes(-(-shape.weights_bytes // num_layers), first_bytes=0, last_bytes=0)
        stages = StageSizes(
            num_layers=num_layers,
            stored=parts,
            placed=parts,
            spare_bytes=0,
            unit_bytes=PAGE_BYTES,
            kv_layer_bytes=-(-block_bytes // num_layers),
            kv_unit_bytes=PAGE_BYTES,
            num_lost_blocks=0,
            workspace_bytes=shared_bytes,
            tables_bytes=tables_bytes,
            context_blocks=context_blocks,
            max_seqs=limits.max_seqs,
        )
        return ModelProfile(
            model,
            shape.weights_bytes,
            {KIND: footprint},
            math.inf if self.is_static else self.keep_alive_s,
            digest=str(model),
            is_pinned=self.is_static,
            stages={KIND: stages},
            may_drop=self.may_drop,
        )


def parse_models(text: str) -> dict[ModelId, str]:
    """Return the shapes of models by name: `1b,7b*2` are `1b-0`, `7b-1` and `7b-2`.

    Raises:
        ConfigError: the text is no list of shapes.
    """
    shapes: dict[ModelId, str] = {}
    for part in text.split(","):
        match = _MODELS.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"models are shapes like `1b,7b,3b` or `7b*40`, given: {part!r} in {text!r}")
        for _ in range(int(match[2] or 1)):
            shapes[ModelId(f"{match[1]}-{len(shapes)}")] = match[1]
    return shapes


def _in_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
