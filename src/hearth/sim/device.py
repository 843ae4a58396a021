"""The memory of a simulated device: whose weights and KV lie there. Chooses nobody who has to go.

    | weights of hosted models | KV and all else of each | one workspace | weights of evicted models | free |

Weights are some units, as layers or pages are. They come in forward order and go from their end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from hearth.core.types import ModelId

#: Units that the weights of a model consist of on a device without pages, unless it has fewer bytes.
NUM_UNITS = 32


@dataclass(slots=True)
class DeviceWeights:
    """The weights of one version of a model, or the units of them that are left. Written by the device."""

    digest: str
    units: tuple[int, ...]  #: bytes of each, in forward order
    num_units: int  #: the first so many have a place on the device
    #: Bytes of the first so many units.
    _bytes_by_num: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._bytes_by_num = tuple(accumulate(self.units, initial=0))

    @property
    def num_bytes(self) -> int:
        """Bytes that the weights take of the device."""
        return self._bytes_by_num[self.num_units]

    @property
    def total_bytes(self) -> int:
        """Bytes that the weights take once all of them have a place."""
        return self._bytes_by_num[-1]

    @property
    def tail(self) -> tuple[int, ...]:
        """Bytes of each unit that has a place, in the order in which they go."""
        return self.units[: self.num_units][::-1]


class DeviceMemory:
    """Bytes of one device, by whom they belong to. Mutable; written only by its worker."""

    def __init__(self, budget_bytes: int, page_bytes: int | None = None) -> None:
        """`page_bytes`: weights come and go by pages of that size; None: in a few units of any size."""
        self.budget_bytes = budget_bytes
        self._page_bytes = page_bytes
        self.weights: dict[ModelId, DeviceWeights] = {}
        #: KV, tables and the like of hosted models; and the workspace of each: all see the largest.
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
        if weights is None or weights.digest != digest or weights.total_bytes != self.rounded(num_bytes):
            weights = self.weights[model] = DeviceWeights(digest, self._split(num_bytes), 0)
        there_bytes = weights.num_bytes
        weights.num_units = len(weights.units)
        return there_bytes

    def place_front(self, model: ModelId, digest: str, num_bytes: int, front_bytes: int) -> int:
        """Give a place to at most so many bytes of the first units that a model lacks; return how many."""
        there_bytes = self.place_weights(model, digest, num_bytes)
        self.truncate(model, there_bytes + front_bytes)
        return self.count_bytes(model) - there_bytes

    def place_other(self, model: ModelId, own_bytes: int, workspace_bytes: int) -> None:
        """Have a hosted model take so much beside its weights, and a workspace that others see too."""
        self._other_bytes[model], self._workspace_bytes[model] = own_bytes, workspace_bytes

    def resize_other(self, model: ModelId, more_bytes: int) -> None:
        """Have a hosted model take more than it does beside its weights; less, if that is negative."""
        self._other_bytes[model] += more_bytes

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

    def rounded(self, num_bytes: int) -> int:
        """Return what so many bytes of weights take of the device."""
        page_bytes = self._page_bytes
        return num_bytes if page_bytes is None else -(-num_bytes // page_bytes) * page_bytes

    def _split(self, num_bytes: int) -> tuple[int, ...]:
        """Return the sizes of units that together hold so many bytes, none of them empty."""
        if self._page_bytes is not None:
            return (self._page_bytes,) * (self.rounded(num_bytes) // self._page_bytes)
        num_units = min(NUM_UNITS, num_bytes)
        ends = [at * num_bytes // num_units for at in range(num_units + 1)]
        return tuple(end - begin for begin, end in pairwise(ends))
