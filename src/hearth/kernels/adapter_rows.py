"""Which rows of a step have which adapter, and where the factors of adapters lie. Multiplies nothing.

    rows of a step:      |  B  |  -  |  A  |  B  |  -  |  B  |  A  |  ...     letters: adapters, -: none
    order:               |  2  |  6  |  0  |  3  |  5  |  ...                 rows that have one, by adapter
    tiles of the order:  |  A, 2 rows  |  B, 3 rows  |  ...                   at most so many rows of one

Lists of rows and tiles lie on the device at fixed addresses, and a tile names the table of its adapter, from
which kernels take addresses and ranks. So one captured launch serves any adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hearth.kernels.jit import HAS_TRITON, tl
from hearth.sizes import ADAPTER_TILE_FIELDS, TARGET_FIELDS


def _for_kernels(value: int) -> int:
    """Return a number as kernels may read it."""
    return tl.constexpr(value) if HAS_TRITON else value


#: Where a target's numbers lie in an adapter's table, behind the address of `a`: for each of three slices the
#: address of its `b`, its rank, where its outputs begin, how many they are; then all ranks together.
FIRST_B, FIRST_RANK, FIRST_BEGIN, FIRST_SIZE, TOTAL_RANK = map(_for_kernels, (1, 4, 7, 10, 13))
FIELDS, TILE_FIELDS = map(_for_kernels, (TARGET_FIELDS, ADAPTER_TILE_FIELDS))


@dataclass(frozen=True, slots=True)
class SliceFactor:
    """The second factor of some outputs of a projection."""

    begin: int  #: the first of them
    b: torch.Tensor  #: [outputs, rank]


@dataclass(frozen=True, slots=True)
class TargetFactors:
    """The factors by which an adapter changes a projection."""

    a: torch.Tensor  #: [ranks of all slices, inputs]
    slices: tuple[SliceFactor, ...]  #: in order

    @property
    def fields(self) -> list[int]:
        """The numbers by which kernels find the factors."""
        missing = [0] * (3 - len(self.slices))
        ranks = [one.b.shape[1] for one in self.slices]
        columns = (
            [one.b.data_ptr() for one in self.slices],
            ranks,
            [one.begin for one in self.slices],
            [len(one.b) for one in self.slices],
        )
        fields = [self.a.data_ptr(), *(value for column in columns for value in (*column, *missing))]
        fields.append(sum(ranks))
        return fields + [0] * (TARGET_FIELDS - len(fields))


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    """The rows of a step that have the same adapter."""

    factors: Mapping[int, TargetFactors]  #: by target
    address: int  #: of its table on the device, [targets, TARGET_FIELDS]
    rows: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which rows of a step have which adapter."""

    groups: tuple[AdapterGroup, ...]  #: for the torch reference
    #: The same for kernels. int64 [rows]: those that have an adapter, by adapter.
    order: torch.Tensor
    #: int64 [capacity, ADAPTER_TILE_FIELDS]: the address of a table, the first of its rows in the order, and
    #: how many of them there are.
    tiles: torch.Tensor
    count: torch.Tensor  #: int64 [1]: how many tiles there are in this step
    tile_rows: int  #: of a whole tile

    @staticmethod
    def of(groups: Sequence[AdapterGroup], tile_rows: int, device: torch.device | str) -> AdapterRows:
        """Lists with memory of their own, just as long as they must be."""
        order, tiles = cut_adapter_tiles(groups, tile_rows)
        found = torch.from_numpy(tiles).to(device).view(-1, ADAPTER_TILE_FIELDS)
        count = torch.tensor([len(found)], device=device)
        return AdapterRows(tuple(groups), torch.from_numpy(order).to(device), found, count, tile_rows)


def cut_adapter_tiles(
    groups: Sequence[AdapterGroup], tile_rows: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the rows of all groups behind each other, and the fields of all tiles."""
    tiles: list[int] = []
    begin = 0
    for group in groups:
        end = begin + len(group.rows)
        for first in range(begin, end, tile_rows):
            tiles += (group.address, first, min(tile_rows, end - first))
        begin = end
    rows = [group.rows for group in groups]
    return np.concatenate([*rows, np.empty(0, np.int64)]), np.array(tiles, np.int64)
