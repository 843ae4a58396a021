"""Requests are recorded over restarts, forecast, and shown by `hearth forecast`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.harness import SMALL, Service, eventually, serving

pytestmark = pytest.mark.e2e

FLAGS = (*SMALL, "--memory", "256MiB", "--host-memory", "256MiB")


def num_recorded(service: Service) -> float:
    counts = service.get("/hearth/models/tiny-a/forecast")["recent_counts"]
    assert isinstance(counts, list)
    return sum(float(str(one)) for one in counts if one is not None)


def complete(service: Service) -> None:
    answer = service.http.post("/v1/completions", json={"model": "tiny-a", "prompt": "Hi", "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def test_requests_are_recorded_over_a_restart_and_forecast(data_dir: Path) -> None:
    with serving(data_dir, *FLAGS, "--set", "service.prewarm=on") as service:

        def is_recorded() -> bool:
            complete(service)  # in each step: one in which the service has begun is not recorded
            return num_recorded(service) > 0

        eventually("a request is recorded", is_recorded, 1.0)
        before = num_recorded(service)
    with serving(data_dir, *FLAGS, "--set", "service.prewarm=advise") as service:
        assert num_recorded(service) >= before
        eventually("the process runs", lambda: service.metrics()["hearth_forecast_process_up"] == 1.0)
        shown = service.cli("forecast", "tiny-a")
        assert shown.returncode == 0, shown.stderr
        assert "tiny-a, requests per minute: the last hour" in shown.stdout
        assert "service.prewarm is advise" in shown.stdout
