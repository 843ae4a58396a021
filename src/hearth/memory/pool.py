"""Device memory as whoever hosts models asks for it. Which bytes a model gets is for others to decide.

All memory of a worker's models comes from its pool, so the pool's own books say what is used, and no reading
of the device does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from hearth.types import ModelId


@dataclass(frozen=True, slots=True)
class Need:
    """What a model takes on the device."""

    weights_bytes: int
    workspace_bytes: int
    kv_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.weights_bytes + self.workspace_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class Space:
    """A model's memory: uint8 tensors of what it needs, nobody else's, with arbitrary bits in them."""

    weights: torch.Tensor
    workspace: torch.Tensor
    kv: torch.Tensor


class Pool(Protocol):
    """Mutable; any thread may call it."""

    @property
    def budget_bytes(self) -> int: ...

    @property
    def used_bytes(self) -> int:
        """By models that have a space; never above the budget."""

    def take(self, model: ModelId, need: Need) -> Space:
        """Memory for a model that has none yet. Raises DeviceError where the budget has no such room."""

    def give_back(self, model: ModelId) -> None:
        """All that the model has. Whoever used it has let go of it, on the device as well."""
