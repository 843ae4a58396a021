"""Finds the fewest devices and the least host memory with which a workload meets a target, by trying."""

from __future__ import annotations

import math
import signal
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from ctypes import c_double, c_int64
from dataclasses import dataclass
from itertools import accumulate, chain
from multiprocessing import get_context
from multiprocessing.sharedctypes import Synchronized, SynchronizedArray
from typing import Self, TypeGuard

from hearth.core.types import ModelId, RequestId
from hearth.policy.fleet.events import RequestFinished
from hearth.sim.profile import Profile
from hearth.sim.report import cold_starts_of
from hearth.sim.sampling import SampledWindow, TraceSample
from hearth.sim.service import SimulatedService
from hearth.sim.setting import SimulationSetting
from hearth.sim.stepped_model import WorkerFact
from hearth.sim.traces import TracedRequest

MAX_GPUS = 4096
#: Decode rows of a device that works to capacity, for the estimate with which the search begins.
TYPICAL_ROWS = 64
#: More devices do not help if twice as many have nearly as many requests on time and nearly as many late.
HELPS = 0.9
POLL_S = 0.2
#: Of the requests, beyond those that may be late: rounding does not end a simulation early.
ROUNDING = 1e-9


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


@dataclass(frozen=True, slots=True)
class Missed:
    """A setting whose simulation ended early: it could not meet the target any more. Becomes JSON."""

    num_gpus: int
    num_nodes: int
    host_bytes: int | None
    requests_on_time: None = None


Outcome = Tried | Missed
#: Tries numbers in ascending order; None: not needed, as a smaller one meets the target. If told to, a
#: simulation ends as soon as the target cannot be met any more.
Attempt = Callable[[Sequence[int], bool], list[Outcome | None]]


