from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hearth.control.keys import keys
from tests.cli.fake_service import FakeService


def completed(line: str, data_dir: Path) -> list[str]:
    """Return what the shell would offer at the end of a line, asked as bash asks."""
    words = line.split(" ")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "HEARTH_DATA_DIR": str(data_dir),
        "_HEARTH_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    asked = subprocess.run(
        [sys.executable, "-m", "hearth"], env=environment, capture_output=True, text=True, check=True
    )
    assert asked.stderr == ""
    return asked.stdout.split()


def test_names_of_deployed_models_are_offered(data_dir: Path, tiny: Path) -> None:
    assert completed("hearth chat t", data_dir) == ["tiny"]
    assert completed("hearth chat x", data_dir) == []


def test_keys_and_their_groups_are_offered(data_dir: Path, tmp_path: Path) -> None:
    assert completed("hearth keys rm ", data_dir) == []
    assert not data_dir.exists()
    for name, group in (("ada", None), ("s1", "support"), ("s2", "support")):
        keys.add(data_dir / "keys.json", name, "user", group)
    keys.add(tmp_path / "k.json", "other", "user")
    assert completed("hearth keys rm s", data_dir) == ["s1", "s2"]
    assert completed("hearth keys add s3 --group s", data_dir) == ["support"]
    assert completed(f"hearth keys rm --api-keys-file {tmp_path / 'k.json'} ", data_dir) == ["other"]


def test_the_models_of_the_service_that_was_named_are_offered(
    data_dir: Path, tiny: Path, service: FakeService
) -> None:
    assert completed(f"hearth chat --url {service.url} ", data_dir) == ["smol"]
    assert completed("hearth chat --url http://127.0.0.1:1 ", data_dir) == []
    assert completed("hearth chat --url http://[::1 ", data_dir) == []
    assert [path for _, path, _ in service.asked] == ["/hearth/models"]


def test_the_models_of_the_directory_that_was_named_are_offered(
    data_dir: Path, tiny: Path, tmp_path: Path
) -> None:
    assert completed(f"hearth chat --data-dir {data_dir} ", tmp_path) == ["tiny"]
    assert completed(f"hearth chat --data-dir {tmp_path} ", data_dir) == []


def test_commands_are_offered(data_dir: Path) -> None:
    assert completed("hearth ex", data_dir) == ["explain"]


def test_a_broken_data_directory_offers_nothing(tmp_path: Path) -> None:
    (tmp_path / "registry.db").write_text("no database")
    assert completed("hearth rm ", tmp_path) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(shell: str, data_dir: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "_HEARTH_COMPLETE": f"source_{shell}",
    }
    script = subprocess.run(
        [sys.executable, "-m", "hearth"], env=environment, capture_output=True, text=True, check=True
    )
    assert "_HEARTH_COMPLETE" in script.stdout
