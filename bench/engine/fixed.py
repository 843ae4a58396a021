"""How close is the engine to the device's limits with requests that are all alike? Where does its time go?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial

import torch

from bench.engine.finding import Arm, Found
from bench.engine.rig import Rig
from bench.engine.scale import Work, even
from bench.report import Row, peers, percentiles

#: Weights that a token reads, over what a device copy reads and writes: 13.2 GB at 4.2 TB/s.
BOUND_TOKENS_PER_S = 318
#: The linears of a 2,048-token prompt alone, through cuBLAS.
BOUND_PROMPT_MS = 40.2


def arms(rig: Rig) -> Mapping[str, Arm]:
    few, many = (even(size, rig.scale.fixed.prompt, rig.scale.fixed.new) for size in rig.scale.batches)
    one = even(1, rig.scale.fixed.prompt, rig.scale.fixed.new)
    alike = f"{rig.scale.fixed.prompt} + {rig.scale.fixed.new}"
    bound = BOUND_TOKENS_PER_S
    found = {
        "one_request": partial(_rate, rig, "one_request", one, f"one request, {alike} tokens", 0.0, bound),
        "requests_64": partial(_rate, rig, "requests_64", few, f"{few.text} at once"),
        "requests_256": partial(_rate, rig, "requests_256", many, f"{many.text} at once"),
        "requests_256_sampled": partial(
            _rate, rig, "requests_256_sampled", many, "the same 256, temperature 0.8, top-p 0.95", 0.8
        ),
        "prompt_2048": partial(_prompt, rig),
    }
    if rig.device.type != "cuda":
        return found
    return {**found, "profiles": partial(_profiles, rig, one, few)}


def start() -> Found:
    """Start an engine twice: the first one compiles what no earlier run has left in the cache."""
    first, second = _start_in_a_new_process(), _start_in_a_new_process()
    text = "engine start without weights, all graphs"
    return Found([_row("start", text, "s", second["total_s"])], {"first_start": first, "start": second})


def _start_in_a_new_process() -> dict[str, float]:
    command = [sys.executable, "-m", "bench.engine.engine_start"]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    parts: dict[str, float] = json.loads(run.stdout)
    return parts


def _rate(
    rig: Rig,
    key: str,
    work: Work,
    text: str,
    temperature: float = 0.0,
    bound: float | None = None,
) -> Found:
    rates = percentiles(rig.rates(work, rig.scale.num_runs, temperature))
    return Found([_row(key, text, "tokens/s", rates["p50"], bound)], {"tokens_per_s": rates})


def _prompt(rig: Rig) -> Found:
    length = rig.scale.prompts[-1]
    times = percentiles(rig.first_tokens_ms(length, rig.scale.num_prompt_runs))
    text = f"{length:,}-token prompt to first token"
    return Found([_row("prompt_2048", text, "ms", times["p50"], BOUND_PROMPT_MS)], {"ms": times})


def _profiles(rig: Rig, *works: Work) -> Found:
    """Find where the device's time goes while so many requests decode: by kernel, and idle."""
    profiles = [_profile(rig, work) for work in works]
    idle = profiles[1]["idle_share"]
    assert isinstance(idle, float)
    text = f"GPU idle between steps at batch {rig.scale.batches[0]}"
    return Found([_row("idle_64", text, "share of the step", idle, 0.0)], {"profiles": profiles})


def _profile(rig: Rig, work: Work) -> dict[str, object]:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        steps = rig.run(work).steps
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    # Decode steps in full flight: what the last three quarters of the time saw.
    first, last = spans[0][0] + (spans[-1][0] - spans[0][0]) // 4, spans[-1][0]
    busy_us, until = 0.0, first
    by_kernel: Counter[str] = Counter()
    for begin, end, name in spans:
        if first <= begin < last:
            by_kernel[name[:60]] += end - begin
            busy_us += max(0.0, end - max(begin, until))
            until = max(until, end)
    return {
        "requests": len(work.requests),
        "idle_share": 1.0 - busy_us / (last - first),
        "share_of_kernels": {name: us / busy_us for name, us in by_kernel.most_common(12)},
        **steps,
    }


#: By row: what the engine should reach.
_AIMS = {
    "one_request": "at least 238",
    "requests_64": "at least vLLM's",
    "requests_256": "at least vLLM's",
    "prompt_2048": "at most vLLM's",
    "start": "under 10 s",
    "idle_64": "under 0.1",
}


def _row(key: str, text: str, unit: str, value: float, bound: float | None = None) -> Row:
    """Return a line of the table, with what peers have reached."""
    figures = peers()["engine"]["peers"]  # type: ignore[index] # JSON
    reached = {name: peer[key] for name, peer in figures.items() if key in peer}
    # Peers load weights within their start.
    return Row(text, unit, value, bound, _AIMS.get(key), reached, is_comparable=key != "start")
