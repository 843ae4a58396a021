from __future__ import annotations

from collections.abc import Sequence
from itertools import count, islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth.core.sizes import StepLimits, input_buffers
from hearth.core.types import RequestId, SamplingParams
from hearth.engine import inputs as inputs_module
from hearth.engine.inputs import InputBuffers
from hearth.engine.step_shape import PaddedSizes, StepShape
from hearth.engine.upload import Uploads
from hearth.kernels.prompt_tiles import PrefillSpan
from hearth.models.buffers import zeroed
from hearth.models.step_inputs import StepInputs
from hearth.policy.batch.plan import Admission, DecodeRows, Row, StepPlan, TableWrite, TableWrites

MAX_TOKENS, MAX_SEQS, MAX_BLOCKS = 12, 4, 3
LIMITS = StepLimits(MAX_TOKENS, MAX_SEQS, block_tokens=4)
DUMMY = MAX_SEQS
SINK = 77
EXACT, PADDED = PaddedSizes(), PaddedSizes(decode=(1, 2, 4), mixed=(8, 12), samples=(1, 4))


def buffers() -> InputBuffers:
    """Slot s has sampled 100 + s last."""
    last_tokens = torch.arange(100, 100 + MAX_SEQS + 1)
    uploads = Uploads(torch.device("cpu"))
    tables = zeroed(input_buffers(LIMITS, 4 * MAX_BLOCKS), uploads.device, None)
    tables["block_table"].fill_(SINK)
    return InputBuffers(MAX_SEQS, tables, last_tokens, uploads, SINK, lambda _num_rows: 32)


def decode(slot: int, start: int) -> Row:
    return Row(RequestId(f"s{slot}"), slot, start, 1, None, samples=True)


def prefill(slot: int, start: int, *tokens: int, samples: bool = True) -> Row:
    return Row(RequestId(f"s{slot}"), slot, start, len(tokens), tokens, samples)


def plan(*rows: Row, writes: Sequence[TableWrite] = ()) -> StepPlan:
    decode = [row for row in rows if row.tokens is None]
    columns = DecodeRows(
        [row.request_id for row in decode], [row.slot for row in decode], [row.start for row in decode]
    )
    return StepPlan(0, (), TableWrites.of(*writes), columns, rows[len(decode) :])


def view_of(inputs: InputBuffers, step: StepPlan, sizes: PaddedSizes = EXACT) -> StepInputs:
    """The step as the decoder sees it."""
    shape = sizes.shape_of(step)
    inputs.fill(step, shape)
    inputs.gather_tokens(shape)
    return inputs.view(step, shape)


def filled(inputs: InputBuffers, step: StepPlan, sizes: PaddedSizes = EXACT) -> list[list[int]]:
    """Tokens, positions and slots as the decoder sees them."""
    view = view_of(inputs, step, sizes)
    return [view.tokens.tolist(), view.rows.positions.tolist(), view.rows.slots.tolist()]


MIXED = plan(decode(2, 9), decode(0, 4), prefill(3, 5, 41, 42, 43), prefill(1, 0, 51, 52, samples=False))


def test_decode_rows_take_what_their_slot_sampled_and_prefill_rows_what_the_plan_says() -> None:
    assert filled(buffers(), MIXED) == [
        [102, 100, 41, 42, 43, 51, 52],
        [9, 4, 5, 6, 7, 0, 1],
        [2, 0, 3, 3, 3, 1, 1],
    ]


def test_rows_that_sample_are_known_to_the_host_and_the_device_and_others_are_dummies() -> None:
    inputs, shape = buffers(), PADDED.shape_of(MIXED)
    rows = inputs.fill(MIXED, shape)

    assert (rows.slots.tolist(), rows.positions.tolist()) == ([2, 0, 3], [9, 4, 7])
    assert rows.device_slots[: shape.num_logits].tolist() == [2, 0, 3, DUMMY]
    assert rows.device_positions[:3].tolist() == [9, 4, 7]
    assert inputs.sample_slots(shape).tolist() == [2, 0, 3, DUMMY]


def test_decode_rows_alone_sample_for_their_own_slots() -> None:
    inputs, step = buffers(), plan(decode(1, 7), decode(0, 3), decode(2, 1))
    rows = inputs.fill(step, PADDED.shape_of(step))

    assert (rows.slots.tolist(), rows.positions.tolist()) == ([1, 0, 2], [7, 3, 1])
    assert inputs.sample_slots(PADDED.shape_of(step)).tolist() == [1, 0, 2, DUMMY]
    assert rows.device_positions[:3].tolist() == [7, 3, 1]


