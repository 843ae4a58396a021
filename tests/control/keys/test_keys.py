from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.control.keys import keys
from hearth.control.keys.keys import ApiKeys
from hearth.control.requests.caller import KeyTerms
from hearth.core.errors import ConfigError, NameTaken, RequestError, UnknownKey
from hearth.policy.limits.key_limiter import KeyLimits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_is_known_by_its_owner_and_role(path: Path) -> None:
    user, admin = keys.add(path, "ada", "user").key, keys.add(path, "root@home", "admin").key
    known = ApiKeys.load(path)

    ada, root = known.check(user), known.check(admin)
    assert ada is not None
    assert root is not None
    assert [(owner.name, owner.role) for owner in (ada, root)] == [("ada", "user"), ("root@home", "admin")]
    assert [(info.name, info.role) for info in keys.list_keys(path)] == [
        ("ada", "user"),
        ("root@home", "admin"),
    ]
    assert len(known) == 2


def test_what_is_no_key_is_nobodys(path: Path) -> None:
    key = keys.add(path, "ada", "user").key
    known = ApiKeys.load(path)
    for wrong in ("", "hearth-", key[:-1], key + "a", key.upper(), "\ud800", "é" * 1000, "ada"):
        assert known.check(wrong) is None


def test_the_file_holds_no_key_and_is_for_its_owner_alone(path: Path) -> None:
    key = keys.add(path, "ada", "user").key
    text = path.read_text()
    assert key not in text
    assert key.removeprefix("hearth-") not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_equal_entries_are_told_apart_by_their_salt(path: Path) -> None:
    for name in ("a", "b", "c"):
        keys.add(path, name, "user")
    entries = json.loads(path.read_text())
    assert len({entry["salt"] for entry in entries}) == len({entry["hash"] for entry in entries}) == 3


def test_a_running_service_learns_of_new_and_removed_keys_at_once(path: Path) -> None:
    known = ApiKeys.load(path)
    assert not known
    key = keys.add(path, "ada", "user").key
    assert known.check(key) is not None
    keys.remove(path, "ada")
    assert known.check(key) is None
    key = keys.add(path, "ada", "user").key
    assert known.check(key) is not None
    path.unlink()
    assert known.check(key) is None


def test_a_name_has_one_key(path: Path) -> None:
    key = keys.add(path, "ada", "user").key
    with pytest.raises(NameTaken, match="holds a key named `ada` already; choose another name, or remove"):
        keys.add(path, "ada", "admin")
    assert ApiKeys.load(path).check(key) is not None


def group_of(path: Path, key: str) -> str:
    caller = ApiKeys.load(path).check(key)
    assert caller is not None
    return caller.group


def test_a_key_shares_with_those_of_its_group_alone(path: Path) -> None:
    ada, bob = keys.add(path, "ada", "user").key, keys.add(path, "bob", "user").key
    first, second = (keys.add(path, name, "user", group="support").key for name in ("s1", "s2"))
    # Named like a key that is its own group, and like the file tells that one.
    named = [
        keys.add(path, f"n{n}", "user", group=name).key for n, name in enumerate(("ada", "key", "group"))
    ]

    assert group_of(path, first) == group_of(path, second)
    assert len({group_of(path, key) for key in (ada, bob, first, *named)}) == 6
    assert [info.group for info in keys.list_keys(path)][:4] == [None, None, "support", "support"]


def test_a_key_that_is_made_anew_has_nothing_of_its_namesake(path: Path) -> None:
    before = group_of(path, keys.add(path, "ada", "user").key)
    keys.remove(path, "ada")
    assert group_of(path, keys.add(path, "ada", "user").key) != before


def test_keys_of_a_file_without_groups_each_are_their_own(path: Path) -> None:
    made = [keys.add(path, name, "user").key for name in ("ada", "bob")]
    entries = json.loads(path.read_text())
    for entry in entries:
        del entry["group"]
    path.write_text(json.dumps(entries))

    assert len({group_of(path, key) for key in made}) == 2
    assert [info.group for info in keys.list_keys(path)] == [None, None]


