"""Models come when they are asked for and make room when they are idle: three models in a budget for two."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from hearth.control.observe.log_rotation import MAX_LOG_BYTES, rotated_path
from tests.service.checkpoints import write_tiny
from tests.service.harness import SMALL, Service, Shelf, eventually, serving

pytestmark = pytest.mark.e2e

#: Each of the tiny models takes 39 MB.
BUDGET = "90MB"
NAMES = ("tiny-a", "tiny-b", "tiny-c")


@pytest.fixture(scope="module")
def crowded(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    data_dir = shelf.copy(tmp_path_factory.mktemp("crowded") / "data")
    with serving(data_dir, *SMALL, "--memory", BUDGET, "--host-memory", "256MiB") as service:
        yield service


@pytest.fixture(autouse=True)
def _empty(crowded: Service) -> None:
    """Each test begins with no model in memory."""
    for name in NAMES:
        crowded.unload(name, free=True)
    eventually("nothing is in memory", lambda: not crowded.residents())


def ask(service: Service, model: str, keep_alive: str | int | None = None, max_tokens: int = 2) -> str:
    """The id of an answer."""
    body = {} if keep_alive is None else {"keep_alive": keep_alive}
    with service.client() as client:
        answer = client.completions.create(
            model=model, prompt="Hello", max_tokens=max_tokens, temperature=0, extra_body=body
        )
    assert answer.choices[0].text
    return answer.id


def told(service: Service, model: str) -> str:
    with service.client() as client:
        answer = client.completions.create(model=model, prompt="Hello", max_tokens=6, temperature=0)
    return answer.choices[0].text


def test_a_model_that_answered_stays_warm_for_its_time(crowded: Service) -> None:
    ask(crowded, "tiny-a")
    resident = crowded.residents()["tiny-a"]
    assert resident["state"] == "warm"
    left_s = resident["expires_in_s"]
    assert isinstance(left_s, float)
    assert 0 < left_s <= 300


def test_a_model_is_busy_while_it_answers(crowded: Service) -> None:
    with crowded.client() as client:
        stream = client.completions.create(
            model="tiny-a", prompt="Hi", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        resident = crowded.residents()["tiny-a"]
        assert (resident["state"], resident["num_running"]) == ("busy", 1)
        stream.close()
    eventually("it is idle again", lambda: crowded.states()["tiny-a"] == "warm")


def test_keep_alive_says_how_long_an_idle_model_stays(crowded: Service) -> None:
    ask(crowded, "tiny-a", keep_alive=0)
    assert crowded.states()["tiny-a"] == "retained"
    ask(crowded, "tiny-a", keep_alive=-1)
    assert crowded.states()["tiny-a"] == "pinned"
    ask(crowded, "tiny-a", keep_alive="1s")
    eventually("its second is over", lambda: crowded.states()["tiny-a"] == "retained")


def test_keep_alive_that_is_no_time_is_refused(crowded: Service) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(crowded, "tiny-a", keep_alive="a while")
    assert "keep_alive" in caught.value.message


def test_stop_leaves_a_model_in_memory_until_the_room_is_needed(crowded: Service) -> None:
    ask(crowded, "tiny-a", keep_alive=-1)
    assert crowded.cli("stop", "tiny-a").returncode == 0
    assert crowded.states() == {"tiny-a": "retained"}


def test_stop_with_free_takes_a_model_out_of_memory(crowded: Service) -> None:
    ask(crowded, "tiny-a")
    assert crowded.cli("stop", "tiny-a", "--free").returncode == 0
    eventually("it has left", lambda: not crowded.residents())
    used = crowded.workers()[0]["used_bytes"]
    assert used == 0


def test_a_third_model_takes_the_place_of_a_retained_one_first(crowded: Service) -> None:
    ask(crowded, "tiny-a")
    ask(crowded, "tiny-b", keep_alive=0)
    placed = crowded.explain(ask(crowded, "tiny-c"))
    assert crowded.hosted() == {"tiny-a", "tiny-c"}
    assert placed["why"] == "evicted"


def test_what_is_left_of_a_model_that_gave_way_need_not_come_again(crowded: Service) -> None:
    ask(crowded, "tiny-a")
    ask(crowded, "tiny-b", keep_alive=0)
    ask(crowded, "tiny-c")
    left = crowded.residents()["tiny-b"]
    assert (left["state"], left["is_hosted"]) == ("retained", False)
    assert 0 < left["loaded_bytes"] <= left["total_bytes"]
    crowded.unload("tiny-c", free=True)

    back = crowded.explain(ask(crowded, "tiny-b"))

    assert 0 < back["reused_bytes"] <= left["total_bytes"]
    came_bytes = sum(rung["num_bytes"] for rung in back["rungs"])
    assert came_bytes < left["total_bytes"]


def test_a_warm_model_makes_room_when_no_other_is_left(crowded: Service) -> None:
    ask(crowded, "tiny-a")
    ask(crowded, "tiny-b")
    ask(crowded, "tiny-c")
    assert len(crowded.hosted()) == 2
    assert "tiny-c" in crowded.hosted()


def test_a_pinned_model_is_never_evicted(crowded: Service) -> None:
    ask(crowded, "tiny-a", keep_alive=-1)
    for name in ("tiny-b", "tiny-c", "tiny-b"):
        ask(crowded, name)
        assert crowded.states()["tiny-a"] == "pinned"


def test_a_model_that_pinned_ones_keep_out_is_refused_until_one_is_let_go(crowded: Service) -> None:
    ask(crowded, "tiny-a", keep_alive=-1)
    ask(crowded, "tiny-b", keep_alive=-1)
    with pytest.raises(openai.InternalServerError, match="pinned") as caught:
        ask(crowded, "tiny-c")
    crowded.unload("tiny-b", free=False)
    ask(crowded, "tiny-c")
    assert caught.value.code == "no_capacity"
    assert crowded.hosted() == {"tiny-a", "tiny-c"}


def test_a_model_that_can_never_fit_is_refused_at_once_with_the_numbers(
    crowded: Service, tmp_path: Path
) -> None:
    wide = write_tiny(tmp_path / "wide", seed=9, hidden_size=256)
    assert crowded.deploy(wide, "wide").is_success
    with pytest.raises(openai.InternalServerError) as caught:
        ask(crowded, "wide")
    assert caught.value.status_code == 503
    assert caught.value.code == "no_capacity"
    assert "90" in caught.value.message
    assert "wide" not in crowded.states()
    assert crowded.http.delete("/hearth/models/wide").is_success


def test_many_first_requests_wait_for_one_load(crowded: Service) -> None:
    before = crowded.metrics()["hearth_cold_start_seconds_count"]
    with ThreadPoolExecutor(10) as threads:
        answers = list(threads.map(lambda _: ask(crowded, "tiny-a"), range(10)))
    assert crowded.metrics()["hearth_cold_start_seconds_count"] == before + 1
    reasons = {crowded.explain(answer)["why"] for answer in answers}
    assert reasons <= {"free_room", "loading", "resident"}


def test_every_model_gives_its_own_answer_however_often_they_change_places(crowded: Service) -> None:
    def told(name: str) -> str:
        with crowded.client() as client:
            return (
                client.completions.create(model=name, prompt="Hello", max_tokens=6, temperature=0)
                .choices[0]
                .text
            )

    first = {name: told(name) for name in NAMES}
    assert len(set(first.values())) == 3
    for name in (*NAMES, *reversed(NAMES)):
        assert told(name) == first[name]


def test_a_model_is_deployed_replaced_and_removed_while_the_service_runs(
    crowded: Service, tmp_path: Path
) -> None:
    place = write_tiny(tmp_path / "passing", seed=10)
    deployed = crowded.cli("deploy", str(place), "--name", "passing", "--json")
    assert deployed.returncode == 0, deployed.stderr
    first = told(crowded, "passing")
    other = write_tiny(tmp_path / "other", seed=11)
    assert crowded.cli("deploy", str(other), "--name", "passing").returncode == 2  # the name is taken
    replaced = crowded.cli("deploy", str(other), "--name", "passing", "--overwrite")
    assert replaced.returncode == 0, replaced.stderr
    assert told(crowded, "passing") != first
    removed = crowded.cli("rm", "passing", "--yes")
    assert removed.returncode == 0, removed.stderr
    with pytest.raises(openai.NotFoundError):
        ask(crowded, "passing")
    eventually("it has left memory", lambda: "passing" not in crowded.residents())
    assert (place / "weights.bin").exists()  # it was deployed from there


def test_the_log_is_rotated_while_the_service_runs(crowded: Service) -> None:
    path = crowded.data_dir / "logs" / "service.log"
    with path.open("ab") as log:
        log.write(b"\n" * (MAX_LOG_BYTES + 1))
    eventually("the log is short", lambda: path.stat().st_size < MAX_LOG_BYTES)
    assert rotated_path(path).exists()
