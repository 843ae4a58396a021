"""A LoRA adapter as data: which projections of its base it changes, their ranks, and the layout of its bytes.

An adapter adds `b @ (a @ x)` to the output of a projection. Several projections of a checkpoint are one in
the base (q, k and v; gate and up), so a target is such a fused projection, and its slices are the rows of its
output that have their own factors:

    target: a [sum of the slices' ranks, inputs of the projection]
            b of the first slice [its rank, its rows] | b of the second | ...

The scale is multiplied into `b`, which is stored transposed: a kernel that computes some outputs of a row
reads whole lines of it, whatever the rank. Its rows are padded to a multiple of 8 numbers. Factors are in
forward order, each at a multiple of 256 bytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from hearth.core.sizes import FACTOR_ROW_ALIGNMENT, MAX_ADAPTER_SLICES, Dimensions, target_fields
from hearth.models.layout import STORED_ITEM_BYTES, ByteRange

#: Factors begin at multiples of it, as kernels need.
FACTOR_ALIGNMENT_BYTES = 256
#: The largest rank of one slice, and the most slices of a target.
MAX_RANK, MAX_SLICES = 256, MAX_ADAPTER_SLICES


class Projection(StrEnum):
    QKV = "qkv"
    O = "o"  # noqa: E741
    UP = "up"
    DOWN = "down"


_NUMBER_OF = {projection: number for number, projection in enumerate(Projection)}


def target_index(layer: int, projection: Projection) -> int:
    return layer * len(_NUMBER_OF) + _NUMBER_OF[projection]


def projection_shape(dimensions: Dimensions, projection: Projection) -> tuple[int, int]:
    match projection:
        case Projection.QKV:
            return dimensions.qkv_size, dimensions.hidden_size
        case Projection.O:
            return dimensions.hidden_size, dimensions.q_size
        case Projection.UP:
            return dimensions.up_size, dimensions.hidden_size
        case Projection.DOWN:
            return dimensions.hidden_size, dimensions.intermediate_size


@dataclass(frozen=True, slots=True)
class AdapterSlice:
    begin: int
    size: int
    rank: int  #: from 1 to MAX_RANK

    @property
    def row_size(self) -> int:
        return -(-self.size // FACTOR_ROW_ALIGNMENT) * FACTOR_ROW_ALIGNMENT


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A projection of one layer that an adapter changes. Its slices are in order and do not overlap."""

    layer: int
    projection: Projection
    num_inputs: int
    slices: tuple[AdapterSlice, ...]  #: from 1 to MAX_SLICES

    @property
    def rank(self) -> int:
        return sum(part.rank for part in self.slices)

    @property
    def factor_sizes(self) -> list[int]:
        """Elements of its first factor, and of each slice's second one with padding."""
        return [self.rank * self.num_inputs, *(part.row_size * part.rank for part in self.slices)]


@dataclass(frozen=True, slots=True)
class FactorPlaces:
    target: AdapterTarget
    a: int
    b: tuple[int, ...]  #: by slice


@dataclass(frozen=True, slots=True)
class RelativeTable:
    """The table by which kernels find an adapter; a load, between two steps, only adds addresses."""

    targets: array[int]  #: int64 [places]: `target_index` of each
    #: int64 [places, TARGET_FIELDS]: addresses are relative to the first byte of the layer.
    fields: array[int]
    weights: tuple[int, ...]  #: elements of the factors, by projection
    #: Elements that are read and written per row, by projection: inputs once, outputs twice.
    row_weights: tuple[int, ...]

    @staticmethod
    def of(places: Iterable[FactorPlaces], begins: Mapping[int, int]) -> RelativeTable:
        targets, fields, weights = array("q"), array("q"), [0] * len(_NUMBER_OF)
        row_weights = weights.copy()
        for place in places:
            target, begin = place.target, begins[place.target.layer]
            targets.append(target_index(target.layer, target.projection))
            slices = [
                (at - begin, part.rank, part.begin, part.size)
                for at, part in zip(place.b, target.slices, strict=True)
            ]
            fields.extend(target_fields(place.a - begin, slices))
            num_numbers = target.rank * target.num_inputs + sum(
                part.rank * part.size for part in target.slices
            )
            number = _NUMBER_OF[target.projection]
            weights[number] += num_numbers
            row_weights[number] += target.num_inputs + 2 * sum(part.size for part in target.slices)
        return RelativeTable(targets, fields, tuple(weights), tuple(row_weights))


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    dtype: str  #: of all factors: one of COMPUTED_DTYPES
    places: tuple[FactorPlaces, ...]
    #: The bytes of each layer that has targets, in order; they touch.
    layers: tuple[tuple[int, ByteRange], ...]
    num_bytes: int
    layer_sizes: tuple[int, ...] = field(compare=False, repr=False)  #: derived from the layers
    table: RelativeTable = field(compare=False, repr=False)  #: derived from the rest

    @staticmethod
    def of(targets: Iterable[AdapterTarget], dtype: str) -> AdapterLayout:
        item_bytes = STORED_ITEM_BYTES[dtype]
        places: list[FactorPlaces] = []
        begins: dict[int, int] = {}
        offset = 0
        for target in targets:
            begins.setdefault(target.layer, offset)
            offsets = []
            for size in target.factor_sizes:
                offsets.append(offset)
                offset = _aligned(offset + size * item_bytes)
            places.append(FactorPlaces(target, offsets[0], tuple(offsets[1:])))
        ends = [*list(begins.values())[1:], offset]
        layers = tuple(
            (layer, ByteRange(begin, end)) for (layer, begin), end in zip(begins.items(), ends, strict=True)
        )
        sizes = tuple(part.end - part.begin for _, part in layers)
        return AdapterLayout(dtype, tuple(places), layers, offset, sizes, RelativeTable.of(places, begins))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // FACTOR_ALIGNMENT_BYTES) * FACTOR_ALIGNMENT_BYTES
