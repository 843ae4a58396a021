"""Shrinking and expanding by projection, beside the bytes of factors and rows, and the products' work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bench.engine.bounds import BYTES_PER_S, FLOPS_PER_S
from bench.engine.timing import microseconds
from bench.llama7b import ARCH
from bench.lora.random_adapters import CUDA, RANKS, layout_of_rank, random_pieces, slice_sizes
from hearth.core.sizes import ADAPTER_PROMPT_TILE_ROWS, ADAPTER_TILE_ROWS
from hearth.core.types import AdapterId
from hearth.engine.adapter_table import AdapterTable
from hearth.engine.upload import Uploads
from hearth.kernels.adapter_blocks import AdapterBlocks, adapter_blocks
from hearth.kernels.adapter_rows import AdapterGroup, AdapterRows
from hearth.kernels.lora_expand import expand_triton
from hearth.kernels.lora_shrink import shrink_triton
from hearth.models.adapter import Projection, projection_shape, target_index

#: Of so many layers, so that no factor is found in a cache.
NUM_LAYERS = 10
DIMENSIONS = replace(ARCH.dimensions, num_layers=NUM_LAYERS)
Launches = list[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Work:
    """Both products of a projection for rows that have adapters, in each of the layers."""

    projection: Projection
    rows: AdapterRows
    x: torch.Tensor
    out: torch.Tensor
    scratch: torch.Tensor
    blocks: AdapterBlocks

    @staticmethod
    def of(projection: Projection, rows: AdapterRows) -> Work:
        n, k = projection_shape(DIMENSIONS, projection)
        num_rows = len(rows.order)
        x, out = (torch.randn(num_rows, size, dtype=torch.bfloat16, device=CUDA) for size in (k, n))
        blocks = adapter_blocks(k, rows.tile_rows, x.dtype)
        scratch = torch.empty(num_rows * blocks.shrunk_room, device=CUDA)
        return Work(projection, rows, x, out, scratch, blocks)

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
    """Yield the times of both launches for each projection, where each row has an adapter of its own."""
    yield from _measured(f"{num_rows} rows, ranks {name}", name, [1] * num_rows, ADAPTER_TILE_ROWS)


def measure_prompts(name: str, lengths: Sequence[int]) -> Iterator[dict[str, object]]:
    """Yield the same of a step in which each adapter has so many rows."""
    text = f"{sum(lengths)} rows of {len(lengths)} adapters, ranks {name}"
    yield from _measured(text, name, lengths, ADAPTER_PROMPT_TILE_ROWS)


def bound_groups(name: str, lengths: Sequence[int]) -> tuple[AdapterTable, list[AdapterGroup]]:
    """Return groups of so many rows behind each other, and the table that keeps their adapters."""
    table, groups, begin = AdapterTable(DIMENSIONS, torch.bfloat16, Uploads(CUDA)), [], 0
    for number, length in enumerate(lengths):
        layout, adapter = layout_of_rank(DIMENSIONS, _rank(name, number)), AdapterId(f"{number}")
        table.bind(adapter, layout, random_pieces(layout))
        bound, own = table[adapter], np.arange(begin, begin + length)
        groups.append(AdapterGroup({}, bound.table.data_ptr(), own, bound.weights, bound.row_weights))
        begin += length
    torch.cuda.synchronize()
    return table, groups


def _measured(text: str, name: str, lengths: Sequence[int], tile_rows: int) -> Iterator[dict[str, object]]:
    table, groups = bound_groups(name, lengths)
    rows = AdapterRows.of(groups, tile_rows, CUDA)
    empty_rows = replace(rows, shares=torch.zeros_like(rows.shares))
    ranks = [_rank(name, number) for number in range(len(lengths))]
    num_rows, num_products = sum(lengths), sum(map(int.__mul__, ranks, lengths))
    for projection, sizes in slice_sizes(DIMENSIONS).items():
        n, k = projection_shape(DIMENSIONS, projection)
        work = Work.of(projection, rows)
        empty = replace(work, rows=empty_rows)
        shrink_numbers = k * (sum(ranks) * len(sizes) + num_rows)
        expand_numbers = n * (sum(ranks) + 2 * num_rows)
        yield {
            "kernels": f"{projection} of {text}",
            "shrink_us": microseconds(work.shrinks() * 2),
            "shrink_bound_us": 2e6 * shrink_numbers / BYTES_PER_S,
            "expand_us": microseconds(work.expands() * 2),
            "expand_bound_us": 2e6 * expand_numbers / BYTES_PER_S,
            "both_us": 2 * microseconds(work.both() * 2),
            "empty_us": 2 * microseconds(empty.both() * 2),
            "products_bound_us": 2e6 * num_products * (k * len(sizes) + n) / FLOPS_PER_S,
        }
    del table  # whose memory kernels have read until here


def _rank(name: str, number: int) -> int:
    return RANKS[name][number % len(RANKS[name])]
