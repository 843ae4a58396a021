"""The adapters that an engine may use, each with the table by which kernels find its factors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hearth.core.sizes import (
    ADAPTER_PROJECTIONS,
    MAX_ADAPTER_SLICES,
    TARGET_FIELDS,
    Dimensions,
    adapter_table_buffer,
)
from hearth.core.types import AdapterId
from hearth.engine.upload import Uploads
from hearth.kernels.adapter_rows import SliceFactor, TargetFactors
from hearth.kernels.jit import runs_triton
from hearth.models.adapter import AdapterLayout, FactorPlaces, RelativeTable, target_index
from hearth.models.buffers import name_of
from hearth.models.dtypes import DTYPES


@dataclass(frozen=True, slots=True)
class BoundAdapter:
    factors: Mapping[int, TargetFactors]  #: by `target_index`, for the torch reference; empty for kernels
    table: torch.Tensor  #: int64 [layers, projections, TARGET_FIELDS]: the same for kernels
    address: int  #: of the table
    weights: tuple[int, ...]  #: numbers in its factors, by projection
    row_weights: tuple[int, ...]  #: numbers read and written per row, by projection
    layers: Sequence[torch.Tensor]  #: its bytes; holding them keeps them in place


class AdapterTable:
    """Adapters by id. Mutable; written by the runner alone, between steps."""

    def __init__(self, dimensions: Dimensions, dtype: torch.dtype, uploads: Uploads) -> None:
        self._shape = adapter_table_buffer(dimensions.num_layers).shape
        self._dtype, self._uploads = dtype, uploads
        self._bound: dict[AdapterId, BoundAdapter] = {}

    def __getitem__(self, adapter: AdapterId) -> BoundAdapter:
        return self._bound[adapter]

    @property
    def ids(self) -> Collection[AdapterId]:
        return self._bound.keys()

    def bind(self, adapter: AdapterId, layout: AdapterLayout, layers: Sequence[torch.Tensor]) -> None:
        """Let steps use an adapter whose bytes (uint8) lie as `layout.layers` says."""
        assert adapter not in self._bound, f"adapter added twice: {adapter}"
        # CUDA kernels need the computed dtype; a CPU computes in float32 from any.
        is_computed = layout.dtype == name_of(self._dtype)
        assert is_computed or self._uploads.device.type == "cpu", f"{layout.dtype=} {self._dtype=}"
        addresses = np.zeros(self._shape[0], np.int64)  # of the bytes of each layer
        for piece, (layer, stored) in zip(layers, layout.layers, strict=True):
            assert len(piece) >= stored.end - stored.begin, f"{layer=} {stored=} in {len(piece)} bytes"
            addresses[layer] = piece.data_ptr()
        (table,) = self._uploads.ints(_absolute(layout.table, addresses).reshape(-1))
        factors = {} if runs_triton(table) else _factors(layout, layers)
        self._bound[adapter] = BoundAdapter(
            factors,
            table.view(self._shape),
            table.data_ptr(),
            layout.table.weights,
            layout.table.row_weights,
            layers,
        )

    def unbind(self, adapter: AdapterId) -> None:
        del self._bound[adapter]


def _absolute(relative: RelativeTable, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return an adapter's table, [targets, TARGET_FIELDS], given the address of each layer's bytes."""
    targets, own = (np.frombuffer(part, np.int64) for part in (relative.targets, relative.fields))
    own = own.reshape(-1, TARGET_FIELDS).copy()
    bases = addresses[targets // ADAPTER_PROJECTIONS]
    own[:, 0] += bases
    # Fields: address of `a`, addresses of `b`, ranks; 0 for a missing slice.
    of_b, ranks = (
        own[:, 1 : 1 + MAX_ADAPTER_SLICES],
        own[:, 1 + MAX_ADAPTER_SLICES : 1 + 2 * MAX_ADAPTER_SLICES],
    )
    of_b += np.where(ranks > 0, bases[:, None], 0)
    fields = np.zeros((len(addresses) * ADAPTER_PROJECTIONS, TARGET_FIELDS), np.int64)
    fields[targets] = own
    return fields


def _factors(layout: AdapterLayout, layers: Sequence[torch.Tensor]) -> dict[int, TargetFactors]:
    pieces = {
        layer: (stored.begin, piece) for piece, (layer, stored) in zip(layers, layout.layers, strict=True)
    }
    return {
        target_index(place.target.layer, place.target.projection): _target_factors(
            place, DTYPES[layout.dtype], *pieces[place.target.layer]
        )
        for place in layout.places
    }


def _target_factors(
    place: FactorPlaces, dtype: torch.dtype, begin: int, piece: torch.Tensor
) -> TargetFactors:

    def matrix(offset: int, num_rows: int, num_columns: int) -> torch.Tensor:
        first = offset - begin
        stored = piece[first : first + num_rows * num_columns * dtype.itemsize]
        return stored.view(dtype).view(num_rows, num_columns)

    target = place.target
    slices = [
        SliceFactor(part.begin, matrix(offset, part.rank, part.row_size)[:, : part.size])
        for part, offset in zip(target.slices, place.b, strict=True)
    ]
    return TargetFactors(matrix(place.a, target.rank, target.num_inputs), tuple(slices))
