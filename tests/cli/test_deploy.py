from __future__ import annotations

import io
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from hearth.cli import local_models
from hearth.cli.deploy import follow
from hearth.control.datadir import DataDir
from hearth.control.deploy.deploy import DeployProgress
from hearth.control.deploy.registry import Registry
from hearth.control.observe.views import UpstreamView
from hearth.core.errors import Unreached
from hearth.store.format.convert import convert
from tests.cli.fake_service import MODEL, FakeService
from tests.cli.shell import Hearth
from tests.store.stored import serving


def test_without_a_service_deploy_works_on_the_data_directory(
    hearth: Hearth, data_dir: Path, chatty: Path
) -> None:
    flags = ["--quant", "int8", "--label", "zone=a", "--label", "disk=ssd", "--json"]
    shown = hearth("deploy", str(chatty), "--name", "tiny", *flags)

    assert (shown.code, shown.err) == (0, "")
    (view,) = json.loads(hearth("list", "--json").out)
    assert view == json.loads(shown.out)
    assert (view["name"], view["source"], view["quant"]) == ("tiny", str(chatty), "int8")
    assert view["labels"] == ["zone=a", "disk=ssd"]
    assert (Path(view["where"]) / "manifest.json").exists()
    assert "zone=a, disk=ssd" in hearth("show", "tiny").out


def test_a_taken_name_is_replaced_only_by_order(
    hearth: Hearth, data_dir: Path, tiny: Path, converted: Path
) -> None:
    refused = hearth("deploy", str(converted), "--name", "tiny")
    forced = hearth("deploy", str(converted), "--name", "tiny", "--overwrite")

    assert (refused.code, refused.out) == (2, "")
    assert "--overwrite" in refused.err
    assert forced.code == 0
    assert forced.out.startswith("deployed tiny: ")
    assert local_models.find(data_dir, "tiny").quant == "int8"


def test_to_pull_what_is_deployed_from_the_same_repository_is_a_success(
    hearth: Hearth, data_dir: Path, tiny: Path
) -> None:
    with Registry(DataDir.open(data_dir)) as registry:
        (deployed,) = registry.all()
        registry.replace(replace(deployed, source="hf:org/tiny"))

    for source in ("hf:org/tiny", "org/tiny"):
        again = hearth("pull", source)
        assert (again.code, again.err) == (0, "")
        assert again.out == "tiny is already deployed from hf:org/tiny; `--overwrite` deploys it again\n"
    assert json.loads(hearth("pull", "org/tiny", "--json").out)["source"] == "hf:org/tiny"
    for words in (["other/tiny"], ["org/tiny@main"], ["org/tiny", "--quant", "int8"], [str(tiny)]):
        taken = hearth("pull", *words, "--name", "tiny")
        assert (taken.code, taken.out) == (2, "")
        assert "a model is deployed as `tiny` already" in taken.err


def test_a_service_may_have_it_already(hearth: Hearth, data_dir: Path, service: FakeService) -> None:
    service.models = [replace(MODEL, source="hf:org/smol")]
    again = hearth("pull", "org/smol", "--name", "smol", "--url", service.url)
    assert (again.code, again.out.partition("; ")[0]) == (0, "smol is already deployed from hf:org/smol")


def test_list_shows_a_line_per_model(hearth: Hearth, data_dir: Path, tiny: Path) -> None:
    header, line = hearth("list").out.splitlines()

    assert header.split() == ["NAME", "ALIASES", "SIZE", "PARAMETERS", "DTYPE", "DEPLOYED", "SOURCE"]
    assert line.split()[:2] == ["tiny", "-"]
    assert line.endswith(str(tiny))


def test_list_of_nothing_makes_nothing(hearth: Hearth, data_dir: Path) -> None:
    assert json.loads(hearth("list", "--json").out) == []
    assert not data_dir.exists()


def test_show_takes_a_name(hearth: Hearth, tiny: Path) -> None:
    assert json.loads(hearth("show", "tiny", "--json").out)["source"] == str(tiny)
    shown = hearth("show", "tiny").out
    assert "max_context" in shown
    assert re.search(r"keep_alive +│ 5m ", shown)


