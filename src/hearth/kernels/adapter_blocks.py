"""How much of adapters' factors a program multiplies at a time. Launches nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from hearth.kernels.jit import next_power_of_2
from hearth.sizes import ADAPTER_SPLITS, ADAPTER_TILE_ROWS

#: Tiles whose ranks a program reads at a time.
TILES_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class AdapterBlocks:
    """How much a program multiplies at a time, and how many programs there are."""

    #: Of tiles of several rows: inputs, outputs and ranks.
    inputs: int
    outputs: int
    ranks: int
    row_inputs: int  #: of tiles of one row: inputs of each chunk of the first factor
    row_chunk: int  #: likewise: numbers of a chunk of either factor
    num_splits: int  #: parts of a row's inputs, which are summed up apart
    programs_per_processor: int
    num_warps: int
    num_stages: int
    max_registers: int | None  #: of a thread of the first product; None: what the compiler takes


#: Inputs of one row that a program reads at a time.
_ROW_INPUTS = 1024


@lru_cache(maxsize=64)
def adapter_blocks(k: int, tile_rows: int, dtype: torch.dtype) -> AdapterBlocks:
    """Return the blocks for rows of so many inputs, in tiles of few rows (decode) or of many (prompts)."""
    is_small, is_float32 = tile_rows <= ADAPTER_TILE_ROWS, dtype == torch.float32
    return AdapterBlocks(
        inputs=64 if is_float32 else 128,
        outputs=64 if is_float32 else 128,
        ranks=16 if is_small or is_float32 else 64,
        row_inputs=_ROW_INPUTS,
        row_chunk=8192,
        # A power of two, and none of them shorter than what a program reads at a time.
        num_splits=min(ADAPTER_SPLITS, next_power_of_2(k // _ROW_INPUTS + 1) // 2 or 1) if is_small else 1,
        programs_per_processor=4,
        num_warps=4,
        num_stages=2 if is_float32 else 3,
        # So that four programs fit on a multiprocessor: the compiler would take twice as many. For the second
        # product it is not set: that got slower by it.
        max_registers=128 if is_small else None,
    )
