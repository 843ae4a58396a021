"""Sizes against what engines really allocate, over every family, and what must hold for any dimensions."""

from __future__ import annotations

import gc
from dataclasses import fields, replace
from itertools import count
from types import FunctionType, ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.config import EngineConfig
from hearth.core.sizes import (
    ADAPTER_SPLITS,
    ITEM_BYTES,
    MAX_SHRUNK_RANK,
    RUN_ALIGNMENT_BYTES,
    Buffer,
    Dimensions,
    StepLimits,
    StepSize,
    adapter_table_buffer,
    block_buffer,
    bytes_of,
    counter_buffer,
    graph_bytes,
    input_buffers,
    run_bytes,
    sampler_buffers,
    table_buffers,
    workspace_buffers,
    workspace_bytes,
)
from hearth.core.types import RequestId, SamplingParams, SamplingTable
from hearth.engine.engine import Engine
from hearth.models.buffers import name_of, zeros
from hearth.models.families import read_arch
from hearth.models.workspace import Workspace
from hearth.worker.hosted_models import MAX_RETIRED
from hearth.worker.runtime import UNBOOKED_BYTES, UNBOOKED_SHARE
from tests.engine.harness import ask, engine_for, greedy
from tests.models.zoo import VARIANTS, build

CPU = torch.device("cpu")
CONFIG = EngineConfig(max_batch_tokens=48, max_seqs=3, block_tokens=8, kv_bytes=1 << 20)
LIMITS = StepLimits(max_batch_tokens=48, max_seqs=3, block_tokens=8)


def dimensions_of(name: str) -> Dimensions:
    return read_arch(build(name).directory).dimensions


def memory_of(engine: Engine) -> dict[int, int]:
    """Bytes of each piece of its device's memory that any tensor of an engine lies in, by its address."""
    device = engine.runner.layers.kv.device
    found: dict[int, int] = {}
    seen, todo = {id(engine)}, [engine]
    while todo:
        for one in gc.get_referents(todo.pop()):
            if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
                continue
            seen.add(id(one))
            todo.append(one)
            if isinstance(one, torch.Tensor) and one.device == device:
                storage = one.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found


