"""Metrics as /metrics shows them, without an event loop."""

from __future__ import annotations

from prometheus_client import generate_latest

from hearth.control.metrics import Metrics


def shown(metrics: Metrics) -> str:
    return generate_latest(metrics.registry).decode() + "".join(metrics.models.families())


def shown_value(metrics: Metrics, series: str) -> float:
    """The value of a series, spelled with its labels."""
    lines = shown(metrics).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{series} "))
