from __future__ import annotations

from collections.abc import Sequence

import pytest
import schemathesis
from fastapi.exceptions import RequestValidationError

from hearth.api.guard import MAX_HEADER_BYTES, OPEN_PATHS
from hearth.core.errors import (
    GuideStuck,
    HearthError,
    LogitsNotFinite,
    NoCapacity,
    Overloaded,
    PromptTooLong,
    ShuttingDown,
    StoreError,
    UnknownModel,
)
from tests.api.conftest import app_of, chat, complete, request
from tests.api.fake import FakeGateway, FakeKeys

USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"temperature": 3},
            "temperature",
            "`temperature`: input should be less than or equal to 2, given: 3",
        ),
        (
            {"temperature": "hot"},
            "temperature",
            "`temperature`: input should be a valid number, given: 'hot'",
        ),
        ({"n": 0}, "n", "`n`: input should be greater than or equal to 1, given: 0"),
        ({"n": 1.5}, "n", "`n`: input should be a valid integer"),
        ({"max_tokens": "5"}, "max_tokens", "`max_tokens`: input should be a valid integer, given: '5'"),
        ({"stop": [5]}, "stop[0]", "`stop[0]`: input should be a valid string, given: 5"),
        ({"stop": ["x"] * 17}, "stop", "`stop`: at most 16 stop strings are allowed, given: 17"),
        (
            {"stop": ["x" * 512, "y" * 513]},
            "stop",
            "`stop`: stop strings may have 1024 characters in total, given: 1025; shorten them or",
        ),
        ({"messages": []}, "messages", "`messages`: list should have at least 1 item, given: a list of 0"),
        ({"messages": [USER, {"content": "Hi"}]}, "messages[1].role", "`messages[1].role`: field required"),
        (
            {"messages": [{"role": "user"}]},
            "messages[0]",
            "`content` of a message of role `user` must be text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "only parts of type `text` are supported, given: 'image_url'",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "no lone surrogates"),
        (
            {"logit_bias": {"5": 101}},
            "logit_bias.5",
            "`logit_bias.5`: input should be less than or equal to 100",
        ),
        ({"response_format": "xml"}, "response_format", "input should be an object, given: 'xml'"),
        ({"stream_options": []}, "stream_options", "input should be an object, given: a list of 0"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'json_object'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "field required"),
        ({"model": 5}, "model", "`model`: input should be a valid string, given: 5"),
        ({"model": ""}, "model", "`model`: text should have at least 1 character, given: ''"),
        (
            {"model": "x" * 300},
            "model",
            f"`model`: text should have at most 256 characters, given: 300, beginning with '{'x' * 40}'",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_limit_and_value(
    gateway: FakeGateway, fields: dict[str, object], param: str, message: str
) -> None:
    response = chat(gateway, **fields)

    error = response.json()["error"]
    assert response.status_code == 400
    assert message in error["message"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, "bad_request")
    assert gateway.requests == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the body is not valid JSON"),
        ("[]", "`body`: input should be an object, given: a list of 0"),
        ('{"model": "tiny", "prompt": []}', "`prompt`: list should have at least 1 item, given: a list of 0"),
        ('{"model": "tiny", "prompt": [[]]}', "`prompt[0]`: list should have at least 1 item, given: a list"),
        ("", "a JSON body is required"),
        ("[" * 50_000, "lists and objects are nested too deep"),
        (
            '{"model": "tiny", "prompt": "a", "temperature": NaN}',
            "`temperature`: input should be a finite number",
        ),
    ],
)
def test_a_body_that_is_none_is_refused(gateway: FakeGateway, content: str, message: str) -> None:
    headers = {"content-type": "application/json"}
    response = request(gateway, "POST", "/v1/completions", content=content, headers=headers)

    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (PromptTooLong("too long"), 400, "invalid_request_error", "context_length_exceeded"),
        (UnknownModel("who?"), 404, "invalid_request_error", "model_not_found"),
        (Overloaded("full", 2.5), 429, "rate_limit_error", "overloaded"),
        (NoCapacity("never"), 503, "server_error", "no_capacity"),
        (LogitsNotFinite("NaN"), 500, "server_error", "logits_not_finite"),
        (GuideStuck("too complex"), 400, "invalid_request_error", "guide_stuck"),
        (ShuttingDown("bye"), 503, "server_error", "shutting_down"),
    ],
)
def test_what_the_gateway_refuses_has_its_status_and_code(
    gateway: FakeGateway, error: HearthError, status: int, kind: str, code: str
) -> None:
    gateway.refusal = error
    response = complete(gateway, stream=True)

    told = response.json()["error"]
    assert (response.status_code, told["type"], told["code"]) == (status, kind, code)
    assert told["message"] == str(error)


