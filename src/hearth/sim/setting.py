"""The setting of a simulation: the models, the workers and how models share them. Simulates nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hearth.errors import ConfigError
from hearth.policy.fleet.events import Footprint, ModelProfile
from hearth.policy.fleet.footprint import PAGE_BYTES
from hearth.policy.turns.turn_policy import TurnRules
from hearth.sim.profile import ShapeProfile
from hearth.sizes import StepLimits
from hearth.types import ModelId, Pace

#: What every engine takes beside weights and KV, in whole pages: about that of 1 to 8 billion parameters.
WORKSPACE_BYTES, TABLES_BYTES = 544 << 20, 16 << 20
#: The kind of all simulated devices: memory is mapped by pages, and one workspace serves all models.
KIND = "cuda"
#: As `EngineConfig` has them.
DEFAULT_LIMITS = StepLimits(max_batch_tokens=4096, max_seqs=256, block_tokens=16)
DEFAULT_MAX_STEP_S = 0.06
_MODELS = re.compile(r"([^*,\s]+)(?:\*([1-9]\d*))?")


class Policy(StrEnum):
    """How models that do not fit together share a worker."""

    TURNS = "turns"  #: by time
    DRAIN = "drain"  #: who waits too long has a busy model end first
    ONE_AT_A_TIME = "one-at-a-time"  #: in order of arrival, one model alone


@dataclass(frozen=True, slots=True)
class OnTime:
    """By when tokens have to be sent to count as on time."""

    first_token_s: float = 1.0  #: after the arrival
    tokens_per_s: float = 10.0  #: from then on


@dataclass(frozen=True, slots=True)
class SimulationSetting:
    """A service to be simulated."""

    shapes: Mapping[ModelId, str]  #: the shape of each model, as a profile names it
    memory_bytes: int  #: of each worker
    num_workers: int = 1
    policy: Policy = Policy.TURNS
    context: int = 2048
    limits: StepLimits = DEFAULT_LIMITS
    max_step_s: float = DEFAULT_MAX_STEP_S  #: as `PromptAllowance` has it
    pace: Pace = field(default_factory=Pace)  #: of all requests
    rules: TurnRules = field(default_factory=TurnRules)
    on_time: OnTime = field(default_factory=OnTime)
    max_queue: int = 512
    keep_alive_s: float = 300.0

    def model_profile(self, model: ModelId, shape: ShapeProfile) -> ModelProfile:
        """Return what the brain knows of a model of such a shape."""
        block_bytes = shape.kv_bytes_per_token * self.limits.block_tokens
        context_blocks = self.limits.num_blocks(self.context)
        footprint = Footprint(
            fixed_bytes=_in_pages(shape.weights_bytes) + WORKSPACE_BYTES + TABLES_BYTES,
            min_kv_bytes=_in_pages((1 + context_blocks) * block_bytes),
            max_kv_bytes=_in_pages((1 + self.limits.max_seqs * context_blocks) * block_bytes),
            workspace_bytes=WORKSPACE_BYTES,
            tables_bytes=TABLES_BYTES,
            sink_bytes=_in_pages(block_bytes),
        )
        return ModelProfile(
            model, shape.weights_bytes, {KIND: footprint}, self.keep_alive_s, digest=str(model)
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
    """Return bytes rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
