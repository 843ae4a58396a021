from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hearth.control.keys import keys
from tests.cli.fake_service import FakeService
from tests.cli.shell import Completed, Hearth, variables_of_bash


def test_names_of_deployed_models_are_offered(data_dir: Path, tiny: Path, completed: Completed) -> None:
    assert completed("hearth run t", data_dir) == ["tiny"]
    assert completed("hearth run x", data_dir) == []


def test_keys_and_their_groups_are_offered(data_dir: Path, tmp_path: Path, completed: Completed) -> None:
    assert completed("hearth keys rm ", data_dir) == []
    assert not data_dir.exists()
    for name, group in (("ada", None), ("s1", "support"), ("s2", "support")):
        keys.add(data_dir / "keys.json", name, "user", group)
    keys.add(tmp_path / "k.json", "other", "user")
    assert completed("hearth keys rm s", data_dir) == ["s1", "s2"]
    assert completed("hearth keys add s3 --group s", data_dir) == ["support"]
    assert completed(f"hearth keys rm --api-keys-file {tmp_path / 'k.json'} ", data_dir) == ["other"]


def test_the_models_of_the_service_that_was_named_are_offered(
    data_dir: Path, tiny: Path, service: FakeService, completed: Completed
) -> None:
    assert completed(f"hearth run --url {service.url} ", data_dir) == ["smol"]
    assert completed("hearth run --url http://127.0.0.1:1 ", data_dir) == []
    assert completed("hearth run --url http://[::1 ", data_dir) == []
    assert [path for _, path, _ in service.asked] == ["/hearth/models"]


def test_the_models_of_the_directory_that_was_named_are_offered(
    data_dir: Path, tiny: Path, tmp_path: Path, completed: Completed
) -> None:
    assert completed(f"hearth run --data-dir {data_dir} ", tmp_path) == ["tiny"]
    assert completed(f"hearth run --data-dir {tmp_path} ", data_dir) == []


def test_commands_are_offered(data_dir: Path, completed: Completed) -> None:
    assert completed("hearth ex", data_dir) == ["explain"]


@pytest.mark.parametrize(("line", "offered"), [("hearth ex", "explain"), ("hearth run t", "tiny")])
def test_a_process_offers_the_same(line: str, offered: str, data_dir: Path, tiny: Path) -> None:
    """It imports only what the command needs."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        **variables_of_bash(line, data_dir),
    }
    command = [sys.executable, "-m", "hearth"]
    asked = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (asked.stdout.split(), asked.stderr) == ([offered], "")


def test_a_broken_data_directory_offers_nothing(tmp_path: Path, completed: Completed) -> None:
    (tmp_path / "registry.db").write_text("no database")
    assert completed("hearth rm ", tmp_path) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(
    shell: str, data_dir: Path, hearth: Hearth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_HEARTH_COMPLETE", f"source_{shell}")
    assert "_HEARTH_COMPLETE" in hearth().out
