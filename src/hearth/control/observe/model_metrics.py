"""Metrics by model, for a bounded number of models; further models are counted as one.

A model has series from its first request or load until it is removed. The observer of a request keeps its
model's series: what is counted after the removal is not shown.

There may be ten thousand series. prometheus_client needs a third of a second for them, during which the event
loop stands still. So they are formatted here, one family at a time, in a twentieth of that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from hearth.policy.fleet.gpu_time import SECONDS_PER_HOUR

FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
INTER_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_WHOLE_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MAX_MODEL_LABELS = 200
#: The label of all others; not a valid name of a model.
OTHER_MODELS = "_other"


class Latencies:
    """A histogram whose update takes a third of a microsecond. Mutable; used on the event loop alone."""

    __slots__ = ("_bounds_s", "_counts", "_sum_s")

    def __init__(self, bounds_s: tuple[float, ...]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        below, buckets = 0, []
        for bound, count in zip([*map(str, self._bounds_s), "+Inf"], self._counts, strict=True):
            below += count
            buckets.append((bound, float(below)))
        return buckets

    @property
    def counts(self) -> tuple[int, ...]:
        """By bucket; the last is of those beyond all bounds."""
        return tuple(self._counts)

    @property
    def sum_s(self) -> float:
        return self._sum_s


class ModelSeries:
    """All counts of one model. Mutable; used on the event loop alone."""

    __slots__ = (
        "busy_s",
        "device_s",
        "first_token",
        "idle_s",
        "inter_token",
        "loads",
        "num_output_tokens",
        "num_prompt_tokens",
        "requests",
        "turns",
        "whole",
    )

    def __init__(self) -> None:
        self.first_token = Latencies(FIRST_TOKEN_S)
        self.inter_token = Latencies(INTER_TOKEN_S)
        self.whole = Latencies(_WHOLE_S)  #: answers, from the arrival of the request to the last token
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.requests: Counter[str] = Counter()  #: by outcome
        self.turns: Counter[str] = Counter()  #: by why they ended
        self.loads: Counter[str] = Counter()  #: by tier
        self.busy_s = 0.0  #: of steps
        self.device_s = 0.0  #: of devices that the model held: see `GpuTime`
        self.idle_s = 0.0  #: of it, without requests


class ModelMetrics:
    """Mutable; used on the event loop alone."""

    def __init__(self, device_hour_price: float | None = None) -> None:
        self._device_hour_price = device_hour_price
        self._series: dict[str, ModelSeries] = {}
        self._other = ModelSeries()
        self._folded: set[str] = set()  #: models that are counted in it

    def take(self, model: str) -> ModelSeries:
        series = self._series.get(model)
        if series is not None:
            return series
        if len(self._series) >= MAX_MODEL_LABELS:
            self._folded.add(model)
            return self._other
        self._folded.discard(model)
        series = self._series[model] = ModelSeries()
        return series

    def find(self, model: str) -> ModelSeries | None:
        return self._series.get(model) or (self._other if model in self._folded else None)

    def remove(self, model: str) -> None:
        self._series.pop(model, None)
        self._folded.discard(model)

    def by_name(self) -> dict[str, ModelSeries]:
        """Return the series of all models, with those of the rest as one if there are more."""
        return self._series | ({OTHER_MODELS: self._other} if self._has_others else {})

    def families(self) -> Iterator[str]:
        yield self._histogram(
            "hearth_ttft_seconds",
            "Time from a request's arrival to its first token.",
            lambda one: one.first_token,
        )
        yield self._histogram(
            "hearth_itl_seconds", "Time between two tokens of a request.", lambda one: one.inter_token
        )
        yield self._histogram(
            "hearth_e2e_seconds",
            "Time from a request's arrival to the end of its answer; answered requests only.",
            lambda one: one.whole,
        )
        yield self._counter(
            "hearth_prompt_tokens_total",
            "Tokens of accepted prompts.",
            lambda one: one.num_prompt_tokens,
        )
        yield self._counter(
            "hearth_output_tokens_total", "Tokens of answers.", lambda one: one.num_output_tokens
        )
        yield self._counters(
            "hearth_requests_total", "Requests that ended.", "outcome", lambda one: one.requests
        )
        yield self._counters(
            "hearth_turns_total", "Turns of models that ended.", "why", lambda one: one.turns
        )
        yield self._counters(
            "hearth_loads_total",
            "Loads of models, by the slowest tier that was read.",
            "tier",
            lambda one: one.loads,
        )
        yield self._counter(
            "hearth_busy_seconds_total", "Device time in steps of models.", lambda one: one.busy_s
        )
        yield self._counter(
            "hearth_device_seconds_total",
            "Device time that models hold.",
            lambda one: one.device_s,
        )
        yield self._counter(
            "hearth_idle_device_seconds_total",
            "Device time that models hold without a running request.",
            lambda one: one.idle_s,
        )
        if (price := self._device_hour_price) is not None:
            per_s = price / SECONDS_PER_HOUR
            yield self._counter(
                "hearth_cost_total",
                "Cost of hearth_device_seconds_total, in the currency of service.device_hour_price.",
                lambda one: one.device_s * per_s,
            )

    @property
    def _has_others(self) -> bool:
        return bool(self._folded or self._other.requests or self._other.loads)

    def _shown(self) -> Iterator[tuple[str, ModelSeries]]:
        for model, series in self.by_name().items():
            yield _label("model", model), series

    def _histogram(self, name: str, text: str, get: Callable[[ModelSeries], Latencies]) -> str:
        lines = _head(name, text, "histogram")
        for label, series in self._shown():
            latencies = get(series)
            buckets = latencies.buckets()
            lines += [f'{name}_bucket{{{label},le="{bound}"}} {count}' for bound, count in buckets]
            lines += [f"{name}_count{{{label}}} {buckets[-1][1]}", f"{name}_sum{{{label}}} {latencies.sum_s}"]
        return _text(lines)

    def _counter(self, name: str, text: str, get: Callable[[ModelSeries], float]) -> str:
        lines = _head(name, text, "counter")
        lines += [f"{name}{{{label}}} {float(get(series))}" for label, series in self._shown()]
        return _text(lines)

    def _counters(self, name: str, text: str, key: str, get: Callable[[ModelSeries], Counter[str]]) -> str:
        lines = _head(name, text, "counter")
        for label, series in self._shown():
            counts = sorted(get(series).items())
            lines += [f"{name}{{{label},{_label(key, value)}}} {float(count)}" for value, count in counts]
        return _text(lines)


def _head(name: str, text: str, kind: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _label(name: str, value: str) -> str:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{name}="{escaped}"'


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
