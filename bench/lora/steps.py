"""Steps of requests that have an adapter each, over those of the bare model. Plans are made by hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from bench.engine.bounds import BYTES_PER_S
from bench.llama7b import SHAPE
from bench.lora.random_adapters import CUDA, AdapterSet
from bench.random_engine import random_weights
from hearth.core.config import EngineConfig
from hearth.core.types import AdapterId, RequestId, SamplingParams
from hearth.engine.assemble import ModelSpec, assemble, own_limits
from hearth.engine.engine import Engine
from hearth.models.dtypes import DTYPES
from hearth.policy.batch.plan import Admission, DecodeRows, Row, StepPlan, TableWrites

CONFIG = EngineConfig(max_batch_tokens=8192, max_seqs=256, kv_bytes=8 << 30, graphs="lazy")
GREEDY = SamplingParams(temperature=0.0)
NUM_ADAPTERS, CONTEXT = 128, 192
#: How often steps are timed: all of them, those of prompts, and by what the host spends on them.
ROUNDS, PROMPT_ROUNDS, HOST_ROUNDS = 30, 8, 10


def new_engine(num_layers: int, quant: str = "none") -> Engine:
    """Return an engine over a model of so many layers, none of whose kernels are compiled before."""
    shape = replace(SHAPE, config={**SHAPE.config, "num_hidden_layers": num_layers}, quant=quant)
    arch, dtype = shape.arch, DTYPES[shape.dtype]
    limits = own_limits(CONFIG, arch, dtype, CUDA)
    spec = ModelSpec(arch, dtype, arch.max_positions, limits, eos_ids=frozenset())
    engine = assemble(spec, random_weights(shape, CUDA, seed=1), CONFIG, CUDA)
    engine.runner.layers.kv.zero_()
    return engine


def plans(
    num_decode: int, prompts: Sequence[int], adapters: Sequence[AdapterId | None]
) -> tuple[StepPlan, StepPlan]:
    """Return the step that admits all of it, and the same step once more."""
    writes, rows, block = TableWrites(), [], 1
    lengths = [*[CONTEXT + 1] * num_decode, *prompts]
    ids = [RequestId(f"{slot}") for slot in range(len(lengths))]
    for slot, length in enumerate(lengths):
        num_blocks = -(-length // CONFIG.block_tokens)
        writes.add(slot, 0, range(block, block + num_blocks))
        block += num_blocks
        if slot >= num_decode:
            tokens = tuple(range(length))
            rows.append(Row(ids[slot], slot, 0, length, tokens, samples=True, adapter=adapters[slot]))
    own = list(adapters[:num_decode])
    decode = DecodeRows(
        ids[:num_decode],
        list(range(num_decode)),
        [CONTEXT] * num_decode,
        adapters=own if any(own) else (),
    )
    admissions = [Admission(one, slot, (1,), 1, 0, GREEDY) for slot, one in enumerate(ids)]
    first = StepPlan(0, tuple(admissions), writes, decode, tuple(rows))
    return first, replace(first, step_id=1, admissions=(), table_writes=TableWrites())


def device_ms(engine: Engine, given: tuple[StepPlan, StepPlan], *, is_parked: bool = False) -> float:
    """Return the median time of a step's graphs, without inputs and sampling.

    `is_parked`: with the graphs of such a step, but of no row that has an adapter.
    """
    runner, (first, plan) = engine.runner, given
    runner.launch(first).wait()
    runner.launch(plan).wait()
    shape = runner.layers.sizes.shape_of(plan)
    with torch.inference_mode():
        if is_parked:
            shape = replace(shape, has_adapters=True)
            runner.layers.inputs.adapters.fill_padding(shape)
        runner.layers.run(shape, plan)
        torch.cuda.synchronize()
        rounds = PROMPT_ROUNDS if plan.prompts else ROUNDS
        events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
        for event in events:
            event.record()
            runner.layers.run(shape, plan)
        torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairwise(events))


def host_ms(engine: Engine, given: tuple[StepPlan, StepPlan]) -> float:
    """Return the median of what the host spends on a launch when the device has nothing else to do."""
    times = []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        pending = engine.runner.launch(given[1])
        times.append(time.perf_counter() - began_s)
        pending.wait()
    return statistics.median(times) * 1e3


def measure(engine: Engine, names: Sequence[str], num_prompts: int = 0) -> Iterator[dict[str, object]]:
    """Yield the times of steps of 32 and 64 rows, or of two prompts beside them, for each set of ranks."""
    prompts, batches = [1024] * num_prompts, (32, 64)
    bare = {batch: plans(batch, prompts, [None] * (batch + num_prompts)) for batch in batches}
    for name in names:
        # Each time anew: a device that has computed for a while is 3% slower than one that has rested.
        base_ms = {batch: device_ms(engine, bare[batch]) for batch in batches}
        adapters = AdapterSet.add_to(engine, name, NUM_ADAPTERS)
        for batch in batches:
            own = adapters.ids[: batch + num_prompts]
            given = plans(batch, prompts, own)
            bound_ms = 1e3 * sum(adapters.num_bytes[: len(own)]) / BYTES_PER_S
            found_ms, floor_ms = device_ms(engine, given), device_ms(engine, bare[batch], is_parked=True)
            one_ms = device_ms(engine, plans(batch, prompts, [own[0]] * len(own)))
            eight_ms = device_ms(engine, plans(batch, prompts, [own[at % 8] for at in range(len(own))]))
            still_ms = device_ms(engine, bare[batch])
            launches_ms = floor_ms - still_ms
            yield {
                "step": f"{batch} rows, ranks {name}" + (f", {num_prompts} prompts" if prompts else ""),
                "base_ms": base_ms[batch],
                "base_with_adapters_loaded_ms": still_ms,
                "adapters_ms": found_ms,
                "one_adapter_for_all_ms": one_ms,
                "eight_adapters_ms": eight_ms,
                "floor_of_launches_ms": launches_ms,
                "bound_of_bytes_ms": bound_ms,
                "times_bound": (found_ms - still_ms - launches_ms) / bound_ms,
                "aim_ms": still_ms + 1.3 * bound_ms + launches_ms,
                "host_ms": host_ms(engine, given),
                "base_host_ms": host_ms(engine, bare[batch]),
            }
        adapters.remove_from(engine)
