"""Where does the time of a step go? Each kernel of captured steps, beside what its products or bytes allow.

    python -m bench.engine.step_budget [--shapes 7B] [--rows 1 64] [--context 192] [--prompts 2048]

Random models in bf16 on one GPU, of shapes that `bench.engine` has; plans are made by hand and launched one
ahead, as an engine does. Without rows and prompts these are steps of a Llama-2-7B under traffic.

Prints a table for each kind of step: the time of the step by itself and while it is traced, what its launch
takes the host, how long the device was idle, and for each kind of kernel how often it runs, its median, by
how much all of them advance the step, and the rate that one reaches. A kernel that starts while the one in
front of it drains is there for longer than it advances the step, from the end of the one in front.
"""

from __future__ import annotations

import gc
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import median

import torch

from bench.engine.bounds import BYTES_PER_S, FLOPS_PER_S
from bench.engine.graph_steps import CONFIG, Case
from bench.engine.scale import GPU
from bench.engine.step_watch import num_padded_tokens
from bench.random_engine import new_engine
from bench.shape import Shape
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
#: Parts of names of the libraries' kernels for products, and of ours for one row and for small matrices.
_PRODUCTS = ("nvjet", "gemm", "cutlass", "splitKreduce", "skinny_linear", "narrow_linear")
#: A part of the name of the kernel that only sums up what the product in front of it left in parts.
_ENDS = "splitKreduce"
#: By a part of our kernels' names.
_KINDS = {
    "add_norm": "norm",
    "rotate_and_store": "rotary",
    "decode_attention": "decode attention",
    "prefill": "prompt attention",
    "activate": "activation",
    "best_": "best token",
}
_NUM_TIMED = 40  #: steps whose time is taken without a trace


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
    before, last = "begin", ""
    for span, kind, behind in zip(spans, plain, reversed(nexts), strict=True):
        if kind is not None:
            before, last = kind, ""
        elif not (last and _ENDS in span.name):  # else the end of the product in front
            last = _product(before, behind, is_first=not last)
        yield kind or last, span


def _plain_kind(name: str) -> str | None:
    """Return the kind of a kernel, None of a product."""
    if any(part in name for part in _PRODUCTS):
        return None
    return next((kind for part, kind in _KINDS.items() if part in name), name[:40])


def _product(before: str, behind: str, *, is_first: bool) -> str:
    if behind == "rotary":
        return "qkv product"
    if "attention" in before and is_first:
        return "o product"
    if behind == "activation":
        return "up product"
    return "down product" if before == "activation" else "head product"


def advances_us(spans: Sequence[Span]) -> list[float]:
    """Return for each kernel how much later than all in front of it it ended; gaps are of the one behind."""
    ends = [spans[0].begin_us, *accumulate((span.end_us for span in spans), max)]
    return [after - before for before, after in pairwise(ends)]


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


@dataclass(frozen=True, slots=True)
class Amount:
    """The numbers that one kernel computes, and the bytes that it moves."""

    flops: float
    num_bytes: float

    def rate(self, us: float) -> str:
        """Say which rate it reaches, of what bounds it, and the share of that."""
        by_bytes_us, by_flops_us = 1e6 * self.num_bytes / BYTES_PER_S, 1e6 * self.flops / FLOPS_PER_S
        if by_bytes_us > by_flops_us:
            return f"{self.num_bytes / us / 1e6:8.2f} TB/s ({by_bytes_us / us:4.0%})"
        return f"{self.flops / us / 1e6:8.0f} TFLOP/s ({by_flops_us / us:4.0%})"


def amounts(shape: Shape, case: Case, num_rows: int) -> Mapping[str, Amount]:
    """Return by kind what one kernel has to do, with numbers of two bytes."""
    arch, sizes = shape.arch, shape.arch.dimensions
    hidden, inner = sizes.hidden_size, sizes.intermediate_size

    def product(n: int, k: int, rows: int = num_rows) -> Amount:
        return Amount(2.0 * rows * n * k, 2.0 * (n * k + rows * (n + k)))

    def moved(num_values: float) -> Amount:
        return Amount(0.0, 2.0 * num_values)

    seen = sum(length * (length + 1) / 2 for length in case.prompts)
    return {
        "qkv product": product(sizes.qkv_size, hidden),
        "o product": product(hidden, sizes.q_size),
        "up product": product(sizes.up_size, hidden),
        "down product": product(hidden, inner),
        "head product": product(arch.vocab_size, arch.embed_size, case.num_decode + len(case.prompts)),
        "norm": moved(4 * num_rows * hidden),
        "activation": moved(3 * num_rows * inner),
        "rotary": moved(num_rows * (sizes.qkv_size + sizes.q_size + 2 * sizes.kv_size)),
        "decode attention": moved(2 * case.num_decode * (case.context + 1) * sizes.kv_size),
        "prompt attention": Amount(4.0 * seen * sizes.q_size, 0.0),
    }


