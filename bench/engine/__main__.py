"""How close is the engine to the device's limits, and to its peers? A random Llama-2-7B in bf16 on one GPU.

python -m bench.engine [--save]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

STARTED_S = time.perf_counter()

import torch  # noqa: E402 - its import is part of what is measured

TORCH_S = time.perf_counter() - STARTED_S

from bench.llama7b import ARCH, new_engine, new_tokenizer  # noqa: E402
from bench.report import arguments, emit, peers, percentiles  # noqa: E402
from hearth import LLM, SamplingParams  # noqa: E402
from hearth.config import EngineConfig  # noqa: E402
from hearth.engine.engine import Engine  # noqa: E402
from hearth.engine.step_shape import GraphKey, StepPart  # noqa: E402
from hearth.sizes import padded_size  # noqa: E402

HEARTH_S = time.perf_counter() - STARTED_S - TORCH_S

CONFIG = EngineConfig(graphs="start")
PROMPT_TOKENS = NEW_TOKENS = 128
#: Weights that a token reads, over what a device copy reads and writes: 13.2 GB at 4.2 TB/s.
BOUND_TOKENS_PER_S = 318
#: The linears of a 2,048-token prompt alone, through cuBLAS.
BOUND_PROMPT_MS = 40.2


class Prompts:
    """Random token ids, never the same prompt twice, so that no prefix is ever found."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def take(self, count: int, length: int) -> list[list[int]]:
        return torch.randint(0, ARCH.vocab_size, (count, length), generator=self._generator).tolist()


GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=NEW_TOKENS, ignore_eos=True)


def throughput(
    llm: LLM, prompts: Prompts, num_requests: int, num_runs: int, params: SamplingParams = GREEDY
) -> dict[str, object]:
    """Measure output tokens per second of requests that arrive at once, prompts included in the time."""
    rates = []
    for run in range(num_runs + 1):
        asked = prompts.take(num_requests, PROMPT_TOKENS)
        began_s = time.perf_counter()
        completions = llm.generate(asked, params)
        elapsed_s = time.perf_counter() - began_s
        assert all(len(c.token_ids) == NEW_TOKENS for c in completions)
        if run:  # the first one warms up
            rates.append(num_requests * NEW_TOKENS / elapsed_s)
    return {"requests": num_requests, "tokens_per_s": percentiles(rates)}


def time_to_first_token(llm: LLM, prompts: Prompts, length: int, num_runs: int) -> dict[str, object]:
    times = []
    for run in range(num_runs + 2):
        (asked,) = prompts.take(1, length)
        began_s = time.perf_counter()
        next(iter(llm.stream(asked, SamplingParams(temperature=0.0, max_tokens=1))))
        if run > 1:
            times.append(1e3 * (time.perf_counter() - began_s))
    return {"prompt_tokens": length, "ms": percentiles(times)}


