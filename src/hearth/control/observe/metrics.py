"""The counters and histograms of the service, for Prometheus. Decides nothing and keeps no text."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.control.observe.latencies import Latencies
from hearth.control.observe.load_log import ON_DEVICE, slowest_tier
from hearth.control.observe.model_metrics import FIRST_TOKEN_S, INTER_TOKEN_S, ModelMetrics
from hearth.core.messages import AdapterLoaded
from hearth.core.types import Rung
from hearth.core.version import hearth_version
from hearth.policy.fleet.events import ModelReady

_QUEUE_S = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_ADAPTER_LOAD_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
_COLD_START_S = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)

#: The route of requests that none is for.
NO_ROUTE = "none"

# A second series for each counter, and nobody asks when that began.
disable_created_metrics()  # type: ignore[no-untyped-call] # it takes and returns nothing


class _Histograms:
    """The `Latencies` of a registry: a collector, as prometheus_client calls it."""

    def __init__(self) -> None:
        self._families: dict[tuple[str, str, str], dict[str, Latencies]] = {}

    def add(self, name: str, text: str, bounds_s: tuple[float, ...]) -> Latencies:
        latencies = Latencies(bounds_s)
        self._families[name, text, ""] = {"": latencies}
        return latencies

    def add_labelled(
        self, name: str, text: str, bounds_s: tuple[float, ...], label: str, values: Iterable[str]
    ) -> dict[str, Latencies]:
        by_value = {value: Latencies(bounds_s) for value in values}
        self._families[name, text, label] = by_value
        return by_value

    def collect(self) -> Iterator[Metric]:
        for (name, text, label), by_value in self._families.items():
            family = HistogramMetricFamily(name, text, labels=[label] if label else [])
            for value, latencies in by_value.items():
                family.add_metric([value] if label else [], latencies.buckets(), latencies.sum_s)
            yield family


class Metrics:
    """Mutable; used on the event loop alone."""

    def __init__(self, device_hour_price: float | None = None) -> None:
        """`device_hour_price`: of a device for an hour; None: there is no metric of money."""
        self.registry = CollectorRegistry()  #: of all metrics but those by model
        self.models = ModelMetrics(device_hour_price)
        ProcessCollector(registry=self.registry)
        Info("hearth_build", "The version that runs.", registry=self.registry).info(
            {"version": hearth_version(), "python": platform.python_version()}
        )
        histograms = _Histograms()
        self.queue = histograms.add(
            "hearth_queue_seconds", "From a request's arrival until a worker has it.", _QUEUE_S
        )
        #: The time to load, by the slowest rung that had to help.
        self.cold_start = histograms.add_labelled(
            "hearth_cold_start_seconds", "Time to load a model.", _COLD_START_S, "tier", [ON_DEVICE, *Rung]
        )
        self.adapter_load = histograms.add_labelled(
            "hearth_adapter_load_seconds",
            "Time to bring an adapter to a device.",
            _ADAPTER_LOAD_S,
            "tier",
            [ON_DEVICE, *Rung],
        )
        self.step = histograms.add(
            "hearth_step_seconds", "Steps of engines, as workers see them.", INTER_TOKEN_S
        )
        self.pause = histograms.add(
            "hearth_pause_seconds", "From a pause of a request to the next turn of its model.", FIRST_TOKEN_S
        )
        self.registry.register(histograms)
        self.rung_bytes = self._counter("hearth_loaded_bytes", "Bytes of weights loaded.", "tier")
        self.reused_bytes = self._counter(
            "hearth_reused_bytes", "Bytes of weights that were on the device already when a model was loaded."
        )
        self.adapter_bytes = self._counter("hearth_adapter_loaded_bytes", "Bytes of adapters loaded.")
        self.late_text_tokens = self._counter(
            "hearth_late_text_tokens",
            "Tokens whose text was made behind others', as their request's takes long.",
        )
        self.evictions = self._counter("hearth_evictions", "Models that had to make room.")
        self.workers_lost = self._counter("hearth_workers_lost", "Workers that died or were killed.")
        self.resumes = self._counter("hearth_resumes", "Requests that went on on another worker.")
        self.preemptions = self._counter("hearth_preemptions", "Requests whose KV had to make room.")
        self.pauses = self._counter("hearth_pauses", "Times that a request waited for its model's next turn.")
        self.tokens_on_time = self._counter(
            "hearth_tokens_on_time", "Tokens that came when the pace of their request said; at its end."
        )
        self.tokens_late = self._counter(
            "hearth_tokens_late", "Tokens that came later than the pace of their request said; at its end."
        )
        self.requests_on_time = self._counter(
            "hearth_requests_on_time", "Answered requests all of whose tokens came on time."
        )
        self.requests_late = self._counter("hearth_requests_late", "Answered requests with late tokens.")
        self.ignored_fields = self._counter(
            "hearth_ignored_fields", "Fields of requests that nothing reads.", "field"
        )
        self._http_responses = self._counter(
            "hearth_http_responses", "HTTP responses; status 499: the client left first.", "route", "status"
        )
        self.connections_closed = self._counter(
            "hearth_connections_closed", "Connections that gave way because too many were open."
        )
        self.key_requests = self._counter("hearth_key_requests", "Requests that ended, by API key.", "key")
        self.key_prompt_tokens = self._counter(
            "hearth_key_prompt_tokens", "Tokens of prompts, by API key.", "key"
        )
        self.key_output_tokens = self._counter(
            "hearth_key_output_tokens", "Tokens of answers, by API key.", "key"
        )
        self.key_refusals = self._counter(
            "hearth_key_refusals", "Requests beyond a limit of their API key.", "key", "limit"
        )
        self.snapshots = self._counter(
            "hearth_snapshots", "Snapshots of models, by how it went with them.", "outcome"
        )
        self.fallbacks = self._counter("hearth_fallbacks", "Ways that had to be gone around.", "what")

    def loaded(self, ready: ModelReady) -> None:
        for use in ready.rungs:
            self.rung_bytes.labels(use.rung).inc(use.num_bytes)
        tier = slowest_tier(use.rung for use in ready.rungs)
        self.cold_start[tier].observe(ready.total_s)
        self.models.take(ready.model).loads[tier] += 1

    def adapter_loaded(self, loaded: AdapterLoaded) -> None:
        self.adapter_bytes.inc(loaded.num_bytes)
        self.adapter_load[slowest_tier(use.rung for use in loaded.rungs)].observe(loaded.total_s)

    def count_response(self, record: ExchangeRecord) -> None:
        """Count an HTTP exchange that has ended."""
        self._http_responses.labels(record.route or NO_ROUTE, record.status_code).inc()

    async def text(self) -> bytes:
        """Return all metrics as Prometheus reads them. Others have the event loop in between."""
        parts = [generate_latest(self.registry)]
        for family in self.models.families():
            parts.append(family.encode())
            await asyncio.sleep(0)
        return b"".join(parts)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Add a gauge whose value is asked for when the metrics are collected."""
        Gauge(name, text, registry=self.registry).set_function(value)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)
