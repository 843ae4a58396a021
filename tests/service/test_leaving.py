"""Clients that go away in the middle stop costing."""

from __future__ import annotations

import httpx
import pytest

from tests.service.harness import PATIENCE_S, Service, eventually

pytestmark = pytest.mark.e2e

#: Would take minutes.
LONG = {"model": "smollm2", "prompt": "Tell me a story.", "max_tokens": 4000, "ignore_eos": True}


def assert_cancelled_soon(service: Service, request_id: str) -> None:
    def is_over() -> bool:
        return service.explain(request_id)["outcome"] != "running"

    eventually("the request ends", is_over)
    explained = service.explain(request_id)
    assert explained["outcome"] == "cancelled"
    count = explained["num_output_tokens"]
    assert isinstance(count, int)
    assert count < 1000
    assert service.get("/hearth/ps")["num_running"] == 0


def test_a_stream_that_nobody_reads_any_more_is_cancelled(service: Service) -> None:
    with service.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
        request_id = answer.headers["x-request-id"]
        for line in answer.iter_lines():
            if line.startswith("data:"):
                break
    assert_cancelled_soon(service, request_id)


def test_the_slot_of_a_cancelled_request_is_free_for_the_next(service: Service) -> None:
    before = service.metrics()["hearth_requests_total"]
    for _ in range(20):  # more than there are slots
        with service.http.stream(
            "POST", "/v1/completions", json={**LONG, "model": "tiny-a", "stream": True}
        ) as answer:
            next(answer.iter_lines())
    eventually("all have ended", lambda: service.metrics()["hearth_requests_total"] == before + 20)
    short = {"model": "tiny-a", "prompt": "Hi", "max_tokens": 1}
    assert service.http.post("/v1/completions", json=short).status_code == 200


def test_an_answer_in_one_piece_is_cancelled_too_when_its_client_goes(service: Service) -> None:
    with (
        httpx.Client(
            base_url=service.url, timeout=httpx.Timeout(PATIENCE_S, read=1.0), trust_env=False
        ) as client,
        pytest.raises(httpx.ReadTimeout),
    ):
        client.post("/v1/completions", json=LONG)
    eventually("nothing runs", lambda: service.get("/hearth/ps")["num_running"] == 0)
