"""Two workers with room for one model each: requests go where the bytes of their model are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.harness import SMALL, Service, Shelf, serving
from tests.service.test_states import NAMES, ask

#: Room for one model and a good part of another.
BUDGET = "56MB"


@pytest.fixture(scope="module")
def pair(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    data_dir = shelf.copy(tmp_path_factory.mktemp("pair") / "data")
    flags = ("--workers", "2", "--memory", BUDGET, "--host-memory", "256MiB")
    with serving(data_dir, *SMALL, *flags) as service:
        yield service


def test_a_model_comes_back_to_the_worker_that_still_has_most_of_it(pair: Service) -> None:
    first, second, third = NAMES
    where = {name: pair.explain(ask(pair, name, keep_alive=0))["worker"] for name in (first, second)}
    assert where[first] != where[second]
    thirds = pair.explain(ask(pair, third, keep_alive=0))["worker"]
    (gone,) = [name for name in (first, second) if where[name] == thirds]

    back = pair.explain(ask(pair, gone, keep_alive=0))

    assert back["worker"] == thirds
    assert isinstance(back["reused_bytes"], int)
    assert back["reused_bytes"] > 0
