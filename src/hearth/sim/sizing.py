"""Finds the fewest devices and the least host memory with which a workload meets a target, by trying."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from ctypes import c_int64
from dataclasses import dataclass
from itertools import accumulate, chain
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized
from typing import Self

from hearth.core.types import ModelId
from hearth.sim.profile import Profile
from hearth.sim.report import cold_starts_of
from hearth.sim.run import serve_trace
from hearth.sim.sampling import SampledWindow, TraceSample
from hearth.sim.setting import SimulationSetting
from hearth.sim.traces import TracedRequest

MAX_GPUS = 4096
#: Decode rows of a device that works to capacity, for the estimate with which the search begins.
TYPICAL_ROWS = 64
#: More devices do not help if twice as many have nearly as many requests on time and nearly as many late.
HELPS = 0.9
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Tried:
    """How a workload fares in a setting. Becomes JSON."""

    num_gpus: int
    num_nodes: int
    host_bytes: int | None  #: of each machine; None: not limited
    requests_on_time: float  #: share of requests with every token on time
    first_token_p99_s: float | None  #: None: no request got a token
    gpus_held: float  #: in the mean
    gpu_s: float  #: that devices were held, for the simulated part of the workload
    idle_gpu_s: float  #: of these, by models without a running request
    cold_starts: int  #: requests that waited for a load, in that part
    refusals: dict[str, int]  #: of counted requests, for each reason


Attempt = Callable[[Sequence[int]], list[Tried]]


def find_least(
    attempt: Attempt, target: float, first: int, most: int, plenty: int, width: int
) -> dict[int, Tried]:
    """Return all that was tried, by number. The first that meets the target is the least that does, if any.

    `attempt` gets `width` numbers at most. `first`: where to begin. `most`: the largest number. From `plenty`
    on, the search ends if more do not help.
    """
    tried: dict[int, Tried] = {}
    low, high = 0, math.inf  # `low` fails, `high` meets the target
    while high - low > 1:
        if high == math.inf:
            begin = max(first, 2 * low)
            nums = sorted({min(begin << power, most) for power in range(width)} - {low})
        else:
            nums = sorted({low + (int(high) - low) * part // (width + 1) for part in range(1, width + 1)})
            nums = [num for num in nums if num > low] or [low + 1]
        if not nums:
            break
        tried.update(zip(nums, attempt(nums), strict=True))
        met = [num for num, one in tried.items() if one.requests_on_time >= target]
        high = min(met, default=math.inf)
        low = max((num for num in tried if num < high), default=0)
        if high == math.inf and low >= plenty and low // 2 in tried:
            half, whole = tried[low // 2].requests_on_time, tried[low].requests_on_time
            if whole <= half / HELPS and 1 - whole >= HELPS * (1 - half):
                break
    return dict(sorted(tried.items()))


def load_s(setting: SimulationSetting, profile: Profile) -> Callable[[TracedRequest], float]:
    """Return how long a request keeps a device busy that works to capacity, about."""
    shapes = {model: profile.shape(shape) for model, shape in setting.shapes.items()}

    def of(request: TracedRequest) -> float:
        shape, num_prompt = shapes[ModelId(request.tenant)], min(request.num_input_tokens, setting.context)
        context = TYPICAL_ROWS * (num_prompt + request.num_output_tokens // 2)
        row_s = shape.step_s(TYPICAL_ROWS, TYPICAL_ROWS, context) / TYPICAL_ROWS
        return shape.step_s(num_prompt, 1, num_prompt) + request.num_output_tokens * row_s

    return of


def least_gpus(sample: TraceSample, load_s: Callable[[TracedRequest], float]) -> int:
    """Return how many devices the busiest window keeps busy, about half of what it needs."""
    window = sample.parts[0]
    return max(1, int(sum(map(load_s, window.trace.requests)) / (sample.window_s + window.before_s) / 2))


@dataclass(frozen=True, slots=True)
class _WindowResult:
    """How a part of a workload fared."""

    weight: float
    late: list[bool]  #: of each counted request
    first_token_s: list[float]
    refusals: Counter[str]
    gpu_s: float
    idle_gpu_s: float
    cold_starts: int
    length_s: float


class SizingPool:
    """Simulates a workload in several settings at a time, in processes of its own."""

    def __init__(
        self,
        sample: TraceSample,
        profile: Profile,
        num_processes: int,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """`on_progress` gets the number of answered requests, and of all that the present settings have."""
        self._sample, self._profile, self._on_progress = sample, profile, on_progress
        context = get_context("spawn")
        self._num_ended = context.Value(c_int64, 0)
        self._processes = ProcessPoolExecutor(num_processes, context, _begin, (self._num_ended,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.shutdown(cancel_futures=True)

    def attempt(self, settings: Sequence[SimulationSetting]) -> list[Tried]:
        """Simulate the workload with each setting."""
        parts = self._sample.parts
        self._num_ended.value = 0
        jobs = [
            [self._processes.submit(_simulate, part, setting, self._profile) for part in parts]
            for setting in settings
        ]
        pending, total = set(chain(*jobs)), len(settings) * sum(len(one.trace.requests) for one in parts)
        while pending:
            done, pending = wait(pending, POLL_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            self._on_progress(self._num_ended.value, total)
        return [
            _tried(setting, [future.result() for future in futures])
            for setting, futures in zip(settings, jobs, strict=True)
        ]


def _tried(setting: SimulationSetting, outcomes: Sequence[_WindowResult]) -> Tried:
    all_weight = sum(outcome.weight * len(outcome.late) for outcome in outcomes)
    late_weight = sum(outcome.weight * sum(outcome.late) for outcome in outcomes)
    ranked = sorted((s, outcome.weight) for outcome in outcomes for s in outcome.first_token_s)
    weight_below = list(accumulate(weight for _, weight in ranked))
    p99 = bisect_left(weight_below, 0.99 * weight_below[-1]) if ranked else 0
    gpu_s = sum(outcome.weight * outcome.gpu_s for outcome in outcomes)
    length_s = sum(outcome.weight * outcome.length_s for outcome in outcomes)
    return Tried(
        setting.num_workers,
        setting.num_nodes,
        None if setting.transfers.host_bytes == math.inf else int(setting.transfers.host_bytes),
        1 - late_weight / max(1.0, all_weight),
        ranked[p99][0] if ranked else None,
        gpu_s / length_s,
        sum(outcome.gpu_s for outcome in outcomes),
        sum(outcome.idle_gpu_s for outcome in outcomes),
        sum(outcome.cold_starts for outcome in outcomes),
        dict(sum((outcome.refusals for outcome in outcomes), Counter())),
    )


# In the processes.

_num_ended: Synchronized[int]


def _begin(num_ended: Synchronized[int]) -> None:
    global _num_ended
    _num_ended = num_ended


def _simulate(part: SampledWindow, setting: SimulationSetting, profile: Profile) -> _WindowResult:
    def count(_: int) -> None:
        with _num_ended.get_lock():
            _num_ended.value += 1

    forecasts = part.forecasts if setting.prewarming is not None else ()
    service = serve_trace(part.trace, setting, profile, count, forecasts)
    counted = list(service.answers.values())[part.num_before :]
    return _WindowResult(
        part.weight,
        [one.is_late(setting.on_time) for one in counted],
        [one.first_token_s for one in counted if one.token_s],
        Counter(one.why_not for one in counted if one.why_not is not None),
        service.gpu_s,
        service.idle_gpu_s,
        sum(cold_starts_of(service).values()),
        service.now_s,
    )
