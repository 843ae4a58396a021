"""Two workers with room for one model each: requests go where their model, or their prompt, is."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.service.harness import Json, Service, eventually
from tests.service.test_states import NAMES, ask

pytestmark = pytest.mark.e2e

#: Of a replica, by the flags `SMALL`.
SLOTS = 16


def test_a_model_comes_back_to_the_worker_that_still_has_most_of_it(workers: Service) -> None:
    first, second, third = NAMES
    where = {name: workers.explain(ask(workers, name, keep_alive=0))["worker"] for name in (first, second)}
    assert where[first] != where[second]
    thirds = workers.explain(ask(workers, third, keep_alive=0))["worker"]
    (gone,) = [name for name in (first, second) if where[name] == thirds]

    back = workers.explain(ask(workers, gone, keep_alive=0))

    assert back["worker"] == thirds
    assert isinstance(back["reused_bytes"], int)
    assert back["reused_bytes"] > 0


def count_busy(workers: Service) -> int:
    found = workers.get("/hearth/ps")["models"]
    assert isinstance(found, list)
    return sum(isinstance(one, dict) and one["state"] == "busy" for one in found)


def test_a_conversation_returns_to_the_replica_that_has_its_prompt_cached(workers: Service) -> None:
    words = [f"{number}" for number in range(200)]
    body = {"ignore_eos": True}
    with workers.client() as client, ExitStack() as streams:

        def occupy(num_slots: int) -> None:
            stream = client.completions.create(
                model=NAMES[0], prompt="Hi", n=num_slots, max_tokens=3000, stream=True, extra_body=body
            )
            streams.enter_context(stream)

        def end_streams() -> None:
            streams.close()
            eventually("all are idle", lambda: count_busy(workers) == 0)

        def worker_of(prompt: str) -> Json:
            answer = client.completions.create(model=NAMES[0], prompt=prompt, max_tokens=1)
            return workers.explain(answer.id)["worker"]

        occupy(2 * SLOTS)  # so many wait that a second replica is loaded
        eventually("both workers serve it", lambda: count_busy(workers) == 2)
        end_streams()
        usual = worker_of("Hello")
        occupy(1)  # of the usual one
        first = worker_of(" ".join(words))
        end_streams()
        second = worker_of(" ".join([*words, "and", "more"]))

        assert first == second != usual
        assert worker_of("Hello") == usual
