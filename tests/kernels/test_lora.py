from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.sizes import ADAPTER_PROJECTIONS, FACTOR_ROW_ALIGNMENT, MAX_SHRUNK_RANK, TARGET_FIELDS
from hearth.kernels import lora_expand, lora_shrink
from hearth.kernels.adapter_blocks import adapter_blocks
from hearth.kernels.adapter_rows import (
    BEGIN_BIT,
    NUM_BIT,
    PART_BIT,
    AdapterGroup,
    AdapterRows,
    SliceFactor,
    TargetFactors,
    cut_adapter_shares,
)
from hearth.kernels.lora import add_adapters_reference, add_adapters_triton, project_with_adapters
from tests.kernels.cases import assert_close, crossed, random
from tests.models.adapters import fields_of

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


def factor(
    rows: int, columns: int, device: str, dtype: torch.dtype, seed: int, row_alignment: int = 1
) -> torch.Tensor:
    """A matrix amid NaN, at an address as adapters have it."""
    row_size = -(-columns // row_alignment) * row_alignment
    around = garbage((128 + rows * row_size + 512,), device, dtype)
    inside = around[128 : 128 + rows * row_size].view(rows, row_size)[:, :columns]
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
                    SliceFactor(
                        begin,
                        factor(rank, size, device, dtype, 10 * index + 1 + at, FACTOR_ROW_ALIGNMENT),
                    )
                    for at, (begin, size, rank) in enumerate(slices)
                ),
            )
            factors[TARGET] = target
            table[TARGET] = torch.tensor(fields_of(target))
        tables.append(table.to(device))
        if len(rows):
            groups.append(AdapterGroup(factors, tables[-1].data_ptr(), rows))
    return groups, tables


CASES = {
    "one row of rank 1": Case(8, 5, [[(0, 5, 1)]], [0]),
    "no row has one": Case(64, 48, [[(0, 48, 4)]], [None, None]),
    "no factors here": Case(64, 48, [[], [(0, 48, 4)]], [0, 1, 0]),
    "three slices": Case(96, 240, [[(0, 130, 3), (130, 50, 17), (180, 60, 8)]], [0, None, 0, 0]),
    "gaps between slices": Case(300, 200, [[(0, 64, 8), (150, 40, 5)], [(70, 33, 2)]], [1, 0, None, 1, 1]),
    "the largest rank": Case(70, 40, [[(0, 20, 256), (20, 20, 1)]], [0, None]),
    "the largest rank of two rows": Case(70, 40, [[(0, 20, 256), (20, 20, 1)]], [0, 0]),
    "the largest rank of aligned rows": Case(70, 48, [[(0, 24, 256), (24, 24, 1)]], [0, None, 0]),
    "more rows than a tile": Case(130, 64, [[(0, 64, 9)], [(0, 64, 16)]], [0, 1] * 20 + [None] + [0] * 9),
    "many adapters": Case(64, 36, [[(0, 36, 1 + 3 * at)] for at in range(9)], [*range(9), None, 5]),
    "wide rows of slices": Case(128, 300, [[(0, 90, 70), (90, 100, 40), (190, 110, 9)]], [0, None]),
    "rows that share wide slices": Case(64, 300, [[(0, 140, 30), (140, 160, 20)]], [0, 0, None, 0]),
    "a prompt of aligned slices": Case(96, 152, [[(0, 88, 70), (96, 56, 8)]], [0] * 70 + [None]),
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

    # In steps of few rows all sums have parts, in those of many the ones that there is room for.
    for tile_rows, room in ((16, 4 * MAX_SHRUNK_RANK), (64, MAX_SHRUNK_RANK)):
        # Few shares, for the interpreter runs one after the other.
        rows = AdapterRows.of(groups, tile_rows, device, min_shares=7)
        # Small ones, so that sums are split and rows have several chunks.
        blocks = adapter_blocks(case.num_inputs, tile_rows, dtype)
        blocks = replace(
            blocks,
            num_splits=4,
            shrunk_room=room,
            shrink_ranks=4,
            shrink_inputs=64,
            expand_ranks=32,
            expand_outputs=32,
            low_rank=10,
            low_ranks=4,
            low_outputs=64,
        )
        scratch = garbage((num_rows * room,), device, torch.float32)
        around = garbage((num_rows + 2, case.num_outputs), device, dtype)
        out = around[1:-1].copy_(base)

        add_adapters_triton(
            x,
            replace(rows, groups=()),
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


@pytest.mark.parametrize("tile_rows", [16, 64])
def test_a_product_is_run_before_its_adapters_are_added(tile_rows: int) -> None:
    case, dtype = CASES["gaps between slices"], torch.float32
    x = random(len(case.choices), case.num_inputs, device="cpu", seed=1)
    base = random(len(x), case.num_outputs, device="cpu", seed=2)
    groups, tables = groups_of(case, "cpu", dtype)
    rows = AdapterRows.of(groups, tile_rows, "cpu", min_shares=7)
    expected = base.clone()
    add_adapters_reference(x, rows, TARGET, out=expected)
    scratch = garbage((4 * len(x) * MAX_SHRUNK_RANK,), "cpu", torch.float32)

    by_torch, by_kernels = (garbage((len(x), case.num_outputs), "cpu", dtype) for _ in range(2))
    project_with_adapters(partial(by_torch.copy_, base), x, rows, TARGET, scratch=scratch, out=by_torch)
    add_adapters_triton(
        x, rows, TARGET, scratch=scratch, out=by_kernels, product=partial(by_kernels.copy_, base)
    )

    assert_close(by_torch, expected)
    assert_close(by_kernels, expected)
    del tables


def test_the_second_product_alone_may_start_while_what_is_in_front_of_it_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first is beside the model's own, and would keep multiprocessors from it while it waits."""
    case, options = CASES["aligned"], {}

    def note(kernel: Callable[..., object], grid: object, *args: object, **given: object) -> None:
        options[kernel.__name__] = given

    for module in (lora_expand, lora_shrink):
        monkeypatch.setattr(module, "launch", note)
    x = random(len(case.choices), case.num_inputs, device="cpu")
    groups, tables = groups_of(case, "cpu", x.dtype)
    add_adapters_triton(
        x,
        AdapterRows.of(groups, 16, "cpu"),
        TARGET,
        scratch=garbage((4 * len(x) * MAX_SHRUNK_RANK,), "cpu", x.dtype),
        out=garbage((len(x), case.num_outputs), "cpu", x.dtype),
        product=lambda: None,
    )

    assert options["_shrink_kernel"]["OVERLAPS"] is False
    assert options["_expand_kernel"].get("OVERLAPS") is None, "`launch` decides by the device"
    del tables


WEIGHTS = st.tuples(*[st.integers(0, 10**9)] * ADAPTER_PROJECTIONS)


@given(
    st.lists(st.tuples(st.integers(1, 90), WEIGHTS, WEIGHTS), max_size=9),
    st.sampled_from([16, 64]),
    st.integers(1, 600),
)
def test_shares_cover_every_row_once_and_none_weighs_much_more_than_the_mean(
    chosen: list[tuple[int, tuple[int, ...], tuple[int, ...]]], tile_rows: int, min_shares: int
) -> None:
    begins = np.cumsum([0, *(num_rows for num_rows, _, _ in chosen)])

    found = cut_adapter_shares(
        np.array([num_rows for num_rows, _, _ in chosen], np.int64),
        1000 + np.arange(len(chosen)),
        np.array([weights for _, *weights in chosen], np.int64).reshape(-1, 2, ADAPTER_PROJECTIONS),
        tile_rows,
        min_shares,
    )

    def weight_of(number: int, num_rows: int, projection: int) -> int:
        _, weights, row_weights = chosen[number]
        return weights[projection] + (num_rows - 1) * row_weights[projection] if weights[projection] else 0

    tiles = [
        (number, min(tile_rows, num_rows - at))
        for number, (num_rows, _, _) in enumerate(chosen)
        for at in range(0, num_rows, tile_rows)
    ]
    for projection, shares in enumerate(found.tolist()):
        parts: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
        for address, word in shares:
            if address:
                begin, num_rows = word >> BEGIN_BIT, word >> NUM_BIT & 0xFF
                parts[address, begin, num_rows].append((word >> PART_BIT & 0xFFFF, word & 0xFFFF))
        total = sum(weight_of(number, num_rows, projection) for number, num_rows in tiles)
        rows = []
        for (address, begin, num_rows), own in parts.items():
            assert own == [(part, len(own)) for part in range(len(own))]
            assert 1 <= num_rows <= tile_rows
            assert begins[address - 1000] <= begin
            assert begin + num_rows <= begins[address - 999]
            rows += range(begin, begin + num_rows)
            weight = weight_of(address - 1000, num_rows, projection)
            assert weight / len(own) <= max(1, total / (len(shares) - len(tiles)) + 1)
        weighty = [at for at, (_, weights, _) in enumerate(chosen) if weights[projection]]
        assert sorted(rows) == [row for at in weighty for row in range(begins[at], begins[at + 1])]
