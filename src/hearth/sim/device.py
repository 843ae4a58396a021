"""The memory of a simulated device. Evicts nothing by itself.

    | weights of hosted models | KV and all else of each | one workspace | weights of evicted models | free |

Weights consist of units, like layers or pages. They come in forward order and go from their end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from hearth.core.types import ModelId

#: Units that the weights of a model consist of on a device without pages, unless it has fewer bytes.
NUM_UNITS = 32


@dataclass(slots=True)
class DeviceWeights:
    digest: str
    units: tuple[int, ...]  #: bytes of each, in forward order
    num_units: int  #: the first so many have a place on the device
    begin_bytes: int = 0  #: of the model, those before the first unit
    _bytes_by_num: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._bytes_by_num = tuple(accumulate(self.units, initial=0))

    @property
    def num_bytes(self) -> int:
        return self._bytes_by_num[self.num_units]

    @property
    def tail(self) -> tuple[int, ...]:
        return self.units[: self.num_units][::-1]


class DeviceMemory:
    """Mutable; written only by its worker."""

    def __init__(self, budget_bytes: int, page_bytes: int | None = None) -> None:
        """`page_bytes`: size of the units of weights; None: a few units of any size."""
        self.budget_bytes = budget_bytes
        self._page_bytes = page_bytes
        self.weights: dict[ModelId, DeviceWeights] = {}
        #: KV, tables and the like of hosted models; and the workspace of each: all see the largest.
        self._other_bytes: dict[ModelId, int] = {}
        self._workspace_bytes: dict[ModelId, int] = {}

    @property
    def free_bytes(self) -> int:
        weights_bytes = sum(weights.num_bytes for weights in self.weights.values())
        workspace_bytes = max(self._workspace_bytes.values(), default=0)
        return self.budget_bytes - weights_bytes - workspace_bytes - sum(self._other_bytes.values())

    def count_bytes(self, model: ModelId) -> int:
        weights = self.weights.get(model)
        return 0 if weights is None else weights.num_bytes

    def place_weights(self, model: ModelId, digest: str, num_bytes: int, begin_bytes: int = 0) -> int:
        """Place all units of a model, or of the stage that begins behind so many bytes of it.

        Return how many bytes of them were there; those of other layers leave.
        """
        before = self.weights.get(model)
        units, there_bytes = self._split(num_bytes), 0
        if before is not None and before.digest == digest:
            end_bytes = min(begin_bytes + sum(units), before.begin_bytes + before.num_bytes)
            there_bytes = max(0, end_bytes - max(begin_bytes, before.begin_bytes))
        self.weights[model] = DeviceWeights(digest, units, len(units), begin_bytes)
        return there_bytes

    def place_front(self, model: ModelId, digest: str, num_bytes: int, front_bytes: int) -> int:
        """Place at most `front_bytes` of the first missing units; return how many."""
        there_bytes = self.place_weights(model, digest, num_bytes)
        self.truncate(model, there_bytes + front_bytes)
        return self.count_bytes(model) - there_bytes

    def place_other(self, model: ModelId, own_bytes: int, workspace_bytes: int) -> None:
        self._other_bytes[model], self._workspace_bytes[model] = own_bytes, workspace_bytes

    def resize_other(self, model: ModelId, more_bytes: int) -> None:
        self._other_bytes[model] += more_bytes

    def take_units(self, model: ModelId, num_units: int) -> None:
        weights = self.weights[model]
        assert num_units <= weights.num_units, f"`{model}` has {weights.num_units=} {num_units=}"
        weights.num_units -= num_units
        if not weights.num_units:
            del self.weights[model]

    def truncate(self, model: ModelId, num_bytes: int) -> None:
        while (weights := self.weights.get(model)) is not None and weights.num_bytes > num_bytes:
            self.take_units(model, 1)

    def free_other(self, model: ModelId) -> None:
        self._other_bytes.pop(model, None)
        self._workspace_bytes.pop(model, None)

    def drop(self, model: ModelId) -> None:
        self.weights.pop(model, None)
        self.free_other(model)

    def rounded(self, num_bytes: int) -> int:
        page_bytes = self._page_bytes
        return num_bytes if page_bytes is None else -(-num_bytes // page_bytes) * page_bytes

    def _split(self, num_bytes: int) -> tuple[int, ...]:
        if self._page_bytes is not None:
            return (self._page_bytes,) * (self.rounded(num_bytes) // self._page_bytes)
        num_units = min(NUM_UNITS, num_bytes)
        ends = [at * num_bytes // num_units for at in range(num_units + 1)]
        return tuple(end - begin for begin, end in pairwise(ends))
