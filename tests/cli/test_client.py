from __future__ import annotations

import socket
import ssl
from contextlib import closing

import pytest

from hearth.api.error_spelling import spell
from hearth.api.errors import fault_of
from hearth.cli.client import Client, _error_of
from hearth.control.deploy.deploy import DeployOrder, DeployProgress
from hearth.control.observe.views import ModelView
from hearth.core.errors import (
    ConfigError,
    Forbidden,
    NameTaken,
    PromptTooLong,
    RequestError,
    ServiceError,
    StoreFull,
    Unauthorized,
    UnknownModel,
    UnknownRequest,
    Unreached,
)
from hearth.core.types import SamplingParams
from tests.cli.fake_service import EXPLANATION, MODEL, PROCESSES, FakeService

PARAMS = SamplingParams(max_tokens=7, temperature=0.0, seed=3)


def test_views_come_back_as_they_were(service: FakeService) -> None:
    with Client(service.url, None) as client:
        assert client.models() == [MODEL]
        assert client.model("tiny") == MODEL
        assert client.ps() == PROCESSES
        assert client.explain("r1") == EXPLANATION


def test_a_starting_service_tells_its_health_too(service: FakeService) -> None:
    service.status = "starting"
    with Client(service.url, None) as client:
        assert client.health().status == "starting"


def test_errors_come_back_as_what_they_were(service: FakeService) -> None:
    with Client(service.url, None) as client:
        with pytest.raises(UnknownModel, match="no model named `other`"):
            client.model("other")
        with pytest.raises(UnknownRequest):
            client.explain("r2")
        with pytest.raises(NameTaken):
            list(client.deploy(DeployOrder("x", "smol")))
        with pytest.raises(StoreFull, match="no room"):
            list(client.deploy(DeployOrder("x", "large")))


def test_a_key_is_sent_and_its_lack_told(service: FakeService) -> None:
    service.key = "hearth-1"
    with Client(service.url, "hearth-1") as client:
        assert client.models() == [MODEL]
    with Client(service.url, None) as client, pytest.raises(Unauthorized, match="API key"):
        client.models()


@pytest.mark.parametrize("kind", [PromptTooLong, Unauthorized, UnknownModel, Forbidden])
def test_codes_of_the_api_are_known_again(kind: type[RequestError]) -> None:
    body = spell(fault_of(kind("why")), "/v1")
    assert type(_error_of(kind.http_status, {}, body, "http://x")) is kind


def test_names_cannot_lead_to_other_pages(service: FakeService) -> None:
    with Client(service.url, None) as client, pytest.raises(UnknownModel):
        client.model("../ps")
    assert service.asked[-1][1] == "/hearth/models/..%2Fps"


def test_an_answer_is_streamed_with_what_was_asked(service: FakeService) -> None:
    with Client(service.url, None) as client:
        pieces = list(client.chat("smol", [{"role": "user", "content": "hi"}], PARAMS))

    assert "".join(piece.text for piece in pieces) == "The sky is blue.\u2028Really."
    assert [piece.finish_reason for piece in pieces] == [None, None, "stop", None]
    assert (pieces[-1].num_tokens, pieces[-1].request_id) == (3, "r1")
    (body,) = service.bodies("/v1/chat/completions")
    assert body == {
        "model": "smol",
        "messages": [{"role": "user", "content": "hi"}],
        **{"temperature": 0.0, "max_tokens": 7, "seed": 3},
        **{"stream": True, "stream_options": {"include_usage": True}},
    }


def test_an_answer_may_be_left_early(service: FakeService) -> None:
    with Client(service.url, None) as client, closing(client.complete("smol", "Once", PARAMS)) as pieces:
        assert next(pieces).text == "The sky"


def test_an_answer_that_breaks_off_is_no_answer(service: FakeService) -> None:
    service.breaks_after = 1
    with Client(service.url, None) as client, pytest.raises(Unreached, match="in the middle of its answer"):
        list(client.complete("smol", "Once", PARAMS))


def test_a_deployment_tells_its_progress_and_ends_with_the_model(service: FakeService) -> None:
    with Client(service.url, None) as client:
        progress, model = client.deploy(DeployOrder("/m", "new", quant="int8", labels=("zone=a",)))
    assert progress == DeployProgress("converting", 1, 2)
    assert isinstance(model, ModelView)
    assert model.name == "new"
    body = service.asked[-1][2]
    assert body is not None
    assert body["labels"] == ["zone=a"]


def test_nobody_there_is_told_with_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Client(url, None) as client, pytest.raises(Unreached, match="hearth serve"):
            client.models()


def test_another_service_is_recognised(service: FakeService) -> None:
    service.models = [{"id": 1}]  # type: ignore[list-item]  # what another service may say
    with Client(service.url, None) as client, pytest.raises(ServiceError, match="another service"):
        client.models()


def test_another_service_may_answer_in_no_text(service: FakeService) -> None:
    with Client(service.url, None) as client:
        with pytest.raises(ServiceError, match="another service"):
            client._decoded(b'{"id": "\xff"}', dict)
        with pytest.raises(ServiceError, match="another service"):
            client._streamed(b'{"error": "\xff"}', dict)
    assert "another service" in str(_error_of(502, {}, b'{"error": "\xff"}', service.url))


def test_no_proxy_stands_between_this_machine_and_itself(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with Client(service.url, None) as client:
        assert client.models() == [MODEL]


def test_certificates_are_asked_for_only_where_there_are_any(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(**_given: object) -> ssl.SSLContext:
        raise NotImplementedError("certificates of authorities are read")

    monkeypatch.setattr(ssl, "create_default_context", read)
    with Client(service.url, None) as client:
        assert client.models() == [MODEL]
    with pytest.raises(NotImplementedError, match="authorities"):
        Client(service.url.replace("http:", "HTTPS:"), None)


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8000", "ftp://host", "http://"),
        *("http://[::1", "http://[nowhere]", "http://host:port", "http://host:99999", "http://a\x00b"),
    ],
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Client(url, None)
