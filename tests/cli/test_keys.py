from __future__ import annotations

import json
from pathlib import Path

from hearth.control.datadir import DataDir
from hearth.control.keys import ApiKeys
from tests.cli.fake_service import FakeService
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


def test_what_a_key_means_for_the_running_service_is_said(
    hearth: Hearth, data_dir: Path, service: FakeService
) -> None:
    with DataDir.hold(data_dir) as held:
        service.announce(held, str(held.keys_path))
        added = [hearth("keys", "add", name).err for name in ("ada", "bob")]
        removed = [hearth("keys", "rm", name).err for name in ("ada", "bob")]

    assert all(f"the service at {service.url} asks everybody for a key from now on" in one for one in added)
    assert f"the service at {service.url} refuses it from now on" in removed[0]
    assert "refuses everybody from now on, until a key is added or it is restarted" in removed[1]


def test_a_service_with_other_keys_is_told_of(
    hearth: Hearth, data_dir: Path, tmp_path: Path, service: FakeService
) -> None:
    with DataDir.hold(data_dir) as held:
        service.announce(held, str(tmp_path / "k.json"))
        shown = hearth("keys", "add", "ada")
        fitting = hearth("keys", "add", "ada", "--api-keys-file", str(tmp_path / "k.json"))

    assert shown.code == 0
    assert f"it reads `{tmp_path / 'k.json'}`, and this was `{data_dir / 'keys.json'}`" in shown.err
    assert "from now on" not in shown.err
    assert "from now on" in fitting.err


def test_a_key_is_made_also_where_the_service_cannot_be_told(hearth: Hearth, data_dir: Path) -> None:
    with DataDir.hold(data_dir) as held:
        (held.run_path / "service.json").write_text("{}")
        added, removed = hearth("keys", "add", "ada"), hearth("keys", "rm", "ada")

    for shown in (added, removed):
        assert shown.code == 0
        assert "whether a service runs that reads these keys cannot be told" in shown.err
    assert added.out.startswith("hearth-")


def test_without_a_service_nothing_is_said_of_one(hearth: Hearth, data_dir: Path) -> None:
    assert "service" not in hearth("keys", "add", "ada").err
