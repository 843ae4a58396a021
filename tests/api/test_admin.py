from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict

import pytest

from hearth.control.observe.views import Explanation
from hearth.core.errors import ConfigError, StoreFull
from tests.api.conftest import request
from tests.api.fake import MODEL, FakeGateway

VIEW = json.loads(json.dumps(asdict(MODEL)))


def test_models_are_listed_as_openai_does(gateway: FakeGateway) -> None:
    listed = request(gateway, "GET", "/v1/models").json()

    model, alias = listed["data"]
    assert listed["object"] == "list"
    assert model["id"] == "tiny"
    assert (model["object"], model["created"], model["owned_by"]) == ("model", 1_700_000_000, "hearth")
    assert request(gateway, "GET", "/v1/models/tiny").json() == model
    assert alias == model | {"id": "small"}
    assert (alias["root"], model["aliases"]) == ("tiny", ["small"])
    assert request(gateway, "GET", "/v1/models/small").json() == alias


def test_models_are_shown_in_full(gateway: FakeGateway) -> None:
    assert request(gateway, "GET", "/hearth/models").json() == [VIEW]
    assert request(gateway, "GET", "/hearth/models/tiny").json() == VIEW
    looked = request(gateway, "GET", "/hearth/models/tiny?look=true").json()
    assert (looked["upstream"]["state"], VIEW["upstream"]) == ("unchanged", None)


def test_deploying_tells_its_progress(gateway: FakeGateway) -> None:
    body = {"source": "/m", "name": "new", "quant": "int8", "labels": ["zone=a"]}
    response = request(gateway, "POST", "/hearth/models", body)

    events = [json.loads(frame.removeprefix("data: ")) for frame in response.text.split("\n\n")[:-1]]
    assert [event["event"] for event in events] == ["progress", "done"]
    assert events[1]["model"] == VIEW
    assert gateway.done == ["deploy /m new auto int8 False on zone=a"]


def test_deploying_can_be_waited_for(gateway: FakeGateway) -> None:
    headers = {"accept": "application/json"}
    response = request(gateway, "POST", "/hearth/models", {"source": "/m"}, headers=headers)

    assert (response.status_code, response.json()) == (200, VIEW)


@pytest.mark.parametrize("accept", ["*/*", "application/json"])
def test_what_cannot_be_deployed_has_its_status(gateway: FakeGateway, accept: str) -> None:
    body = {"source": "/m", "name": "tiny"}
    response = request(gateway, "POST", "/hearth/models", body, headers={"accept": accept})

    assert (response.status_code, response.json()["error"]["code"]) == (409, "name_taken")


def test_a_deployment_that_fails_on_its_way_says_so_in_an_event(gateway: FakeGateway) -> None:
    gateway.deploy_failure = StoreFull("the disk is full")
    response = request(gateway, "POST", "/hearth/models", {"source": "/m"})

    last = json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))
    assert (last["error"]["code"], last["error"]["message"]) == ("store_full", "the disk is full")


@pytest.mark.parametrize("accept", ["*/*", "application/json"])
def test_a_model_that_the_settings_forbid_is_a_wrong_request(gateway: FakeGateway, accept: str) -> None:
    async def deploy(*order: object, **labels: object) -> AsyncIterator[dict[str, object]]:
        raise ConfigError("`x` is an alias of `y`; choose another name")
        yield {}

    gateway.deploy = deploy  # type: ignore[assignment, method-assign]
    response = request(gateway, "POST", "/hearth/models", {"source": "/m"}, headers={"accept": accept})

    assert (response.status_code, response.json()["error"]["code"]) == (400, "bad_request")
    assert "alias of `y`" in response.json()["error"]["message"]


def test_models_are_removed_and_unloaded_by_any_name(gateway: FakeGateway) -> None:
    removed = request(gateway, "DELETE", "/hearth/models/small")
    freed = request(gateway, "POST", "/hearth/models/tiny/unload", {"free": True})
    stopped = request(gateway, "POST", "/hearth/models/tiny/unload", {})

    assert [answer.status_code for answer in (removed, freed, stopped)] == [200, 200, 200]
    had = {"was_loaded": True, "num_requests": 2, "device_bytes": 3 << 20, "host_bytes": 2 << 20}
    assert freed.json() == {"unloaded": "tiny", "free": True, **had}
    assert stopped.json() == {"unloaded": "tiny", "free": False, **had}
    assert gateway.done == ["remove tiny", "unload tiny True", "unload tiny False"]


@pytest.mark.parametrize(
    ("status", "code"), [("ok", 200), ("starting", 503), ("failing", 503), ("draining", 503)]
)
def test_health_is_what_a_balancer_needs(gateway: FakeGateway, status: str, code: int) -> None:
    gateway.status = status
    for path in ("/health", "/readyz"):
        response = request(gateway, "GET", path)
        assert (response.status_code, response.json()["status"]) == (code, status)


def test_a_service_that_is_not_ready_is_alive_all_the_same(gateway: FakeGateway) -> None:
    gateway.status = "failing"
    response = request(gateway, "GET", "/livez")

    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_metrics_are_prometheus_text(gateway: FakeGateway) -> None:
    response = request(gateway, "GET", "/metrics")

    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "hearth_test_total 1.0" in response.text


def test_the_rest_of_the_service_is_shown(gateway: FakeGateway) -> None:
    assert request(gateway, "GET", "/hearth/ps").json()["num_running"] == 0
    assert request(gateway, "GET", "/version").json() == {"version": "0.1.0"}
    assert "/v1/chat/completions" in request(gateway, "GET", "/openapi.json").json()["paths"]


@pytest.mark.parametrize("request_id", ["r0", "chatcmpl-r0", "cmpl-r0"])
def test_a_request_is_explained_under_the_id_of_its_answer(gateway: FakeGateway, request_id: str) -> None:
    gateway.explanation = Explanation(
        request_id="r0",
        model="tiny",
        arrived_at_s=1.0,
        outcome="stop",
        error=None,
        worker="w0",
        why="resident",
        options=(),
        num_prompt_tokens=5,
        num_cached_tokens=0,
        num_output_tokens=2,
        queue_s=0.0,
        load_s=None,
        first_token_s=0.1,
        total_s=0.2,
        tokens_per_s=10.0,
        reused_bytes=0,
        shared_bytes=0,
        rungs=(),
        num_preemptions=0,
        num_resumes=0,
        spans=(),
        marks=(),
    )

    assert request(gateway, "GET", f"/hearth/requests/{request_id}").json()["worker"] == "w0"