@pytest.mark.parametrize("command", ["deploy", "pull"])
def test_a_source_that_is_named_as_on_the_hub_comes_from_there(
    hearth: Hearth, data_dir: Path, service: FakeService, command: str
) -> None:
    with DataDir.hold(data_dir) as held:
        service.announce(held)
        for source in ("Qwen/Qwen3-0.6B", "hf:Qwen/Qwen3-0.6B"):
            assert hearth(command, source, "--name", "new").code == 0
    assert [body["source"] for body in service.bodies("/hearth/models") if isinstance(body, dict)] == [
        "hf:Qwen/Qwen3-0.6B"
    ] * 2


@pytest.mark.usefixtures("data_dir")
def test_a_source_that_is_nowhere_is_told_how_those_of_the_hub_are_written(hearth: Hearth) -> None:
    shown = hearth("pull", "llama3.2")
    assert (shown.code, shown.out) == (2, "")
    assert shown.err == (
        "hearth: no model at `llama3.2`; give the directory of its files, or a GGUF file; a model of the "
        "Hugging Face Hub is `hf:ORG/NAME`\n"
    )


@pytest.mark.usefixtures("tiny")
def test_verify_takes_a_name_too(hearth: Hearth, data_dir: Path) -> None:
    where = local_models.find(data_dir, "tiny").where
    assert hearth("verify", "tiny").out.startswith(f"{where} is intact: ")

    (Path(where) / "weights.bin").write_bytes(b"")
    bad = hearth("verify", "tiny")
    assert (bad.code, bad.out.splitlines()[-1]) == (1, f"{where} is damaged: convert the model again")


def test_show_tells_that_upstream_has_changed(service: FakeService, hearth: Hearth) -> None:
    remedy = "hearth deploy s3://models/smol --name smol --overwrite"
    changed = UpstreamView("changed", "v1", "v2", time.time() - 125, None, remedy)
    service.models[0] = replace(service.models[0], upstream=changed)

    shown = " ".join(hearth("show", "smol", "--url", service.url).out.replace("│", " ").split())

    assert re.search(r"changed to v2, noticed 2m\d+s ago; still serving v1", shown)
    assert remedy in shown
    assert ("GET", "/hearth/models/smol?look=true", None) in service.asked


def test_show_looks_upstream_without_a_service(hearth: Hearth, data_dir: Path, chatty: Path) -> None:
    convert(chatty, data_dir.parent / "made", dtype="float32")
    with serving(data_dir.parent / "made") as server:
        assert hearth("deploy", f"{server.url}/tiny", "--name", "far").code == 0
        view = json.loads(hearth("show", "far", "--json").out)
        assert view["upstream"]["state"] == "unchanged"
        server.files = {}
        shown = json.loads(hearth("show", "far", "--json").out)["upstream"]
        assert (shown["state"], shown["deployed_version"]) == ("unknown", view["digest"])
        assert "does not exist: 404" in shown["reason"]


def test_rm_takes_what_deploy_made_and_leaves_the_source(hearth: Hearth, data_dir: Path, tiny: Path) -> None:
    where = Path(local_models.find(data_dir, "tiny").where)

    shown = hearth("rm", "tiny", "--yes")

    assert (shown.code, shown.out) == (0, "removed tiny\n")
    assert local_models.names(data_dir) == []
    assert not where.exists()
    assert tiny.exists()


@pytest.mark.usefixtures("tiny")
def test_rm_asks_first_and_needs_somebody_to_ask(hearth: Hearth, data_dir: Path) -> None:
    unknown = hearth("rm", "tniy")
    assert (unknown.code, unknown.err) == (3, "hearth: no model named `tniy`; did you mean `tiny`?\n")
    shown = hearth("rm", "tiny")
    assert (shown.code, shown.out) == (2, "")
    assert "--yes" in shown.err


@pytest.mark.usefixtures("tiny")
def test_rm_takes_several_names(hearth: Hearth, data_dir: Path) -> None:
    hearth("cp", "tiny", "other")
    assert hearth("rm", "other", "absent").code == 3
    shown = hearth("rm", "other", "tiny", "--yes")
    assert (shown.code, shown.out) == (0, "removed other\nremoved tiny\n")
    assert local_models.names(data_dir) == []


