from __future__ import annotations

import json
import re
import time
from pathlib import Path

import msgspec
import pytest

from hearth.control.datadir import DataDir
from hearth.control.keys.key_usage import KeyUse, UsageRecord
from hearth.control.keys.keys import ApiKeys, list_keys
from hearth.control.requests.caller import KeyTerms
from hearth.policy.limits.key_limiter import KeyLimits
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
    assert not {"salt", "hash", "key_id"} & ada.keys()
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

    assert all(f"the service at {service.url} requires a key from now on" in one for one in added)
    assert f"the service at {service.url} rejects it from now on" in removed[0]
    assert "rejects all requests until a key is added or it is restarted" in removed[1]


def test_a_service_with_other_keys_is_told_of(
    hearth: Hearth, data_dir: Path, tmp_path: Path, service: FakeService
) -> None:
    with DataDir.hold(data_dir) as held:
        service.announce(held, str(tmp_path / "k.json"))
        shown = hearth("keys", "add", "ada")
        fitting = hearth("keys", "add", "ada", "--api-keys-file", str(tmp_path / "k.json"))

    assert shown.code == 0
    assert (
        f"reads its keys from `{tmp_path / 'k.json'}`, but this was `{data_dir / 'keys.json'}`" in shown.err
    )
    assert "from now on" not in shown.err
    assert "from now on" in fitting.err


def test_a_key_is_made_also_where_the_service_cannot_be_told(hearth: Hearth, data_dir: Path) -> None:
    with DataDir.hold(data_dir) as held:
        (held.run_path / "service.json").write_text("{}")
        added, removed = hearth("keys", "add", "ada"), hearth("keys", "rm", "ada")

    for shown in (added, removed):
        assert shown.code == 0
        assert "cannot tell whether a running service reads these keys" in shown.err
    assert added.out.startswith("hearth-")


def test_without_a_service_nothing_is_said_of_one(hearth: Hearth, data_dir: Path) -> None:
    assert "service" not in hearth("keys", "add", "ada").err


def test_a_key_for_a_model_that_is_not_deployed_is_made_with_a_note(hearth: Hearth, tiny: Path) -> None:
    made = hearth("keys", "add", "ada", "--models", "tiny,tinny")
    assert (made.code, made.err.count("note: ")) == (0, 1)
    assert "note: no model named `tinny`; did you mean `tiny`?" in made.err
    assert "note: " not in hearth("keys", "set", "ada", "--models", "tiny").err


def columns(shown: str) -> list[dict[str, str]]:
    header, *rows = [line.split() for line in shown.splitlines()]
    return [dict(zip(header, row, strict=False)) for row in rows]


def test_limits_are_given_changed_and_lifted_and_the_key_stays(hearth: Hearth, data_dir: Path) -> None:
    given = (
        "--rpm",
        "60",
        "--tpm",
        "9000",
        "--concurrent",
        "4",
        "--models",
        "tiny, small",
        "--class",
        "batch",
    )
    key = hearth("keys", "add", "ada", *given).out.strip()
    known = ApiKeys.load(data_dir / "keys.json")
    before = known.check(key)
    assert before is not None
    assert before.terms == KeyTerms(KeyLimits(60, 9000, 4), ("tiny", "small"), "batch")
    (row,) = columns(hearth("keys", "list").out)
    limits = {"CLASS": "batch", "RPM": "60", "TPM": "9000", "CONCURRENT": "4", "MODELS": "tiny,small"}
    assert row.items() >= limits.items()

    changed = hearth("keys", "set", "ada", "--rpm", "none", "--models", "all", "--class", "interactive")

    assert changed.out == "ada: rpm none, tpm 9000, concurrent 4, models all, interactive\n"
    after = known.check(key)
    assert after is not None
    assert after.terms == KeyTerms(KeyLimits(None, 9000, 4))
    assert (after.key_id, after.group) == (before.key_id, before.group)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "give at least one of"),
        (("--rpm", "0"), "--rpm must be a number above 0, or none"),
        (("--tpm", "many"), "--tpm must be a number above 0, or none"),
        (("--class", "fast"), "--class must be interactive or batch, given: fast"),
        (("--models", ","), "may be limited to 1 to 64 models, given: 0"),
    ],
)
def test_limits_that_mean_nothing_are_wrong_input(
    hearth: Hearth, data_dir: Path, given: tuple[str, ...], message: str
) -> None:
    hearth("keys", "add", "ada", "--rpm", "5")
    refused = hearth("keys", "set", "ada", *given)
    assert refused.code == 2
    assert message in " ".join(refused.err.replace("│", " ").split())
    (info,) = list_keys(data_dir / "keys.json")
    assert info.terms == KeyTerms(KeyLimits(requests_per_min=5))


def test_the_limits_of_nobody_cannot_be_changed(hearth: Hearth, data_dir: Path) -> None:
    hearth("keys", "add", "ada")
    refused = hearth("keys", "set", "bob", "--rpm", "5")
    assert refused.code == 3
    assert "holds no key named 'bob'; it holds: ada" in " ".join(refused.err.split())


def test_what_was_asked_with_a_key_is_listed(hearth: Hearth, data_dir: Path) -> None:
    hearth("keys", "add", "ada")
    hearth("keys", "add", "bob")
    (ada, bob) = list_keys(data_dir / "keys.json")
    use = KeyUse(num_requests=3, prompt_tokens=1500, output_tokens=250, last_used_at_s=time.time() - 65)
    record = UsageRecord(since_s=bob.created_at_s - 1e-3, keys={ada.key_id: use})
    (data_dir / "usage.json").write_bytes(msgspec.json.encode(record))

    shown = hearth("keys", "list")

    assert [row["REQUESTS"] for row in columns(shown.out)] == ["3", "0"]
    assert [row["TOKENS"] for row in columns(shown.out)] == ["1.8K", "0"]
    used, never = (row["USED"] for row in columns(shown.out))
    assert re.fullmatch(r"1m\d+s", used)
    assert never == "never"
    assert "requests and tokens are counted since" in shown.err
    listed = json.loads(hearth("keys", "list", "--json").out)
    assert [(one["num_requests"], one["prompt_tokens"]) for one in listed] == [(3, 1500), (0, 0)]


def test_keys_are_listed_also_where_their_use_cannot_be_read(hearth: Hearth, data_dir: Path) -> None:
    hearth("keys", "add", "ada")
    (data_dir / "usage.json").write_text("{")
    shown = hearth("keys", "list")
    assert (shown.code, columns(shown.out)[0]["NAME"]) == (0, "ada")
    assert "cannot be read as the use of API keys" in " ".join(shown.err.split())
