"""LoRA adapters in OpenAI's list of models, and the routes by which vLLM's users load and unload them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hearth.control.deploy.preset import Preset
from hearth.control.deploy.sources import HubSource, PathSource, parse_source
from hearth.core.errors import BadCheckpoint, HasAdapters, HearthError, RequestError, SourceMissing, StoreFull
from tests.api.conftest import request
from tests.api.fake import MODEL, FakeGateway, FakeKeys

ADAPTER = replace(
    *(MODEL,),
    name="shop",
    aliases=(),
    source="/loras/shop",
    base="tiny",
    max_rank=8,
    targets=("qkv",),
)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def test_an_adapter_is_listed_with_its_base_as_parent(gateway: FakeGateway) -> None:
    gateway.adapters = [ADAPTER]
    model, _, adapter = request(gateway, "GET", "/v1/models").json()["data"]
    assert (model["parent"], model["root"]) == (None, "tiny")
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("shop", "tiny", "/loras/shop")
    assert request(gateway, "GET", "/v1/models/shop").json() == adapter
    tags = request(gateway, "GET", "/api/tags").json()["models"]
    assert [tag["details"]["parent_model"] for tag in tags if tag["name"] == "shop:latest"] == ["tiny:latest"]


def test_an_adapter_is_deployed_with_a_base(gateway: FakeGateway) -> None:
    request(gateway, "POST", "/hearth/models", {"source": "/l", "name": "shop", "base": "tiny"})
    assert gateway.done == ["deploy /l shop auto auto False of tiny"]


@pytest.mark.parametrize(
    ("query", "done"), [("", "remove tiny"), ("?with_adapters=true", "remove tiny with adapters")]
)
def test_a_model_is_removed_with_its_adapters_only_if_that_is_said(
    gateway: FakeGateway, query: str, done: str
) -> None:
    assert request(gateway, "DELETE", f"/hearth/models/tiny{query}").status_code == 200
    assert gateway.done == [done]


@pytest.mark.parametrize("path", ["/loras/shop", "org/shop-lora", "hf:org/shop", "s3://bucket/shop"])
def test_adapters_are_loaded_and_unloaded_in_the_words_of_vllm(gateway: FakeGateway, path: str) -> None:
    body = {"lora_name": "shop", "lora_path": path, "base_model_name": "tiny"}
    loaded = request(gateway, "POST", LOAD, body)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'shop' added successfully.")
    gateway.adapters = [ADAPTER]
    unloaded = request(gateway, "POST", UNLOAD, {"lora_name": "shop", "lora_int_id": 1})
    assert (unloaded.status_code, unloaded.text) == (
        200,
        "Success: LoRA adapter 'shop' removed successfully.",
    )
    assert gateway.done == [f"deploy {path} shop auto auto False of tiny as adapter", "remove shop"]


def test_a_directory_comes_before_a_repository_of_that_name(
    gateway: FakeGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parse_source("org/shop") == HubSource("org/shop", None)
    (tmp_path / "org" / "shop").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_source("org/shop") == PathSource(tmp_path / "org" / "shop")
    request(gateway, "POST", LOAD, {"lora_name": "shop", "lora_path": "org/shop", "load_inplace": True})
    assert gateway.done == ["deploy org/shop shop auto auto True as adapter"]


def test_a_preset_is_no_adapter_to_unload(gateway: FakeGateway) -> None:
    gateway.adapters = [replace(ADAPTER, name="pirate", base="tiny", preset=Preset(system="Arr."))]
    refused = request(gateway, "POST", UNLOAD, {"lora_name": "pirate"})
    assert refused.status_code == 404
    assert "that is a preset; remove it with `hearth rm`" in refused.json()["error"]["message"]
    assert gateway.done == []


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (BadCheckpoint("no `lora_B` for it"), 400),
        (SourceMissing("no adapter_config.json"), 404),
        (RequestError("name the base"), 400),
        (HasAdapters("it has some"), 409),
        (StoreFull("no room"), 507),
    ],
)
def test_what_cannot_be_loaded_is_said_in_openais_object(
    gateway: FakeGateway, failure: HearthError, status: int
) -> None:
    gateway.deploy_failure = failure
    response = request(gateway, "POST", LOAD, {"lora_name": "shop", "lora_path": "/x"})
    assert (response.status_code, response.json()["error"]["message"]) == (status, str(failure))


def test_names_that_are_taken_unknown_or_no_adapters_are_refused(gateway: FakeGateway) -> None:
    gateway.adapters = [ADAPTER]
    taken = request(gateway, "POST", LOAD, {"lora_name": "shop", "lora_path": "/x"})
    assert taken.status_code == 400
    assert "'shop' has already been loaded" in taken.json()["error"]["message"]
    for name in ("nobody", "tiny"):
        unknown = request(gateway, "POST", UNLOAD, {"lora_name": name})
        assert unknown.status_code == 404
        assert f"The lora adapter '{name}' cannot be found" in unknown.json()["error"]["message"]
    for path in (LOAD, UNLOAD):
        assert request(gateway, "POST", path, {}).status_code == 400
    assert gateway.done == []


@pytest.mark.parametrize("name", ["tiny", "small"])
@pytest.mark.parametrize("in_place", [False, True])
def test_no_adapter_takes_the_place_of_a_model(gateway: FakeGateway, name: str, in_place: bool) -> None:
    body = {"lora_name": name, "lora_path": "/x", "load_inplace": in_place}
    refused = request(gateway, "POST", LOAD, body)
    assert refused.status_code == 400
    assert f"`{name}` is the name of a model" in refused.json()["error"]["message"]
    assert gateway.done == []


def test_no_adapter_takes_the_place_of_a_model_that_the_key_may_not_use(gateway: FakeGateway) -> None:
    gateway.keys = FakeKeys()
    body = {"lora_name": "tiny", "lora_path": "/x", "load_inplace": True}
    refused = request(gateway, "POST", LOAD, body, headers={"authorization": "Bearer limited-key"})
    assert refused.status_code == 400
    assert "`tiny` is the name of a model" in refused.json()["error"]["message"]
    assert gateway.done == []


def test_the_modelfile_of_an_adapter_names_its_base(gateway: FakeGateway) -> None:
    gateway.adapters = [ADAPTER]
    shown = request(gateway, "POST", "/api/show", {"model": "shop"}).json()
    assert shown["modelfile"].splitlines()[1:] == ["FROM tiny", "ADAPTER /loras/shop"]
    shown = request(gateway, "POST", "/api/show", {"model": "tiny"}).json()
    assert shown["modelfile"].splitlines()[1:] == [f"FROM {MODEL.source}"]


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_only_who_may_deploy_may_load_and_unload(gateway: FakeGateway, path: str) -> None:
    gateway.keys = FakeKeys()
    gateway.adapters = [ADAPTER] if path == UNLOAD else []
    body = {"lora_name": "shop", **({"lora_path": "/x"} if path == LOAD else {})}
    for key, status in (("user-key", 403), ("monitor-key", 403), ("admin-key", 200)):
        headers = {"authorization": f"Bearer {key}"}
        assert request(gateway, "POST", path, body, headers=headers).status_code == status
