"""The order in which the chunks of a plan are received."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from hearth.core.errors import LoadCancelled
from hearth.core.node_messages import PlannedFetch
from hearth.core.types import NodeId
from hearth.store.transfer import fetch_plan
from hearth.store.transfer.fetch_plan import FetchPlan

PATIENCE_S = 120.0


def a_plan(*order: int) -> FetchPlan:
    fetches = [PlannedFetch(index, index + 1, NodeId("a"), turn) for turn, index in enumerate(order)]
    return FetchPlan(fetches, order)


def wanted() -> bool:
    return True


def test_one_chunk_is_received_at_a_time_in_the_order_of_the_plan() -> None:
    plan, begun, waits = a_plan(7, 5, 6), list[int](), {5: Event(), 6: Event()}

    def receive(index: int) -> None:
        plan.begin(index, lambda: waits[index].set() is None)
        begun.append(index)
        plan.came(index)
        plan.end(index)

    plan.begin(7, wanted)
    with ThreadPoolExecutor(2) as threads:
        received = []
        for index in (6, 5):
            received.append(threads.submit(receive, index))
            assert waits[index].wait(PATIENCE_S)
        assert begun == []
        plan.came(7)
        plan.end(7)
        for one in received:
            one.result(PATIENCE_S)
    assert begun == [5, 6]


def test_a_chunk_that_comes_in_another_way_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_plan, "MAX_IDLE_S", 0.01)
    plan = a_plan(0, 1, 2)
    plan.begin(1, wanted)
    plan.end(1)
    plan.begin(2, wanted)


def test_a_chunk_may_begin_again_on_another_connection_and_end_twice() -> None:
    plan = a_plan(0, 1)
    plan.begin(0, wanted)
    plan.begin(0, wanted)
    plan.came(0)
    plan.end(0)
    plan.end(0)
    plan.begin(1, wanted)


def test_a_chunk_that_is_not_wanted_any_more_does_not_wait() -> None:
    plan = a_plan(0, 1)
    plan.begin(0, wanted)
    with pytest.raises(LoadCancelled):
        plan.begin(1, lambda: False)
    plan.came(0)
    plan.end(0)
    plan.begin(1, wanted)
