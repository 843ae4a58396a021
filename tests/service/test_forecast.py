"""Requests are recorded over restarts, shown by `hearth forecast`, and models are loaded before they come."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from hearth.control.datadir import DataDir
from hearth.control.observe.metrics import Metrics
from hearth.control.request_history import STEP_S, RequestHistory
from hearth.core.forecast_messages import LONG_STEP_S
from hearth.core.types import ModelId, RequestId
from hearth.policy.fleet.events import RequestArrived
from tests.service.harness import FORECAST_S, SMALL, Service, eventually, serving

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1000)]

FLAGS = (*SMALL, "--memory", "1GiB", "--host-memory", "256MiB", "--set", "service.keep_alive=3s")


def record(data_dir: Path, model: str, num_each: int) -> None:
    """Leave a history of three hours, with as many requests in each step."""
    history = RequestHistory(DataDir(data_dir).request_history_path, Metrics())
    begin_s = (time.time() // LONG_STEP_S - 18) * LONG_STEP_S
    for step in range(round(18 * LONG_STEP_S / STEP_S) + 1):
        history.tick(begin_s + step * STEP_S, step * STEP_S)
        for _ in range(num_each):
            history.observe(RequestArrived(0.0, RequestId("r"), ModelId(model), 1, 1), ())
    asyncio.run(history.write())


def num_recorded(service: Service, model: str) -> float:
    counts = service.get(f"/hearth/forecasts/{model}")["recent_counts"]
    assert isinstance(counts, list)
    return sum(float(str(one)) for one in counts if one is not None)


def is_whole(service: Service, model: str) -> bool:
    resident = service.residents().get(model)
    return resident is not None and resident["loaded_bytes"] == resident["total_bytes"]


def complete(service: Service, model: str) -> str:
    answer = service.http.post("/v1/completions", json={"model": model, "prompt": "Hi", "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-request-id"])


def test_a_model_is_loaded_before_its_requests_and_they_are_recorded_over_a_restart(data_dir: Path) -> None:
    record(data_dir, "tiny-b", num_each=20)
    with serving(data_dir, *FLAGS, "--set", "service.prewarm=on") as service:
        unasked = "a model is loaded that nobody asked for"
        eventually(unasked, lambda: is_whole(service, "tiny-b"), 0.5, FORECAST_S)
        marks = service.explain(complete(service, "tiny-b"))["marks"]
        assert isinstance(marks, list)
        assert "prewarm" in [mark["what"] for mark in marks if isinstance(mark, dict)]

        def is_recorded() -> bool:
            complete(service, "tiny-a")  # in each step: one in which the service has begun is not recorded
            return num_recorded(service, "tiny-a") > 0

        eventually("a request is recorded", is_recorded, 1.0)
        before = num_recorded(service, "tiny-a")
    with serving(data_dir, *FLAGS, "--set", "service.prewarm=advise") as service:
        assert num_recorded(service, "tiny-a") >= before
        path = "/hearth/forecasts/tiny-b"
        eventually("there is a forecast", lambda: service.get(path)["forecast"], patience_s=FORECAST_S)
        shown = service.cli("forecast", "tiny-b")
        assert shown.returncode == 0, shown.stderr
        assert "tiny-b, requests per minute: the last hour" in shown.stdout
        assert "method: " in shown.stdout
        assert "service.prewarm is advise" in shown.stdout
