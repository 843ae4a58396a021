from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.kernels.adapter_blocks import adapter_blocks
from hearth.kernels.adapter_rows import (
    AdapterGroup,
    AdapterRows,
    SliceFactor,
    TargetFactors,
    cut_adapter_tiles,
)
from hearth.kernels.lora import add_adapters_reference, add_adapters_triton
from hearth.sizes import ADAPTER_TILE_FIELDS, MAX_SHRUNK_RANK, TARGET_FIELDS
from tests.kernels.cases import assert_close, crossed, random

#: Slices of an output, by begin, size and rank, of one adapter.
Slices = Sequence[tuple[int, int, int]]
TARGET = 2


@dataclass(frozen=True, slots=True)
class Case:
    """Rows in memory that is NaN all around them, some of which have adapters."""

    num_inputs: int
    num_outputs: int
    adapters: Sequence[Slices]  #: none: the adapter has factors for other projections alone
    choices: Sequence[int | None]  #: the adapter of each row


def garbage(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=device, dtype=dtype)


def factor(rows: int, columns: int, device: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A matrix amid NaN, at an address as adapters have it."""
    around = garbage((128 + rows * columns + 512,), device, dtype)
    inside = around[128 : 128 + rows * columns].view(rows, columns)
    return inside.copy_(random(rows, columns, device=device, dtype=dtype, seed=seed) * 0.3)


def groups_of(case: Case, device: str, dtype: torch.dtype) -> tuple[list[AdapterGroup], list[torch.Tensor]]:
    """Groups of rows, and the tables that live as long as they."""
    groups, tables = [], []
    for index, slices in enumerate(case.adapters):
        rows = np.array([at for at, one in enumerate(case.choices) if one == index], np.int64)
        rank = sum(one[2] for one in slices)
        factors = {}
        table = torch.zeros(TARGET + 2, TARGET_FIELDS, dtype=torch.int64)
        if slices:
            target = TargetFactors(
                factor(rank, case.num_inputs, device, dtype, seed=10 * index),
                tuple(
                    SliceFactor(begin, factor(size, rank, device, dtype, seed=10 * index + 1 + at))
                    for at, (begin, size, rank) in enumerate(slices)
                ),
            )
            factors[TARGET] = target
            table[TARGET] = torch.tensor(target.fields)
        tables.append(table.to(device))
        if len(rows):
            groups.append(AdapterGroup(factors, tables[-1].data_ptr(), rows))
    return groups, tables


CASES = {
    "one row of rank 1": Case(8, 5, [[(0, 5, 1)]], [0]),
    "nobody has one": Case(64, 48, [[(0, 48, 4)]], [None, None]),
    "no factors here": Case(64, 48, [[], [(0, 48, 4)]], [0, 1, 0]),
    "three slices": Case(96, 240, [[(0, 130, 3), (130, 50, 17), (180, 60, 8)]], [0, None, 0, 0]),
    "gaps between slices": Case(300, 200, [[(0, 64, 8), (150, 40, 5)], [(70, 33, 2)]], [1, 0, None, 1, 1]),
    "the largest rank": Case(70, 40, [[(0, 20, 256), (20, 20, 1)]], [0, None]),
    "the largest rank of two rows": Case(70, 40, [[(0, 20, 256), (20, 20, 1)]], [0, 0]),
    "more rows than a tile": Case(130, 64, [[(0, 64, 9)], [(0, 64, 16)]], [0, 1] * 20 + [None] + [0] * 9),
    "many adapters": Case(64, 36, [[(0, 36, 1 + 3 * at)] for at in range(9)], [*range(9), None, 5]),
    "aligned": Case(512, 256, [[(0, 128, 8), (128, 128, 16)], [(0, 256, 32)]], [0, 1, 1, None]),
}


@pytest.mark.parametrize(
    ("name", "device", "dtype"), crossed([(name,) for name in CASES], halves_on_cpu=[("three slices",)])
)
def test_kernels_equal_the_reference(name: str, device: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    num_rows = len(case.choices)
    x = random(num_rows, case.num_inputs, device=device, dtype=dtype, seed=1)
    base = random(num_rows, case.num_outputs, device=device, dtype=dtype, seed=2)
    groups, tables = groups_of(case, device, dtype)
    expected = base.double()
    add_adapters_reference(x.double(), AdapterRows.of(groups, 16, device), TARGET, out=expected)

    for tile_rows, num_splits in ((16, 4), (64, 1)):
        rows = AdapterRows.of(groups, tile_rows, device)
        # Small ones, so that sums are split and rows have several chunks.
        blocks = adapter_blocks(case.num_inputs, tile_rows, dtype)
        blocks = replace(blocks, row_inputs=64, row_chunk=512, num_splits=num_splits)
        # As in a captured step there is room for more tiles, in which stands what is left of others.
        tiles = torch.full((len(rows.tiles) + 3, ADAPTER_TILE_FIELDS), -1, device=device)
        tiles[: len(rows.tiles)] = rows.tiles
        scratch = garbage((num_splits * num_rows * MAX_SHRUNK_RANK,), device, torch.float32)
        around = garbage((num_rows + 2, case.num_outputs), device, dtype)
        out = around[1:-1].copy_(base)

        add_adapters_triton(
            x,
            AdapterRows((), rows.order, tiles, rows.count, tile_rows),
            TARGET,
            scratch=scratch,
            out=out,
            blocks=blocks,
        )

        assert_close(out, expected)
        without = [at for at, one in enumerate(case.choices) if one is None or not case.adapters[one]]
        assert torch.equal(out[without], base[without]), "a row without an adapter was touched"
        assert around[0].isnan().all()
        assert around[-1].isnan().all()
    del tables


@given(st.lists(st.integers(0, 5), max_size=60), st.sampled_from([16, 64]))
def test_tiles_cover_every_row_once_and_are_of_one_adapter(choices: list[int], tile_rows: int) -> None:
    groups = [
        AdapterGroup({}, 1000 + one, np.flatnonzero(np.array(choices) == one)) for one in sorted(set(choices))
    ]

    order, tiles = cut_adapter_tiles(groups, tile_rows)

    covered = []
    for address, begin, num_rows in tiles.reshape(-1, ADAPTER_TILE_FIELDS).tolist():
        assert 1 <= num_rows <= tile_rows
        rows = order[begin : begin + num_rows].tolist()
        assert {choices[row] for row in rows} == {address - 1000}
        covered += rows
    assert sorted(covered) == list(range(len(choices)))
    assert sorted(order.tolist()) == list(range(len(choices)))