def test_a_full_queue_says_when_to_come_back(gateway: FakeGateway) -> None:
    gateway.refusal = Overloaded("the queue is full", 2.5)

    assert chat(gateway).headers["retry-after"] == "3"


def test_a_load_that_failed_says_when_it_is_tried_again(gateway: FakeGateway) -> None:
    gateway.refusal = StoreError("the disk is gone; it is tried again in 8 s")
    assert "retry-after" not in chat(gateway).headers
    gateway.refusal.retry_s = 7.2

    response = chat(gateway)
    assert (response.status_code, response.headers["retry-after"]) == (503, "8")


def test_a_refusal_closes_the_choices_that_were_taken(gateway: FakeGateway) -> None:
    def script(stream: object) -> None:
        if len(gateway.streams) == 2:
            gateway.refusal = Overloaded("full", 1)

    gateway.script = script

    assert chat(gateway, n=4).status_code == 429
    assert gateway.cancelled == ["r0", "r1"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/hearth/models/none", 404, "model_not_found"),
        ("GET", "/hearth/requests/none", 404, "request_not_found"),
        ("GET", "/hearth/nothing", 404, "not_found"),
        ("GET", "/apis", 404, "not_found"),
    ],
)
def test_wrong_addresses_get_the_error_object_too(
    gateway: FakeGateway, method: str, path: str, status: int, code: str
) -> None:
    response = request(gateway, method, path)

    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_each_api_has_errors_in_its_own_words(gateway: FakeGateway) -> None:
    told = {path: request(gateway, "GET", path).json() for path in ("/v1/x", "/v1/messages/x", "/api/x")}

    message = "no route `{}`; `/docs` lists all routes"
    error = {"type": "invalid_request_error", "param": None, "code": "not_found"}
    assert told == {
        "/v1/x": {"error": {"message": message.format("/v1/x"), **error}},
        "/v1/messages/x": {
            "type": "error",
            "error": {"type": "not_found_error", "message": message.format("/v1/messages/x")},
        },
        "/api/x": {"error": message.format("/api/x")},
    }


@pytest.mark.parametrize(
    ("method", "path", "meant"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/v1/messages", "/v1/messages"),
        ("POST", "/v1/api/chat", "/api/chat"),
        ("GET", "/tags", "/api/tags"),
        ("GET", "/chat/completions", None),  # as no route of that path takes GET
        ("GET", "/v1", None),
    ],
)
def test_a_wrong_base_url_is_told_the_route(
    gateway: FakeGateway, method: str, path: str, meant: str | None
) -> None:
    response = request(gateway, method, path)

    assert response.status_code == 404
    nearest = f"; did you mean `{meant}`?" if meant else "; `/docs` lists"
    assert f"no route `{path}`{nearest}" in response.text


def test_errors_of_every_route_are_as_documented(gateway: FakeGateway) -> None:
    """Errors that need no example of a route's own, in each way in which errors are made."""
    schema = schemathesis.openapi.from_dict(app_of(gateway).openapi())
    gateway.keys = FakeKeys()
    admin = {"authorization": "Bearer admin-key"}
    broken = FakeGateway(gateway.tokenizer_, admin_token=None)  # type: ignore[arg-type] # it fails inside
    for operation in (found.ok() for found in schema.get_all_operations()):
        method, path = operation.method.upper(), operation.path
        refused = {
            405: request(gateway, "PUT", path, headers=admin),
            413: request(
                gateway, method, path, headers=admin | {"content-length": str(1 << 30)}, content=" "
            ),
            431: request(gateway, method, path, headers=admin | {"x-long": "x" * MAX_HEADER_BYTES}),
        }
        if operation.body:
            wrong = {"content-type": "application/json"}
            refused[400] = request(gateway, method, path, headers=admin | wrong, content="{")
        if path not in OPEN_PATHS:
            refused[401] = request(gateway, method, path)
            refused[500] = request(broken, method, path)
        for status, response in refused.items():
            assert response.status_code == status, (operation.label, response.text)
            operation.validate_response(response)


