"""Whatever the OpenAPI document allows, and much that it does not: no request makes the service fail."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.schemas import APIOperation

from tests.service.harness import PATIENCE_S, Json, Service

pytestmark = pytest.mark.e2e

MODEL = "tiny-a"
#: Operations that change deployed models.
CHANGING = ("/api/copy", "/api/create", "/api/delete", "/api/pull")
NUM_EXAMPLES = 4
#: Each of these may start a process, of either of two routes.
NUM_DEPLOYMENTS = 2
#: A wish for more tokens or choices is cut to this, where it is a number at all.
MOST = {
    **{"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "num_predict": 4},
    **{"n": 2, "min_tokens": 2, "best_of": 2},
}
#: The field that says how long an answer may be, by endpoint.
LIMITS = {
    **dict.fromkeys(["/v1/completions", "/v1/chat/completions", "/v1/messages"], "max_tokens"),
    "/v1/responses": "max_output_tokens",
}
#: Endpoints of whose examples some must be answered.
ANSWERED = (*LIMITS, "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/embed")


def tamed(case: Case) -> Case:
    """Asked of a model that exists, and for little, so that examples are quick. Wrong types stay wrong."""
    if isinstance(case.body, dict) and not case.path.startswith("/hearth/"):
        body: dict[str, object] = case.body
        if isinstance(body.get("model"), str):
            body["model"] = MODEL
        if case.path in LIMITS:
            body.setdefault(LIMITS[case.path], 4)
        if case.path in ("/api/chat", "/api/generate"):
            body.setdefault("options", {"num_predict": 4})
        options = body.get("options")
        for fields in (body, options if isinstance(options, dict) else {}):
            for name, most in MOST.items():
                wish = fields.get(name)
                if type(wish) is int and (wish > most or (name == "num_predict" and wish < 0)):
                    fields[name] = most
        messages = body.get("messages")
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and message.get("content") is None:
                message["content"] = "Hi"  # which the document lets be absent, for the assistant's sake
    return case


def answerable(case: Case) -> Case:
    """Without what a document of JSON cannot rule out: 2.0 for 2, and texts of no token."""
    if isinstance(case.body, dict) and not case.path.startswith("/hearth/"):
        body: dict[str, Json] = {name: _with_integers(value) for name, value in case.body.items()}
        match body.get("prompt"):
            case str() as text:
                body["prompt"] = text or "Hi"
            case list() as prompts:
                body["prompt"] = [one or "Hi" if isinstance(one, str) else one for one in prompts]
        case.body = body
    return case


def _with_integers(value: Json) -> Json:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_with_integers(one) for one in value]
        case dict():
            return {name: _with_integers(one) for name, one in value.items()}
        case _:
            return value


def operations(service: Service) -> list[APIOperation]:
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


def test_the_document_names_every_endpoint(service: Service) -> None:
    labels = {operation.label for operation in operations(service)}
    assert labels >= {
        "GET /v1/models",
        "POST /v1/completions",
        "POST /v1/chat/completions",
        *("POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"),
        "POST /v1/responses",
        "GET /v1/responses/{response_id}",
        "DELETE /v1/responses/{response_id}",
        "GET /v1/responses/{response_id}/input_items",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "GET /",
        "GET /api/tags",
        "POST /api/show",
        "GET /api/ps",
        "GET /api/version",
        "POST /api/chat",
        "POST /api/generate",
        "POST /api/embed",
        "DELETE /api/delete",
        *("GET /health", "GET /livez", "GET /readyz", "GET /version"),
        "GET /metrics",
        "GET /hearth/ps",
        "GET /hearth/models",
        "POST /hearth/models",
        "DELETE /hearth/models/{name}",
        "POST /hearth/models/{name}/unload",
        "GET /hearth/requests/{request_id}",
    }


def test_no_request_makes_the_service_fail(service: Service) -> None:
    for operation in operations(service):
        statuses = _assert_never_fails(service, operation, GenerationMode.POSITIVE)
        if operation.path in ANSWERED:
            assert 200 in statuses, operation.path  # or the examples prove little
        if operation.body:
            _assert_never_fails(service, operation, GenerationMode.NEGATIVE)
    assert service.get("/health")["status"] == "ok"
    short = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
    assert service.http.post("/v1/completions", json=short).status_code == 200


def _assert_never_fails(service: Service, operation: APIOperation, mode: GenerationMode) -> set[int]:
    """Statuses that were answered."""
    statuses: set[int] = set()
    key = {"Authorization": f"Bearer {service.admin_token}"}
    is_deploying = operation.label in ("POST /hearth/models", "POST /v1/load_lora_adapter")
    num_examples = NUM_DEPLOYMENTS if is_deploying else NUM_EXAMPLES
    if not operation.body and not list(operation.iter_parameters()):
        num_examples = 1  # there is nothing to vary

    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Case) -> None:
        changes_a_model = operation.label.startswith(("DELETE /hearth/", "POST /hearth/models/"))
        if changes_a_model and "name" in case.path_parameters:
            case.path_parameters["name"] = f"absent-{case.path_parameters['name']}"[:64]
        case = tamed(answerable(case) if mode is GenerationMode.POSITIVE else case)
        if operation.path in CHANGING and isinstance(case.body, dict):  # other tests have the models
            case.body |= {name: "absent" for name in ("model", "name", "source", "from") if name in case.body}
        response = case.call(timeout=PATIENCE_S, headers=key)
        statuses.add(response.status_code)
        has_failed = response.status_code >= 500 and response.status_code not in (503, 507)
        is_refused = response.status_code >= 400 and operation.path != "/health"
        if has_failed or (is_refused and not _message(response.json()["error"])):
            told = f"{response.status_code} {response.text[:500]}"
            pytest.fail(f"{told} after {case.as_curl_command()}")  # which takes a while to spell
        operation.validate_response(response)

    check()
    return statuses


def _message(error: object) -> object:
    """Return what an error says; Ollama's is a text."""
    return error["message"] if isinstance(error, dict) else error
