"""What an operator sees: metrics, explanations, states while a model loads."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.bad_server import Exchange, well
from hearth.store.format.manifest import read_manifest
from tests.control.shown_metrics import check_with_promtool
from tests.service.checkpoints import write_tiny
from tests.service.harness import PATIENCE_S, Service, eventually
from tests.store.stored import files_of
from tests.store.stored import serving as serving_files

pytestmark = pytest.mark.e2e

#: With the labels that they have.
FAMILIES = {
    "hearth_ttft_seconds": {"model"},
    "hearth_itl_seconds": {"model"},
    "hearth_e2e_seconds": {"model"},
    "hearth_queue_seconds": set(),
    "hearth_cold_start_seconds": {"tier"},
    "hearth_loads": {"model", "tier"},
    "hearth_loaded_bytes": {"tier"},
    "hearth_requests": {"model", "outcome"},
    "hearth_prompt_tokens": {"model"},
    "hearth_output_tokens": {"model"},
    "hearth_busy_seconds": {"model"},
    "hearth_device_seconds": {"model"},
    "hearth_http_responses": {"route", "status"},
    "hearth_evictions": set(),
    "hearth_snapshots": {"outcome"},
    "hearth_workers_lost": set(),
    "hearth_kv_blocks_used": set(),
    "hearth_kv_blocks": set(),
    "hearth_device_used_bytes": set(),
    "hearth_device_budget_bytes": set(),
    "hearth_build_info": {"version", "python"},
    "process_cpu_seconds": set(),
}


def complete(service: Service, model: str, max_tokens: int = 4) -> str:
    answer = service.http.post(
        "/v1/completions",
        json={"model": model, "prompt": "Hello there", "max_tokens": max_tokens, "ignore_eos": True},
    )
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-request-id"])


def test_metrics_have_every_family_that_an_operator_needs(service: Service) -> None:
    complete(service, "tiny-a")
    text = service.http.get("/metrics").text
    found = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(found) >= set(FAMILIES)
    for name, labels in FAMILIES.items():
        shown = {key for sample in found[name].samples for key in sample.labels} - {"le"}
        assert shown == labels, name
    assert "_created" not in text
    check_with_promtool(text)


def test_time_on_devices_is_counted_by_model(service: Service) -> None:
    def seconds() -> dict[str, float]:
        families = text_string_to_metric_families(service.http.get("/metrics").text)
        return {
            sample.labels["model"]: sample.value
            for family in families
            if family.name == "hearth_device_seconds"
            for sample in family.samples
        }

    complete(service, "tiny-a")
    before = seconds()["tiny-a"]
    grown = eventually("a heartbeat", lambda: seconds()["tiny-a"] - before or None)
    assert 0 < grown < 60
    assert "hearth_cost" not in service.http.get("/metrics").text, "there is no price"


def test_each_request_is_a_line_of_the_access_log(service: Service) -> None:
    asked = complete(service, "tiny-a", max_tokens=5)
    service.http.get("/v1/models", headers={"x-request-id": "look/1"})
    path = service.data_dir / "logs" / "access.log"
    parts = (f" id={asked} ", "client_id=look/1")  # in either order: a line is written behind its answer
    eventually("both lines", lambda: all(part in path.read_text() for part in parts))
    lines = path.read_text().splitlines()
    (line,) = [line for line in lines if f" id={asked} " in line]
    fields = dict(word.partition("=")[::2] for word in line.split()[1:])
    assert (fields["status"], fields["route"], fields["model"]) == ("200", "/v1/completions", "tiny-a")
    assert (fields["key"], fields["output_tokens"], fields["complete"]) == ("anybody", "5", "yes")
    assert 0 <= float(fields["queue_s"]) <= float(fields["first_token_s"]) <= float(fields["total_s"])
    assert service.cli("logs", "--access", "-n", "1").stdout.strip() == lines[-1]


def test_a_request_is_found_by_the_id_that_its_client_sent(service: Service) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    answer = service.http.post(
        "/v1/completions",
        json={"model": "tiny-a", "prompt": "Hello there", "max_tokens": 1},
        headers={"X-Request-Id": "shop/order-17", "traceparent": trace},
    )
    assert answer.headers["x-request-id"] == "shop/order-17"
    explained = service.explain("shop/order-17")
    assert explained["request_id"] == answer.headers["x-hearth-request-id"]
    assert explained["traceparent"] == trace


def test_what_a_worker_logs_is_on_standard_error_and_in_the_log_once_each(service: Service) -> None:
    """The service logs JSON: each line of each process is an object."""
    complete(service, "tiny-b")
    for text in (service.output(), (service.data_dir / "logs" / "service.log").read_text()):
        lines = [json.loads(line) for line in text.splitlines()]
        assert any(line.get("event") == "serving" and "process" not in line for line in lines)
        told = [f"{line['time']} {line['text']}" for line in lines if line.get("process") == "w0"]
        assert any("model_loaded model=tiny-b" in line for line in told), text[-2000:]
        assert len(told) == len(set(told))


def test_metrics_count_what_was_asked_and_answered(service: Service) -> None:
    complete(service, "tiny-a")
    before = service.metrics()
    complete(service, "tiny-a", max_tokens=5)
    after = service.metrics()
    grown = {name: value - before[name] for name, value in after.items() if name in before}
    assert grown["hearth_requests_total"] == 1
    assert grown["hearth_output_tokens_total"] == 5
    assert grown["hearth_ttft_seconds_count"] == 1
    assert grown["hearth_itl_seconds_count"] == 4
    assert 0 < grown["hearth_ttft_seconds_sum"] < 60
    assert grown["hearth_prompt_tokens_total"] > 0


def test_a_cold_request_explains_where_its_bytes_came_from(service: Service) -> None:
    service.unload("tiny-b", free=True)
    explained = service.explain(complete(service, "tiny-b"))
    assert explained["why"] in ("free_room", "evicted")
    spans = explained["spans"]
    rungs = explained["rungs"]
    marks = explained["marks"]
    assert isinstance(spans, list)
    assert isinstance(rungs, list)
    assert isinstance(marks, list)
    assert {"queue", "load", "prefill", "decode"} <= {one["what"] for one in spans if isinstance(one, dict)}
    whats = [one["what"] for one in marks if isinstance(one, dict)]
    assert whats.index("queued") < whats.index("placed") < whats.index("first_token") < whats.index("ended")
    loaded = [one["num_bytes"] for one in rungs if isinstance(one, dict)]
    total = service.residents()["tiny-b"]["total_bytes"]
    assert sum(one for one in loaded if isinstance(one, int)) == total
    assert isinstance(explained["load_s"], float)


def test_explain_prints_a_waterfall(service: Service) -> None:
    service.unload("tiny-b", free=True)
    request_id = complete(service, "tiny-b")
    printed = service.cli("explain", request_id)
    assert printed.returncode == 0, printed.stderr
    for word in ("queue", "load", "prefill", "decode", "█", "first_token"):
        assert word in printed.stdout


def test_explain_of_an_unknown_request_is_not_found(service: Service) -> None:
    assert service.http.get("/hearth/requests/nothing").status_code == 404
    assert service.cli("explain", "nothing").returncode == 3


def test_ps_and_list_show_models_and_workers(service: Service) -> None:
    complete(service, "tiny-a")
    printed = service.cli("ps").stdout
    assert "tiny-a" in printed
    assert "warm" in printed
    assert "smollm2" in service.cli("list").stdout


def test_a_model_can_be_asked_from_the_command_line(service: Service) -> None:
    options = ("--temperature", "0", "--max-tokens", "4")
    printed = [service.cli("run", "tiny-a", "Hello", *options) for _ in range(2)]
    assert [one.returncode for one in printed] == [0, 0], printed[0].stderr
    assert printed[0].stdout.strip()
    assert printed[0].stdout == printed[1].stdout
    assert "model_ready" in service.cli("logs").stdout


def test_a_stream_hears_from_the_service_while_its_model_loads(service: Service, tmp_path: Path) -> None:
    """The model lies on a server that delivers nothing until it is let go."""
    source = write_tiny(tmp_path / "tiny", seed=20)
    let_go = threading.Event()

    def held(exchange: Exchange) -> None:
        let_go.wait()
        well(exchange)

    body = {"model": "far", "prompt": "Hello", "max_tokens": 2, "stream": True}
    with serving_files(source) as server:
        deployed = service.deploy(f"{server.url}/tiny", "far")
        assert deployed.is_success, deployed.text
        server.plan.extend([held] * 100)
        try:
            with service.http.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                comments = 0
                while comments < 3:
                    line = next(lines)
                    assert not line.startswith("data:")
                    comments += line.startswith(":")
                assert service.states()["far"] == "loading"
                server.plan.clear()
                let_go.set()
                said = [line for line in lines if line.startswith("data:")]
        finally:
            let_go.set()
            server.plan.clear()
        assert said[-1] == "data: [DONE]"
        explained = service.explain(answer.headers["x-request-id"])
        rungs = explained["rungs"]
        assert isinstance(rungs, list)
        assert {one["rung"] for one in rungs if isinstance(one, dict)} == {"object"}
        assert service.http.delete("/hearth/models/far").is_success
    eventually("it has left memory", lambda: "far" not in service.residents())


def test_a_new_upload_leaves_the_deployed_model_as_it_is_and_is_shown(
    service: Service, tmp_path: Path
) -> None:
    body = {"model": "far", "prompt": "Hello there", "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def said() -> str:
        answer = service.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    with serving_files(write_tiny(tmp_path / "old", seed=21)) as server:
        assert service.deploy(f"{server.url}/tiny", "far").is_success
        before = said()
        server.files = files_of(write_tiny(tmp_path / "new", seed=22))
        service.unload("far", free=True)
        eventually("it has left memory", lambda: "far" not in service.residents())

        assert said() == before
        shown = service.get("/hearth/models/far?look=true")["upstream"]
    assert isinstance(shown, dict)
    assert shown["state"] == "changed"
    assert shown["current_version"] == read_manifest(tmp_path / "new").digest
    assert service.http.delete("/hearth/models/far").is_success
    eventually("it has left memory again", lambda: "far" not in service.residents())


def test_a_snapshot_is_made_by_hand_and_lies_beside_the_model(service: Service) -> None:
    answer = service.http.post(
        "/hearth/models/tiny-a/snapshot", headers={"accept": "application/json"}, timeout=PATIENCE_S
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "tiny-a"
    digest = service.get("/hearth/models/tiny-a")["digest"]
    (path,) = (service.data_dir / "snapshots" / str(digest)).glob("*.snapshot")
    assert path.stat().st_size == answer.json()["num_bytes"]
    assert service.http.post("/hearth/models/nobody/snapshot").status_code == 404
