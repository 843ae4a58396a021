from __future__ import annotations

import httpx
import pytest

from hearth.core.errors import Overloaded
from tests.api.conftest import request
from tests.api.fake import FakeGateway, FakeKeys

PAGE = "https://chat.example"
ASK = {"model": "tiny", "prompt": "Hi"}


def preflight(gateway: FakeGateway, origin: str, allowed: tuple[str, ...]) -> httpx.Response:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    return request(gateway, "OPTIONS", "/v1/chat/completions", headers=headers, allowed_origins=allowed)


def locked(gateway: FakeGateway) -> FakeGateway:
    gateway.keys = FakeKeys()
    return gateway


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("allowed", [(PAGE,), ("https://other.example", PAGE), ("*",)])
def test_a_browser_gets_permission_for_an_allowed_page_without_a_key(
    gateway: FakeGateway, allowed: tuple[str, ...], has_keys: bool
) -> None:
    response = preflight(locked(gateway) if has_keys else gateway, PAGE, allowed)

    headers = response.headers
    assert (response.status_code, response.content) == (204, b"")
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["access-control-allow-methods"] == "GET, HEAD, POST, PATCH, DELETE"
    assert headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
    assert headers["access-control-max-age"] == "7200"
    assert "access-control-allow-credentials" not in headers
    assert headers["vary"] == ("access-control-request-method, access-control-request-headers, origin")


@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("origin", ["https://evil.example", "https://chat.example.evil.example", "null"])
@pytest.mark.parametrize("allowed", [(), (PAGE,)])
def test_a_browser_gets_none_for_any_other_page(
    gateway: FakeGateway, origin: str, allowed: tuple[str, ...], has_keys: bool
) -> None:
    response = preflight(locked(gateway) if has_keys else gateway, origin, allowed)

    assert response.status_code == 403
    assert (
        f"origin not allowed: {origin}; add it to `service.allowed_origins`"
        in response.json()["error"]["message"]
    )
    assert [name for name in response.headers if name.startswith("access-control-")] == []


def test_a_page_may_reach_a_private_network_only_if_it_is_allowed(gateway: FakeGateway) -> None:
    headers = {
        "origin": PAGE,
        "access-control-request-method": "GET",
        "access-control-request-private-network": "true",
    }
    response = request(gateway, "OPTIONS", "/v1/models", headers=headers, allowed_origins=(PAGE,))

    assert response.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models", None, 200),
        ("GET", "/health", None, 200),
        ("POST", "/v1/completions", ASK, 200),
        ("POST", "/v1/completions", ASK | {"stream": True}, 200),
        ("POST", "/v1/completions", ASK | {"n": 0}, 400),
        ("GET", "/nowhere", None, 404),
        ("PUT", "/v1/models", None, 405),
        ("POST", "/v1/completions", ASK | {"prompt": "x" * 200_000}, 413),
    ],
)
def test_an_allowed_page_may_read_every_answer(
    gateway: FakeGateway, method: str, path: str, body: dict[str, object] | None, status: int
) -> None:
    headers = {"origin": PAGE, "authorization": "Bearer user-key"}
    response = request(locked(gateway), method, path, body, headers=headers, allowed_origins=(PAGE,))

    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["vary"] == "origin"
    exposed = response.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(exposed)


def test_an_allowed_page_may_read_why_it_was_refused(gateway: FakeGateway) -> None:
    headers = {"origin": PAGE}
    gateway.refusal = Overloaded("full", 2)
    refused = request(gateway, "POST", "/v1/completions", ASK, headers=headers, allowed_origins=(PAGE,))
    keyless = request(locked(gateway), "GET", "/v1/models", headers=headers, allowed_origins=(PAGE,))

    assert [one.status_code for one in (refused, keyless)] == [429, 401]
    assert [one.headers["access-control-allow-origin"] for one in (refused, keyless)] == [PAGE, PAGE]


def test_answers_for_others_differ_only_where_pages_are_allowed(gateway: FakeGateway) -> None:
    """A cache must not hand one page the answer that another may read."""
    for headers in ({}, {"origin": "http://localhost"}):
        told = request(gateway, "GET", "/v1/models", headers=headers, allowed_origins=(PAGE,)).headers
        assert (told["vary"], "access-control-allow-origin" in told) == ("origin", False)
        assert "vary" not in request(gateway, "GET", "/v1/models", headers=headers).headers


@pytest.mark.parametrize(
    ("allowed", "status"), [((), 403), (("https://other.example",), 403), (("*",), 403), ((PAGE,), 200)]
)
def test_without_keys_only_a_page_that_is_named_comes_in(
    gateway: FakeGateway, allowed: tuple[str, ...], status: int
) -> None:
    """Whoever comes in is an admin: with `*`, any page that somebody opens could remove models."""
    headers = {"origin": PAGE}
    response = request(gateway, "DELETE", "/hearth/models/tiny", headers=headers, allowed_origins=allowed)

    assert response.status_code == status
    assert len(gateway.done) == (status == 200)


@pytest.mark.parametrize("kind", [{}, {"content-type": "text/plain"}])
@pytest.mark.parametrize("has_keys", [True, False])
@pytest.mark.parametrize("allowed", [(), ("*",), ("https://other.example",)])
def test_what_a_page_sends_without_asking_its_browser_does_not_get_through(
    gateway: FakeGateway, allowed: tuple[str, ...], has_keys: bool, kind: dict[str, str]
) -> None:
    """A browser sends such requests at once, and of a blob without a type no content type at all."""
    response = request(
        locked(gateway) if has_keys else gateway,
        *("POST", "/hearth/models"),
        headers={"origin": PAGE} | kind,
        content='{"source": "x"}',
        allowed_origins=allowed,
    )

    assert response.status_code == (401 if has_keys else 403)
    assert gateway.done == []


def test_with_keys_a_page_that_is_not_allowed_is_answered_and_cannot_read_it(gateway: FakeGateway) -> None:
    headers = {"origin": "https://evil.example", "authorization": "Bearer user-key"}
    response = request(locked(gateway), "GET", "/v1/models", headers=headers, allowed_origins=(PAGE,))

    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers
