"""API keys over HTTP, in a real file of keys."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from hearth.control.keys import keys
from hearth.control.keys.key_usage import UsageRecord, view_of
from hearth.control.keys.keys import ApiKeys
from hearth.control.requests.caller import KeyTerms
from hearth.policy.limits.key_limiter import KeyLimits
from tests.api.conftest import request
from tests.api.fake import FakeGateway

LIMITED = {
    "name": "ada",
    "role": "user",
    "group": "support",
    "requests_per_min": 60,
    "tokens_per_min": 1000,
    "concurrent": 2,
    "models": ["tiny", "tiny"],
    "service_class": "batch",
}


class Admin:
    """Asks with the key of an admin."""

    def __init__(self, gateway: FakeGateway, path: Path) -> None:
        self.gateway, self.path = gateway, path
        self.key = keys.add(path, "ops", "admin").key
        gateway.keys = ApiKeys.load(path)

    def __call__(
        self, method: str, path: str, body: dict[str, object] | None = None, key: str = ""
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.key}"}
        return request(self.gateway, method, path, body, headers=headers)


@pytest.fixture
def admin(gateway: FakeGateway, tmp_path: Path) -> Admin:
    return Admin(gateway, tmp_path / "keys.json")


def test_a_key_made_over_http_works_at_once_and_has_its_limits(admin: Admin) -> None:
    made = admin("POST", "/hearth/keys", LIMITED)

    assert made.status_code == 200
    caller = admin.gateway.keys.check(made.json()["key"])
    assert caller is not None
    assert (caller.name, caller.role, caller.group) == ("ada", "user", "group:support")
    assert caller.terms == KeyTerms(KeyLimits(60, 1000, 2), ("tiny",), "batch")
    assert admin("GET", "/v1/models", key=made.json()["key"]).status_code == 200


def test_keys_are_listed_with_their_usage_and_without_themselves(admin: Admin) -> None:
    made = admin("POST", "/hearth/keys", LIMITED).json()
    caller = admin.gateway.keys.check(made["key"])
    assert caller is not None

    async def ask() -> None:
        admin.gateway.usage.count(caller, 5, 7)

    asyncio.run(ask())

    listed = admin("GET", "/hearth/keys")

    assert [(key["name"], key["num_requests"], key["output_tokens"]) for key in listed.json()] == [
        ("ops", 0, 0),
        ("ada", 1, 7),
    ]
    assert made["key"] not in listed.text
    shown = [view_of(key, UsageRecord()) for key in keys.list_keys(admin.path)]
    assert [key.keys() for key in listed.json()] == [
        key.keys() for key in msgspec.json.decode(msgspec.json.encode(shown))
    ], "the fields are those of `hearth keys list --json`"


def test_limits_change_and_what_is_left_out_stays(admin: Admin) -> None:
    key = admin("POST", "/hearth/keys", LIMITED).json()["key"]

    changed = admin("PATCH", "/hearth/keys/ada", {"requests_per_min": 120, "models": None})

    assert (changed.json()["requests_per_min"], changed.json()["models"]) == (120, None)
    caller = admin.gateway.keys.check(key)
    assert caller is not None
    assert caller.terms == KeyTerms(KeyLimits(120, 1000, 2), None, "batch")


@pytest.mark.parametrize(
    ("change", "method", "path"), [("add", "POST", "/hearth/keys"), ("change", "PATCH", "/hearth/keys/ada")]
)
def test_a_change_is_answered_though_another_admin_removes_the_key_behind_it(
    admin: Admin, monkeypatch: pytest.MonkeyPatch, change: str, method: str, path: str
) -> None:
    if method == "PATCH":
        keys.add(admin.path, "ada", "user")
    body = {"name": "ada", "concurrent": 3} if method == "POST" else {"concurrent": 3}
    done = getattr(keys, change)

    def then_removed(*given: object) -> object:
        changed = done(*given)
        keys.remove(admin.path, "ada")
        return changed

    monkeypatch.setattr(keys, change, then_removed)
    answer = admin(method, path, body)

    assert (answer.status_code, answer.json()["name"], answer.json()["concurrent"]) == (200, "ada", 3)


def test_a_removed_key_is_refused_and_none_removes_itself(admin: Admin) -> None:
    key = admin("POST", "/hearth/keys", LIMITED).json()["key"]

    assert admin("DELETE", "/hearth/keys/ada").json() == {"removed": "ada"}

    assert admin("GET", "/v1/models", key=key).status_code == 401
    itself = admin("DELETE", "/hearth/keys/ops")
    assert itself.status_code == 400
    assert "key `ops` cannot remove itself" in itself.json()["error"]["message"]
    assert admin("GET", "/hearth/keys").status_code == 200


@pytest.mark.parametrize("role", ["user", "monitor"])
def test_only_admins_see_and_change_keys(admin: Admin, role: str) -> None:
    key = admin("POST", "/hearth/keys", {"name": "other", "role": role}).json()["key"]
    asked = [
        admin("GET", "/hearth/keys", key=key),
        admin("POST", "/hearth/keys", {"name": "mine", "role": "admin"}, key=key),
        admin("PATCH", "/hearth/keys/other", {"tokens_per_min": None}, key=key),
        admin("DELETE", "/hearth/keys/ops", key=key),
    ]

    assert [answer.status_code for answer in asked] == [403] * 4
    assert [known.name for known in keys.list_keys(admin.path)] == ["ops", "other"]


def test_the_first_key_is_not_made_by_anybody(gateway: FakeGateway, tmp_path: Path) -> None:
    gateway.keys = ApiKeys.load(tmp_path / "keys.json")

    refused = request(gateway, "POST", "/hearth/keys", {"name": "me", "role": "admin"})

    assert refused.status_code == 403
    assert "make the first with `hearth keys add NAME --admin`" in refused.json()["error"]["message"]
    assert keys.list_keys(tmp_path / "keys.json") == []


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "told"),
    [
        ("POST", "/hearth/keys", {"name": "ops"}, 409, "a key named `ops` already"),
        ("POST", "/hearth/keys", {"name": "a b"}, 400, "the name of a key is 1 to 64 letters"),
        ("POST", "/hearth/keys", {"name": "a", "group": ""}, 400, "the name of a group is 1 to 64 letters"),
        ("POST", "/hearth/keys", {"name": "a", "concurrent": 0}, 400, "must be from 1 to"),
        ("POST", "/hearth/keys", {"name": "a", "models": []}, 400, "limited to 1 to 64 models"),
        ("POST", "/hearth/keys", {"name": "a", "role": "root"}, 400, "`role`"),
        ("POST", "/hearth/keys", {"name": "a", "rpm": 5}, 400, "`rpm`"),
        ("PATCH", "/hearth/keys/nobody", {"concurrent": 1}, 404, "no key named 'nobody'; it holds: ops"),
        ("DELETE", "/hearth/keys/nobody", None, 404, "no key named 'nobody'"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    admin: Admin, method: str, path: str, body: dict[str, object] | None, status: int, told: str
) -> None:
    before = admin.path.read_bytes()

    refused = admin(method, path, body)

    assert (refused.status_code, refused.json()["error"]["message"].count(told)) == (status, 1)
    assert admin.path.read_bytes() == before
