"""The part of a long workload that is simulated: some of its windows, the busiest first.

Thinning the requests, the models and the devices in proportion would be wrong for few devices: a tenth of the
requests does not queue as all of them do, and half a device cannot be simulated. So windows are simulated
whole, one by one, each after a warm-up. They are ranked by load. The busiest stands for itself. The others
form groups of neighbours, each larger than the one before, and the middle one of each stands for all of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from hearth.policy.fleet.events import DemandForecast
from hearth.sim.traces import Trace, TracedRequest

#: A shorter window would end before its requests.
MIN_WINDOW_S = 20.0
#: Of a window's length, before it.
WARM_UP_SHARE = 0.5
#: A sample has more requests than wanted rather than fewer parts.
MIN_PARTS = 3


@dataclass(frozen=True, slots=True)
class SampledWindow:
    trace: Trace
    num_before: int = 0  #: requests of the warm-up, which are not counted
    before_s: float = 0.0  #: its length
    weight: float = 1.0  #: requests of the workload that each counted one stands for
    forecasts: tuple[DemandForecast, ...] = ()

    @property
    def num_counted(self) -> int:
        return len(self.trace.requests) - self.num_before


@dataclass(frozen=True, slots=True)
class TraceSample:
    parts: tuple[SampledWindow, ...]  #: the busiest first
    num_windows: int
    window_s: float
    num_requests: int  #: of the workload

    @property
    def is_whole(self) -> bool:
        return self.num_windows == 1

    @property
    def num_counted(self) -> int:
        return sum(part.num_counted for part in self.parts)

    @property
    def all_weight(self) -> float:
        return sum(part.weight * part.num_counted for part in self.parts)


def sample(trace: Trace, load_s: Callable[[TracedRequest], float], max_requests: int) -> TraceSample:
    """Return windows with about `max_requests` requests, warm-up included, or all of a shorter workload.

    `load_s`: of a request, on a device.
    """
    num_requests = len(trace.requests)
    length_s = math.nextafter(trace.requests[-1].arrival_s, math.inf)
    if num_requests <= max_requests:
        return TraceSample((SampledWindow(trace),), 1, length_s, num_requests)
    load_before_s = list(accumulate(map(load_s, trace.requests), initial=0.0))
    window_s, ratio = length_s, 2
    while True:
        if window_s > MIN_WINDOW_S:
            window_s = max(MIN_WINDOW_S, window_s / 2)
        else:  # more of the windows between are left out
            ratio *= 2
        picks = _pick(trace, load_before_s, window_s, ratio)
        num_simulated = sum(pick.end - pick.begin for pick in picks)
        if num_simulated <= max_requests or (ratio > 2 and len(picks) <= MIN_PARTS):
            parts = tuple(_part(trace, pick) for pick in picks)
            return TraceSample(parts, math.ceil(length_s / window_s), window_s, num_requests)


@dataclass(frozen=True, slots=True)
class _Pick:
    """The requests of a window, by their places in the trace."""

    begin: int  #: of its warm-up
    counted: int  #: the first that is counted
    end: int
    from_s: float
    before_s: float
    weight: float


def _pick(trace: Trace, load_before_s: Sequence[float], window_s: float, ratio: int) -> list[_Pick]:
    def at(time_s: float) -> int:
        return bisect_left(trace.requests, time_s, key=lambda request: request.arrival_s)

    num_windows = math.ceil(math.nextafter(trace.requests[-1].arrival_s, math.inf) / window_s)
    ends = [*(at(number * window_s) for number in range(num_windows)), len(trace.requests)]
    windows = [number for number in range(num_windows) if ends[number] < ends[number + 1]]
    ranked = sorted(windows, key=lambda one: load_before_s[ends[one]] - load_before_s[ends[one + 1]])
    picks, first = list[_Pick](), 0
    while first < len(ranked):
        after = min((first + 1) * ratio - 1, len(ranked)) if first else 1
        window = ranked[(first + after - 1) // 2]
        before_s = min(1.0, window) * WARM_UP_SHARE * window_s
        from_s, counted, end = window * window_s - before_s, ends[window], ends[window + 1]
        stratum = sum(ends[one + 1] - ends[one] for one in ranked[first:after])
        picks.append(_Pick(at(from_s), counted, end, from_s, before_s, stratum / (end - counted)))
        first = after
    return picks


def _part(trace: Trace, pick: _Pick) -> SampledWindow:
    requests = tuple(
        replace(one, arrival_s=one.arrival_s - pick.from_s) for one in trace.requests[pick.begin : pick.end]
    )
    num_before = pick.counted - pick.begin
    return SampledWindow(Trace(trace.name, requests), num_before, pick.before_s, pick.weight)
