"""The part of a long workload that is simulated: some of its windows, the busiest first.

Thinning the requests, the models and the devices in proportion would be wrong for few devices: a tenth of the
requests does not queue as all of them do, and half a device cannot be simulated. So windows are simulated
whole, one by one. They are ranked by load. Those of the ranks 1, 2, 4, 8 and so on are simulated, each after
a warm-up, and each stands for all windows up to the next one. These are less busy, so that the share of
requests on time is more likely understated than overstated.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from hearth.policy.fleet.events import DemandForecast
from hearth.sim.traces import Trace, TracedRequest

#: A shorter window would end before its requests.
MIN_WINDOW_S = 30.0
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


def sample(trace: Trace, load_s: Callable[[TracedRequest], float], max_requests: int) -> TraceSample:
    """Return windows with about `max_requests` requests, warm-up included, or all of a shorter workload.

    `load_s`: of a request, on a device.
    """
    num_requests = len(trace.requests)
    length_s = math.nextafter(trace.requests[-1].arrival_s, math.inf)
    if num_requests <= max_requests:
        return TraceSample((SampledWindow(trace),), 1, length_s, num_requests)
    window_s, ratio = length_s, 2
    while True:
        if window_s / 2 >= MIN_WINDOW_S:
            window_s /= 2
        else:  # more of the windows between are left out
            ratio *= 2
        parts = _parts(trace, load_s, window_s, ratio)
        num_simulated = sum(len(part.trace.requests) for part in parts)
        if num_simulated <= max_requests or (ratio > 2 and len(parts) <= MIN_PARTS):
            return TraceSample(tuple(parts), math.ceil(length_s / window_s), window_s, num_requests)


def _parts(
    trace: Trace, load_s: Callable[[TracedRequest], float], window_s: float, ratio: int
) -> list[SampledWindow]:
    loads: dict[int, float] = defaultdict(float)
    ends: dict[int, int] = {}
    for number, request in enumerate(trace.requests):
        window = int(request.arrival_s // window_s)
        loads[window] += load_s(request)
        ends[window] = number + 1
    begins = dict(zip(ends, [0, *ends.values()], strict=False))
    ranked = sorted(loads, key=lambda window: (-loads[window], window))
    parts, first = list[SampledWindow](), 0
    while first < len(ranked):
        after, window = (first + 1) * ratio - 1, ranked[first]
        before_s = min(1.0, window) * WARM_UP_SHARE * window_s
        from_s = window * window_s - before_s
        begin = bisect_left(trace.requests, from_s, key=lambda request: request.arrival_s)
        requests = trace.requests[begin : ends[window]]
        stratum = sum(ends[one] - begins[one] for one in ranked[first:after])
        parts.append(
            SampledWindow(
                Trace(trace.name, tuple(replace(one, arrival_s=one.arrival_s - from_s) for one in requests)),
                begins[window] - begin,
                before_s,
                stratum / (ends[window] - begins[window]),
            )
        )
        first = after
    return parts
