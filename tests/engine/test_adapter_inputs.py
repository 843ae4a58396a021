"""Every row of a plan gets the adapter of its request, among the rows of the step and among its logits."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.sizes import ADAPTER_PROJECTIONS, TARGET_FIELDS, Dimensions, PackedAdapters
from hearth.core.types import AdapterId, RequestId
from hearth.engine.adapter_inputs import AdapterInputs
from hearth.engine.adapter_table import AdapterTable
from hearth.engine.step_shape import PaddedSizes
from hearth.engine.upload import Uploads
from hearth.kernels import jit
from hearth.kernels.adapter_rows import BEGIN_BIT, NUM_BIT, AdapterRows
from hearth.models.adapter import AdapterLayout, AdapterSlice, AdapterTarget, Projection
from hearth.models.dtypes import DTYPES
from hearth.models.layout import COMPUTED_DTYPES
from hearth.policy.batch.plan import DecodeRows, Row, StepPlan, TableWrites
from tests.models.adapters import fields_of
from tests.models.test_adapter_layout import SIZES as SIZES_OF_LAYOUTS
from tests.models.test_adapter_layout import targets

MAX_SEQS, MAX_TOKENS = 40, 400
IDS = [AdapterId(name) for name in ("a", "b", "c")]
DIMENSIONS = Dimensions(1, 2, 2, 4, 8, 8, 8, 16, 4, is_gated=True, is_parallel=False)
ADAPTERS = st.sampled_from([None, *IDS])
SIZES = PaddedSizes(decode=(8, MAX_SEQS), mixed=(64, MAX_TOKENS), samples=(8, MAX_SEQS))


class Prompt(NamedTuple):
    num_tokens: int
    adapter: AdapterId | None


class Step(NamedTuple):
    decode: list[AdapterId | None]
    prompts: list[Prompt]


STEPS = st.builds(
    Step,
    st.lists(ADAPTERS, min_size=1, max_size=30),
    st.lists(st.builds(Prompt, st.integers(1, 90), ADAPTERS), max_size=3),
)


def plan(step: Step) -> StepPlan:
    decode = DecodeRows(
        [RequestId("d")] * len(step.decode),
        [0] * len(step.decode),
        [5] * len(step.decode),
        adapters=step.decode if any(step.decode) else (),
    )
    prompts = [
        Row(RequestId("p"), 0, 0, one.num_tokens, (1,) * one.num_tokens, True, adapter=one.adapter)
        for one in step.prompts
    ]
    return StepPlan(0, (), TableWrites(), decode, tuple(prompts))


def bound() -> AdapterTable:
    table = AdapterTable(DIMENSIONS, torch.float32, Uploads(torch.device("cpu")))
    target = AdapterTarget(0, Projection.O, 8, (AdapterSlice(0, 8, 2),))
    layout = AdapterLayout.of([target], "float32")
    for one in IDS:
        table.bind(one, layout, [torch.zeros(layout.num_bytes, dtype=torch.uint8)])
    return table


def tiles_of(rows: AdapterRows) -> dict[int, tuple[int, int]]:
    """The table and the number of rows of each tile that has shares, by its first row."""
    found = {}
    # Adapters here have factors of one projection alone.
    others = [at for at, one in enumerate(Projection) if one is not Projection.O]
    assert not rows.shares[others].any()
    for address, word in rows.shares[list(Projection).index(Projection.O)].tolist():
        if address:
            tile = (address, word >> NUM_BIT & 0xFF)
            assert found.setdefault(word >> BEGIN_BIT, tile) == tile
    return found


def told(rows: AdapterRows, num_rows: int, table: AdapterTable) -> list[AdapterId | None]:
    """Which adapter each row has, by the lists that kernels read; the reference's groups say the same."""
    name_of = {table[one].table.data_ptr(): one for one in IDS}
    found: list[AdapterId | None] = [None] * num_rows
    for begin, (address, count) in tiles_of(rows).items():
        assert 1 <= count <= rows.tile_rows
        for row in rows.order[begin : begin + count].tolist():
            assert found[row] is None, "a row is in two tiles"
            found[row] = name_of[address]
    grouped: list[AdapterId | None] = [None] * num_rows
    for group in rows.groups:
        for row in group.rows.tolist():
            grouped[row] = name_of[group.address]
    assert grouped == found
    return found


@given(st.lists(STEPS, min_size=1, max_size=4))
def test_rows_have_the_adapters_of_their_requests_step_after_step(steps: Sequence[Step]) -> None:
    table = bound()
    packed = torch.full((PackedAdapters.of(MAX_TOKENS, MAX_SEQS).shares.stop,), -1, dtype=torch.int64)
    inputs = AdapterInputs(packed, MAX_SEQS)
    for step in steps:
        given = plan(step)
        shape = SIZES.shape_of(given)
        assert shape.has_adapters == any([*step.decode, *(one.adapter for one in step.prompts)])
        if not shape.has_adapters:
            continue
        for _ in ("first", "again, with nothing to send if no row is of a prompt"):
            inputs.fill(given, shape, table)
            rows, logit_rows = inputs.rows(shape), inputs.logit_rows(shape)
            logits = [*step.decode, *(one.adapter for one in step.prompts)]
            tokens = [*step.decode, *(one.adapter for one in step.prompts for _ in range(one.num_tokens))]
            assert told(logit_rows, len(logits), table) == logits
            assert told(rows, len(tokens), table) == tokens
            assert len(logit_rows.order) == shape.num_logits
            assert len(rows.order) == shape.num_rows


