"""Which rows of a step have which adapter, and how the work is divided among programs.

    rows of a step:      |  B  |  -  |  A  |  B  |  -  |  B  |  A  |  ...     letters: adapters, -: none
    order:               |  2  |  6  |  0  |  3  |  5  |  ...                 rows that have one, by adapter
    tiles of the order:  |  A, 2 rows  |  B, 3 rows  |  ...                   at most `tile_rows` rows of one
    shares of tiles:     |  A, 1 of 2  |  A, 2 of 2  |  B, 1 of 3  |  ...     one per program

The number of a tile's shares is proportional to the bytes of its adapter's factors and of its rows, so that
all programs move about as many. The lists are on the device at fixed addresses, and a share names the table
of its adapter, which has addresses and ranks. So one captured launch serves any adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hearth.core.sizes import (
    ADAPTER_PROJECTIONS,
    ADAPTER_SHARE_FIELDS,
    ADAPTER_SHARES,
    FACTOR_ROW_ALIGNMENT,
    MAX_SHRUNK_RANK,
    TARGET_FIELDS,
    adapter_shares,
)
from hearth.kernels.jit import HAS_TRITON, tl, triton


def _for_kernels(value: int) -> int:
    return tl.constexpr(value) if HAS_TRITON else value


#: Columns of an adapter's table after the address of `a`: for each of three slices the address of its `b`,
#: its rank, its first output, the number of its outputs; then the sum of the ranks.
FIRST_B, FIRST_RANK, FIRST_BEGIN, FIRST_SIZE, TOTAL_RANK = map(_for_kernels, (1, 4, 7, 10, 13))
FIELDS, SHARE_FIELDS = map(_for_kernels, (TARGET_FIELDS, ADAPTER_SHARE_FIELDS))
FACTOR_ALIGNMENT, MAX_RANKS = map(_for_kernels, (FACTOR_ROW_ALIGNMENT, MAX_SHRUNK_RANK))
#: Bits of a share's second word: the first row of its tile in the order, the number of rows, the index of the
#: part, and from bit 0 the number of parts.
BEGIN_BIT, NUM_BIT, PART_BIT = 40, 32, 16
_BEGIN, _NUM, _PART = map(_for_kernels, (BEGIN_BIT, NUM_BIT, PART_BIT))


@dataclass(frozen=True, slots=True)
class SliceFactor:
    begin: int  #: the first output
    b: torch.Tensor  #: [rank, outputs]; the stride of rows is a multiple of FACTOR_ROW_ALIGNMENT


@dataclass(frozen=True, slots=True)
class TargetFactors:
    a: torch.Tensor  #: [ranks of all slices, inputs]
    slices: tuple[SliceFactor, ...]  #: in order


@dataclass(frozen=True, slots=True)
class AdapterGroup:
    factors: Mapping[int, TargetFactors]  #: by target
    address: int  #: of its table on the device, [targets, TARGET_FIELDS]
    rows: npt.NDArray[np.int64]
    #: The size of all its factors by projection, in any unit.
    weights: tuple[int, ...] = (1,) * ADAPTER_PROJECTIONS
    #: The size of the reads and writes of each row but the first, likewise.
    row_weights: tuple[int, ...] = (0,) * ADAPTER_PROJECTIONS


@dataclass(frozen=True, slots=True)
class AdapterRows:
    groups: tuple[AdapterGroup, ...]  #: for the torch reference
    #: For kernels. int64 [rows]: rows that have an adapter, by adapter.
    order: torch.Tensor
    #: int64 [ADAPTER_PROJECTIONS, capacity, ADAPTER_SHARE_FIELDS]: the address of a table, and the other
    #: numbers of a share in one word. Unused shares are zero.
    shares: torch.Tensor
    tile_rows: int  #: of a whole tile

    @staticmethod
    def of(
        groups: Sequence[AdapterGroup],
        tile_rows: int,
        device: torch.device | str,
        *,
        min_shares: int = ADAPTER_SHARES,
    ) -> AdapterRows:
        order = np.concatenate([*(group.rows for group in groups), np.empty(0, np.int64)])
        counts, addresses = (
            np.array(column, np.int64)
            for column in ([len(one.rows) for one in groups], [one.address for one in groups])
        )
        weights = np.array([(one.weights, one.row_weights) for one in groups], np.int64)
        weights = weights.reshape(-1, 2, ADAPTER_PROJECTIONS)
        shares = cut_adapter_shares(counts, addresses, weights, tile_rows, min_shares)
        return AdapterRows(
            tuple(groups), torch.from_numpy(order).to(device), torch.from_numpy(shares).to(device), tile_rows
        )


def cut_adapter_shares(
    counts: npt.NDArray[np.int64],
    addresses: npt.NDArray[np.int64],
    weights: npt.NDArray[np.int64],
    tile_rows: int,
    min_shares: int = ADAPTER_SHARES,
) -> npt.NDArray[np.int64]:
    """Return the shares of all groups of rows, [ADAPTER_PROJECTIONS, shares, ADAPTER_SHARE_FIELDS].

    By group: `counts` of rows, which follow those of the previous group in the order; `addresses` of the
    adapters' tables; `weights` [groups, 2, ADAPTER_PROJECTIONS] of the factors, and of each row but the
    first. A group without factors has no share.
    """
    num_tiles = -(-counts // tile_rows)
    num_shares = adapter_shares(int(num_tiles.sum()), min_shares)
    found = np.zeros((ADAPTER_PROJECTIONS, num_shares, ADAPTER_SHARE_FIELDS), np.int64)
    if not len(counts):
        return found
    group, number = _numbered(num_tiles)
    ends = counts.cumsum()
    first = (ends - counts)[group] + number * tile_rows
    num_rows = np.minimum(tile_rows, ends[group] - first)
    rows = first << BEGIN_BIT | num_rows << NUM_BIT
    of_factors, of_row = weights[group].transpose(1, 2, 0)
    weight = np.where(of_factors > 0, of_factors + (num_rows - 1) * of_row, 0)
    # The largest weight of a share, rounded up so that there is room for all of them.
    most = np.maximum(1, -(-weight.sum(1, keepdims=True) // (num_shares - len(group))))
    parts = -(-weight // most)
    for projection, count in enumerate(parts):
        if projection and np.array_equal(count, parts[projection - 1]):
            found[projection] = found[projection - 1]  # adapters of the same targets, as most are
            continue
        tile, part = _numbered(count)
        found[projection, : len(tile), 0] = addresses[group[tile]]
        found[projection, : len(tile), 1] = (rows | count)[tile] | part << PART_BIT
    return found


def _numbered(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]


@triton.jit
def load_share(shares):
    """The share of this program: the address of a table, or 0, and the fields of the second word."""
    share = shares + tl.program_id(0) * SHARE_FIELDS
    table = tl.load(share)
    word = tl.load(share + 1)
    num = (word >> _NUM & 0xFF).to(tl.int32)
    part = (word >> _PART & 0xFFFF).to(tl.int32)
    parts = (word & 0xFFFF).to(tl.int32)
    return table, word >> _BEGIN, num, part, parts