def memory_beside_weights_and_kv(engine: Engine) -> int:
    memory = memory_of(engine)
    for tensor in (engine.runner.layers.kv, engine.runner.layers.decoder.weights.layers[0].qkv.weight):
        del memory[tensor.untyped_storage().data_ptr()]
    return sum(memory.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_an_engine_allocates_exactly_what_is_told(name: str, dtype: str) -> None:
    engine, dimensions = engine_for(name, CONFIG, dtype=dtype), dimensions_of(name)
    context = engine.batcher.limits.max_context

    tables_bytes = run_bytes(table_buffers(dimensions, LIMITS, context))
    size = StepSize.of(LIMITS, "cpu")
    told_bytes = tables_bytes + workspace_bytes(dimensions, dimensions.layers, dtype, size)
    # The host has two copies of a step's inputs, of writes to its table and of what it chose, whatever the
    # device is.
    staged = (
        input_buffers(LIMITS, context)["packed"],
        sampler_buffers(LIMITS.max_seqs, dimensions.vocab_size)["chosen"],
    )
    num_writes = LIMITS.max_seqs + LIMITS.max_batch_tokens  # of the block table, a place and a block each
    staged_bytes = 2 * (sum(buffer.num_bytes for buffer in staged) + 2 * 4 * num_writes)

    assert memory_beside_weights_and_kv(engine) == told_bytes + staged_bytes
    ask(engine, [[5, 6, 7], [8, 9]], greedy(3))
    assert memory_beside_weights_and_kv(engine) == told_bytes + staged_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama-gqa", "opt-350m", "neox-parallel"])
def test_an_engine_on_a_gpu_allocates_exactly_what_is_told(name: str) -> None:
    engine, dimensions = engine_for(name, CONFIG, "cuda", dtype="bfloat16"), dimensions_of(name)
    size = StepSize.of(LIMITS, "cuda", torch.cuda.get_device_properties(0).multi_processor_count)
    tables_bytes = run_bytes(table_buffers(dimensions, LIMITS, engine.batcher.limits.max_context))
    told_bytes = tables_bytes + workspace_bytes(dimensions, dimensions.layers, "bfloat16", size)

    assert memory_beside_weights_and_kv(engine) == told_bytes
    engine.add(engine.request(RequestId("one"), [5, 6, 7], replace(PENALISED, logit_bias={7: 2.0})))
    engine.step()
    assert held_tables_bytes(engine) == needed_tables_bytes(engine) == PENALTIES_BYTES + BIAS_BYTES
    while engine.has_work:
        engine.step()
    assert held_tables_bytes(engine) == needed_tables_bytes(engine) == 0


PENALISED = replace(greedy(4), presence_penalty=0.5)
BIASED = replace(greedy(4), logit_bias={7: 2.0})
#: What 3 slots and a vocabulary of 160 take: a flag and a count for each token, and 3 weights; a bias.
PENALTIES_BYTES, BIAS_BYTES = 3 * (160 * (1 + 4) + 3 * 4), 3 * 160 * 4


@pytest.mark.parametrize(
    ("params", "num_bytes"),
    [
        (greedy(4), 0),
        (PENALISED, PENALTIES_BYTES),
        (replace(greedy(4), repetition_penalty=1.2), PENALTIES_BYTES),
        (BIASED, BIAS_BYTES),
        (replace(greedy(4), allowed_token_ids=(3, 4)), BIAS_BYTES),
        (replace(PENALISED, logit_bias={7: 2.0}), PENALTIES_BYTES + BIAS_BYTES),
    ],
)
def test_tables_that_only_some_requests_need_are_there_while_one_needs_them(
    params: SamplingParams, num_bytes: int
) -> None:
    engine = engine_for("llama-gqa", CONFIG)
    before_bytes = memory_beside_weights_and_kv(engine)
    assert needed_tables_bytes(engine) == 0

    engine.add(engine.request(RequestId("one"), [5, 6, 7], params))
    assert needed_tables_bytes(engine) == num_bytes, "known before the step that admits it"
    assert memory_beside_weights_and_kv(engine) == before_bytes
    engine.step()
    assert needed_tables_bytes(engine) == num_bytes
    assert held_tables_bytes(engine) == num_bytes
    while engine.has_work:
        engine.step()
    assert needed_tables_bytes(engine) == held_tables_bytes(engine) == 0


def needed_tables_bytes(engine: Engine) -> int:
    """Tables that requests of an engine need, whether they are there or not."""
    return sum(engine.tables.needed_bytes().values())


def held_tables_bytes(engine: Engine) -> int:
    """Tables that the sampler of an engine has now; a step in flight has tensors besides."""
    sampler = engine.runner.sampler
    tables = [vars(one.table) for one in (sampler.tables.penalties, sampler.tables.bias) if one.is_there]
    tensors = [value for table in tables for value in table.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def test_a_table_goes_with_the_last_who_needs_it_and_no_other_table_with_it() -> None:
    engine = engine_for("llama-gqa", CONFIG)
    asked = {"short": PENALISED, "long": replace(PENALISED, max_tokens=20), "biased": BIASED}
    for name, params in asked.items():
        engine.add(engine.request(RequestId(name), [5, 6, 7], params))
    ended: set[str] = set()
    while engine.has_work:
        ended |= {one.request_id for one in engine.step().outputs if one.finish_reason is not None}
        penalties_bytes = 0 if {"short", "long"} <= ended else PENALTIES_BYTES
        bias_bytes = 0 if "biased" in ended else BIAS_BYTES
        assert needed_tables_bytes(engine) == penalties_bytes + bias_bytes == held_tables_bytes(engine)
    assert ended == asked.keys()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_table_goes_when_its_request_is_cancelled_wherever_that_is(num_steps: int) -> None:
    engine = engine_for("llama-gqa", CONFIG)
    engine.add(engine.request(RequestId("other"), [5, 6, 7], greedy(8)))
    engine.add(engine.request(RequestId("one"), [5, 6, 7], replace(PENALISED, logit_bias={7: 2.0})))
    for _ in range(num_steps):
        engine.step()

    assert engine.cancel(RequestId("one"))

    assert needed_tables_bytes(engine) == held_tables_bytes(engine) == 0
    while engine.has_work:
        engine.step()


def test_a_request_answers_the_same_with_tables_that_went_and_came_back() -> None:
    used, fresh = engine_for("llama-gqa", CONFIG), engine_for("llama-gqa", CONFIG)
    params = replace(PENALISED, frequency_penalty=0.7, repetition_penalty=1.3, max_tokens=20)
    ask(used, [[5, 6, 7], [8, 9, 8]], params)
    assert ask(used, [[3, 4], [5, 5, 5]], params) == ask(fresh, [[3, 4], [5, 5, 5]], params)


def test_preempted_requests_keep_their_tables_and_their_outputs() -> None:
    params = replace(PENALISED, frequency_penalty=0.7, logit_bias={7: 2.0}, max_tokens=30)
    prompts = [[5, 6, 7], [8, 9, 8], [3, 3, 4]]
    tight = engine_for("llama-gqa", replace(CONFIG, kv_bytes=8 * block_bytes()))
    roomy = engine_for("llama-gqa", CONFIG)
    assert ask(tight, prompts, params) == ask(roomy, prompts, params)
    assert needed_tables_bytes(tight) == held_tables_bytes(tight) == 0


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_tables_in_given_memory_give_the_same_tokens_also_when_they_are_moved_out_of_it(
    num_steps: int,
) -> None:
    """Given memory is full of ones, and is filled with ones again once the tables have left it."""
    params = replace(PENALISED, frequency_penalty=0.7, logit_bias={7: 2.0}, max_tokens=20)
    prompts = [[5, 6, 7], [8, 9, 8], [3, 3, 4]]
    expected = ask(engine_for("llama-gqa", CONFIG), prompts, params)
    engine = engine_for("llama-gqa", CONFIG)
    for number, prompt in enumerate(prompts):
        engine.add(engine.request(RequestId(str(number)), prompt, params))
    memory = {
        table: torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
        for table, num_bytes in engine.tables.needed_bytes().items()
    }
    for table, piece in memory.items():
        engine.runner.place_table(table, piece)
        assert engine.tables.has(table)

    tokens: list[list[int]] = [[] for _ in prompts]
    for step in count():
        if step == num_steps:
            for table, piece in memory.items():
                engine.runner.place_table(table, None)
                piece.fill_(0xFF)
        for one in engine.step().outputs:
            tokens[int(one.request_id)].append(one.token)
        if not engine.has_work:
            break

    assert tokens == [answer.tokens for answer in expected]
    assert not any(engine.tables.has(table) for table in memory)


def test_tables_lie_in_the_memory_that_was_given() -> None:
    engine = engine_for("llama-gqa", CONFIG)
    engine.add(engine.request(RequestId("one"), [5, 6, 7], replace(PENALISED, logit_bias={7: 2.0})))
    before_bytes = memory_beside_weights_and_kv(engine)
    memory = torch.empty(PENALTIES_BYTES + BIAS_BYTES, dtype=torch.uint8)
    for table, begin in zip(SamplingTable, (0, PENALTIES_BYTES), strict=True):
        engine.runner.place_table(table, memory[begin : begin + engine.tables.needed_bytes()[table]])

    assert memory_beside_weights_and_kv(engine) == before_bytes + len(memory)
    assert held_tables_bytes(engine) == len(memory)


def block_bytes() -> int:
    dimensions = dimensions_of("llama-gqa")
    return block_buffer(dimensions, dimensions.layers, "float32", LIMITS.block_tokens).num_bytes


@pytest.mark.parametrize("name", VARIANTS)
def test_a_block_of_kv_is_as_large_as_is_told(name: str) -> None:
    engine, dimensions = engine_for(name, CONFIG), dimensions_of(name)
    block = block_buffer(dimensions, dimensions.layers, "float32", LIMITS.block_tokens)
    assert engine.runner.layers.kv.shape[1:] == block.shape
    assert engine.runner.layers.kv[0].nbytes == block.num_bytes


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_a_tensor_has_the_shape_and_the_bytes_of_its_buffer(dtype: str) -> None:
    tensor = zeros(Buffer((3, 5), dtype), CPU)
    assert (tensor.shape, name_of(tensor.dtype)) == ((3, 5), dtype)
    assert tensor.nbytes == Buffer((3, 5), dtype).num_bytes


COUNTS = st.integers(1, 300)
DIMENSIONS = st.builds(
    lambda group, num_kv_heads, rope_dim, projected, **others: Dimensions(
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        rope_dim=2 * rope_dim,
        embed_size=projected or others["hidden_size"],
        **others,
    ),
    group=st.integers(1, 8),
    num_kv_heads=st.integers(1, 8),
    rope_dim=st.integers(0, 32),
    projected=st.none() | COUNTS,
    num_layers=st.integers(1, 40),
    head_dim=COUNTS,
    hidden_size=COUNTS,
    intermediate_size=COUNTS,
    vocab_size=COUNTS,
    is_gated=st.booleans(),
    is_parallel=st.booleans(),
)
STEP_LIMITS = st.builds(StepLimits, COUNTS, COUNTS, st.integers(1, 64))
STEP_SIZES = st.builds(StepSize, COUNTS, COUNTS, st.integers(1, 768))
DTYPES = st.sampled_from(["float32", "float16", "bfloat16"])


@given(DIMENSIONS, STEP_SIZES, DTYPES)
def test_a_workspace_is_its_buffers_and_a_little_padding(
    dimensions: Dimensions, size: StepSize, dtype: str
) -> None:
    buffers = workspace_buffers(dimensions, dimensions.layers, dtype, size)
    lost_bytes = workspace_bytes(dimensions, dimensions.layers, dtype, size) - bytes_of(buffers)
    assert 0 <= lost_bytes < len(buffers) * RUN_ALIGNMENT_BYTES
    assert {*buffers} == {f.name for f in fields(Workspace)} - {"scratch"} | {"partial", "stats"}


@given(DIMENSIONS, STEP_SIZES, DTYPES, st.data())
def test_stages_of_a_model_have_all_of_its_kv_and_no_more_workspace_each(
    dimensions: Dimensions, size: StepSize, dtype: str, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, dimensions.num_layers))
    stages = range(cut), range(cut, dimensions.num_layers)
    whole = dimensions.layers

    blocks = [block_buffer(dimensions, stage, dtype, 16).num_bytes for stage in stages]
    assert sum(blocks) == block_buffer(dimensions, whole, dtype, 16).num_bytes
    for stage in stages:
        workspace = workspace_buffers(dimensions, stage, dtype, size)
        for name, buffer in workspace_buffers(dimensions, whole, dtype, size).items():
            assert workspace[name] == buffer or workspace[name].num_bytes == 0


@pytest.mark.parametrize(
    ("name", "dtype", "without_rows"),
    [
        ("llama-gqa", "bfloat16", {"embedded", "mlp_out", "kept_normed", "head_in"}),
        ("llama-gqa", "float32", {"embedded", "mlp_out", "kept_normed", "head_in", "head_out"}),
        ("neox-parallel", "bfloat16", {"embedded", "head_in"}),
        ("opt-350m", "bfloat16", {"mlp_out", "kept_normed"}),
    ],
)
def test_a_buffer_that_nothing_is_written_to_has_no_rows(
    name: str, dtype: str, without_rows: set[str]
) -> None:
    dimensions = dimensions_of(name)
    buffers = workspace_buffers(dimensions, dimensions.layers, dtype, StepSize(7, 3, 5))
    assert {name for name, buffer in buffers.items() if buffer.num_bytes == 0} == without_rows


def test_only_the_ends_of_a_model_embed_and_sample() -> None:
    dimensions = dimensions_of("opt-350m")  # has an embedding of its own width

    def without_rows(layers: range) -> set[str]:
        buffers = workspace_buffers(dimensions, layers, "bfloat16", StepSize(7, 3, 5))
        return {name for name, buffer in buffers.items() if buffer.num_bytes == 0}

    at_whole = without_rows(range(3))
    samples = {"kept_residual", "kept_attended", "head_in", "head_out", "logits"}
    assert without_rows(range(2)) - at_whole == samples
    assert without_rows(range(1, 2)) - at_whole == {"embedded", *samples}
    assert without_rows(range(1, 3)) - at_whole == {"embedded"}


@given(DIMENSIONS, STEP_LIMITS, st.integers(1, 4096), st.data())
def test_a_larger_limit_never_takes_less(
    dimensions: Dimensions, limits: StepLimits, context: int, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["max_batch_tokens", "max_seqs"]))
    larger = replace(limits, **{name: getattr(limits, name) + data.draw(COUNTS)})

    def told(limits: StepLimits, context: int) -> tuple[int, int]:
        size = StepSize.of(limits, "cuda")
        workspace = workspace_bytes(dimensions, dimensions.layers, "bfloat16", size)
        return workspace, bytes_of(table_buffers(dimensions, limits, context))

    assert told(limits, context) <= told(larger, context)
    assert told(limits, context)[1] < told(larger, context)[1]
    assert told(limits, context)[1] <= told(limits, context + 1)[1]


