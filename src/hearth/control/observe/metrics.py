"""The counters and histograms of the service, for Prometheus."""

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
from hearth.control.observe.load_log import ON_DEVICE, slowest_tier
from hearth.control.observe.model_metrics import FIRST_TOKEN_S, INTER_TOKEN_S, Latencies, ModelMetrics
from hearth.core.messages import AdapterLoaded
from hearth.core.types import Rung
from hearth.core.version import hearth_version
from hearth.policy.fleet.events import ModelReady

_QUEUE_S = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_ADAPTER_LOAD_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
_COLD_START_S = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)

NO_ROUTE = "none"
#: The most keys that are counted by name; all others are counted as one.
MAX_KEY_LABELS = 64
#: The label of those: no key can have it as its name.
OTHER_KEYS = "_other"

# They would double the series of counters.
disable_created_metrics()  # type: ignore[no-untyped-call] # it takes and returns nothing


class _Histograms:
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
        self.registry = CollectorRegistry()  #: of all metrics but those by model
        self.models = ModelMetrics(device_hour_price)
        self.device_hour_price = device_hour_price
        self._key_labels: set[str] = set()
        ProcessCollector(registry=self.registry)
        Info("hearth_build", "The running version.", registry=self.registry).info(
            {"version": hearth_version(), "python": platform.python_version()}
        )
        histograms = _Histograms()
        self.queue = histograms.add(
            "hearth_queue_seconds", "Time from a request's arrival to its dispatch to a worker.", _QUEUE_S
        )
        #: By the slowest rung that was read.
        self.cold_start = histograms.add_labelled(
            "hearth_cold_start_seconds", "Time to load a model.", _COLD_START_S, "tier", [ON_DEVICE, *Rung]
        )
        self.adapter_load = histograms.add_labelled(
            "hearth_adapter_load_seconds",
            "Time to load an adapter.",
            _ADAPTER_LOAD_S,
            "tier",
            [ON_DEVICE, *Rung],
        )
        self.step = histograms.add(
            "hearth_step_seconds", "Duration of engine steps, as workers see them.", INTER_TOKEN_S
        )
        self.pause = histograms.add(
            "hearth_pause_seconds",
            "Time from a request's pause to the next turn of its model.",
            FIRST_TOKEN_S,
        )
        self.registry.register(histograms)
        self.rung_bytes = self._counter("hearth_loaded_bytes", "Bytes of weights loaded.", "tier")
        self.peer_bytes = self._counter(
            "hearth_peer_bytes", "Bytes of weights that nodes have sent to others.", "source", "node"
        )
        self.reused_bytes = self._counter(
            "hearth_reused_bytes", "Bytes of weights found on the device when a model was loaded."
        )
        self.adapter_bytes = self._counter("hearth_adapter_loaded_bytes", "Bytes of adapters loaded.")
        self.late_text_tokens = self._counter(
            "hearth_late_text_tokens",
            "Tokens delivered after their step because their text is slow to decode.",
        )
        self.evictions = self._counter("hearth_evictions", "Models that were evicted.")
        self.workers_lost = self._counter("hearth_workers_lost", "Workers that died or were killed.")
        self.node_up = Gauge(
            "hearth_node_up", "1 while a node of the cluster is up.", ["node"], registry=self.registry
        )
        self.link_speed = Gauge(
            "hearth_link_bytes_per_second",
            "Measured speed at which a node gets weights from another one.",
            ["source", "node"],
            registry=self.registry,
        )
        self.cluster_stale = self._counter(
            "hearth_cluster_stale", "Connections of an earlier life of a node that were refused."
        )
        self.routed_tokens = self._counter(
            "hearth_routed_prefix_tokens",
            "Prompt tokens routed to a replica that probably has them cached.",
        )
        self.resumes = self._counter("hearth_resumes", "Requests that continued on another worker.")
        self.drop_moves = self._counter(
            "hearth_drop_moves",
            "Requests moved because replicas gave up layers for KV memory, or had them back.",
            "why",
        )
        self.switches = self._counter(
            "hearth_switches",
            "Requests moved from workers that were loading their model to one that has all of it.",
        )
        self.kv_bytes = self._counter(
            "hearth_kv_moved_bytes", "Bytes of KV memory that came with requests which moved."
        )
        self.kv_recomputed = self._counter(
            "hearth_kv_recomputed", "Requests that moved without their KV memory, which is computed again."
        )
        self.preemptions = self._counter(
            "hearth_preemptions", "Requests whose KV memory was needed by others."
        )
        self.pauses = self._counter("hearth_pauses", "Times a request waited for its model's next turn.")
        self.tokens_on_time = self._counter(
            "hearth_tokens_on_time", "Tokens on time by the pace of their request; counted at its end."
        )
        self.tokens_late = self._counter(
            "hearth_tokens_late", "Tokens late by the pace of their request; counted at its end."
        )
        self.requests_on_time = self._counter(
            "hearth_requests_on_time", "Answered requests without late tokens."
        )
        self.requests_late = self._counter("hearth_requests_late", "Answered requests with late tokens.")
        self.ignored_fields = self._counter(
            "hearth_ignored_fields", "Request fields that Hearth ignores.", "field"
        )
        self._http_responses = self._counter(
            "hearth_http_responses",
            "HTTP responses; status 499: the client disconnected first.",
            "route",
            "status",
        )
        self.connections_closed = self._counter(
            "hearth_connections_closed", "Connections closed because too many were open."
        )
        self.key_requests = self._counter("hearth_key_requests", "Requests that ended, by API key.", "key")
        self.key_prompt_tokens = self._counter(
            "hearth_key_prompt_tokens", "Tokens of prompts, by API key.", "key"
        )
        self.key_output_tokens = self._counter(
            "hearth_key_output_tokens", "Tokens of answers, by API key.", "key"
        )
        self.key_device_s = self._counter(
            "hearth_key_device_seconds", "Device time of requests, by API key.", "key"
        )
        self.key_cost = self._counter(
            "hearth_key_cost", "Cost of hearth_key_device_seconds_total, if there is a price.", "key"
        )
        self.key_refusals = self._counter(
            "hearth_key_refusals", "Requests refused by a limit of their API key.", "key", "limit"
        )
        self.snapshots = self._counter("hearth_snapshots", "Snapshots of models, by outcome.", "outcome")
        self.fallbacks = self._counter("hearth_fallbacks", "Fallbacks taken.", "what")

    def key_label(self, name: str) -> str:
        if name not in self._key_labels and len(self._key_labels) == MAX_KEY_LABELS:
            return OTHER_KEYS
        self._key_labels.add(name)
        return name

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
        self._http_responses.labels(record.route or NO_ROUTE, record.status_code).inc()

    async def text(self) -> bytes:
        """Return all metrics in Prometheus' text format. Yields to the event loop between families."""
        parts = [generate_latest(self.registry)]
        for family in self.models.families():
            parts.append(family.encode())
            await asyncio.sleep(0)
        return b"".join(parts)

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(name, text, registry=self.registry).set_function(value)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)
