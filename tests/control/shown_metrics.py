"""Metrics as /metrics shows them, without an event loop, and what Prometheus' own tool says of them."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from prometheus_client import generate_latest

from hearth.control.observe.metrics import Metrics


def shown(metrics: Metrics) -> str:
    return generate_latest(metrics.registry).decode() + "".join(metrics.models.families())


def shown_value(metrics: Metrics, series: str) -> float:
    """The value of a series, spelled with its labels."""
    lines = shown(metrics).splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{series} "))


def check_with_promtool(text: str) -> None:
    """Have promtool read and lint metrics; where it is missing, the rest of the test is skipped."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian's package `prometheus` has it)")
    said = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=240, check=False
    )
    assert (said.returncode, said.stdout + said.stderr) == (0, "")
