"""Commands about LoRA adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.cli import local_models
from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployOrder
from hearth.control.deploy.deployed import DeployedAdapter
from hearth.control.deploy.deployer import carry_out
from hearth.control.deploy.registry import Registry
from tests.cli.fake_service import FakeService
from tests.cli.shell import Completed, Hearth
from tests.models.zoo import build
from tests.store.format.peft_files import write_peft


def test_list_shows_adapters_below_their_base(hearth: Hearth, shop: DeployedAdapter) -> None:
    header, base, adapter = hearth("list").out.splitlines()
    assert header.split()[:3] == ["NAME", "BASE", "ALIASES"]
    assert base.split()[:2] == ["tiny", "-"]
    assert adapter.split()[:2] == ["shop", "tiny"]
    names = [(view["name"], view["base"]) for view in json.loads(hearth("list", "--json").out)]
    assert names == [("tiny", None), ("shop", "tiny")]


def test_show_tells_what_an_adapter_changes(hearth: Hearth, shop: DeployedAdapter) -> None:
    view = json.loads(hearth("show", "shop", "--json").out)
    assert (view["base"], view["max_rank"], view["targets"]) == ("tiny", 8, ["qkv", "o"])
    assert "qkv, o" in hearth("show", "shop").out
    assert "max_rank" not in hearth("show", "tiny").out


def test_rm_takes_adapters_only_if_that_is_said(
    hearth: Hearth, data_dir: Path, shop: DeployedAdapter
) -> None:
    refused = hearth("rm", "tiny", "--yes")
    assert (refused.code, refused.out) == (2, "")
    assert "shop; remove them first" in refused.err
    assert "--with-adapters" in refused.err
    assert local_models.names(data_dir) == ["tiny", "shop"]
    removed = hearth("rm", "tiny", "--yes", "--with-adapters")
    assert (removed.code, removed.out) == (0, "removed tiny, shop\n")
    assert local_models.names(data_dir) == []


@pytest.mark.e2e
def test_deploy_warns_of_adapters_whose_base_has_changed(
    hearth: Hearth, converted: Path, shop: DeployedAdapter
) -> None:
    replaced = hearth("deploy", str(converted), "--name", "tiny", "--overwrite")
    assert (replaced.code, replaced.out.partition(":")[0]) == (0, "deployed tiny")
    assert "warning: `tiny` has changed" in replaced.err
    assert "still deployed: shop; redeploy them with `--overwrite`, or remove" in replaced.err
    assert "warning" not in hearth("show", "tiny").out


def test_rm_takes_an_adapter_alone(hearth: Hearth, data_dir: Path, shop: DeployedAdapter) -> None:
    assert hearth("rm", "shop", "--yes").code == 0
    assert local_models.names(data_dir) == ["tiny"]


def test_an_adapter_is_converted_for_a_base_and_shown(hearth: Hearth, tmp_path: Path) -> None:
    lora, dest = write_peft(tmp_path / "lora", targets=["v_proj"]), str(tmp_path / "made")
    base = str(build("llama-gqa").directory)
    made = json.loads(hearth("convert", str(lora), dest, "--base", base, "--dtype", "float16", "--json").out)
    assert (made["dtype"], made["num_targets"], made["max_rank"]) == ("float16", 3, 4)
    shown = json.loads(hearth("show", dest, "--json").out)
    assert shown["digest"] == made["digest"]
    assert "is intact" in hearth("verify", dest).out
    refused = hearth("convert", str(lora), dest, "--base", base, "--quant", "int8")
    assert "cannot be quantised" in refused.err


def test_without_a_service_an_adapter_answers_in_this_process(
    hearth: Hearth, tiny: Path, data_dir: Path, tmp_path: Path
) -> None:
    order = DeployOrder(str(write_peft(tmp_path / "lora")), "shop", base="tiny")
    with Registry(DataDir.open(data_dir)) as registry:
        registry.add(carry_out(order, DataDir.open(data_dir), lambda *progress: None))
    words = ("hi", "--temperature", "0", "--max-tokens", "6", "--device", "cpu", "--json")

    shop, bare = (json.loads(hearth("run", name, *words).out) for name in ("shop", "tiny"))

    assert len(shop["token_ids"]) == len(bare["token_ids"]) == 6
    assert shop["token_ids"] != bare["token_ids"]


def test_run_says_that_an_adapter_elsewhere_needs_a_service(
    hearth: Hearth, data_dir: Path, shop: DeployedAdapter
) -> None:
    with Registry(DataDir.open(data_dir)) as registry:
        registry.replace(replace(shop, where="s3://bucket/shop"))
    shown = hearth("run", "shop", "hi")
    assert (shown.code, shown.out) == (2, "")
    assert "is at `s3://bucket/shop`, which only a service can load; start one" in shown.err


def test_only_models_are_offered_as_bases(
    data_dir: Path, shop: DeployedAdapter, completed: Completed
) -> None:
    assert completed("hearth deploy x --base ", data_dir) == ["tiny"]


def test_deploy_and_rm_tell_a_service_of_bases_and_adapters(
    hearth: Hearth, data_dir: Path, tmp_path: Path, service: FakeService
) -> None:
    deployed = hearth("deploy", str(tmp_path), "--name", "shop", "--base", "smol", "--url", service.url)
    assert deployed.code == 0
    assert hearth("rm", "smol", "--yes", "--with-adapters", "--url", service.url).code == 0
    (_, _, body), (method, path, _) = service.asked[0], service.asked[-1]
    assert body is not None
    assert body["base"] == "smol"
    assert (method, path) == ("DELETE", "/hearth/models/smol?with_adapters=true")
