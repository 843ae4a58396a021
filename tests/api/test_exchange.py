from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from hearth.api.dashboard import GREETING
from hearth.control.requests.correlation import UNNAMED, Correlation, TraceParent
from hearth.core.errors import NoCapacity, Overloaded
from tests.api.conftest import Connection, app_of, complete, request
from tests.api.fake import FakeGateway, FakeKeys

ASK = {"model": "tiny", "prompt": "Hi"}
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def ids_of(response: httpx.Response) -> tuple[str, str]:
    return response.headers["x-request-id"], response.headers["x-hearth-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/health", None, {}, 200),
        ("POST", "/v1/completions", ASK | {"n": 0}, {}, 400),
        ("GET", "/v1/models", None, {"authorization": "Bearer wrong"}, 401),
        ("DELETE", "/hearth/models/tiny", None, {}, 403),
        ("GET", "/v1/models/none", None, {}, 404),
        ("GET", "/v1/completions", None, {}, 405),
        ("POST", "/v1/completions", ASK | {"prompt": "x" * 200_000}, {}, 413),
        ("POST", "/v1/completions", ASK, {"content-type": "text/plain"}, 415),
        ("GET", "/v1/models", None, {"x-long": "x" * 40_000}, 431),
        ("OPTIONS", "/v1/models", None, {}, 204),
        ("OPTIONS", "/v1/models", None, {"origin": "x", "access-control-request-method": "GET"}, 403),
    ],
)
def test_every_response_has_an_id(
    gateway: FakeGateway,
    method: str,
    path: str,
    body: dict[str, object] | None,
    headers: dict[str, str],
    status: int,
) -> None:
    gateway.keys = FakeKeys()
    first, second = (
        request(gateway, method, path, body, headers={"authorization": "Bearer user-key"} | headers)
        for _ in range(2)
    )

    assert (first.status_code, second.status_code) == (status, status)
    assert ids_of(first)[0] == ids_of(first)[1]
    assert ids_of(first)[0].startswith("req-")
    assert ids_of(first) != ids_of(second)


def test_a_response_to_what_is_refused_or_breaks_inside_has_an_id_too(gateway: FakeGateway) -> None:
    statuses = []
    for failure in (Overloaded("full", 1), NoCapacity("never"), ZeroDivisionError()):
        gateway.refusal = failure  # type: ignore[assignment] # the last one is none that anybody expects
        response = complete(gateway)
        statuses.append(response.status_code)
        assert ids_of(response)[1].startswith("req-")
    assert statuses == [429, 503, 500]


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_client_gets_its_own_id_back_with_ours_beside_it(
    gateway: FakeGateway, fields: dict[str, object]
) -> None:
    headers = {"x-request-id": "order-17", "traceparent": TRACE}
    for number in range(2):  # as often as it likes: ours differ
        response = request(gateway, "POST", "/v1/completions", ASK | fields, headers=headers)
        assert ids_of(response) == ("order-17", f"r{number}")
    trace = TraceParent("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", is_sampled=True)
    assert gateway.correlations == [Correlation("order-17", trace)] * 2


@pytest.mark.parametrize("sent", ["", "a b", "a,b", "x" * 129, "a\tb"])
def test_an_id_that_no_log_line_should_hold_is_not_taken_over(gateway: FakeGateway, sent: str) -> None:
    headers = {"x-request-id": sent, "traceparent": "00-x"}
    response = request(gateway, "POST", "/v1/completions", ASK, headers=headers)

    assert ids_of(response) == ("r0", "r0")
    assert gateway.correlations == [UNNAMED]


def test_each_response_is_one_debug_line_that_a_client_finds_by_its_own_id(
    gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"x-request-id": "order-17", "traceparent": TRACE}
    with caplog.at_level(logging.DEBUG, "hearth"):
        request(gateway, "POST", "/v1/completions", ASK, headers=headers)
        request(gateway, "GET", "/no%0Awhere?secret=1")

    asked, lost = [record.getMessage() for record in caplog.records if record.name == "hearth.api.exchange"]
    assert asked == (
        f"answered id=r0 method=POST path='/v1/completions' status=200 client_id=order-17 traceparent={TRACE}"
    )
    assert lost.endswith(" method=GET path='/no\\nwhere' status=404")


def test_what_breaks_inside_is_found_in_the_log_by_the_clients_id(
    gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.refusal = ZeroDivisionError()  # type: ignore[assignment] # none that anybody expects
    response = request(gateway, "POST", "/v1/completions", ASK, headers={"x-request-id": "order-17"})

    (failure,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "client_id=order-17" in failure
    assert ids_of(response)[0] == "order-17"
    assert ids_of(response)[1] in failure
    assert ids_of(response)[1] in response.json()["error"]["message"]


def test_choices_that_were_taken_before_a_refusal_are_named_by_it(gateway: FakeGateway) -> None:
    def script(stream: object) -> None:
        if len(gateway.streams) == 2:
            gateway.refusal = Overloaded("full", 1)

    gateway.script = script

    assert ids_of(complete(gateway, n=4)) == ("r0,r1", "r0,r1")


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/health",
            "/livez",
            "/readyz",
            "/version",
            "/metrics",
            "/openapi.json",
            "/v1/models",
            "/v1/models/tiny",
        ),
        *("/hearth/models", "/hearth/models/tiny", "/hearth/ps", "/v1/models/none"),
    ],
)
def test_head_is_answered_like_get(gateway: FakeGateway, path: str) -> None:
    get, head = (request(gateway, method, path) for method in ("GET", "HEAD"))

    assert (head.status_code, head.content) == (get.status_code, b"")
    same = ("content-type", "content-length")
    assert [head.headers[name] for name in same] == [get.headers[name] for name in same]


def test_head_needs_the_key_that_get_needs(gateway: FakeGateway) -> None:
    gateway.keys = FakeKeys()
    statuses = [
        request(gateway, "HEAD", path, headers={"authorization": "Bearer user-key"}).status_code
        for path in ("/metrics", "/v1/models")
    ]

    assert [*statuses, request(gateway, "HEAD", "/v1/models").status_code] == [403, 200, 401]


def test_a_slash_at_the_end_changes_nothing(gateway: FakeGateway) -> None:
    gateway.keys = FakeKeys()
    user = {"authorization": "Bearer user-key"}
    assert [request(gateway, "GET", "/health/").status_code] == [200]
    assert request(gateway, "GET", "/v1/models/", headers=user).json()["object"] == "list"
    assert request(gateway, "POST", "/v1/completions/", ASK, headers=user).status_code == 200
    assert request(gateway, "GET", "/metrics/", headers=user).status_code == 403
    assert request(gateway, "GET", "/").text == request(gateway, "GET", "//").text == GREETING


def test_headers_of_openais_clients_are_let_through(gateway: FakeGateway) -> None:
    headers = {"OpenAI-Organization": "org-1", "OpenAI-Project": "p", "X-Stainless-Lang": "python"}
    response = request(
        gateway, "POST", "/v1/completions", ASK, headers={**headers, "Accept": "text/event-stream"}
    )

    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")


def test_a_client_that_leaves_gets_no_answer(gateway: FakeGateway) -> None:
    async def scene() -> Connection:
        connection = Connection(b'{"model": "tiny", "prompt": "Hi"}')
        gateway.script = lambda stream: connection.is_gone.set()
        await connection.run(app_of(gateway), "/v1/completions")
        return connection

    assert asyncio.run(scene()).status is None