@dataclass(slots=True)
class KindTimes:
    """All kernels of a kind. Mutable while a trace is read."""

    each_us: list[float] = field(default_factory=list)
    advance_us: float = 0.0
    num_ends: int = 0  #: of them that only end what the kernel in front began
    names: set[str] = field(default_factory=set)


def report(title: str, spans: Sequence[Span], num_steps: int, most: Mapping[str, Amount]) -> None:
    """Print a table of what ran in so many steps."""
    by_kind: dict[str, KindTimes] = defaultdict(KindTimes)
    for (kind, span), advance_us in zip(kinds(spans), advances_us(spans), strict=True):
        times = by_kind[kind]
        times.each_us.append(span.us)
        times.advance_us += advance_us
        times.num_ends += _ENDS in span.name
        times.names.add(span.name[:60])
    traced_us = (spans[-1].end_us - spans[0].begin_us) / num_steps
    print(f"\n## {title}, traced {traced_us / 1e3:.3f} ms, idle {idle_us(spans) / num_steps:.0f} us")
    for kind, times in sorted(by_kind.items(), key=lambda item: -item[1].advance_us):
        count, each_us, per_step_us = len(times.each_us), median(times.each_us), times.advance_us / num_steps
        if per_step_us < 0.5:
            continue
        rate = most[kind].rate(times.advance_us / (count - times.num_ends)) if kind in most else ""
        library = " ".join(sorted(name for name in times.names if "nvjet" in name or _ENDS in name))[:150]
        counts = f"{count / num_steps:6.1f} x {each_us:8.1f} us, advance {per_step_us:9.1f} us"
        print(f"{kind:<42}{counts} {rate} {library}")
    print("longest gaps:", "; ".join(longest_gaps(spans, 4)), flush=True)


def measure(engine: Engine, shape: Shape, case: Case, num_steps: int) -> None:
    runner, (first, plan) = engine.runner, case.plans()
    runner.launch(first).wait()
    _run(runner, plan, 2)
    launch_us: list[float] = []
    began_s = time.perf_counter()
    _run(runner, plan, _NUM_TIMED, launch_us)
    step_ms = 1e3 * (time.perf_counter() - began_s) / _NUM_TIMED
    spans = traced(lambda: _run(runner, plan, num_steps))
    num_rows = plan.num_tokens + num_padded_tokens(runner, plan)
    times = f"{step_ms:.3f} ms a step, launch {median(launch_us):.0f} us"
    title = f"{shape.name}, {case.name} ({num_rows} rows): {times}"
    report(title, spans, num_steps, amounts(shape, case, num_rows))


def _run(runner: Runner, plan: StepPlan, num_steps: int, launch_us: list[float] | None = None) -> None:
    """Run steps, each launched before the one before is waited for."""
    pending = runner.launch(plan)
    for _ in range(num_steps - 1):
        began_s = time.perf_counter()
        pending, previous = runner.launch(plan), pending
        if launch_us is not None:
            launch_us.append(1e6 * (time.perf_counter() - began_s))
        previous.wait()
    pending.wait()


def _kv_bytes(shape: Shape, cases: Sequence[Case]) -> int:
    """Return the bytes of KV that the largest of the steps needs, and some more."""
    block_tokens = CONFIG.block_tokens
    num_tokens = (
        case.num_decode * (case.context + block_tokens)
        + sum(length + block_tokens for length in case.prompts)
        for case in cases
    )
    return max(num_tokens) * shape.kv_bytes_per_token + (1 << 30)


def main() -> None:
    parser = ArgumentParser("python -m bench.engine.step_budget")
    parser.add_argument("--shapes", nargs="+", default=["7B"], choices=GPU.shapes, help="as in bench.engine")
    parser.add_argument("--rows", nargs="+", type=int, default=[], help="that decode, in steps of their own")
    parser.add_argument("--context", type=int, default=192, help="of rows that decode")
    parser.add_argument("--prompts", nargs="+", type=int, default=[], help="lengths, in steps of their own")
    parser.add_argument("--steps", type=int, default=5, help="that are looked at, of each kind")
    given = parser.parse_args()
    cases = [
        *(Case(f"{rows} decode rows behind {given.context}", rows, given.context) for rows in given.rows),
        *(Case(f"a prompt of {length:,}", 0, 0, (length,)) for length in given.prompts),
    ]
    for name in given.shapes:
        shape = GPU.shapes[name]
        config = replace(CONFIG, kv_bytes=_kv_bytes(shape, cases or CASES))
        engine = new_engine(shape, config, torch.device("cuda"), seed=1)
        engine.runner.layers.kv.normal_()
        for case in cases or CASES:
            measure(engine, shape, case, given.steps)
        del engine
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
