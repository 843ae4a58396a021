"""Workloads drawn at random: arrivals by rate or count, lengths from a list.

The seed of the given `Random` makes a workload repeatable.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from hearth.core.errors import ConfigError
from hearth.sim.traces import Trace, TracedRequest


@dataclass(frozen=True, slots=True)
class RequestLength:
    num_input_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    choices: tuple[RequestLength, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise ConfigError("lengths of requests are drawn from at least 1, given: none")

    @staticmethod
    def fixed(num_input_tokens: int, num_output_tokens: int) -> Lengths:
        return Lengths((RequestLength(num_input_tokens, num_output_tokens),))

    def draw(self, chooser: Random) -> RequestLength:
        return chooser.choice(self.choices)


@dataclass(frozen=True, slots=True)
class CountedPeriod:
    tenant: str
    begin_s: float
    length_s: float
    num_requests: int

    @property
    def num_expected(self) -> float:
        return self.num_requests

    def draw_arrivals(self, chooser: Random) -> Iterator[float]:
        for _ in range(self.num_requests):
            yield self.begin_s + self.length_s * chooser.random()


@dataclass(frozen=True, slots=True)
class RatedPeriod:
    tenant: str
    begin_s: float
    length_s: float
    rate_per_s: float
    cv: float = 1.0  #: of the gaps: their deviation over their mean. 1 is Poisson; more comes in bursts

    def __post_init__(self) -> None:
        is_right = 0.0 < self.rate_per_s < math.inf and 0.0 < self.cv < math.inf and self.length_s < math.inf
        if not is_right:
            raise ConfigError(
                f"arrivals need a rate and a CV above 0 and an end, given for `{self.tenant}`: "
                f"{self.rate_per_s:g} requests/s, CV {self.cv:g}, {self.length_s:g} s"
            )

    @property
    def num_expected(self) -> float:
        return self.rate_per_s * self.length_s

    def draw_arrivals(self, chooser: Random) -> Iterator[float]:
        """Draw times as of a stationary process, so that their mean number is exact."""
        shape, scale = self.cv**-2, self.cv**2 / self.rate_per_s
        # A gap that is under way is likely to be a long one, and to be over in part.
        at_s = self.begin_s + chooser.random() * chooser.gammavariate(shape + 1.0, scale)
        while at_s < self.begin_s + self.length_s:
            yield at_s
            at_s += chooser.gammavariate(shape, scale)


Period = CountedPeriod | RatedPeriod


def draw_trace(name: str, periods: Sequence[Period], lengths: Lengths, chooser: Random) -> Trace:
    requests = []
    for period in periods:
        for arrival_s in period.draw_arrivals(chooser):
            length = lengths.draw(chooser)
            requests.append(
                TracedRequest(arrival_s, period.tenant, length.num_input_tokens, length.num_output_tokens)
            )
    return Trace.of(name, requests)


def count_before(begin_s: float, periods: Iterable[Period], step_s: float) -> dict[str, list[float]]:
    """Return how many requests of each tenant are expected in the whole steps before a time."""
    num_steps = int(begin_s // step_s)
    counts: dict[str, list[float]] = defaultdict(lambda: [0.0] * num_steps)
    for period in periods:
        first = (period.begin_s - begin_s) / step_s + num_steps
        num = period.length_s / step_s
        for step in range(max(0, math.floor(first)), min(num_steps, math.ceil(first + num))):
            share = (min(first + num, step + 1) - max(first, step)) / num
            counts[period.tenant][step] += share * period.num_expected
    return counts


def steady(rates_per_s: Mapping[str, float], length_s: float, cv: float = 1.0) -> list[RatedPeriod]:
    return [RatedPeriod(tenant, 0.0, length_s, rate, cv) for tenant, rate in rates_per_s.items()]