def test_routes_that_answer_with_text_are_documented_so(gateway: FakeGateway) -> None:
    documented = app_of(gateway).openapi()["paths"]
    for path in ("/", "/metrics"):
        response = request(gateway, "GET", path)
        assert [*documented[path]["get"]["responses"]["200"]["content"]] == ["text/plain"]
        assert response.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/chat/completions", "POST, OPTIONS"),
        ("/hearth/keys/ann", "PATCH, DELETE, OPTIONS"),
        ("/hearth/models", "GET, POST, HEAD, OPTIONS"),
        ("/hearth/models/tiny", "GET, DELETE, HEAD, OPTIONS"),
        ("/openapi.json", "GET, HEAD, OPTIONS"),
    ],
)
def test_a_method_that_is_not_taken_is_told_all_that_are(
    gateway: FakeGateway, path: str, allowed: str
) -> None:
    refused, asked = (request(gateway, method, path) for method in ("PUT", "OPTIONS"))

    assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
    assert f"takes {allowed}, given: PUT" in refused.json()["error"]["message"]
    assert (asked.status_code, asked.headers["allow"], asked.content) == (204, allowed, b"")


@pytest.mark.parametrize(
    ("path", "param", "message"),
    [
        ("/v1/responses/x/input_items?limit=0", "limit", "`limit`: input should be greater than or equal"),
        ("/v1/responses/x?stream=maybe", "stream", "`stream`: input should be a valid boolean"),
        ("/hearth/models/tiny?look=maybe", "look", "given: 'maybe'"),
    ],
)
def test_a_wrong_parameter_of_a_query_is_named(
    gateway: FakeGateway, path: str, param: str, message: str
) -> None:
    response = request(gateway, "GET", path)

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert message in error["message"]


def test_an_unknown_model_is_refused(gateway: FakeGateway) -> None:
    response = chat(gateway, model="none")

    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


MANY = 50_000


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"messages": [{}] * MANY}, "messages[0].role"),
        ("chat/completions", {"messages": [USER] * MANY}, "messages"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{}] * MANY}]},
            "messages[0].content[0].type",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]},
            "messages[0].tool_calls[0].function",
        ),
        ("chat/completions", {"messages": [USER], "tools": [{}] * MANY}, "tools[0].type"),
        ("chat/completions", {"messages": {str(n): 0 for n in range(MANY)}}, "messages"),
        ("completions", {"prompt": ["a", 1] * MANY}, "prompt[0]"),
        ("completions", {"prompt": ["a"] * MANY}, "prompt"),
        ("completions", {"prompt": [[1], ["a"] * MANY]}, "prompt[1][0]"),
        ("completions", {"prompt": "a", "stop": [1] * MANY}, "stop"),
        ("completions", {"prompt": "a", "stop_token_ids": ["a"] * MANY}, "stop_token_ids[0]"),
        ("completions", {"prompt": "a", "logit_bias": {str(n): "a" for n in range(MANY)}}, "logit_bias"),
    ],
)
def test_of_many_faults_few_are_looked_for(
    gateway: FakeGateway,
    path: str,
    fields: dict[str, object],
    param: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_faults: list[int] = []

    def counted(self: RequestValidationError) -> Sequence[dict[str, object]]:
        num_faults.append(len(self._errors))
        return self._errors

    monkeypatch.setattr(RequestValidationError, "errors", counted)
    response = request(gateway, "POST", f"/v1/{path}", {"model": "tiny"} | fields, max_body_bytes=32 << 20)

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert len(error["message"]) < 300
    assert num_faults[0] < 8