LLAMA_2_7B = Dimensions(
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    hidden_size=4096,
    embed_size=4096,
    intermediate_size=11008,
    vocab_size=32000,
    rope_dim=128,
    is_gated=True,
    is_parallel=False,
)


@pytest.mark.parametrize(("num_heads", "num_counters"), [(32, 300), (64, 300), (71, 600), (192, 900)])
def test_each_part_of_the_heads_that_share_k_and_v_has_a_counter(num_heads: int, num_counters: int) -> None:
    dimensions = replace(LLAMA_2_7B, num_heads=num_heads, num_kv_heads=1)

    assert counter_buffer(dimensions, 300).shape == (num_counters,)


@pytest.mark.parametrize(
    ("limits", "budget_bytes"),
    [(StepLimits(4096, 256, 16), 0), (StepLimits(8192, 1024, 16), 40 << 30)],
    ids=["small device", "large device"],
)
def test_graphs_of_all_engines_that_a_worker_keeps_fit_beside_its_pool(
    limits: StepLimits, budget_bytes: int
) -> None:
    """Each as large as Llama-2-7B; 30% of what is not booked is left to the sampler and to libraries."""
    unbooked_bytes = UNBOOKED_BYTES + UNBOOKED_SHARE * budget_bytes
    assert (MAX_RETIRED + 1) * graph_bytes(LLAMA_2_7B, limits) < 0.7 * unbooked_bytes


