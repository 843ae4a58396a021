"""Metrics as /metrics shows them."""

from __future__ import annotations

from prometheus_client import generate_latest

from hearth.control.observe.metrics import Metrics
from hearth.control.observe.model_metrics import Latencies
from tests.control.shown_metrics import shown


def test_a_histogram_counts_what_lies_at_or_below_each_bound() -> None:
    latencies = Latencies((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        latencies.observe(seconds)
    assert latencies.buckets() == [("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]
    assert latencies.sum_s == 7.65


def test_every_family_is_there_before_anything_happened() -> None:
    text = shown(Metrics())
    for family in (
        "# TYPE hearth_ttft_seconds histogram",
        "# TYPE hearth_itl_seconds histogram",
        "hearth_queue_seconds_bucket",
        'hearth_cold_start_seconds_bucket{le="0.05",tier="host"}',
        "# TYPE hearth_loaded_bytes_total counter",
        "# TYPE hearth_requests_total counter",
    ):
        assert family in text


def test_a_gauge_is_asked_for_when_somebody_looks() -> None:
    metrics, value = Metrics(), 1.0
    metrics.watch("hearth_running", "Requests that run.", lambda: value)
    value = 3.0
    assert "hearth_running 3.0" in generate_latest(metrics.registry).decode()
