"""Presets by `hearth create` and `cp`, through a service and without one."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.cli import local_models
from hearth.cli.create import parse_modelfile
from hearth.control.deploy.preset import Preset
from hearth.core.errors import ConfigError
from tests.cli.fake_service import MODEL, FakeService
from tests.cli.shell import Hearth

PIRATE = '''
# A pirate.
FROM tiny
PARAMETER temperature 0
PARAMETER stop "Ahoy\\n"
parameter stop <|end|>
PARAMETER num_ctx 4096
SYSTEM """
You are a pirate.
Say "arr".
"""
'''


@pytest.fixture
def pirate(tmp_path: Path) -> Path:
    (tmp_path / "Modelfile").write_text(PIRATE, encoding="utf-8")
    return tmp_path / "Modelfile"


def test_a_modelfile_becomes_a_preset_of_a_deployed_model(
    hearth: Hearth, data_dir: Path, tiny: Path, pirate: Path
) -> None:
    made = hearth("create", "pirate", "-f", str(pirate))

    assert (made.code, made.out) == (0, "created pirate: preset of tiny\n")
    assert made.err.startswith("note: `PARAMETER num_ctx` is ignored")
    view = local_models.find(data_dir, "pirate")
    system = 'You are a pirate.\nSay "arr".'
    assert view.preset == Preset(system=system, temperature=0.0, stop=("Ahoy\n", "<|end|>"))
    assert (view.base, view.where) == ("tiny", local_models.find(data_dir, "tiny").where)
    shown = hearth("show", "pirate").out
    assert "You are a pirate." in shown
    _, base, preset = hearth("list").out.splitlines()
    assert (base.split()[:2], preset.split()[:4]) == (["tiny", "-"], ["pirate", "tiny", "-", "preset"])


def test_a_preset_answers_without_a_service(
    hearth: Hearth, data_dir: Path, tiny: Path, tmp_path: Path
) -> None:
    """The system prompt changes the greedy answer."""
    file = tmp_path / "Modelfile"
    file.write_text(
        "FROM tiny\nSYSTEM Be brief, in one word.\nPARAMETER temperature 0\nPARAMETER num_predict 4\n"
    )
    assert hearth("create", "brief", "-f", str(file)).code == 0
    assert hearth("cp", "brief", "short").code == 0
    asked = ("Why?", "--device", "cpu", "--json")
    plain, brief, short = (
        json.loads(hearth("run", name, *asked, *flags).out)
        for name, flags in (
            ("tiny", ("--temperature", "0", "--max-tokens", "4")),
            ("brief", ()),
            ("short", ()),
        )
    )
    assert (brief["num_tokens"], brief["finish_reason"]) == (4, "length")
    assert brief["token_ids"] == short["token_ids"]
    assert brief["token_ids"] != plain["token_ids"]


def test_a_copy_shares_the_weights_and_goes_alone(hearth: Hearth, data_dir: Path, tiny: Path) -> None:
    assert hearth("cp", "tiny", "gpt-4").out == "copied tiny to gpt-4\n"
    kept = hearth("rm", "tiny", "--yes")
    assert kept.code == 2
    assert "`tiny` has presets, which are nothing without it: gpt-4" in kept.err
    assert hearth("rm", "gpt-4", "--yes").out == "removed gpt-4\n"
    assert local_models.names(data_dir) == ["tiny"]
    assert hearth("rm", "tiny", "--yes").code == 0


def test_a_preset_takes_no_name_of_a_model(hearth: Hearth, data_dir: Path, tiny: Path) -> None:
    refused = hearth("cp", "tiny", "tiny")
    assert (refused.code, local_models.names(data_dir)) == (2, ["tiny"])
    assert "`tiny` is the name of a model" in refused.err


def test_through_a_service_a_preset_is_sent_whole(
    hearth: Hearth, data_dir: Path, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.models.append(replace(MODEL, name="odd/name"))
    monkeypatch.setattr("sys.stdin", io.StringIO("FROM smol\nSYSTEM Arr.\nPARAMETER top_k 5"))
    assert hearth("create", "pirate", "-f", "-", "--url", service.url).code == 0
    assert hearth("cp", "odd/name", "even", "--url", service.url).code == 0
    made = [(path, body) for method, path, body in service.asked if path.endswith("/presets")]
    assert made == [
        ("/hearth/models/smol/presets", {"name": "pirate", "system": "Arr.", "top_k": 5}),
        ("/hearth/models/odd%2Fname/presets", {"name": "even"}),
    ]


def test_a_source_of_a_modelfile_is_deployed_once(
    hearth: Hearth, data_dir: Path, service: FakeService, tmp_path: Path
) -> None:
    file = tmp_path / "Modelfile"
    file.write_text("FROM hf:org/new\n")
    service.derived_name = "smol"
    assert hearth("create", "mine", "-f", str(file), "--url", service.url).code == 0
    service.models = [replace(MODEL, source="hf:org/new")]
    assert hearth("create", "mine", "-f", str(file), "--url", service.url).code == 0
    deployed = [body for method, path, body in service.asked if (method, path) == ("POST", "/hearth/models")]
    assert len(deployed) == 1


def test_paths_are_relative_to_the_modelfile_and_adapters_are_deployed(
    hearth: Hearth, data_dir: Path, service: FakeService, tmp_path: Path
) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "Modelfile").write_text("FROM smol\nADAPTER ./lora\n")
    service.derived_name = "smol"
    made = hearth("create", "smol", "-f", str(tmp_path / "Modelfile"), "--url", service.url)
    (body,) = [body for body in service.bodies("/hearth/models") if isinstance(body, dict)]
    assert (body["source"], body["name"], body["base"], body["overwrite"]) == (
        str(tmp_path / "lora"),
        "smol-adapter",
        "smol",
        True,
    )
    assert "no model named `smol-adapter`" in made.err, "the service of this test registers nothing"


def test_a_directory_beside_the_modelfile_is_a_source(
    hearth: Hearth, data_dir: Path, service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "Modelfile").write_text("FROM ./model\n")
    service.derived_name = "smol"
    monkeypatch.chdir(tmp_path)
    assert hearth("create", "mine", "--url", service.url).code == 0
    (body,) = [body for body in service.bodies("/hearth/models") if isinstance(body, dict)]
    assert body["source"] == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SYSTEM hi", "needs `FROM`"),
        ("FROM", "an instruction and its value"),
        ("FROM a\nRUN b", "given: RUN"),
        ("FORM a", "given: FORM"),
    ],
)
def test_a_wrong_modelfile_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_modelfile(text)


def test_a_missing_modelfile_is_told_how_to_be_named(hearth: Hearth, data_dir: Path) -> None:
    shown = hearth("create", "pirate", "-f", str(data_dir / "nowhere"))
    assert (shown.code, shown.err.count("\n")) == (2, 1)
    assert "No such file or directory; name it with `-f FILE`" in shown.err
    data_dir.mkdir(exist_ok=True)
    (data_dir / "weights.gguf").write_bytes(b"GGUF\xff\xff")
    shown = hearth("create", "pirate", "-f", str(data_dir / "weights.gguf"))
    assert (shown.code, shown.err.count("\n")) == (2, 1)
    assert "it is not UTF-8 text" in shown.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("PARAMETER temperature warm", "`PARAMETER temperature`"),
        ("PARAMETER temperature -1", "`PARAMETER temperature`"),
        ("PARAMETER mirostat 2", "mirostat"),
        ('TEMPLATE """{{ .Prompt }}"""', "not Go as Ollama's"),
    ],
)
def test_what_a_preset_cannot_keep_is_one_line(
    hearth: Hearth, data_dir: Path, tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "Modelfile").write_text(f"FROM tiny\n{line}\n")
    shown = hearth("create", "p", "-f", str(tmp_path / "Modelfile"))
    assert (shown.code, shown.err.count("\n")) == (2, 1)
    assert message in shown.err
