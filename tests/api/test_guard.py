from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from hearth.api import guard
from hearth.api.guard import OPEN_PATHS
from hearth.control.keys import keys
from hearth.control.keys.keys import ApiKeys
from hearth.control.requests.generation import AnswerStream
from hearth.core.types import PromptReading
from tests.api.conftest import app_of, chat, request
from tests.api.fake import FakeGateway, FakeKeys, tokens_of

SECRET = "the prompt that nobody may log"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def error_of(response: httpx.Response) -> dict[str, object]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error, dict)
    return error


@pytest.fixture
def locked(gateway: FakeGateway) -> FakeGateway:
    gateway.keys = FakeKeys()
    return gateway


@pytest.mark.parametrize("headers", [{}, bearer("wrong"), bearer(""), {"authorization": "Basic user-key"}])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/hearth/ps", "/openapi.json", "/nowhere"])
def test_without_a_right_key_nothing_is_shown(
    locked: FakeGateway, path: str, headers: dict[str, str]
) -> None:
    response = request(locked, "GET", path, headers=headers)

    assert response.status_code == 401
    assert error_of(response)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_a_key_may_come_by_anthropics_header_and_two_that_differ_are_refused(locked: FakeGateway) -> None:
    def asked(**headers: str) -> httpx.Response:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return request(locked, "GET", "/v1/models", headers=given)

    assert asked(x_api_key="user-key").status_code == 200
    assert asked(x_api_key="user-key", authorization="Bearer user-key").status_code == 200
    assert asked(x_api_key="user-key", authorization="Basic abc").status_code == 200
    wrong, both = asked(x_api_key="nobodys"), asked(x_api_key="user-key", authorization="Bearer admin-key")
    assert (wrong.status_code, both.status_code) == (401, 401)
    assert "have different keys; send one of them" in both.json()["error"]["message"]


def test_probes_need_no_key(locked: FakeGateway) -> None:
    assert {request(locked, "GET", path).status_code for path in OPEN_PATHS} == {200}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/hearth/models", {"source": "x"}),
        ("DELETE", "/hearth/models/tiny", None),
        ("POST", "/hearth/models/tiny/unload", {"free": True}),
    ],
)
def test_changes_need_an_admins_key(
    locked: FakeGateway, method: str, path: str, body: dict[str, object] | None
) -> None:
    statuses = [
        request(locked, method, path, body, headers=bearer(key)).status_code
        for key in ("user-key", "admin-key", "admin-token")
    ]

    assert statuses == [403, 200, 200]


@pytest.mark.parametrize("path", ["/metrics", "/hearth/ps", "/hearth/forecasts/tiny"])
def test_what_shows_everybodys_requests_needs_a_monitors_key(locked: FakeGateway, path: str) -> None:
    """Counts and times would tell one user how long another's prompt was, and whether it was cached."""
    keys = ("user-key", "monitor-key", "admin-key", "admin-token")
    statuses = [request(locked, "GET", path, headers=bearer(key)).status_code for key in keys]

    assert statuses == [403, 200, 200, 200]
    refused = error_of(request(locked, "GET", path, headers=bearer("user-key")))
    assert "but this needs `monitor`; create a key with `hearth keys add NAME --monitor`" in str(
        refused["message"]
    )


def test_a_monitors_key_changes_nothing(locked: FakeGateway) -> None:
    deleted = request(locked, "DELETE", "/hearth/models/tiny", headers=bearer("monitor-key"))
    assert (deleted.status_code, locked.done) == (403, [])


def test_the_gateway_is_told_who_asks(locked: FakeGateway) -> None:
    body = {"model": "tiny", "prompt": "Hi", "n": 2}
    for key in ("user-key", "admin-key", "admin-token"):
        request(locked, "POST", "/v1/completions", body, headers=bearer(key))
    request(locked, "GET", "/hearth/requests/r0", headers=bearer("user-key"))
    names = [caller.name for caller in locked.callers]
    assert names == [*["ann"] * 2, *["bob"] * 2, *["operator"] * 2, "ann"]


