"""Two workers with room for one model each: requests go where the bytes of their model are."""

from __future__ import annotations

import pytest

from tests.service.harness import Service
from tests.service.test_states import NAMES, ask

pytestmark = pytest.mark.e2e


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
