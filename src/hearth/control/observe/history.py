"""The last hour of the service in samples of ten seconds, for charts. Decides nothing.

A sample is what has happened since the one before. Percentiles are read off the buckets of the metrics'
histograms, so they are as exact as these.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hearth.control.observe.load_log import slowest_tier
from hearth.control.observe.model_metrics import FIRST_TOKEN_S, INTER_TOKEN_S, ModelSeries
from hearth.control.observe.views import ProcessView
from hearth.core.types import FinishReason, model_of
from hearth.policy.fleet import events
from hearth.policy.fleet.gpu_time import cost_of

STEP_S = 10.0
NUM_SAMPLES = 360
#: Models are summed up over the samples since the oldest of these marks, one every five minutes.
SAMPLES_PER_MARK, NUM_MARKS = 30, 12


@dataclass(frozen=True, slots=True)
class Latency:
    p50_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float  #: since the epoch, its end
    num_answered: int
    num_failed: int
    num_cancelled: int
    prompt_tokens: int
    output_tokens: int
    first_token: Latency | None  #: None: there was none
    inter_token: Latency | None
    loads: dict[str, int]  #: by the slowest tier that was read
    loaded_bytes: dict[str, int]  #: by tier
    num_running: int  #: when it ended, as the rest
    num_waiting: int
    busy_share: float  #: of the time of all workers, in steps
    used_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class LastLoad:
    at_s: float  #: since the epoch
    total_s: float
    tier: str


@dataclass(frozen=True, slots=True)
class ModelHistory:
    """A model's last hour, or the time since the service began, if that is less."""

    num_requests: int
    num_failed: int
    output_tokens: int
    first_token: Latency | None
    device_s: float
    busy_s: float
    cost: float | None  #: None: no price is set
    last_load: LastLoad | None


@dataclass(frozen=True, slots=True)
class HistoryView:
    step_s: float
    since_s: float  #: since the epoch: of what `models` sum up
    samples: tuple[Sample, ...]
    models: dict[str, ModelHistory]


@dataclass(slots=True)
class _Counts:
    """The counters of one model, or their growth. Mutable; written by the history."""

    requests: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    busy_s: float = 0.0
    device_s: float = 0.0
    first_token: tuple[int, ...] = (0,) * (len(FIRST_TOKEN_S) + 1)
    inter_token: tuple[int, ...] = (0,) * (len(INTER_TOKEN_S) + 1)

    @classmethod
    def of(cls, series: ModelSeries) -> _Counts:
        return cls(
            Counter(series.requests),
            series.num_prompt_tokens,
            series.num_output_tokens,
            series.busy_s,
            series.device_s,
            series.first_token.counts,
            series.inter_token.counts,
        )

    def add_growth(self, now: _Counts, before: _Counts) -> None:
        self.requests += now.requests - before.requests
        self.prompt_tokens += now.prompt_tokens - before.prompt_tokens
        self.output_tokens += now.output_tokens - before.output_tokens
        self.busy_s += now.busy_s - before.busy_s
        self.device_s += now.device_s - before.device_s
        self.first_token = _sums(self.first_token, now.first_token, before.first_token)
        self.inter_token = _sums(self.inter_token, now.inter_token, before.inter_token)

    @property
    def num_answered(self) -> int:
        return self.requests[FinishReason.STOP] + self.requests[FinishReason.LENGTH]

    @property
    def num_failed(self) -> int:
        return self.requests.total() - self.num_answered - self.requests[FinishReason.CANCELLED]


_Marked = dict[str, tuple[ModelSeries, _Counts]]


