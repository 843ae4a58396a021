"""The memory of a simulated device: how much of whose weights lies there. Chooses nobody who has to go.

    | weights of hosted models | their least KV | one workspace | weights of evicted models | free |

Weights are some units, as layers are. They come in forward order and go from their end.
"""

from __future__ import annotations

from dataclasses import dataclass

from hearth.types import ModelId

#: Units that the weights of a model consist of, unless it has fewer bytes.
NUM_UNITS = 32


@dataclass(slots=True)
class DeviceWeights:
    """The weights of one version of a model, or the units of them that are left. Written by the device."""

    digest: str
    units: tuple[int, ...]  #: bytes of each, in forward order
    num_units: int  #: the first so many have a place on the device

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take of the device."""
        return sum(self.units[: self.num_units])

    @property
    def tail(self) -> tuple[int, ...]:
        """Bytes of each unit that has a place, in the order in which they go."""
        return self.units[: self.num_units][::-1]


class DeviceMemory:
    """Bytes of one device, by whom they belong to. Mutable; written only by its worker."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.weights: dict[ModelId, DeviceWeights] = {}
        #: Tables and least KV of hosted models; and the workspace of each, of which all see the largest.
        self._other_bytes: dict[ModelId, int] = {}
        self._workspace_bytes: dict[ModelId, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has."""
        weights_bytes = sum(weights.num_bytes for weights in self.weights.values())
        workspace_bytes = max(self._workspace_bytes.values(), default=0)
        return self.budget_bytes - weights_bytes - workspace_bytes - sum(self._other_bytes.values())

    def count_bytes(self, model: ModelId) -> int:
        """Return how many bytes the weights of a model take."""
        weights = self.weights.get(model)
        return 0 if weights is None else weights.num_bytes

    def place_weights(self, model: ModelId, digest: str, num_bytes: int) -> int:
        """Give a place to all units of a model; return how many bytes of this version were there already."""
        weights = self.weights.get(model)
        if weights is None or weights.digest != digest or sum(weights.units) != num_bytes:
            weights = self.weights[model] = DeviceWeights(digest, _split(num_bytes), 0)
        there_bytes = weights.num_bytes
        weights.num_units = len(weights.units)
        return there_bytes

    def place_other(self, model: ModelId, own_bytes: int, workspace_bytes: int) -> None:
        """Give a hosted model its least KV and all else but weights, and a workspace that others see too."""
        self._other_bytes[model], self._workspace_bytes[model] = own_bytes, workspace_bytes

    def take_units(self, model: ModelId, num_units: int) -> None:
        """Take so many units from the end of a model's weights."""
        weights = self.weights[model]
        assert num_units <= weights.num_units, f"`{model}` has {weights.num_units=} {num_units=}"
        weights.num_units -= num_units
        if not weights.num_units:
            del self.weights[model]

    def truncate(self, model: ModelId, num_bytes: int) -> None:
        """Take units from the end of a model's weights until it has at most so many bytes."""
        while (weights := self.weights.get(model)) is not None and weights.num_bytes > num_bytes:
            self.take_units(model, 1)

    def free_other(self, model: ModelId) -> None:
        """Take the workspace and KV of a model that is hosted no longer; its weights stay."""
        self._other_bytes.pop(model, None)
        self._workspace_bytes.pop(model, None)

    def drop(self, model: ModelId) -> None:
        """Take all that a model has."""
        self.weights.pop(model, None)
        self.free_other(model)


def _split(num_bytes: int) -> tuple[int, ...]:
    """Return the sizes of units that together have so many bytes, none of them empty."""
    num_units = min(NUM_UNITS, num_bytes)
    return tuple((at + 1) * num_bytes // num_units - at * num_bytes // num_units for at in range(num_units))