@given(STEPS, STEPS)
def test_a_parked_step_names_no_adapter_of_the_steps_before(before: Step, step: Step) -> None:
    """They may be gone by then, and their memory unmapped."""
    table, packed = bound(), torch.zeros(PackedAdapters.of(MAX_TOKENS, MAX_SEQS).shares.stop).long()
    inputs = AdapterInputs(packed, MAX_SEQS)
    shape = SIZES.shape_of(plan(before))
    if shape.has_adapters:
        inputs.fill(plan(before), shape, table)
    parked = replace(SIZES.shape_of(plan(step)), has_adapters=True)
    inputs.fill_padding(parked)

    assert told(inputs.rows(parked), parked.num_rows, table) == [None] * parked.num_rows
    assert told(inputs.logit_rows(parked), parked.num_logits, table) == [None] * parked.num_logits


def test_nothing_is_sent_while_the_same_requests_decode() -> None:
    table, packed = (
        bound(),
        torch.zeros(PackedAdapters.of(MAX_TOKENS, MAX_SEQS).shares.stop, dtype=torch.int64),
    )
    inputs, given = AdapterInputs(packed, MAX_SEQS), plan(Step([IDS[0], None], []))
    shape = SIZES.shape_of(given)
    inputs.fill(given, shape, table)
    sent = packed.clone()
    packed.fill_(-1)

    inputs.fill(given, shape, table)
    assert (packed == -1).all()
    inputs.forget()
    inputs.fill(given, shape, table)
    num_words = PackedAdapters.of(1, MAX_SEQS).order.start
    assert torch.equal(packed[:num_words], sent[:num_words])


def test_a_table_says_where_every_factor_lies() -> None:
    table = bound()
    fields = np.array(table[IDS[1]].table.tolist())
    assert fields.shape == (1, 4, 16)
    (factors,) = table[IDS[1]].factors.values()
    (only,) = factors.slices
    assert fields[0, 1].tolist() == [
        factors.a.data_ptr(),
        only.b.data_ptr(),
        0,
        0,
        2,
        0,
        0,
        0,
        0,
        0,
        8,
        0,
        0,
        2,
        0,
        0,
    ]
    assert not fields[0, [0, 2, 3]].any()


@given(targets(), st.sampled_from(COMPUTED_DTYPES))
def test_a_table_without_tensors_says_the_same(chosen: list[AdapterTarget], dtype: str) -> None:
    """A layout knows all of an adapter's table but addresses, so that no factor needs a tensor of its own."""
    layout = AdapterLayout.of(chosen, dtype)
    pieces = [torch.zeros(part.end - part.begin + 64, dtype=torch.uint8) for _, part in layout.layers]
    table = AdapterTable(SIZES_OF_LAYOUTS, DTYPES[dtype], Uploads(torch.device("cpu")))
    table.bind(IDS[0], layout, pieces)
    bound = table[IDS[0]]

    expected = torch.zeros(
        SIZES_OF_LAYOUTS.num_layers * ADAPTER_PROJECTIONS, TARGET_FIELDS, dtype=torch.int64
    )
    weights, row_weights = [0] * ADAPTER_PROJECTIONS, [0] * ADAPTER_PROJECTIONS
    for index, factors in bound.factors.items():
        expected[index] = torch.tensor(fields_of(factors))
        num_outputs = sum(one.b.shape[1] for one in factors.slices)
        weights[index % ADAPTER_PROJECTIONS] += factors.a.numel() + sum(
            one.b.numel() for one in factors.slices
        )
        row_weights[index % ADAPTER_PROJECTIONS] += factors.a.shape[1] + 2 * num_outputs
    assert torch.equal(bound.table.view(-1, TARGET_FIELDS), expected)
    assert bound.weights == tuple(weights)
    assert bound.row_weights == tuple(row_weights)


def test_factors_have_no_tensors_where_kernels_read_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "HAS_TRITON", True)
    table = AdapterTable(DIMENSIONS, torch.float32, Uploads(torch.device("meta")))
    layout = AdapterLayout.of([AdapterTarget(0, Projection.O, 8, (AdapterSlice(0, 8, 2),))], "float32")
    piece = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    kept = weakref.ref(piece)
    table.bind(IDS[0], layout, [piece])
    del piece

    assert not table[IDS[0]].factors
    assert kept() is not None, "whoever has added an adapter need not keep its bytes"
    table.unbind(IDS[0])
    assert kept() is None


def test_the_reference_has_all_that_it_needs_on_a_device_without_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It computes adapters there, too, and must not find that no row has one."""
    monkeypatch.setattr(jit, "HAS_TRITON", False)
    device = torch.device("meta")
    table = AdapterTable(DIMENSIONS, torch.float32, Uploads(device))
    layout = AdapterLayout.of([AdapterTarget(0, Projection.O, 8, (AdapterSlice(0, 8, 2),))], "float32")
    table.bind(IDS[0], layout, [torch.zeros(layout.num_bytes, dtype=torch.uint8)])
    words = PackedAdapters.of(MAX_TOKENS, MAX_SEQS).shares.stop
    inputs = AdapterInputs(torch.zeros(words, dtype=torch.int64, device=device), MAX_SEQS)
    given = plan(Step([None, IDS[0], None], []))
    shape = SIZES.shape_of(given)
    inputs.fill(given, shape, table)

    (group,) = inputs.rows(shape).groups
    assert group.rows.tolist() == [1]
    assert group.factors