def test_without_keys_all_callers_are_one(gateway: FakeGateway) -> None:
    for headers in ({}, bearer("user-key"), bearer("admin-token")):
        request(gateway, "POST", "/v1/completions", {"model": "tiny", "prompt": "Hi"}, headers=headers)
    assert len(gateway.callers) == 3
    assert len(set(gateway.callers)) == 1


def test_the_first_key_closes_an_open_service_at_once_and_the_last_one_opens_none(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    gateway.keys = ApiKeys.load(path)

    def statuses(key: str) -> list[int]:
        return [
            request(gateway, "GET", "/v1/models", headers=headers).status_code
            for headers in ({}, bearer(key), bearer(gateway.admin_token))
        ]

    assert statuses("anything") == [200, 200, 200]
    key = keys.add(path, "ada", "user").key
    assert statuses(key) == [401, 200, 200]
    keys.remove(path, "ada")
    assert statuses(key) == [401, 401, 200]
    path.unlink()
    assert statuses(key) == [401, 401, 200]


def test_keys_that_cannot_be_read_let_nobody_in_but_the_owner(
    gateway: FakeGateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    gateway.keys = ApiKeys.load(path)
    path.write_text("no keys")

    refused = request(gateway, "GET", "/v1/models")
    assert (refused.status_code, str(path) in refused.text) == (503, False)
    assert str(path) in caplog.text
    assert request(gateway, "GET", "/v1/models", headers=bearer(gateway.admin_token)).status_code == 200


def test_keys_that_cannot_be_read_are_logged_once_for_each_state_of_their_file(
    gateway: FakeGateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    gateway.keys = ApiKeys.load(path)

    async def scene() -> list[int]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app_of(gateway)), base_url="http://localhost"
        ) as client:
            statuses = []
            for text in ("no keys", "[]", "no keys", '[{"name": 1}]'):
                path.write_text(text)
                statuses += [(await client.get("/v1/models")).status_code for _ in range(3)]
            return statuses

    assert asyncio.run(scene()) == [*[503] * 3, *[200] * 3, *[503] * 6]
    assert caplog.text.count("keys_unreadable") == 3


def test_a_users_key_is_enough_to_ask(locked: FakeGateway) -> None:
    body = {"model": "tiny", "prompt": "Hi"}

    assert request(locked, "POST", "/v1/completions", body, headers=bearer("user-key")).status_code == 200
    assert request(locked, "GET", "/hearth/models", headers=bearer("user-key")).status_code == 200


def test_pages_of_other_sites_are_refused_where_no_keys_are_needed(gateway: FakeGateway) -> None:
    def status(origin: str, host: str) -> int:
        headers = {"origin": origin, "host": host}
        return request(gateway, "DELETE", "/hearth/models/tiny", headers=headers).status_code

    assert status("http://localhost:8000", "localhost:8000") == 200
    assert status("https://evil.example", "localhost:8000") == 403
    assert status("http://rebound.example:8000", "rebound.example:8000") == 403
    assert status("null", "localhost:8000") == 403
    assert status("http://[", "localhost:8000") == 403


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[
            (host, 200)
            for host in ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "127.0.0.2")
        ],
        *[(host, 403) for host in ("rebound.example", "rebound.example:8000", "192.168.1.1", "[", "")],
    ],
)
def test_without_keys_only_this_machines_names_lead_here(
    gateway: FakeGateway, host: str, status: int
) -> None:
    assert request(gateway, "GET", "/v1/models", headers={"host": host}).status_code == status


def test_with_keys_any_name_leads_here(locked: FakeGateway) -> None:
    headers = {"host": "hearth.example", **bearer("user-key")}
    assert request(locked, "GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/api/generate", {"prompt": "Hi"}),
        ("/api/generate", {"prompt": "Hi", "raw": True}),
        ("/api/generate", {}),
        ("/api/chat", {}),
        ("/api/embed", {"input": "Hi"}),
        ("/api/embeddings", {"prompt": "Hi"}),
    ],
)
def test_only_an_admin_may_pin(locked: FakeGateway, path: str, asked: dict[str, object]) -> None:
    def script(stream: AnswerStream) -> None:
        stream.reading = PromptReading(embedding=bytes(8))
        stream.put(tokens_of("Hi"))

    locked.script = script

    def answered(key: str, keep_alive: object) -> httpx.Response:
        body = {"model": "tiny", "keep_alive": keep_alive} | asked
        return request(locked, "POST", path, body, headers=bearer(key))

    refused = answered("user-key", -1)
    assert refused.status_code == 403
    assert "`admin`" in refused.text
    assert answered("user-key", "-1s").status_code in (400, 403)
    assert [answered(key, -1).status_code for key in ("admin-key", "admin-token")] == [200, 200]
    assert [
        answered("user-key", "1h").status_code,
        chat(FakeGateway(locked.tokenizer_), keep_alive=-1).status_code,
    ] == [200, 200]


