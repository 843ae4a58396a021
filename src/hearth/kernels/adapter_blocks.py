"""Block sizes of the adapter kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from hearth.core.sizes import ADAPTER_SPLITS, ADAPTER_TILE_ROWS, MAX_SHRUNK_RANK
from hearth.kernels.jit import next_power_of_2


@dataclass(frozen=True, slots=True)
class AdapterBlocks:
    #: Of tiles of several rows: inputs, outputs and ranks.
    inputs: int
    outputs: int
    ranks: int
    #: Of tiles of one row: ranks and inputs of the first factor, ranks and outputs of the second.
    shrink_ranks: int
    shrink_inputs: int
    expand_ranks: int
    expand_outputs: int
    #: Slices of at most `low_rank` ranks use these blocks of the second factor.
    low_rank: int
    low_ranks: int
    low_outputs: int
    num_splits: int  #: parts of a row's inputs, each with its own partial sum
    shrunk_room: int  #: scratch numbers per row between the two products, at least MAX_SHRUNK_RANK
    num_warps: int
    num_stages: int  #: blocks in flight, with the one that is multiplied
    max_registers: int | None  #: per thread; None: the compiler chooses


#: Inputs of one row that a program reads at a time.
_ROW_INPUTS = 1024


@lru_cache(maxsize=64)
def adapter_blocks(k: int, tile_rows: int, dtype: torch.dtype) -> AdapterBlocks:
    is_small, is_float32 = tile_rows <= ADAPTER_TILE_ROWS, dtype == torch.float32
    num_splits = ADAPTER_SPLITS
    if is_small:  # a power of two, each at least as long as one read of a program
        num_splits = min(num_splits, next_power_of_2(k // _ROW_INPUTS + 1) // 2 or 1)
    return AdapterBlocks(
        inputs=64 if is_float32 else 128,
        outputs=(32 if is_small else 64) if is_float32 else (64 if is_small else 128),
        ranks=16 if is_small or is_float32 else 64,
        shrink_ranks=8,
        shrink_inputs=_ROW_INPUTS,
        expand_ranks=64,
        expand_outputs=64 if is_float32 else 128,
        low_rank=16,
        low_ranks=8,
        low_outputs=1024,
        num_splits=num_splits,
        shrunk_room=MAX_SHRUNK_RANK * (num_splits if is_small else 1),
        num_warps=4,
        num_stages=2 if is_float32 else 3,
        # Four programs fit on a multiprocessor.
        max_registers=128 if is_small else None,
    )
