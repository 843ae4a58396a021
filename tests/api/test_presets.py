"""Sampling parameters of presets, in all APIs, and the route that makes presets."""

from __future__ import annotations

import pytest

from hearth.control.deploy.preset import Preset
from hearth.core.types import SamplingParams
from tests.api.conftest import request
from tests.api.fake import FakeGateway, FakeKeys

HI = [{"role": "user", "content": "Hi"}]
PRESET = Preset(system="Arr.", temperature=0.25, top_k=7, max_tokens=9, stop=("Ahoy",))


@pytest.fixture
def preset(gateway: FakeGateway) -> FakeGateway:
    gateway.presets["pirate"] = PRESET
    return gateway


def sampled(gateway: FakeGateway, path: str, **fields: object) -> SamplingParams:
    response = request(gateway, "POST", path, {"model": "pirate"} | fields)
    assert response.status_code == 200, response.text
    return gateway.requests[-1].sampling


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/api/chat", {"messages": HI}),
    ],
)
def test_a_request_that_sets_nothing_is_sampled_as_the_preset_says(
    preset: FakeGateway, path: str, prompt: dict[str, object]
) -> None:
    params = sampled(preset, path, **prompt)
    assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 7, 9)
    assert params.stop_strings == ("Ahoy",)


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_what_a_request_sets_goes_before_the_preset(preset: FakeGateway, limit: str) -> None:
    fields = {"temperature": 1.0, "stop": "Bye", limit: 5}
    params = sampled(preset, "/v1/chat/completions", messages=HI, **fields)
    assert (params.temperature, params.top_k, params.max_tokens) == (1.0, 7, 5)
    assert params.stop_strings == ("Bye",)


def test_what_neither_sets_is_as_the_api_has_it(preset: FakeGateway) -> None:
    """Ollama's default of `top_p` differs from OpenAI's."""
    by_ollama = sampled(preset, "/api/chat", messages=HI, options={"temperature": 0.5})
    by_openai = sampled(preset, "/v1/chat/completions", messages=HI)
    assert (by_ollama.temperature, by_ollama.top_p) == (0.5, 0.9)
    assert by_openai.top_p == 1.0


def test_a_preset_is_made_by_a_route_of_its_base(gateway: FakeGateway) -> None:
    body = {"name": "pirate", "system": "Arr.", "temperature": 0.25, "stop": ["Ahoy"]}
    made = request(gateway, "POST", "/hearth/models/tiny/presets", body)
    assert made.status_code == 200
    assert gateway.presets == {"pirate": Preset(system="Arr.", temperature=0.25, stop=("Ahoy",))}
    assert (made.json()["name"], made.json()["base"]) == ("pirate", "tiny")
    assert made.json()["preset"]["system"] == "Arr."


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"temperature": -1.0}, "`temperature` must be at least 0"), ({"temprature": 1}, "temprature")],
)
def test_wrong_parameters_make_no_preset(
    gateway: FakeGateway, fields: dict[str, object], message: str
) -> None:
    refused = request(gateway, "POST", "/hearth/models/tiny/presets", {"name": "pirate"} | fields)
    assert refused.status_code == 400
    assert message in refused.json()["error"]["message"]
    assert gateway.presets == {}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/hearth/models/tiny/presets", {"name": "p"}), ("/api/create", {"model": "p", "from": "tiny"})],
)
def test_only_an_admin_makes_presets(gateway: FakeGateway, path: str, body: dict[str, object]) -> None:
    gateway.keys = FakeKeys()
    user, admin = ({"authorization": f"Bearer {who}-key"} for who in ("user", "admin"))
    assert request(gateway, "POST", path, body, headers=user).status_code == 403
    assert request(gateway, "POST", path, body, headers=admin).status_code == 200