def test_a_body_that_is_announced_too_large_is_not_read(gateway: FakeGateway) -> None:
    response = request(gateway, "POST", "/v1/completions", {"model": "tiny", "prompt": "x" * 200_000})

    assert response.status_code == 413
    assert "limit: 100000 bytes" in str(error_of(response)["message"])


def test_a_body_in_chunks_is_counted(gateway: FakeGateway) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 10_000

    headers = {"content-type": "application/json"}
    response = request(gateway, "POST", "/v1/completions", content=chunks(), headers=headers)

    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/v1/models", {"x-long": "x" * 40_000}),
        (f"/v1/models?{'x' * 40_000}", {}),
        (f"/v1/{'x' * 40_000}", {}),
    ],
)
def test_headers_are_limited(gateway: FakeGateway, path: str, headers: dict[str, str]) -> None:
    response = request(gateway, "GET", path, headers=headers)

    assert response.status_code == 431
    assert error_of(response)["code"] == "headers_too_large"


def test_what_breaks_inside_is_logged_once_and_told_without_details(
    gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    def script(stream: object) -> None:
        raise ZeroDivisionError("a detail")

    gateway.script = script
    with caplog.at_level(logging.DEBUG):
        response = chat(gateway, messages=[{"role": "user", "content": SECRET}])

    assert response.status_code == 500
    error_id = response.headers["x-request-id"]
    assert error_of(response)["message"] == f"internal error; see `{error_id}` in the log of the service"
    assert "a detail" not in response.text
    failures = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [error_id in record.getMessage() for record in failures] == [True]
    assert SECRET not in caplog.text


def test_a_path_cannot_write_lines_of_the_log(
    gateway: FakeGateway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(name: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(gateway, "model", broken)
    request(gateway, "GET", "/v1/models/a%0Dinvented line")

    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "\r" not in record.getMessage()


def test_prompts_are_never_logged(gateway: FakeGateway, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        chat(gateway, messages=[{"role": "user", "content": SECRET}])
        chat(gateway, messages=[{"role": "user", "content": SECRET}], temperature=9)

    assert SECRET not in caplog.text


def test_a_form_cannot_stand_in_for_json(gateway: FakeGateway) -> None:
    body = json.dumps({"source": "x"})
    response = request(
        gateway, "POST", "/hearth/models", content=body, headers={"content-type": "text/plain"}
    )

    assert response.status_code == 415
    assert gateway.done == []


def test_bodies_that_are_still_coming_have_a_limit_together(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_INCOMING_BODIES", 2)
    whole = json.dumps({"model": "tiny", "prompt": "a" * 900}).encode()

    async def scene() -> list[int]:
        may_end, have_come = asyncio.Event(), asyncio.Barrier(3)

        async def slow() -> AsyncIterator[bytes]:
            yield whole[:-1]
            await have_come.wait()
            await may_end.wait()
            yield whole[-1:]

        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app_of(gateway, max_body_bytes=1000)),
            base_url="http://localhost",
            headers={"content-type": "application/json"},
        ) as client:
            slow_ones = [
                asyncio.create_task(client.post("/v1/completions", content=slow())) for _ in range(2)
            ]
            await have_come.wait()  # their first pieces are here
            refused = await client.post("/v1/completions", content=whole)
            may_end.set()
            answers = [
                *(await asyncio.gather(*slow_ones)),
                await client.post("/v1/completions", content=whole),
            ]
            assert refused.headers["retry-after"] == "1"
            assert "limit: 2000 bytes in total" in refused.text
            return [refused.status_code, *(answer.status_code for answer in answers)]

    assert asyncio.run(scene()) == [429, 200, 200, 200]