def test_spans_say_the_same_on_the_host_and_on_the_device() -> None:
    view = view_of(buffers(), MIXED)

    assert len(view.decode_rows.positions) == 2
    assert view.spans == (PrefillSpan(2, 3, 5), PrefillSpan(5, 2, 0))
    assert view.tiles is not None
    assert view.tiles.count.tolist() == [2]
    assert view.tiles.items[:2].tolist() == [[2, 3, 5, 0], [5, 2, 0, 0]]


def test_logit_rows_are_the_last_tokens_of_all_rows_whether_they_sample_or_not() -> None:
    logit_rows = view_of(buffers(), MIXED).logit_rows

    assert logit_rows is not None
    assert logit_rows.tolist() == [0, 1, 4, 6]


def test_padded_rows_go_to_the_dummy_slot_and_so_to_the_sink_block() -> None:
    inputs = buffers()
    writes = tuple(TableWrite(slot, 0, (7 + slot,)) for slot in range(MAX_SEQS))
    filled(inputs, plan(prefill(1, 3, 5, 5, 5, 5), writes=writes))

    view = view_of(inputs, plan(decode(1, 7), decode(0, 3), decode(2, 1)), PADDED)

    assert view.rows.slots.tolist() == [1, 0, 2, DUMMY]
    assert view.rows.positions.tolist() == [7, 3, 1, 0]
    assert view.tokens.tolist() == [101, 100, 102, 0]
    assert view.rows.block_table[DUMMY].tolist() == [SINK] * MAX_BLOCKS
    assert (len(view.decode_rows.positions), view.spans, view.logit_rows) == (3, (), None)


def test_padding_stands_behind_the_prompts_and_its_logits_behind_theirs() -> None:
    view = view_of(buffers(), MIXED, PADDED)

    assert view.tokens.tolist() == [102, 100, 41, 42, 43, 51, 52, 0]
    assert view.rows.positions.tolist() == [9, 4, 5, 6, 7, 0, 1, 0]
    assert view.rows.slots.tolist() == [2, 0, 3, 3, 3, 1, 1, DUMMY]
    assert view.spans == (PrefillSpan(2, 3, 5), PrefillSpan(5, 2, 0))
    three = view_of(buffers(), plan(*MIXED.rows[:3]), PADDED).logit_rows
    assert three is not None
    assert three.tolist() == [0, 1, 4, 0]


@pytest.mark.parametrize("shape", PADDED.all_shapes(), ids=str)
def test_a_parked_step_is_all_padding(shape: StepShape) -> None:
    inputs = buffers()
    filled(inputs, plan(*(prefill(slot, 2, 9, 9, 9) for slot in range(MAX_SEQS))))

    inputs.fill_padding(shape)
    inputs.gather_tokens(shape)

    view = inputs.view(None, shape)
    assert view.rows.slots.tolist() == [DUMMY] * shape.num_rows
    assert view.rows.positions.tolist() == view.tokens.tolist() == [0] * shape.num_rows
    assert (len(view.decode_rows.positions), view.spans) == (0, ())
    if view.tiles is not None:
        assert view.tiles.count.tolist() == [0]


def test_table_writes_change_their_cells_and_no_others() -> None:
    inputs = buffers()
    view_of(inputs, plan(decode(0, 0), writes=(TableWrite(0, 0, (5,)), TableWrite(3, 2, (9,)))))
    view_of(inputs, plan(decode(0, 1), writes=(TableWrite(0, 1, (6,)), TableWrite(3, 2, (8,)))))

    none = [SINK] * 3
    assert inputs.block_table.tolist() == [[5, 6, SINK], none, none, [SINK, SINK, 8], none]
    assert inputs.block_table.dtype == torch.int32


def test_the_row_of_a_slot_with_a_new_owner_names_no_block_of_the_old_one() -> None:
    """Which may be gone, and kernels without masks read past the end of shorter rows."""
    inputs = buffers()
    view_of(inputs, plan(decode(1, 9), writes=(TableWrite(1, 0, (5, 6)), TableWrite(1, 2, (7,)))))
    admission = Admission(RequestId("new"), 1, (3,), 1, 0, SamplingParams())

    writes = TableWrites.of(TableWrite(1, 0, (9,)))
    view_of(inputs, StepPlan(1, (admission,), writes, DecodeRows(), (prefill(1, 0, 3),)))

    assert inputs.block_table[1].tolist() == [9, SINK, SINK]


