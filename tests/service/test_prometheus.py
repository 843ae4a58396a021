"""A real Prometheus scrapes the service and answers the queries of the dashboard."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from bench.chaos.nodes import free_port
from tests.dashboard import queries
from tests.service.harness import PATIENCE_S, Service, eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="Debian's package `prometheus` is not installed"
    ),
]
#: Panels of what has not happened: nobody has a key, nothing costs money, nothing went wrong.
EMPTY = {
    "Errors by route",
    "Requests by key",
    "Refused by a key's limits",
    "Output tokens by key",
    "Cost per hour",
}


@pytest.fixture(scope="module")
def prometheus(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Scrapes five times a second."""
    place = tmp_path_factory.mktemp("prometheus")
    config = place / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
        "scrape_configs: [{job_name: hearth, "
        f"authorization: {{credentials: {service.admin_token}}}, "
        f"static_configs: [{{targets: ['{service.url.removeprefix('http://')}']}}]}}]\n"
    )
    port = free_port()
    with (place / "said").open("w") as said:
        process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={place / 'data'}"),
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=said,
            stderr=said,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S, trust_env=False) as client:
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def results(prometheus: httpx.Client, query: str) -> list[object]:
    """What a query finds now; nothing while Prometheus is starting."""
    try:
        answer = prometheus.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if answer.status_code == 503:
        return []
    assert answer.json()["status"] == "success", f"{query}: {answer.text}"
    found: list[object] = answer.json()["data"]["result"]
    return found


def test_every_query_of_the_dashboard_is_answered(service: Service, prometheus: httpx.Client) -> None:
    def ask() -> None:
        body = {"model": "tiny-a", "prompt": "Hello there", "max_tokens": 4, "ignore_eos": True}
        assert service.http.post("/v1/completions", json=body).status_code == 200

    ask()
    eventually("a first scrape", lambda: results(prometheus, "hearth_requests_total"), 0.1)
    ask()
    rate = "rate(hearth_requests_total[1m]) > 0"
    eventually("another one, with more requests", lambda: results(prometheus, rate), 0.1)
    empty = {
        title for title, asked in queries().items() if not any(results(prometheus, query) for query in asked)
    }
    assert empty <= EMPTY
