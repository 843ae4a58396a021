"""Limits of API keys as clients see them: refusals, headers, and what comes back when requests end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import openai
import pytest

from hearth.api.rate_limit_headers import openai_duration
from hearth.control.keys import keys
from hearth.control.keys.keys import ApiKeys
from hearth.control.requests.caller import KeyTerms
from hearth.control.requests.generation import AnswerStream
from hearth.core.errors import EngineFailed
from hearth.policy.limits.key_limiter import KeyLimits
from tests.api.conftest import Connection, app_of, request
from tests.api.fake import FakeGateway, tokens_of

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


class Client:
    """Somebody with a key of some limits. Each prompt has 5 tokens, each answer 2 of at most 20."""

    def __init__(self, gateway: FakeGateway, path: Path, limits: KeyLimits) -> None:
        self.gateway = gateway
        self.key = keys.add(path, "ada", "user", terms=KeyTerms(limits)).key
        gateway.keys = ApiKeys(path)
        self.headers = {"authorization": f"Bearer {self.key}"}

    def ask(self, **fields: object) -> httpx.Response:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20} | fields
        return request(self.gateway, "POST", CHAT, body, headers=self.headers)


def limited(response: httpx.Response) -> dict[str, str]:
    """The headers of limits, without what all of them begin with."""
    prefix = "x-ratelimit-"
    return {k.removeprefix(prefix): v for k, v in response.headers.items() if k.startswith(prefix)}


def test_every_answer_tells_what_is_left(gateway: FakeGateway, tmp_path: Path) -> None:
    client = Client(gateway, tmp_path / "k.json", KeyLimits(10, 1000))
    assert limited(client.ask()) == {
        "limit-requests": "10",
        "remaining-requests": "9",
        "reset-requests": "1m0s",
        "limit-tokens": "1000",
        "remaining-tokens": "975",  # before the end nobody knows that there are 2 tokens and not 20
        "reset-tokens": "1m0s",
    }
    gateway.now_s = 15.5
    streamed = client.ask(stream=True)
    assert limited(streamed)["remaining-tokens"] == str(1000 - 7 - 25)
    assert limited(streamed)["remaining-requests"] == "8"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/models/nobody", None, 404),
        ("GET", "/nowhere", None, 404),
        ("GET", "/metrics", None, 403),
        ("POST", CHAT, {"model": "nobody", "messages": MESSAGES}, 404),
        ("POST", CHAT, {"model": "tiny", "messages": MESSAGES, "n": 0}, 400),
        ("POST", CHAT, {"model": "tiny", "messages": "x" * 200_000}, 413),
        ("PUT", CHAT, None, 405),
    ],
)
def test_what_is_no_answer_tells_it_too_and_takes_nothing(
    gateway: FakeGateway, tmp_path: Path, method: str, path: str, body: dict[str, object] | None, status: int
) -> None:
    client = Client(gateway, tmp_path / "k.json", KeyLimits(10))
    response = request(gateway, method, path, body, headers=client.headers)
    assert response.status_code == status
    assert limited(response) == {
        "limit-requests": "10",
        "remaining-requests": "10",
        "reset-requests": "0s",
    }


def test_who_has_no_key_is_told_of_no_limits(gateway: FakeGateway, tmp_path: Path) -> None:
    Client(gateway, tmp_path / "k.json", KeyLimits(10))
    assert limited(request(gateway, "GET", "/v1/models")) == {}
    assert limited(request(gateway, "GET", "/health")) == {}


@pytest.mark.parametrize("limits", [KeyLimits(1), KeyLimits(tokens_per_min=4)])
def test_a_page_may_read_every_header_of_a_refusal(
    gateway: FakeGateway, tmp_path: Path, limits: KeyLimits
) -> None:
    client = Client(gateway, tmp_path / "k.json", limits)
    client.ask()
    page = {"origin": "https://chat.example"}
    body = {"model": "tiny", "messages": MESSAGES}
    refused = request(
        *(gateway, "POST", CHAT, body),
        headers=client.headers | page,
        allowed_origins=(page["origin"],),
    )
    assert refused.status_code == 429
    exposed = set(refused.headers["access-control-expose-headers"].split(", "))
    own = {name for name in refused.headers if name.startswith(("x-", "retry-"))}
    assert own <= exposed


def test_without_limits_there_are_no_such_headers(gateway: FakeGateway, tmp_path: Path) -> None:
    assert limited(Client(gateway, tmp_path / "k.json", KeyLimits(concurrent=3)).ask()) == {}


def test_a_request_too_many_is_told_when_to_come_back(gateway: FakeGateway, tmp_path: Path) -> None:
    client = Client(gateway, tmp_path / "k.json", KeyLimits(requests_per_min=2))
    for _ in range(2):
        assert client.ask().status_code == 200
    gateway.now_s = 47.7
    refused = client.ask()
    assert refused.status_code == 429
    assert refused.json()["error"] == {
        "message": "key `ada` has sent 2 requests in the last minute, its limit: 2; try again in 13 s",
        "type": "requests",
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert (refused.headers["retry-after"], refused.headers["retry-after-ms"]) == ("13", "12300")
    assert limited(refused) == {
        "limit-requests": "2",
        "remaining-requests": "0",
        "reset-requests": "12.3s",
    }
    assert len(gateway.requests) == 2
    gateway.now_s = 60.0
    assert client.ask().status_code == 200


def test_nothing_is_tokenised_for_a_request_too_many(gateway: FakeGateway, tmp_path: Path) -> None:
    client = Client(gateway, tmp_path / "k.json", KeyLimits(requests_per_min=1))
    assert client.ask().status_code == 200
    talk, generated = {"model": "tiny", "messages": MESSAGES}, {"model": "tiny", "prompt": "Hi"}
    for path, body in (
        ("/api/generate", generated | {"context": [7, 8]}),
        ("/v1/messages/count_tokens", talk),
        ("/tokenize", talk),
        ("/detokenize", {"model": "tiny", "tokens": [5]}),
    ):
        assert request(gateway, "POST", path, body, headers=client.headers).status_code == 429
    assert gateway.encoded == []


def test_tokens_beyond_the_limit_are_refused_and_what_ended_is_settled(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    client = Client(gateway, tmp_path / "k.json", KeyLimits(tokens_per_min=40))
    for _ in range(3):  # each takes 25 in advance, and 7 in the end
        assert client.ask().status_code == 200
    refused = client.ask()
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "tokens"
    assert (
        "has used 21 tokens in the last minute and the request is charged 25 more, its limit: 40"
        in (refused.json()["error"]["message"])
    )
    assert client.ask(max_tokens=14).status_code == 200


def test_of_prompts_that_are_too_many_together_none_is_computed(gateway: FakeGateway, tmp_path: Path) -> None:
    client = Client(gateway, tmp_path / "k.json", KeyLimits(requests_per_min=1, tokens_per_min=14))
    body = {"model": "tiny", "prompt": ["one", "two", "three"], "max_tokens": 2}
    refused = request(gateway, "POST", "/v1/completions", body, headers=client.headers)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")
    assert gateway.streams == []
    assert limited(refused)["remaining-requests"] == "1"
    assert limited(refused)["remaining-tokens"] == "14"


def test_what_can_never_pass_is_not_to_be_tried_again(gateway: FakeGateway, tmp_path: Path) -> None:
    client = Client(gateway, tmp_path / "k.json", KeyLimits(tokens_per_min=4))
    refused = client.ask()
    assert refused.status_code == 429
    assert (
        "the request is charged 5 tokens, limit of key `ada` per minute: 4; send less"
        in (refused.json()["error"]["message"])
    )
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers


def test_several_choices_are_one_request_whose_prompt_counts_once(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    client = Client(gateway, tmp_path / "k.json", KeyLimits(1, 100))
    answered = client.ask(n=3)
    assert answered.json()["usage"]["total_tokens"] == 5 + 3 * 2
    gateway.now_s = 1.0
    refused = client.ask()
    assert (refused.status_code, limited(refused)["remaining-tokens"]) == (429, "89")


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": True, "n": 3}, {}])
def test_a_client_that_leaves_gives_its_place_back_and_pays_for_what_it_had(
    gateway: FakeGateway, tmp_path: Path, fields: dict[str, object]
) -> None:
    client = Client(gateway, tmp_path / "k.json", KeyLimits(tokens_per_min=100, concurrent=1))
    gateway.script = lambda stream: stream.put(tokens_of("a", finish=None))
    num_streams = int(str(fields.get("n", 1)))

    async def leave() -> None:
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20} | fields
        connection = Connection(json.dumps(body).encode())
        connection.headers = [(b"authorization", client.headers["authorization"].encode())]
        running = asyncio.create_task(connection.run(app_of(gateway), CHAT))
        while len(gateway.streams) < num_streams:
            await asyncio.sleep(0)
        assert (await asked()).status_code == 429
        connection.is_gone.set()
        await running

    async def asked() -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app_of(gateway)), base_url="http://localhost"
        ) as http:
            body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20}
            return await http.post(CHAT, json=body, headers=client.headers)

    asyncio.run(leave())
    gateway.script = lambda stream: stream.put(tokens_of("a"))
    assert limited(client.ask())["remaining-tokens"] == str(100 - 5 - num_streams - 25)


def test_too_many_at_a_time_are_told_so(gateway: FakeGateway, tmp_path: Path) -> None:
    client = Client(gateway, tmp_path / "k.json", KeyLimits(concurrent=1))

    def second(stream: AnswerStream) -> None:
        gateway.script = lambda stream: stream.put(tokens_of("a"))
        caller = gateway.callers[-1]
        with pytest.raises(Exception, match="key `ada` has 1 requests running, its limit: 1; wait until"):
            gateway.admissions.admit(caller)
        stream.put(tokens_of("a"))

    gateway.script = second
    assert client.ask().status_code == 200
    assert client.ask().status_code == 200


def test_a_request_that_failed_gives_its_place_back(gateway: FakeGateway, tmp_path: Path) -> None:
    client = Client(gateway, tmp_path / "k.json", KeyLimits(concurrent=1, tokens_per_min=30))
    for _ in range(4):
        assert client.ask(model="nobody").status_code == 404
        assert client.ask(temperature="hot").status_code == 400
    assert client.ask().status_code == 200


def test_a_request_that_the_service_fails_before_its_first_token_pays_nothing(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    client = Client(gateway, tmp_path / "k.json", KeyLimits(requests_per_min=5, tokens_per_min=100))
    gateway.script = lambda stream: stream.fail(EngineFailed("broken"))
    failed = client.ask()
    assert failed.status_code == 500
    assert limited(failed)["remaining-requests"] == "4"
    assert limited(failed)["remaining-tokens"] == "100"


def test_a_changed_limit_counts_at_once(gateway: FakeGateway, tmp_path: Path) -> None:
    path = tmp_path / "k.json"
    client = Client(gateway, path, KeyLimits(requests_per_min=1))
    assert [client.ask().status_code for _ in range(2)] == [200, 429]
    keys.change(path, "ada", lambda terms: KeyTerms(KeyLimits(requests_per_min=2)))
    assert [client.ask().status_code for _ in range(2)] == [200, 429]


def test_openais_client_comes_back_when_it_is_told_to(gateway: FakeGateway, tmp_path: Path) -> None:
    client = Client(gateway, tmp_path / "k.json", KeyLimits(requests_per_min=1))
    client.ask()
    gateway.now_s = 59.95

    async def ask() -> str | None:
        transport = httpx.ASGITransport(app_of(gateway))
        async with (
            httpx.AsyncClient(transport=transport) as http,
            openai.AsyncOpenAI(
                api_key=client.key, base_url="http://localhost/v1", http_client=http, max_retries=1
            ) as service,
        ):
            asyncio.get_running_loop().call_later(0.01, lambda: setattr(gateway, "now_s", 60.0))
            answer = await service.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}]
            )
            return answer.choices[0].message.content

    assert asyncio.run(ask()) == "Hello"
    assert len(gateway.requests) == 2


@pytest.mark.parametrize(
    ("seconds", "spelt"),
    [
        (0.0, "0s"),
        (0.0005, "1ms"),
        (0.12, "120ms"),
        (1.0, "1s"),
        (7.66, "7.66s"),
        (60.0, "1m0s"),
        (90.5, "1m30.5s"),
    ],
)
def test_durations_are_spelt_as_openai_does(seconds: float, spelt: str) -> None:
    assert openai_duration(seconds) == spelt


@pytest.mark.parametrize(
    ("tier", "is_batch", "told"),
    [
        ("flex", True, "flex"),
        ("batch", True, "flex"),
        ("auto", False, "default"),
        ("priority", False, "default"),
    ],
)
def test_a_tier_is_a_class_of_service_and_the_answer_tells_which(
    gateway: FakeGateway, tier: str, is_batch: bool, told: str
) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "service_tier": tier}
    answered = request(gateway, "POST", CHAT, body)
    assert (gateway.requests[0].is_batch, answered.json()["service_tier"]) == (is_batch, told)
    assert "x-hearth-ignored-fields" not in answered.headers
    plain = request(gateway, "POST", "/v1/completions", {"model": "tiny", "prompt": "Hi"})
    assert "service_tier" not in plain.json()


def test_an_unknown_tier_is_refused(gateway: FakeGateway) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "service_tier": "gold"}
    assert request(gateway, "POST", CHAT, body).status_code == 400
