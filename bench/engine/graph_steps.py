"""What does a step cost the host and the device, captured and not, and what do graphs of all sizes take?

    python -m bench.engine.graph_steps

A random Llama-2-7B in bf16 on one GPU; plans are made by hand. Prints a JSON line per kind of step; one that
fails costs no other, and the exit status is 1 then.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from bench.engine.step_watch import num_padded_tokens
from bench.llama7b import new_engine
from hearth.core.config import EngineConfig
from hearth.core.sizes import graph_bytes
from hearth.core.types import RequestId, SamplingParams
from hearth.engine.assemble import own_limits
from hearth.engine.engine import Engine
from hearth.engine.runner import Runner
from hearth.engine.step_shape import PaddedSizes
from hearth.policy.batch.plan import Admission, DecodeRows, Row, StepPlan, TableWrites

CONFIG = EngineConfig(max_batch_tokens=8192, max_seqs=1024, kv_bytes=48 << 30, graphs="lazy")
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of step: decode rows, each behind so many tokens, and prompts by their lengths."""

    name: str
    num_decode: int
    context: int
    prompts: tuple[int, ...] = ()
    sampling: SamplingParams = GREEDY

    def plans(self) -> tuple[StepPlan, StepPlan]:
        """The step that admits all of it, and the same step once more."""
        writes, prompts, block = TableWrites(), [], 1
        lengths = [*[1] * self.num_decode, *self.prompts]
        ids = [RequestId(f"{slot}") for slot in range(len(lengths))]
        for slot, length in enumerate(lengths):
            is_prompt = slot >= self.num_decode
            num_blocks = -(-(length if is_prompt else self.context + 1) // CONFIG.block_tokens)
            writes.add(slot, 0, range(block, block + num_blocks))
            block += num_blocks
            if is_prompt:
                prompts.append(Row(ids[slot], slot, 0, length, tuple(range(length)), samples=True))
        slots = list(range(self.num_decode))
        decode = DecodeRows(ids[: self.num_decode], slots, [self.context] * self.num_decode)
        admissions = [Admission(one, slot, (1,), 1, 0, self.sampling) for slot, one in enumerate(ids)]
        first = StepPlan(0, tuple(admissions), writes, decode, tuple(prompts))
        return first, replace(first, step_id=1, admissions=(), table_writes=TableWrites())


CASES = [
    Case("decode 1", 1, 192),
    Case("decode 64", 64, 192),
    Case("decode 256", 256, 192),
    Case("decode 256, sampled", 256, 192, sampling=SAMPLED),
    Case("decode 1024", 1024, 63),
    Case("decode 1024, sampled", 1024, 63, sampling=SAMPLED),
    Case("prompt 128", 0, 0, (128,)),
    Case("prompt 512", 0, 0, (512,)),
    Case("prompt 2048", 0, 0, (2048,)),
    Case("16 prompts, 496 decode", 496, 63, (96,) * 16),
    Case("2 prompts of 1920, 256 decode", 256, 63, (1920, 1920)),
]


def measure(engine: Engine, case: Case) -> dict[str, object]:
    runner, (first, plan) = engine.runner, case.plans()
    graphs, runner.layers.graphs = runner.layers.graphs, None
    assert graphs is not None
    runner.launch(first).wait()
    eager_ms = _host_ms(runner, plan)
    eager_device_ms = _device_ms(lambda: _run(runner, plan), 3)
    runner.layers.graphs, free_bytes, began_s = graphs, torch.cuda.mem_get_info()[0], time.perf_counter()
    runner.launch(plan)
    first_ms = (time.perf_counter() - began_s) * 1e3
    torch.cuda.synchronize()
    return {
        "step": case.name,
        "padded_tokens": num_padded_tokens(runner, plan),
        "launch_ms": _host_ms(runner, plan),
        "eager_launch_ms": eager_ms,
        "first_launch_and_capture_ms": first_ms,
        "device_ms": _device_ms(lambda: _run(runner, plan), ROUNDS),
        "eager_device_ms": eager_device_ms,
        "step_ms": _step_ms(runner, plan),
        "captured_bytes": free_bytes - torch.cuda.mem_get_info()[0],
    }


def _host_ms(runner: Runner, plan: StepPlan) -> float:
    """Median of what the host spends on a launch when the device has nothing else to do."""
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        pending = runner.launch(plan)
        times.append(time.perf_counter() - began_s)
        pending.wait()
    return statistics.median(times) * 1e3


@torch.inference_mode()
def _run(runner: Runner, plan: StepPlan) -> None:
    runner.layers.run(runner.layers.sizes.shape_of(plan), plan)


def _device_ms(queue: Callable[[], None], rounds: int) -> float:
    """The time of forward passes back to back, without inputs and sampling."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    queue()
    begin.record()
    for _ in range(rounds):
        queue()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / rounds


def _step_ms(runner: Runner, plan: StepPlan) -> float:
    """The time of whole steps, each launched before the one before is waited for."""
    pending, began_s = runner.launch(plan), time.perf_counter()
    for _ in range(ROUNDS):
        pending, previous = runner.launch(plan), pending
        previous.wait()
    pending.wait()
    return (time.perf_counter() - began_s) / (ROUNDS + 1) * 1e3


def sweep(engine: Engine) -> dict[str, object]:
    """Time prompts of lengths around sizes, captured and not padded: which of them cost the same anyway."""
    runner = engine.runner
    sizes = runner.layers.sizes
    lengths = (65, 96, 128, 192, 256, 257, 320, 384, 513, 576, 640, 704, 768, 1025, 1088, 1152, 1280)
    found = {}
    for length in (*lengths, 2049, 2112, 2176, 2304, 4033, 4096):
        runner.layers.sizes = PaddedSizes(decode=(1,), mixed=(length,), samples=(1,))
        first, plan = Case("", 0, 0, (length,)).plans()
        runner.launch(first).wait()
        found[str(length)] = round(_device_ms(lambda plan=plan: _run(runner, plan), 4), 2)
    runner.layers.sizes = sizes
    return {"step": "prompt, not padded: device ms by tokens", **found}


def capture_all(engine: Engine) -> dict[str, object]:
    """Capture what is missing of every size; how long it takes, and what graphs take in all."""
    graphs = engine.runner.layers.graphs
    assert graphs is not None
    graphs.forget()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_bytes, began_s = torch.cuda.mem_get_info()[0], time.perf_counter()
    engine.runner.capture_all()
    torch.cuda.synchronize()
    used_bytes = free_bytes - torch.cuda.mem_get_info()[0]
    arch, device = engine.runner.layers.decoder.arch, engine.runner.layers.kv.device
    return {
        "step": "all sizes",
        "graphs": len(graphs),
        "capture_s": time.perf_counter() - began_s,
        "used_bytes": used_bytes,
        "estimated_bytes": graph_bytes(arch.dimensions, own_limits(CONFIG, arch, torch.bfloat16, device)),
    }


def main() -> None:
    engine = new_engine(CONFIG, seed=1)
    engine.runner.layers.kv.zero_()
    parts: list[Callable[[], dict[str, object]]] = [
        *(lambda case=case: measure(engine, case) for case in CASES),
        lambda: sweep(engine),
        lambda: capture_all(engine),
    ]
    has_failed = False
    for part in parts:
        try:
            result = part()
        except Exception as error:
            result, has_failed = {"error": repr(error)}, True
        shown = {name: round(x, 3) if isinstance(x, float) else x for name, x in result.items()}
        print(json.dumps(shown), flush=True)
    if has_failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
