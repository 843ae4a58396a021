"""The dashboard's page, its files and its sessions, with a real file of keys."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from hearth.api.dashboard import GREETING
from hearth.control.journal import TAGS
from hearth.control.keys import keys
from hearth.control.keys.keys import ApiKeys
from hearth.policy.fleet.events import SetTimer, Why
from tests.api.conftest import request
from tests.api.fake import FakeGateway

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
OWN_PAGE = {"origin": "http://localhost"}


@pytest.fixture
def keyed(gateway: FakeGateway, tmp_path: Path) -> dict[str, str]:
    """Keys of a service that has some, by role."""
    path = tmp_path / "keys.json"
    made = {role: keys.add(path, role, role).key for role in ("user", "monitor", "admin")}
    gateway.keys = ApiKeys.load(path)
    return made


def session(gateway: FakeGateway, key: str) -> dict[str, str]:
    """Return the header of a browser's next requests."""
    begun = request(gateway, "POST", "/hearth/session", headers={"authorization": f"Bearer {key}"})
    assert begun.status_code == 200, begun.text
    return {"cookie": begun.headers["set-cookie"].partition(";")[0]}


def test_browsers_get_the_page_and_clients_of_ollama_their_line(gateway: FakeGateway) -> None:
    page = request(gateway, "GET", "/", headers=BROWSER)
    line = request(gateway, "GET", "/", headers={"accept": "*/*"})

    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert line.text == GREETING
    assert page.headers["vary"] == line.headers["vary"] == "accept"
    assert request(gateway, "HEAD", "/", headers=BROWSER).status_code == 200


def test_the_page_may_load_nothing_from_elsewhere_and_stand_in_no_frame(gateway: FakeGateway) -> None:
    for path in ("/", "/web/app.js"):
        headers = request(gateway, "GET", path, headers=BROWSER).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
        assert headers["x-content-type-options"] == "nosniff"


def test_a_file_is_sent_again_only_if_it_has_changed(gateway: FakeGateway) -> None:
    first = request(gateway, "GET", "/web/app.js")
    again = request(gateway, "GET", "/web/app.js", headers={"if-none-match": first.headers["etag"]})

    assert first.headers["content-type"] == "text/javascript; charset=utf-8"
    assert (again.status_code, again.content) == (304, b"")


def test_every_event_order_and_reason_is_told_in_words(gateway: FakeGateway) -> None:
    def words(name: str) -> set[str]:
        return set(re.findall(r"^  (\w+): ", request(gateway, "GET", f"/web/{name}").text, re.MULTILINE))

    assert {tag for kind, tag in TAGS.items() if kind is not SetTimer} <= words("decisions.js")
    assert set(Why) <= words("format.js")


@pytest.mark.parametrize(
    "path", ["", "none.js", "../app.py", "%2e%2e/app.py", "vendor", "vendor/htm.LICENSE"]
)
def test_no_path_leads_to_other_files(gateway: FakeGateway, path: str) -> None:
    assert request(gateway, "GET", f"/web/{path}").status_code == 404


def test_the_page_needs_no_key_but_what_it_shows_does(gateway: FakeGateway, keyed: dict[str, str]) -> None:
    assert request(gateway, "GET", "/", headers=BROWSER).status_code == 200
    assert request(gateway, "GET", "/web/app.js").status_code == 200
    for path in ("/hearth/session", "/hearth/events", "/hearth/history", "/hearth/models"):
        assert request(gateway, "GET", path).status_code == 401


def test_a_session_stands_for_a_key_and_its_rights(gateway: FakeGateway, keyed: dict[str, str]) -> None:
    user, admin = session(gateway, keyed["user"]), session(gateway, keyed["admin"])

    assert request(gateway, "GET", "/hearth/session", headers=user).json() == {
        "name": "user",
        "role": "user",
        "has_keys": True,
    }
    assert request(gateway, "GET", "/hearth/history", headers=user).status_code == 403
    removed = request(gateway, "DELETE", "/hearth/models/tiny", headers=user | OWN_PAGE)
    assert removed.status_code == 403
    assert request(gateway, "DELETE", "/hearth/models/tiny", headers=admin | OWN_PAGE).status_code == 200


def test_the_cookie_is_kept_from_scripts_and_other_sites(gateway: FakeGateway, keyed: dict[str, str]) -> None:
    def attributes(headers: dict[str, str]) -> list[str]:
        key = {"authorization": f"Bearer {keyed['user']}"}
        begun = request(gateway, "POST", "/hearth/session", headers=key | headers)
        assert keyed["user"] not in begun.headers["set-cookie"]
        return begun.headers["set-cookie"].split("; ")[1:]

    assert attributes({}) == ["Path=/", "Max-Age=43200", "HttpOnly", "SameSite=Strict"]
    assert attributes({"origin": "https://localhost"})[-1] == "Secure"


def test_a_session_changes_things_only_from_the_services_own_page(
    gateway: FakeGateway, keyed: dict[str, str]
) -> None:
    cookie = session(gateway, keyed["admin"])

    def remove(headers: dict[str, str]) -> httpx.Response:
        return request(gateway, "DELETE", "/hearth/models/tiny", headers=headers)

    for origin in ("http://evil.example", "http://localhost:3000", "null", "http://[", ""):
        refused = remove(cookie | {"origin": origin})
        assert refused.status_code == 403, origin
        assert "`Origin`" in refused.json()["error"]["message"]
    assert remove(cookie).status_code == 403
    assert not gateway.done
    assert remove({"authorization": f"Bearer {keyed['admin']}"}).status_code == 200  # no browser adds that


def test_a_session_ends_when_it_is_ended_or_its_key_is_removed(
    gateway: FakeGateway, keyed: dict[str, str]
) -> None:
    first, second = session(gateway, keyed["user"]), session(gateway, keyed["user"])
    other = session(gateway, keyed["monitor"])

    def status(headers: dict[str, str]) -> int:
        return request(gateway, "GET", "/hearth/session", headers=headers).status_code

    ended = request(gateway, "DELETE", "/hearth/session", headers=first | OWN_PAGE)
    assert "Max-Age=0" in ended.headers["set-cookie"]
    assert (status(first), status(second), status(other)) == (401, 200, 200)
    assert isinstance(gateway.keys, ApiKeys)
    keys.remove(gateway.keys.path, "user")
    assert (status(second), status(other)) == (401, 200)
    assert status({"cookie": "hearth_session=guessed"}) == status({"cookie": "a=;;=\x7f,"}) == 401


def test_a_key_with_many_sessions_ends_only_its_own(
    gateway: FakeGateway, keyed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.api.sessions.MAX_SESSIONS", 5)
    monkeypatch.setattr("hearth.api.sessions.MAX_SESSIONS_PER_KEY", 3)
    admin, *users = session(gateway, keyed["admin"]), *(session(gateway, keyed["user"]) for _ in range(6))
    statuses = [
        request(gateway, "GET", "/hearth/session", headers=one).status_code for one in [admin, *users]
    ]

    assert statuses == [200, 401, 401, 401, 200, 200, 200]


def test_the_operator_has_a_session_too_and_a_service_without_keys_none(
    gateway: FakeGateway, keyed: dict[str, str]
) -> None:
    cookie = session(gateway, gateway.admin_token)
    assert request(gateway, "GET", "/hearth/session", headers=cookie).json()["role"] == "admin"
    gateway.keys = ApiKeys(Path("/nowhere/keys.json"))
    begun = request(gateway, "POST", "/hearth/session")
    assert begun.json() == {"name": "anybody", "role": "admin", "has_keys": False}
    assert "set-cookie" not in begun.headers