class History:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        series: Callable[[], dict[str, ModelSeries]],
        device_hour_price: float | None,
        ps: Callable[[], ProcessView],
    ) -> None:
        self._series, self._price, self._ps = series, device_hour_price, ps
        self._samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self._last: _Marked = {}
        self._marks: deque[tuple[float, _Marked]] = deque([(time.time(), {})], maxlen=NUM_MARKS)
        self._loads: Counter[str] = Counter()
        self._loaded_bytes: Counter[str] = Counter()
        self._last_loads: dict[str, LastLoad] = {}
        self._num_steps = 0

    def observe(self, event: events.Event, _: Sequence[events.Action]) -> None:
        match event:
            case events.ModelReady():
                tier = slowest_tier(use.rung for use in event.rungs)
                self._loads[tier] += 1
                for use in event.rungs:
                    self._loaded_bytes[use.rung] += use.num_bytes
                self._last_loads[model_of(event.model)] = LastLoad(time.time(), event.total_s, tier)
            case events.ModelRemoved(_, model):
                self._last_loads.pop(model, None)
            case _:
                pass

    async def run(self, on_sample: Callable[[], None]) -> None:
        """Take samples for ever; `on_sample` is called after each."""
        while True:
            await asyncio.sleep(STEP_S)
            self.take_sample(STEP_S)
            on_sample()

    def take_sample(self, seconds: float) -> None:
        """Note what has happened in the last `seconds`."""
        now = self._mark()
        grown = _Counts()
        for name, (series, counts) in now.items():
            grown.add_growth(counts, _before(self._last, name, series))
        self._last = now
        view = self._ps()
        self._samples.append(
            Sample(
                at_s=time.time(),
                num_answered=grown.num_answered,
                num_failed=grown.num_failed,
                num_cancelled=grown.requests[FinishReason.CANCELLED],
                prompt_tokens=grown.prompt_tokens,
                output_tokens=grown.output_tokens,
                first_token=percentiles(FIRST_TOKEN_S, grown.first_token),
                inter_token=percentiles(INTER_TOKEN_S, grown.inter_token),
                loads=dict(self._loads),
                loaded_bytes=dict(self._loaded_bytes),
                num_running=view.num_running,
                num_waiting=view.num_waiting,
                busy_share=min(1.0, grown.busy_s / seconds / max(1, len(view.workers))),
                used_bytes=sum(one.used_bytes for one in view.workers),
                budget_bytes=sum(one.budget_bytes for one in view.workers),
            )
        )
        self._loads.clear()
        self._loaded_bytes.clear()
        self._num_steps += 1
        if self._num_steps % SAMPLES_PER_MARK == 0:
            self._marks.append((time.time(), now))

    @property
    def last_sample(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    def view(self) -> HistoryView:
        since_s, before = self._marks[0]
        models = {}
        for name, (series, counts) in self._mark().items():
            grown = _Counts()
            grown.add_growth(counts, _before(before, name, series))
            models[name] = ModelHistory(
                num_requests=grown.requests.total(),
                num_failed=grown.num_failed,
                output_tokens=grown.output_tokens,
                first_token=percentiles(FIRST_TOKEN_S, grown.first_token),
                device_s=grown.device_s,
                busy_s=grown.busy_s,
                cost=cost_of(grown.device_s, self._price),
                last_load=self._last_loads.get(name),
            )
        return HistoryView(STEP_S, since_s, tuple(self._samples), models)

    def _mark(self) -> _Marked:
        return {name: (series, _Counts.of(series)) for name, series in self._series().items()}


def percentiles(bounds_s: Sequence[float], counts: Sequence[int]) -> Latency | None:
    if not any(counts):
        return None
    return Latency(_quantile(bounds_s, counts, 0.5), _quantile(bounds_s, counts, 0.95))


def _quantile(bounds_s: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Interpolate within the bucket; beyond the last bound, return that."""
    wanted, below, lower_s = share * sum(counts), 0, 0.0
    for bound_s, count in zip(bounds_s, counts, strict=False):
        if count and below + count >= wanted:
            return lower_s + (bound_s - lower_s) * (wanted - below) / count
        below, lower_s = below + count, bound_s
    return bounds_s[-1]


def _before(marked: _Marked, name: str, series: ModelSeries) -> _Counts:
    """Return what a model had counted; nothing, if a removed model of that name had."""
    known = marked.get(name)
    return _Counts() if known is None or known[0] is not series else known[1]


def _sums(total: Sequence[int], now: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b - c for a, b, c in zip(total, now, before, strict=True))
