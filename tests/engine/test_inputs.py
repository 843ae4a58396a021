from __future__ import annotations

import pytest
import torch

from hearth.engine.inputs import InputBuffers
from hearth.engine.upload import Uploads
from hearth.kernels.prompt_tiles import PrefillSpan
from hearth.policy.batch.plan import Admission, DecodeRows, Row, StepPlan, TableWrite
from hearth.sizes import StepLimits
from hearth.types import RequestId, SamplingParams

MAX_TOKENS, MAX_SEQS, MAX_BLOCKS = 12, 4, 3
LIMITS = StepLimits(MAX_TOKENS, MAX_SEQS, block_tokens=4)
DUMMY = MAX_SEQS
SINK = 77


def buffers() -> InputBuffers:
    """Slot s has sampled 100 + s last."""
    last_tokens = torch.arange(100, 100 + MAX_SEQS + 1)
    return InputBuffers(
        LIMITS, 4 * MAX_BLOCKS, last_tokens, Uploads(torch.device("cpu")), SINK, tile_tokens=32
    )


def decode(slot: int, start: int) -> Row:
    return Row(RequestId(f"s{slot}"), slot, start, 1, None, samples=True)


def prefill(slot: int, start: int, *tokens: int, samples: bool = True) -> Row:
    return Row(RequestId(f"s{slot}"), slot, start, len(tokens), tokens, samples)


def plan(*rows: Row, writes: tuple[TableWrite, ...] = ()) -> StepPlan:
    decode = [row for row in rows if row.tokens is None]
    columns = DecodeRows(
        [row.request_id for row in decode], [row.slot for row in decode], [row.start for row in decode]
    )
    return StepPlan(0, (), writes, columns, rows[len(decode) :])


def filled(inputs: InputBuffers, step: StepPlan) -> list[list[int]]:
    """Tokens, positions and slots as the decoder sees them."""
    inputs.fill(step)
    inputs.gather_tokens(step.num_decode_rows, step.num_tokens)
    view = inputs.view(step)
    return [view.tokens.tolist(), view.rows.positions.tolist(), view.rows.slots.tolist()]


MIXED = plan(decode(2, 9), decode(0, 4), prefill(3, 5, 41, 42, 43), prefill(1, 0, 51, 52, samples=False))


def test_decode_rows_take_what_their_slot_sampled_and_prefill_rows_what_the_plan_says() -> None:
    assert filled(buffers(), MIXED) == [
        [102, 100, 41, 42, 43, 51, 52],
        [9, 4, 5, 6, 7, 0, 1],
        [2, 0, 3, 3, 3, 1, 1],
    ]


def test_spans_say_the_same_on_the_host_and_on_the_device() -> None:
    inputs = buffers()
    inputs.fill(MIXED)

    view = inputs.view(MIXED)

    assert len(view.decode_rows.positions) == 2
    assert view.spans == (PrefillSpan(2, 3, 5), PrefillSpan(5, 2, 0))
    assert view.tiles is not None
    assert view.tiles.count.tolist() == [2]
    assert view.tiles.items[:2].tolist() == [[2, 3, 5, 0], [5, 2, 0, 0]]


def test_logit_rows_are_the_last_tokens_of_all_rows_whether_they_sample_or_not() -> None:
    inputs = buffers()
    inputs.fill(MIXED)

    logit_rows = inputs.view(MIXED).logit_rows

    assert logit_rows is not None
    assert (logit_rows.tolist(), logit_rows.dtype) == ([0, 1, 4, 6], torch.int64)


def test_padded_rows_go_to_the_dummy_slot_and_so_to_the_sink_block() -> None:
    inputs = buffers()
    writes = tuple(TableWrite(slot, 0, (7 + slot,)) for slot in range(MAX_SEQS))
    filled(inputs, plan(prefill(1, 3, 5, 5, 5, 5), writes=writes))
    inputs.fill(plan(decode(1, 7)), num_padded_rows=3)
    inputs.gather_tokens(4, 4)

    view = inputs.decode_view(4)

    assert view.rows.slots.tolist() == [1, DUMMY, DUMMY, DUMMY]
    assert view.rows.positions.tolist() == [7, 0, 0, 0]
    assert view.tokens.tolist() == [101] + [100 + DUMMY] * 3
    assert view.rows.block_table[view.rows.slots[1:].long()].tolist() == [[SINK] * MAX_BLOCKS] * 3
    assert (len(view.decode_rows.positions), view.spans, view.logit_rows) == (4, (), None)


def test_parked_rows_go_to_the_dummy_slot_too() -> None:
    inputs = buffers()
    filled(inputs, MIXED)

    inputs.park(3)

    view = inputs.decode_view(4)
    assert view.rows.slots.tolist() == [DUMMY, DUMMY, DUMMY, 3]
    assert view.rows.positions.tolist()[:3] == [0, 0, 0]


def test_table_writes_change_their_cells_and_no_others() -> None:
    inputs = buffers()
    inputs.fill(plan(decode(0, 0), writes=(TableWrite(0, 0, (5,)), TableWrite(3, 2, (9,)))))
    inputs.fill(plan(decode(0, 1), writes=(TableWrite(0, 1, (6,)), TableWrite(3, 2, (8,)))))

    none = [SINK] * 3
    assert inputs.block_table.tolist() == [[5, 6, SINK], none, none, [SINK, SINK, 8], none]
    assert inputs.block_table.dtype == torch.int32


def test_the_row_of_a_slot_with_a_new_owner_names_no_block_of_the_old_one() -> None:
    """Which may be gone, and kernels without masks read past the end of shorter rows."""
    inputs = buffers()
    inputs.fill(plan(decode(1, 9), writes=(TableWrite(1, 0, (5, 6)), TableWrite(1, 2, (7,)))))
    admission = Admission(RequestId("new"), 1, (3,), 1, 0, SamplingParams())

    inputs.fill(StepPlan(1, (admission,), (TableWrite(1, 0, (9,)),), DecodeRows(), (prefill(1, 0, 3),)))

    assert inputs.block_table[1].tolist() == [9, SINK, SINK]


def test_a_short_step_sees_nothing_of_the_longer_ones_before_it() -> None:
    inputs = buffers()
    for _ in range(2):
        filled(inputs, MIXED)

    assert filled(inputs, plan(decode(3, 2))) == [[103], [2], [3]]


def test_every_step_uses_the_same_addresses() -> None:
    inputs, addresses = buffers(), set()
    for step in (MIXED, plan(decode(3, 2)), MIXED):
        inputs.fill(step)
        view = inputs.view(step)
        tensors = (view.tokens, view.rows.positions, view.rows.slots, view.rows.block_table)
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))

    assert len(addresses) == 1


def test_the_largest_step_fits() -> None:
    inputs = buffers()
    rows = [prefill(slot, 0, *[slot] * (MAX_TOKENS // MAX_SEQS)) for slot in range(MAX_SEQS)]

    tokens, positions, slots = filled(inputs, plan(*rows))

    assert tokens == slots == [slot for slot in range(MAX_SEQS) for _ in range(3)]
    assert positions == [0, 1, 2] * MAX_SEQS


def test_a_decode_row_behind_a_prefill_row_is_refused() -> None:
    with pytest.raises(AssertionError, match="decode row behind prefill rows"):
        buffers().fill(plan(prefill(0, 0, 1, 2), decode(1, 3)))
