"""Keys, limits, names, and what is never written down."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest

from hearth.control.keys import keys
from tests.service.harness import PATIENCE_S, SMALL, Service, Shelf, eventually, run_hearth, serving

pytestmark = pytest.mark.e2e

SECRET_WORD = "xylophagous"
MAX_BODY_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Guarded:
    service: Service
    user_key: str
    admin_key: str

    def http(self, key: str | None) -> httpx.Client:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.service.url, headers=headers, trust_env=False, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def guarded(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Listens to everybody who has a key, answers one request at a time and logs all that it ever logs."""
    data_dir = shelf.copy(tmp_path_factory.mktemp("guarded") / "data")
    made = [
        run_hearth("keys", "add", *who, "--data-dir", str(data_dir))
        for who in (("ada",), ("root", "--admin"))
    ]
    assert all(one.returncode == 0 for one in made), made
    user_key, admin_key = (one.stdout.strip() for one in made)
    flags = ("--host", "0.0.0.0", "--memory", "256MiB", "--host-memory", "64MiB", "--set", "log.level=debug")
    limits = ("--set", "engine.max_seqs=1", "--max-queue", "1")
    limits += ("--set", f"service.max_body_bytes={MAX_BODY_BYTES}")
    with serving(data_dir, *SMALL, *flags, *limits) as service:
        yield Guarded(service, user_key, admin_key)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/hearth/ps", "/hearth/models", "/hearth/requests/x"]
)
def test_nothing_is_told_without_a_key(guarded: Guarded, path: str) -> None:
    for key in (None, "wrong", guarded.user_key[:-1]):
        with guarded.http(key) as client:
            assert client.get(path).status_code == 401


def test_commands_of_the_owner_need_no_key_wherever_the_service_listens(guarded: Guarded) -> None:
    told = guarded.service.cli("ps", "--json")
    assert told.returncode == 0, told.stderr
    assert (guarded.service.data_dir / "run" / "service.json").stat().st_mode & 0o077 == 0


def test_health_needs_no_key(guarded: Guarded) -> None:
    with guarded.http(None) as client:
        assert client.get("/health").status_code == 200


def test_a_wrong_key_is_an_authentication_error_of_the_client(guarded: Guarded) -> None:
    with guarded.service.client("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_a_user_may_ask_but_not_remove_deploy_or_unload(guarded: Guarded) -> None:
    with guarded.service.client(guarded.user_key) as client:
        assert client.completions.create(model="tiny-a", prompt="Hi", max_tokens=1).choices
    with guarded.http(guarded.user_key) as http:
        assert http.delete("/hearth/models/tiny-a").status_code == 403
        assert http.post("/hearth/models", json={"source": "/tmp"}).status_code == 403
        assert http.post("/hearth/models/tiny-a/unload", json={"free": True}).status_code == 403


def test_nobody_learns_from_the_cache_what_another_key_asked(guarded: Guarded) -> None:
    ada, bob, first, second = (
        guarded.user_key,
        *(
            keys.add(guarded.service.data_dir / "keys.json", name, "user", group).key
            for name, group in (("bob", None), ("team-1", "team"), ("team-2", "team"))
        ),
    )
    prompt = "the plan is to meet at the old mill when the moon is up and nobody looks " * 2

    def num_cached_tokens(key: str) -> int:
        with guarded.service.client(key) as client:
            usage = client.completions.create(model="tiny-a", prompt=prompt, max_tokens=1).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert num_cached_tokens(ada) == 0
    assert [num_cached_tokens(key) for key in (bob, first)] == [0, 0]
    assert num_cached_tokens(ada) == num_cached_tokens(bob) == num_cached_tokens(second) > 0


def test_a_request_is_explained_to_the_key_that_sent_it(guarded: Guarded) -> None:
    bob = keys.add(guarded.service.data_dir / "keys.json", "bob-2", "user").key
    with guarded.service.client(guarded.user_key) as client:
        answer = client.completions.create(model="tiny-a", prompt="Hi", max_tokens=1)

    def asked(key: str, request_id: str) -> httpx.Response:
        with guarded.http(key) as http:
            return http.get(f"/hearth/requests/{request_id}")

    found = [asked(key, answer.id).status_code for key in (guarded.user_key, guarded.admin_key, bob)]
    assert found == [200, 200, 404]
    invented = "cmpl-" + "0" * 24
    assert asked(bob, answer.id).text.replace(answer.id, "") == asked(bob, invented).text.replace(
        invented, ""
    )


def test_an_admin_may_unload(guarded: Guarded) -> None:
    with guarded.http(guarded.admin_key) as http:
        assert http.post("/hearth/models/tiny-a/unload", json={"free": True}).is_success


def test_keys_are_not_kept_as_they_are(guarded: Guarded) -> None:
    for path in guarded.service.data_dir.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert guarded.user_key.encode() not in content, path
            assert guarded.admin_key.encode() not in content, path


def test_a_full_queue_says_when_to_come_back(guarded: Guarded) -> None:
    """One slot and one place in the queue: the third of three has to go."""
    service = guarded.service
    with service.client(guarded.user_key) as client:
        running = client.completions.create(
            model="tiny-a", prompt="Hi", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(running))
        waiting = threading.Thread(
            target=client.completions.create,
            kwargs={"model": "tiny-a", "prompt": "Ho", "max_tokens": 1},
        )
        waiting.start()
        eventually("the second waits", lambda: service.get("/hearth/ps")["num_waiting"] == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="tiny-a", prompt="He", max_tokens=1)
        assert float(caught.value.response.headers["Retry-After"]) > 0
        running.close()
        waiting.join()
        assert client.completions.create(model="tiny-a", prompt="He", max_tokens=1).choices


def test_a_body_beyond_the_limit_is_too_large(guarded: Guarded) -> None:
    body = {"model": "tiny-a", "prompt": "x" * (MAX_BODY_BYTES + 1)}
    with guarded.http(guarded.user_key) as http:
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 413
        assert str(MAX_BODY_BYTES) in answer.json()["error"]["message"]

        def chunks() -> Iterator[bytes]:
            for _ in range(20):
                yield b" " * 8192

        assert http.post("/v1/completions", content=chunks()).status_code == 413


@pytest.mark.parametrize("name", ["../x", "a/../b", "", "x" * 300, "..", ".hidden", "a\x00b"])
def test_a_name_that_could_lead_elsewhere_is_refused(guarded: Guarded, shelf: Shelf, name: str) -> None:
    with guarded.http(guarded.admin_key) as http:
        source = str(shelf.places["tiny-a"])
        answer = http.post("/hearth/models", json={"source": source, "name": name})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]


def test_prompts_and_answers_are_in_no_log(guarded: Guarded) -> None:
    with guarded.service.client(guarded.user_key) as client:
        answer = client.chat.completions.create(
            model="tiny-a",
            messages=[{"role": "user", "content": f"The word is {SECRET_WORD}."}],
            max_completion_tokens=12,
            temperature=0,
        )
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny-a", prompt=f"{SECRET_WORD} " * 2000, max_tokens=1)
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model="tiny-a", prompt=SECRET_WORD, temperature=9)
    said = answer.choices[0].message.content or ""
    logs = guarded.service.logs()
    assert len(said) > 20
    assert SECRET_WORD not in logs
    assert said[:20] not in logs