def test_graphs_of_steps_with_adapters_are_a_second_set_of_which_some_fit_beside_the_pool() -> None:
    """Four engines of that size with adapters, in all sizes, among all that a worker keeps."""
    limits = StepLimits(4096, 256, 16)
    each_bytes = graph_bytes(LLAMA_2_7B, limits) + bytes_of(table_buffers(LLAMA_2_7B, limits, 4096))
    more_bytes = graph_bytes(LLAMA_2_7B, limits, has_adapters=True)

    assert 87e6 < more_bytes < 88e6
    assert (MAX_RETIRED + 1) * each_bytes + 4 * more_bytes < 0.7 * UNBOOKED_BYTES


@pytest.mark.parametrize(
    ("limits", "kilobytes"), [(StepLimits(4096, 256, 16), 182), (StepLimits(8192, 1024, 16), 631)]
)
def test_adapters_take_little_of_a_large_model_beside_their_own_bytes(
    limits: StepLimits, kilobytes: int
) -> None:
    """What they leave between two products lies in workspace that is idle just then."""
    assert round(input_buffers(limits, 4096)["adapters"].num_bytes / 1e3) == kilobytes
    size = StepSize.of(limits, "cuda")
    assert workspace_buffers(LLAMA_2_7B, LLAMA_2_7B.layers, "bfloat16", size)["shrunk"].num_bytes == 0
    assert adapter_table_buffer(LLAMA_2_7B.num_layers).num_bytes == 16 << 10


