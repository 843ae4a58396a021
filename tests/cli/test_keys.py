from __future__ import annotations

import json
from pathlib import Path

from hearth.control.keys import ApiKeys
from tests.cli.shell import Hearth


def test_a_key_is_shown_once_and_works(hearth: Hearth, data_dir: Path) -> None:
    shown = hearth("keys", "add", "ada", "--admin")

    key = shown.out.strip()
    info = ApiKeys.load(data_dir / "keys.json").check(key)
    assert info is not None
    assert (info.name, info.role) == ("ada", "admin")
    assert key not in (data_dir / "keys.json").read_text()


def test_keys_are_listed_without_themselves(hearth: Hearth, data_dir: Path) -> None:
    hearth("keys", "add", "ada")
    hearth("keys", "add", "bob", "--admin")

    hearth("keys", "add", "eve", "--monitor", "--group", "watchers")

    assert [line.split()[:3] for line in hearth("keys", "list").out.splitlines()] == [
        ["NAME", "ROLE", "GROUP"],
        ["ada", "user", "-"],
        ["bob", "admin", "-"],
        ["eve", "monitor", "watchers"],
    ]
    (ada, _, eve) = json.loads(hearth("keys", "list", "--json").out)
    assert ada.keys() == {"name", "role", "created_at_s", "group"}
    assert (ada["group"], eve["group"]) == (None, "watchers")


def test_a_group_that_cannot_be_one_is_wrong_input(hearth: Hearth, data_dir: Path) -> None:
    refused = hearth("keys", "add", "ada", "--group", "two words")
    assert (refused.code, refused.out) == (2, "")
    assert "the name of a group is 1 to 64 letters" in " ".join(refused.err.split())


def test_a_removed_key_is_refused(hearth: Hearth, data_dir: Path) -> None:
    key = hearth("keys", "add", "ada").out.strip()
    assert hearth("keys", "rm", "ada").code == 0
    assert ApiKeys.load(data_dir / "keys.json").check(key) is None


def test_a_taken_name_is_wrong_input(hearth: Hearth, data_dir: Path) -> None:
    hearth("keys", "add", "ada")
    assert hearth("keys", "add", "ada").code == 2


def test_the_file_may_be_elsewhere(hearth: Hearth, data_dir: Path, tmp_path: Path) -> None:
    hearth("keys", "add", "ada", "--api-keys-file", str(tmp_path / "k.json"))
    assert len(ApiKeys.load(tmp_path / "k.json")) == 1
    assert not data_dir.exists()