@pytest.mark.parametrize("group", ["", " ", "a b", "-a", "a\n", "x" * 65])
def test_a_group_is_named_like_a_key(path: Path, group: str) -> None:
    with pytest.raises(RequestError, match="the name of a group is 1 to 64 letters"):
        keys.add(path, "ada", "user", group)
    assert not path.exists()


def test_removing_an_unknown_key_names_those_that_are_there(path: Path) -> None:
    keys.add(path, "ada", "user")
    with pytest.raises(UnknownKey, match="holds no key named 'bob'; it holds: ada"):
        keys.remove(path, "bob")


@pytest.mark.parametrize("name", ["", " ", "a b", "-a", "a\n", "x" * 65])
def test_a_name_that_would_confuse_a_log_is_refused(path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="the name of a key is 1 to 64 letters"):
        keys.add(path, name, "user")


def test_keys_that_are_added_at_the_same_time_are_all_kept(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: keys.add(path, f"k{number}", "user").key, range(16)))
    known = ApiKeys.load(path)
    assert all(known.check(key) is not None for key in made)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '[{"name": "a"}]',
        '[{"name": "a", "role": "king", "salt": "00", "hash": "00", "created_at_s": 0}]',
        '[{"name": "a", "role": "user", "salt": "zz", "hash": "00", "created_at_s": 0}]',
        '[{"name": "a", "role": "admin", "salt": "", "hash": "", "created_at_s": 0}]',
    ],
)
def test_a_file_that_cannot_be_understood_lets_nobody_in(path: Path, text: str) -> None:
    key = keys.add(path, "ada", "user").key
    known = ApiKeys.load(path)
    path.write_text(text)
    for ask in (
        lambda: known.check(key),
        lambda: ApiKeys.load(path),
        lambda: keys.add(path, "bob", "user").key,
    ):
        with pytest.raises(ConfigError, match=r"keys.json` cannot be read as API keys: .*; move it away"):
            ask()


def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written: "):
        keys.add(tmp_path / "file" / "keys.json", "ada", "user")


def test_limits_are_kept_with_a_key_and_a_running_service_learns_of_changes_at_once(path: Path) -> None:
    key = keys.add(path, "ada", "user", terms=KeyTerms(KeyLimits(1, 2, 3), ("tiny",), "batch")).key
    known = ApiKeys.load(path)
    before = known.check(key)
    assert before is not None
    assert before.terms == KeyTerms(KeyLimits(1, 2, 3), ("tiny",), "batch")
    keys.change(path, "ada", lambda terms: replace(terms, models=None))
    after = known.check(key)
    assert after is not None
    assert after.terms == KeyTerms(KeyLimits(1, 2, 3), None, "batch")
    assert known.ids() == {before.key_id} == {after.key_id}


def test_a_key_made_before_there_were_limits_has_none(path: Path) -> None:
    key = keys.add(path, "ada", "user").key
    (entry,) = json.loads(path.read_text())
    fields = ("name", "role", "salt", "hash", "created_at_s")
    path.write_text(json.dumps([{field: entry[field] for field in fields}]))
    caller = ApiKeys.load(path).check(key)
    assert caller is not None
    assert caller.terms == KeyTerms()


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests_per_min": 0},
        {"concurrent": -1},
        {"models": []},
        {"models": [""]},
        {"service_class": "fast"},
    ],
)
def test_limits_that_no_key_can_have_let_nobody_in(path: Path, wrong: dict[str, object]) -> None:
    keys.add(path, "ada", "user")
    (entry,) = json.loads(path.read_text())
    path.write_text(json.dumps([entry | wrong]))
    with pytest.raises(ConfigError, match="cannot be read as API keys"):
        ApiKeys.load(path)


def test_a_key_of_the_same_name_has_another_id(path: Path) -> None:
    ids = set()
    for _ in range(2):
        keys.add(path, "ada", "user")
        ids |= ApiKeys.load(path).ids()
        keys.remove(path, "ada")
    assert len(ids) == 2