def profile(llm: LLM, prompts: Prompts, num_requests: int) -> dict[str, object]:
    """Find where the device's time goes while so many requests decode: by kernel, and idle."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        llm.generate(prompts.take(num_requests, PROMPT_TOKENS), GREEDY)
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    steps = [begin for begin, _, name in spans if "Memcpy DtoH" in name]
    # From the second to the last but one token copied back: decode steps in full flight.
    first, last = steps[1], steps[-2]
    inside = [span for span in spans if first <= span[0] < last]
    busy_us, until = 0.0, first
    by_kernel: Counter[str] = Counter()
    for begin, end, name in inside:
        by_kernel[name[:60]] += end - begin
        busy_us += max(0.0, end - max(begin, until))
        until = max(until, end)
    num_steps = sum(first <= at < last for at in steps)
    return {
        "requests": num_requests,
        "steps": num_steps,
        "step_ms": (last - first) / num_steps / 1e3,
        "idle_share": 1.0 - busy_us / (last - first),
        "us_per_step": {name: us / num_steps for name, us in by_kernel.most_common(12)},
    }


def step_times(engine: Engine, num_requests: int) -> dict[str, float]:
    """Replay a decode graph back to back: what a step costs without host and sampling."""
    graphs = engine.runner.graphs
    assert graphs is not None
    key = GraphKey(StepPart.DECODE, padded_size(engine.runner.sizes.decode, num_requests))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graphs.replay(key)
    begin.record()
    for _ in range(20):
        graphs.replay(key)
    end.record()
    torch.cuda.synchronize()
    return {"requests": num_requests, "graph_ms": begin.elapsed_time(end) / 20}


def start() -> dict[str, float]:
    """Time the parts of an engine start, weights left out, in this process, which should be new."""
    marks = {"import_torch_s": TORCH_S, "import_hearth_s": HEARTH_S}
    at = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal at
        torch.cuda.synchronize()
        marks[name] = time.perf_counter() - at
        at = time.perf_counter()

    torch.zeros(1, device="cuda")
    mark("context_s")
    engine = new_engine(EngineConfig(graphs="lazy"), seed=None)
    mark("buffers_s")
    with LLM.over(engine, None) as llm:
        llm.generate([[1] * 200], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
        mark("first_tokens_s")
        engine.runner.capture_all()
        mark("graphs_s")
    return {**marks, "total_s": sum(marks.values())}


def start_in_a_new_process() -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-m", "bench.engine", "--start"], check=True, capture_output=True, text=True
    )
    parts: dict[str, float] = json.loads(run.stdout)
    return parts


def measure() -> dict[str, object]:
    # Before this process takes the memory. The first one compiles what no earlier run has left in the cache.
    first_start, start = start_in_a_new_process(), start_in_a_new_process()
    prompts = Prompts()
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = new_tokenizer(Path(directory))
    engine = new_engine(CONFIG, seed=1)
    with LLM.over(engine, tokenizer) as llm:
        return {
            "first_start": first_start,
            "start": start,
            "prompt_128": time_to_first_token(llm, prompts, 128, 15),
            "prompt_2048": time_to_first_token(llm, prompts, 2048, 15),
            "one_request": throughput(llm, prompts, 1, 7),
            "requests_64": throughput(llm, prompts, 64, 5),
            "requests_256": throughput(llm, prompts, 256, 3),
            "requests_64_sampled": throughput(llm, prompts, 64, 3, SAMPLED),
            "requests_256_sampled": throughput(llm, prompts, 256, 3, SAMPLED),
            "graphs": [step_times(engine, size) for size in (1, 64, 256)],
            "profiles": [profile(llm, prompts, size) for size in (1, 64, 256)],
        }


ROWS = {
    "one_request": ("one request, 128 + 128 tokens", "tokens/s", BOUND_TOKENS_PER_S, "at least 238"),
    "requests_64": ("64 requests of 128 + 128 at once", "tokens/s", None, "at least vLLM's"),
    "requests_256": ("256 requests of 128 + 128 at once", "tokens/s", None, "at least vLLM's"),
    "requests_256_sampled": ("the same 256, temperature 0.8, top-p 0.95", "tokens/s", None, None),
    "prompt_2048": ("2,048-token prompt to first token", "ms", BOUND_PROMPT_MS, "at most vLLM's"),
    "start": ("engine start without weights, 35 graphs", "s", None, "under 10 s"),
    "idle_64": ("GPU idle between steps at batch 64", "share of the step", 0, "under 0.1"),
}


def table(results: dict[str, object]) -> list[dict[str, object]]:
    def dig(*path: object) -> float:
        at: object = results
        for key in path:
            at = at[key]  # type: ignore[index] # JSON
        assert isinstance(at, float | int)
        return at

    values = {
        "one_request": dig("one_request", "tokens_per_s", "p50"),
        "requests_64": dig("requests_64", "tokens_per_s", "p50"),
        "requests_256": dig("requests_256", "tokens_per_s", "p50"),
        "requests_256_sampled": dig("requests_256_sampled", "tokens_per_s", "p50"),
        "prompt_2048": dig("prompt_2048", "ms", "p50"),
        "start": dig("start", "total_s"),
        "idle_64": dig("profiles", 1, "idle_share"),
    }
    figures = peers()["engine"]["peers"]
    return [
        {
            "measure": measure,
            "unit": unit,
            "value": values[key],
            "bound": bound,
            "aim": aim,
            "peers": {name: peer[key] for name, peer in figures.items() if key in peer},
            "is_comparable": key != "start",  # theirs loads weights within it
        }
        for key, (measure, unit, bound, aim) in ROWS.items()
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--start", action="store_true", help="only time an engine start in this process")
    options = parser.parse_args()
    if options.start:
        print(json.dumps(start()))
        return
    results = measure()
    emit("engine", {"config": asdict(CONFIG), "rows": table(results), "results": results}, save=options.save)


if __name__ == "__main__":
    main()
