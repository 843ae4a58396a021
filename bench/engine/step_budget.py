"""Where does the time of a step go? Each kernel of captured steps, beside what its products or bytes allow.

    python -m bench.engine.step_budget [--steps 5]

A random Llama-2-7B in bf16 on one GPU; plans are made by hand and launched one ahead, as an engine does.
Prints a table for each kind of step: the time of the step, how much of it the device was idle, and for each
kind of kernel how often it runs, its median and sum, and the rate that it reaches.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from bench.engine.graph_steps import CONFIG, Case
from bench.llama7b import ARCH, new_engine
from hearth.engine.engine import Engine
from hearth.engine.runner import Runner
from hearth.policy.batch.plan import StepPlan

CASES = [
    Case("256 decode rows behind 160 tokens", 256, 160),
    Case("208 decode rows behind 500 tokens", 208, 500),
    Case("a prompt of 2,048", 0, 0, (2048,)),
    Case("64 prompts of 128", 0, 0, (128,) * 64),
    Case("a prompt of 3,500, 20 decode rows behind 3,500", 20, 3500, (3500,)),
]
#: Parts of names of the libraries' kernels for products, and of ours for one row.
_PRODUCTS = ("nvjet", "gemm", "cutlass", "splitKreduce", "skinny_linear")
#: By a part of our kernels' names.
_KINDS = {
    "add_norm": "norm",
    "rotate_and_store": "rotary",
    "decode_attention": "decode attention",
    "prefill": "prompt attention",
    "activate": "activation",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel that ran on the device."""

    begin_us: float
    end_us: float
    name: str

    @property
    def us(self) -> float:
        return self.end_us - self.begin_us


def traced(run: Callable[[], object]) -> list[Span]:
    """Return what the device ran, in order."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    spans = [
        Span(event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(spans, key=lambda span: span.begin_us)


def kinds(spans: Sequence[Span]) -> Iterator[tuple[str, Span]]:
    """Yield each kernel with its kind; that of a product is told by its neighbours."""
    plain = [_plain_kind(span.name) for span in spans]
    following, nexts = "end", list[str]()
    for kind in reversed(plain):
        nexts.append(following)
        following = kind or following
    before = "begin"
    for span, kind, behind in zip(spans, plain, reversed(nexts), strict=True):
        yield kind or _product(before, behind), span
        before = kind or before


def _plain_kind(name: str) -> str | None:
    """Return the kind of a kernel, None of a product."""
    if any(part in name for part in _PRODUCTS):
        return None
    return next((kind for part, kind in _KINDS.items() if part in name), name[:40])


def _product(before: str, behind: str) -> str:
    if behind == "rotary":
        return "qkv product"
    if behind == "activation":
        return "up product"
    if before == "activation":
        return "down product"
    return "o product" if behind == "norm" else "head product"


def idle_us(spans: Sequence[Span]) -> float:
    """Return for how long nothing ran between the first kernel and the last."""
    idle, until = 0.0, spans[0].begin_us
    for span in spans:
        idle += max(0.0, span.begin_us - until)
        until = max(until, span.end_us)
    return idle


def longest_gaps(spans: Sequence[Span], count: int) -> list[str]:
    """Return the longest pauses, with what ran before and behind each."""
    gaps = sorted(
        ((b.begin_us - a.end_us, a.name[:30], b.name[:30]) for a, b in pairwise(spans)), reverse=True
    )
    return [f"{us:.0f} us: {before} -> {behind}" for us, before, behind in gaps[:count]]


def allowed(case: Case, num_rows: int) -> Mapping[str, tuple[float, str]]:
    """Return by kind what one kernel computes, in TFLOP, or moves, in TB, with the unit of its rate."""
    sizes = ARCH.dimensions
    hidden, inner = sizes.hidden_size, sizes.intermediate_size

    def product(n: int, k: int) -> tuple[float, str]:
        return 2e-12 * num_rows * n * k, "TFLOP/s"

    def moved(num_values: float) -> tuple[float, str]:
        return 2e-12 * num_values, "TB/s"

    seen = sum(length * (length + 1) / 2 for length in case.prompts)
    return {
        "qkv product": product(sizes.qkv_size, hidden),
        "o product": product(hidden, sizes.q_size),
        "up product": product(sizes.up_size, hidden),
        "down product": product(hidden, inner),
        "norm": moved(4 * num_rows * hidden),
        "activation": moved(3 * num_rows * inner),
        "rotary": moved(num_rows * (sizes.qkv_size + sizes.q_size + 2 * sizes.kv_size)),
        "decode attention": moved(2 * case.num_decode * (case.context + 1) * sizes.kv_size),
        "prompt attention": (4e-12 * seen * sizes.q_size, "TFLOP/s"),
    }


def report(title: str, spans: Sequence[Span], num_steps: int, most: Mapping[str, tuple[float, str]]) -> None:
    """Print a table of what ran in so many steps."""
    by_kind: dict[str, list[float]] = defaultdict(list)
    names: dict[str, set[str]] = defaultdict(set)
    for kind, span in kinds(spans):
        by_kind[kind].append(span.us)
        names[kind].add(span.name[:50])
    step_us = (spans[-1].end_us - spans[0].begin_us) / num_steps
    print(f"\n## {title}: {step_us / 1e3:.2f} ms a step, idle {idle_us(spans) / num_steps:.0f} us")
    for kind, times in sorted(by_kind.items(), key=lambda item: -sum(item[1])):
        each_us, per_step = median(times), sum(times) / num_steps / 1e3
        if per_step < 0.01:
            continue
        amount, unit = most.get(kind, (0.0, ""))
        rate = f"{amount / each_us * 1e6:8.2f} {unit}" if amount else ""
        library = " ".join(sorted(name for name in names[kind] if "nvjet" in name or "splitK" in name))[:150]
        counts = f"{len(times) / num_steps:6.1f} x {each_us:8.1f} us = {per_step:7.3f} ms"
        print(f"{kind:<42}{counts} {rate} {library}")
    print("longest gaps:", "; ".join(longest_gaps(spans, 4)), flush=True)


def measure(engine: Engine, case: Case, num_steps: int) -> None:
    runner, (first, plan) = engine.runner, case.plans()
    runner.launch(first).wait()
    _run(runner, plan, 2)
    spans = traced(lambda: _run(runner, plan, num_steps))
    num_rows = plan.num_tokens + runner.num_padded_tokens(plan)
    report(f"{case.name} ({num_rows} rows)", spans, num_steps, allowed(case, num_rows))


def _run(runner: Runner, plan: StepPlan, num_steps: int) -> None:
    """Run steps, each launched before the one before is waited for."""
    pending = runner.launch(plan)
    for _ in range(num_steps - 1):
        pending, previous = runner.launch(plan), pending
        previous.wait()
    pending.wait()


def main() -> None:
    parser = ArgumentParser("python -m bench.engine.step_budget")
    parser.add_argument("--steps", type=int, default=5, help="that are looked at, of each kind")
    given = parser.parse_args()
    engine = new_engine(CONFIG, seed=1)
    engine.runner.kv.normal_()
    for case in CASES:
        measure(engine, case, given.steps)


if __name__ == "__main__":
    main()
