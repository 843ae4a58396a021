"""Shrinking and expanding by projection, beside the bytes of the factors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from bench.engine.bounds import BYTES_PER_S
from bench.engine.timing import microseconds
from bench.llama7b import ARCH
from bench.lora.random_adapters import CUDA, RANKS, layout_of_rank, random_pieces, slice_sizes
from hearth.engine.adapter_table import AdapterTable
from hearth.engine.upload import Uploads
from hearth.kernels.adapter_blocks import AdapterBlocks, adapter_blocks
from hearth.kernels.adapter_rows import AdapterGroup, AdapterRows
from hearth.kernels.lora_expand import expand_triton
from hearth.kernels.lora_shrink import shrink_triton
from hearth.models.adapter import Projection, projection_shape, target_index
from hearth.sizes import ADAPTER_TILE_ROWS, MAX_SHRUNK_RANK
from hearth.types import AdapterId

#: Of so many layers, so that no factor is found in a cache.
NUM_LAYERS = 10
DIMENSIONS = replace(ARCH.dimensions, num_layers=NUM_LAYERS)
Launches = list[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Work:
    """Both products of a projection for one adapter per row, in each of the layers."""

    projection: Projection
    rows: AdapterRows
    x: torch.Tensor
    out: torch.Tensor
    scratch: torch.Tensor

    @staticmethod
    def of(projection: Projection, rows: AdapterRows) -> Work:
        n, k = projection_shape(DIMENSIONS, projection)
        num_rows = len(rows.order)
        x, out = (torch.randn(num_rows, size, dtype=torch.bfloat16, device=CUDA) for size in (k, n))
        scratch = torch.empty(16 * num_rows * MAX_SHRUNK_RANK, device=CUDA)
        return Work(projection, rows, x, out, scratch)

    @property
    def blocks(self) -> AdapterBlocks:
        return adapter_blocks(self.x.shape[1], ADAPTER_TILE_ROWS, self.x.dtype)

    def shrink(self, layer: int) -> None:
        target = target_index(layer, self.projection)
        shrink_triton(self.x, self.rows, target, self.blocks, out=self.scratch)

    def expand(self, layer: int) -> None:
        target = target_index(layer, self.projection)
        expand_triton(self.scratch, self.rows, target, self.blocks, out=self.out)

    def shrinks(self) -> Launches:
        return [lambda layer=layer: self.shrink(layer) for layer in range(NUM_LAYERS)]  # type: ignore[misc]

    def expands(self) -> Launches:
        return [lambda layer=layer: self.expand(layer) for layer in range(NUM_LAYERS)]  # type: ignore[misc]

    def both(self) -> Launches:
        return [one for pair in zip(self.shrinks(), self.expands(), strict=True) for one in pair]


def measure(name: str, num_rows: int) -> Iterator[dict[str, object]]:
    """Yield the times of both launches for each projection."""
    ranks = [RANKS[name][row % len(RANKS[name])] for row in range(num_rows)]
    table, groups = AdapterTable(DIMENSIONS, torch.bfloat16, Uploads(CUDA)), []
    for row, rank in enumerate(ranks):
        layout, adapter = layout_of_rank(DIMENSIONS, rank), AdapterId(f"{row}")
        table.bind(adapter, layout, random_pieces(layout))
        bound = table[adapter]
        groups.append(AdapterGroup({}, bound.table.data_ptr(), np.array([row]), bound.weights))
    torch.cuda.synchronize()
    rows = AdapterRows.of(groups, ADAPTER_TILE_ROWS, CUDA)
    empty_rows = replace(rows, shares=torch.zeros_like(rows.shares))
    for projection, sizes in slice_sizes(DIMENSIONS).items():
        (_, k), n = projection_shape(DIMENSIONS, projection), sizes[0]
        us_of_rank = 1e6 * 2 * sum(ranks) * len(sizes) / BYTES_PER_S
        work = Work.of(projection, rows)
        empty = replace(work, rows=empty_rows)
        yield {
            "kernels": f"{projection} of {num_rows} rows, ranks {name}",
            "shrink_us": microseconds(work.shrinks() * 2),
            "shrink_bound_us": us_of_rank * k,
            "expand_us": microseconds(work.expands() * 2),
            "expand_bound_us": us_of_rank * n,
            "both_us": 2 * microseconds(work.both() * 2),
            "empty_us": 2 * microseconds(empty.both() * 2),
        }