def find_least(
    attempt: Attempt,
    target: float,
    first: int,
    most: int,
    plenty: int,
    width: int,
    known: Mapping[int, Outcome] | None = None,
) -> dict[int, Outcome]:
    """Return all that was tried, by number. The first that meets the target is the least that does, if any.

    `attempt` gets `width` numbers at most. `first`: where to begin. `most`: the largest number. From `plenty`
    on, simulations do not end early, and the search ends if more do not help. `known`: was tried before.
    """
    tried: dict[int, Outcome] = dict(known or {})
    while True:
        high = min((num for num, one in tried.items() if is_met(one, target)), default=math.inf)
        low = max((num for num in tried if num < high), default=0)
        if high == math.inf:
            begin = max(first, 2 * low)
            nums = sorted({min(begin << power, most) for power in range(width)} - {low})
        else:
            nums = sorted({low + (int(high) - low) * part // (width + 1) for part in range(1, width + 1)})
            nums = [num for num in nums if num > low] or [low + 1]
        if high - low <= 1 or not nums or (high == math.inf and _is_helpless(tried, low, plenty)):
            return dict(sorted(tried.items()))
        outcomes = attempt(nums, high < math.inf or nums[-1] < plenty)
        tried.update((num, one) for num, one in zip(nums, outcomes, strict=True) if one is not None)


def is_met(one: Outcome, target: float) -> TypeGuard[Tried]:
    return isinstance(one, Tried) and one.requests_on_time >= target


def _is_helpless(tried: Mapping[int, Outcome], num: int, plenty: int) -> bool:
    """Whether more than `num`, the largest number that was tried, do not help."""
    if num < plenty or num // 2 not in tried:
        return False
    half, whole = tried[num // 2].requests_on_time, tried[num].requests_on_time
    if half is None or whole is None:  # ended early
        return False
    return whole <= half / HELPS and 1 - whole >= HELPS * (1 - half)


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
        self._late = context.Array(c_double, num_processes)
        shared = self._num_ended, self._late
        self._processes = ProcessPoolExecutor(num_processes, context, _begin, shared)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(0)
        self._processes.shutdown(cancel_futures=True)

    def simulate(self, settings: Sequence[SimulationSetting]) -> list[Tried]:
        """Simulate the workload with each setting to its end."""
        outcomes = self.attempt(settings, math.inf, ends_early=False)
        return [one for one in outcomes if isinstance(one, Tried)]

    def attempt(
        self, settings: Sequence[SimulationSetting], target: float, *, ends_early: bool
    ) -> list[Outcome | None]:
        """Simulate the workload with each setting, from the smallest to the largest.

        `ends_early`: a simulation ends once the target cannot be met any more. None: the setting is not
        needed, as a smaller one meets the target.
        """
        sample, num_slots = self._sample, len(self._late)
        late_weight = (1 - target + ROUNDING) * sample.all_weight if ends_early else sys.float_info.max
        assert len(settings) <= num_slots or math.isinf(target), f"{len(settings)=} {num_slots=}"
        self._num_ended.value, self._late[:] = 0, [0.0] * num_slots
        heaviest_first = sorted(sample.parts, key=lambda part: -part.weight)  # whose late requests count most
        jobs = [
            [
                self._processes.submit(
                    _simulate, part, setting, self._profile, number % num_slots, late_weight
                )
                for part in heaviest_first
            ]
            for number, setting in enumerate(settings)
        ]
        tried: list[Outcome | None] = []
        total = len(settings) * sum(len(one.trace.requests) for one in sample.parts)
        for number, (setting, futures) in enumerate(zip(settings, jobs, strict=True)):
            pending = {*futures}
            while pending:
                done, pending = wait(pending, POLL_S, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                self._on_progress(self._num_ended.value, total)
            one = _tried(setting, [future.result() for future in futures])
            tried.append(one)
            if is_met(one, target):
                self._stop(number + 1)
                wait(chain(*jobs[number + 1 :]))
                break
        return [*tried, *[None] * (len(settings) - len(tried))]

    def _stop(self, first: int) -> None:
        """End the simulations of this attempt from that number on."""
        self._late[first:] = [math.inf] * (len(self._late) - first)


def _tried(setting: SimulationSetting, results: Sequence[_WindowResult | None]) -> Outcome:
    host_bytes = None if math.isinf(setting.transfers.host_bytes) else int(setting.transfers.host_bytes)
    machines = setting.num_workers, setting.num_nodes, host_bytes
    outcomes = [result for result in results if result is not None]
    if len(outcomes) < len(results):
        return Missed(*machines)
    all_weight = sum(outcome.weight * len(outcome.late) for outcome in outcomes)
    late_weight = sum(outcome.weight * sum(outcome.late) for outcome in outcomes)
    ranked = sorted((s, outcome.weight) for outcome in outcomes for s in outcome.first_token_s)
    weight_below = list(accumulate(weight for _, weight in ranked))
    p99 = bisect_left(weight_below, 0.99 * weight_below[-1]) if ranked else 0
    gpu_s = sum(outcome.weight * outcome.gpu_s for outcome in outcomes)
    length_s = sum(outcome.weight * outcome.length_s for outcome in outcomes)
    return Tried(
        *machines,
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
#: Of each simulated setting: the weight of late requests; infinite: its simulation is to end.
_late: SynchronizedArray[float]


class _EndedError(Exception):
    """The result of a simulation is not needed any more."""


def _begin(num_ended: Synchronized[int], late: SynchronizedArray[float]) -> None:
    global _num_ended, _late
    _num_ended, _late = num_ended, late
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the command, and that its processes


def _simulate(
    part: SampledWindow, setting: SimulationSetting, profile: Profile, number: int, late_weight: float
) -> _WindowResult | None:
    """Simulate a window; None: it has ended early, because a greater weight of requests is late.

    `number`: of the setting in `_late`.
    """
    on_time, late, num_due = setting.on_time, set[RequestId](), 0

    def watch(fact: WorkerFact) -> None:
        nonlocal num_due
        if not isinstance(fact, RequestFinished):
            return
        num_before, answer = len(late), service.answers[fact.request_id]
        if answer.request_id in counted and answer.is_whole and answer.is_late(on_time):
            late.add(answer.request_id)
        while num_due < len(due) and due[num_due].arrived_s + on_time.first_token_s < fact.now_s:
            if not due[num_due].token_s:
                late.add(due[num_due].request_id)
            num_due += 1
        with _num_ended.get_lock():
            _num_ended.value += 1
        with _late.get_lock():
            _late[number] += part.weight * (len(late) - num_before)
            if _late[number] > late_weight:
                raise _EndedError

    if _late[number] > late_weight:
        return None
    service = SimulatedService(setting, profile, watch)
    service.ask(part.trace.requests)
    if setting.prewarming is not None:
        for forecast in part.forecasts:
            service.schedule(forecast)
    due = list(service.answers.values())[part.num_before :]
    counted = {answer.request_id for answer in due}
    try:
        service.run()
    except _EndedError:
        return None
    service.check()
    are_late = [one.is_late(on_time) for one in due]
    assert sum(are_late) >= len(late), f"on time after all: {len(late)=} {sum(are_late)=}"
    return _WindowResult(
        part.weight,
        are_late,
        [one.first_token_s for one in due if one.token_s],
        Counter(one.why_not for one in due if one.why_not is not None),
        service.gpu_s,
        service.idle_gpu_s,
        sum(cold_starts_of(service).values()),
        service.now_s,
    )
