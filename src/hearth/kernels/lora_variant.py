"""Which way adapters are computed, while ways are compared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(slots=True)
class Way:
    order: str = "behind"  #: behind, first, shrink (forked), both (forked)
    early: bool = False
    overlaps_side: bool = True
    priority: int = 0
    prefetch: int = 0  #: 1: before the wait, 2: at the end
    prefetched: int = 256
    stages: int = 0


WAY = Way()


@cache
def side_stream(priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=priority)


@cache
def added_buffer(rows: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(rows * n, dtype=dtype, device=device)