@given(DIMENSIONS, STEP_LIMITS, st.sampled_from(["float32", "bfloat16"]))
def test_what_adapters_leave_between_two_products_has_room(
    dimensions: Dimensions, limits: StepLimits, dtype: str
) -> None:
    """In the smaller of the two buffers that may be idle, or in memory of its own."""
    size = StepSize.of(limits, "cuda")
    buffers = workspace_buffers(dimensions, dimensions.layers, dtype, size)
    own, idle = buffers["shrunk"].num_bytes, buffers["activated"].num_bytes
    num_decode = min(limits.max_seqs, limits.max_batch_tokens)
    needed = 4 * MAX_SHRUNK_RANK * max(limits.max_batch_tokens, ADAPTER_SPLITS * num_decode)
    assert (own or idle) >= needed


@given(DIMENSIONS, STEP_LIMITS)
def test_graphs_take_more_with_every_layer_and_size(dimensions: Dimensions, limits: StepLimits) -> None:
    deeper = replace(dimensions, num_layers=dimensions.num_layers + 1)
    larger = replace(limits, max_batch_tokens=2 * limits.max_batch_tokens + 128)

    assert 0 < graph_bytes(dimensions, limits) < graph_bytes(deeper, limits)
    assert graph_bytes(dimensions, limits) < graph_bytes(dimensions, larger)


@given(STEP_LIMITS, st.integers(1, 1000))
def test_the_largest_device_of_a_kind_is_what_an_unknown_one_is_counted_as(
    limits: StepLimits, num_processors: int
) -> None:
    most, real = StepSize.of(limits, "cuda"), StepSize.of(limits, "cuda", num_processors)
    assert 1 <= real.num_programs <= most.num_programs
    assert StepSize.of(limits, "cpu").num_programs == 1


@given(DIMENSIONS, STEP_SIZES)
def test_each_program_of_decode_attention_has_room_for_two_parts(
    dimensions: Dimensions, size: StepSize
) -> None:
    """A program's run of tiles begins inside of one head at most, and ends inside of one."""
    buffers = workspace_buffers(dimensions, dimensions.layers, "bfloat16", size)
    left = size.num_programs * 2 * (dimensions.num_heads // dimensions.num_kv_heads)
    assert left * dimensions.head_dim <= buffers["partial"].shape[0]
    assert left * 2 <= buffers["stats"].shape[0]


@given(st.integers(1, 4096), st.integers(1, 64))
def test_blocks_of_a_sequence_hold_it_with_less_than_one_to_spare(num_tokens: int, block_tokens: int) -> None:
    num_blocks = StepLimits(1, 1, block_tokens).num_blocks(num_tokens)
    assert 0 <= num_blocks * block_tokens - num_tokens < block_tokens