@given(st.data())
@settings(derandomize=True)
def test_the_table_holds_what_was_written_and_the_sink_behind_it(data: st.DataObject) -> None:
    """Whichever slots get new owners, and whichever blocks move, before or behind others of their slot."""
    inputs, table = buffers(), [[SINK] * MAX_BLOCKS for _ in range(MAX_SEQS)]
    num_held, next_block = [0] * MAX_SEQS, count(100)
    for _ in range(data.draw(st.integers(1, 6))):
        admissions, writes = [], list[TableWrite]()
        for slot in data.draw(st.sets(st.integers(0, MAX_SEQS - 1))):
            begin = num_held[slot]
            if data.draw(st.booleans()):
                admissions.append(Admission(RequestId("new"), slot, (3,), 1, 0, SamplingParams()))
                begin, table[slot] = 0, [SINK] * MAX_BLOCKS
            elif begin and data.draw(st.booleans()):
                writes.append(TableWrite(slot, data.draw(st.integers(0, begin - 1)), (next(next_block),)))
            num_new = data.draw(st.integers(0, MAX_BLOCKS - begin))
            writes.append(TableWrite(slot, begin, tuple(islice(next_block, num_new))))
            num_held[slot] = begin + num_new
        for write in writes:
            table[write.slot][write.begin : write.begin + len(write.blocks)] = write.blocks
        ordered = TableWrites.of(*data.draw(st.permutations(writes)))

        view_of(inputs, StepPlan(0, tuple(admissions), ordered, DecodeRows(), (prefill(0, 0, 3),)))

        assert inputs.block_table.tolist() == [*table, [SINK] * MAX_BLOCKS]


def test_table_writes_of_two_steps_in_a_row_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may still read those of the step before, also where the next has more than ever."""
    sent: list[torch.Tensor] = []

    def noted(*_: object, writes: torch.Tensor | None, **__: object) -> None:
        assert writes is not None
        sent.append(writes)

    monkeypatch.setattr(inputs_module, "read_step", noted)
    inputs, num_many = buffers(), 2 * (MAX_TOKENS + MAX_SEQS)
    written = []
    for number, num_blocks in enumerate((1, 2, num_many, 3, num_many, 1)):
        blocks = tuple(range(100 * number, 100 * number + num_blocks))
        step = plan(decode(0, 0), writes=(TableWrite(0, 0, blocks),))
        inputs.fill(step, EXACT.shape_of(step))
        written.append([list(range(num_blocks)), list(blocks)])
        assert [one.tolist() for one in sent[-2:]] == written[-2:]


def test_a_short_step_sees_nothing_of_the_longer_ones_before_it() -> None:
    inputs = buffers()
    for _ in range(2):
        filled(inputs, MIXED)

    assert filled(inputs, plan(decode(3, 2))) == [[103], [2], [3]]


@pytest.mark.parametrize("sizes", [EXACT, PADDED])
def test_every_step_of_a_shape_uses_the_same_addresses(sizes: PaddedSizes) -> None:
    """And the tail of a step, which a graph replays by its logits alone, whatever the shape."""
    inputs = buffers()
    addresses: dict[StepShape, set[tuple[int, ...]]] = {}
    tails = set()
    other = plan(decode(3, 2), *MIXED.rows[2:])
    for step in (MIXED, plan(decode(3, 2)), other, MIXED, plan(decode(1, 1))):
        view = view_of(inputs, step, sizes)
        tensors = [view.tokens, view.rows.positions, view.rows.slots, view.rows.block_table]
        if view.logit_rows is not None:
            tails.add(view.logit_rows.data_ptr())
        if view.tiles is not None:
            tensors += [view.tiles.items, view.tiles.count]
        shape = sizes.shape_of(step)
        addresses.setdefault(shape, set()).add(tuple(tensor.data_ptr() for tensor in tensors))

    assert [len(found) for found in addresses.values()] == [1] * len(addresses)
    assert len(tails) == 1


@pytest.mark.parametrize("num_rows", range(1, MAX_TOKENS + 1))
def test_every_part_of_the_inputs_begins_at_a_multiple_of_16_bytes(num_rows: int) -> None:
    """Else a kernel would be compiled a second time."""
    view = view_of(buffers(), plan(prefill(1, 0, *range(num_rows))))
    assert view.tiles is not None
    assert view.logit_rows is not None

    parts = (view.rows.positions, view.rows.slots, view.tokens, view.tiles.items, view.logit_rows)
    assert [part.data_ptr() % 16 for part in parts] == [0] * len(parts)


def test_the_largest_step_fits() -> None:
    inputs = buffers()
    rows = [prefill(slot, 0, *[slot] * (MAX_TOKENS // MAX_SEQS)) for slot in range(MAX_SEQS)]

    tokens, positions, slots = filled(inputs, plan(*rows))

    assert tokens == slots == [slot for slot in range(MAX_SEQS) for _ in range(3)]
    assert positions == [0, 1, 2] * MAX_SEQS


def test_a_decode_row_behind_a_prefill_row_is_refused() -> None:
    with pytest.raises(AssertionError, match="decode row behind prefill rows"):
        view_of(buffers(), plan(prefill(0, 0, 1, 2), decode(1, 3)))