@pytest.mark.usefixtures("tiny")
def test_rm_refuses_a_model_with_presets_before_it_asks(hearth: Hearth, data_dir: Path) -> None:
    hearth("cp", "tiny", "one")
    shown = hearth("rm", "tiny")
    assert shown.err == hearth("rm", "tiny", "--yes").err
    assert "has presets, which are nothing without it: one; remove" in shown.err
    assert "not a terminal" in hearth("rm", "one", "tiny").err


@pytest.mark.parametrize("command", [("rm", "absent", "--yes"), ("show", "absent"), ("run", "absent", "hi")])
def test_an_unknown_name_is_exit_code_3(hearth: Hearth, data_dir: Path, command: tuple[str, ...]) -> None:
    shown = hearth(*command)
    assert (shown.code, shown.out, shown.err.count("\n")) == (3, "", 1)
    assert "`absent`" in shown.err


def test_deploy_of_nothing_is_wrong_input(hearth: Hearth, data_dir: Path) -> None:
    shown = hearth("deploy", "nowhere")
    assert (shown.code, shown.out) == (2, "")
    assert "no model at `nowhere`" in shown.err


def test_through_a_service_paths_are_whole(
    hearth: Hearth, data_dir: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m").mkdir()

    shown = hearth("deploy", "m", "--name", "new", "--quant", "fp8", "--url", service.url)

    assert shown.out.startswith("deployed new: 538 MiB, float32, in ")
    (body,) = service.bodies("/hearth/models")
    assert body == {
        "source": str(tmp_path / "m"),
        **{"name": "new", "dtype": "auto", "quant": "fp8", "overwrite": False},
    }


def test_a_service_may_have_what_this_machine_lacks(
    hearth: Hearth, data_dir: Path, service: FakeService
) -> None:
    hearth("deploy", "hf:ORG/NAME", "--url", service.url)
    hearth("deploy", "/only/there", "--url", service.url)
    sources = [dict(body)["source"] for body in service.bodies("/hearth/models")]  # type: ignore[call-overload]
    assert sources == ["hf:ORG/NAME", "/only/there"]


def test_list_show_and_rm_go_through_a_service(hearth: Hearth, data_dir: Path, service: FakeService) -> None:
    assert "smol  tiny     538 MiB  135M" in hearth("list", "--url", service.url).out
    assert json.loads(hearth("show", "tiny", "--json", "--url", service.url).out)["name"] == "smol"
    assert hearth("rm", "smol", "--yes", "--url", service.url).code == 0
    assert service.models == []


@pytest.mark.parametrize(("source", "shown"), [("model", "0.0/2.0 kB"), ("hf:some/model", "deploying")])
def test_a_deployment_shows_the_bytes_of_its_source_until_it_knows_more(
    source: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_bytes(bytes(2000))
    monkeypatch.chdir(tmp_path)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("hearth.cli.progress.err", terminal)

    with pytest.raises(Unreached):
        follow(source, iter(()))

    assert isinstance(terminal.file, io.StringIO)
    seen = terminal.file.getvalue()
    assert shown in seen
    assert "?" not in seen.replace("\x1b[?25", ""), "a size that nobody knows"


@pytest.mark.parametrize("columns", [60, 80])
def test_however_long_a_source_is_the_bytes_of_its_deployment_are_seen(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "site-packages-of-a-virtual-environment" / ("Model-" + "Instruct-" * 6 + "Q4_1.gguf")
    model.parent.mkdir()
    model.write_bytes(bytes(2000))
    terminal = Console(file=io.StringIO(), force_terminal=True, width=columns)
    monkeypatch.setattr("hearth.cli.progress.err", terminal)

    with pytest.raises(Unreached):
        follow(str(model), iter([DeployProgress("converting", 0, 538_200_000)]))

    assert isinstance(terminal.file, io.StringIO)
    seen = terminal.file.getvalue()
    assert "deploying Model" in seen
    assert "0.0/2.0 kB" in seen
    assert "0.0/538.2 MB" in seen
