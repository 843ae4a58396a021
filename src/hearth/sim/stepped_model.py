"""A model on a simulated worker, from the order to host it to the last of its requests. Decides nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hearth.core.types import Hold, ModelId, Pace, RequestId
from hearth.policy.batch.step_sharing import MAX_HOLD_S
from hearth.policy.fleet.events import LoadModel
from hearth.policy.fleet.profile import ModelProfile
from hearth.sim.profile import ShapeProfile
from hearth.sim.stepped_engine import SteppedEngine


@dataclass(frozen=True, slots=True)
class HostOrder:
    """Host a model: the brain's order, with what a live worker finds in the model's files."""

    load: LoadModel
    profile: ModelProfile
    shape: ShapeProfile
    max_context: int


@dataclass(frozen=True, slots=True)
class StartOrder:
    """Run a request to the end of its answer."""

    request_id: RequestId
    model: ModelId
    num_prompt_tokens: int
    num_output_tokens: int
    pace: Pace
    arrived_s: float
    num_sent: int  #: tokens that workers which are gone have sent


@dataclass(frozen=True, slots=True)
class LoadUnderWay:
    """Bytes of a model on their way."""

    began_s: float
    end_s: float
    num_bytes: int
    is_front: bool = False  #: some of those that it lacks, before its turn

    @property
    def follow_s(self) -> float:
        """When a step may begin that follows the bytes layer by layer; infinite: no step may."""
        return math.inf if self.is_front else max(self.began_s, self.end_s - MAX_HOLD_S)


@dataclass(slots=True)
class SteppedModel:
    """A hosted model. Mutable; written by its worker."""

    order: HostOrder
    engine: SteppedEngine
    is_assembled: bool = False  #: its engine is there, as it is from its first load on
    is_returning: bool = False  #: it was evicted, and nothing of it was loaded since
    hold: Hold = Hold.WARM  #: while it has no requests
    load: LoadUnderWay | None = None
    requests: dict[RequestId, StartOrder] = field(default_factory=dict)
