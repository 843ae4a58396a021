"""A test of a worker that would wait for ever fails, and says what the worker did last."""

from __future__ import annotations

import threading
from queue import Queue

import pytest

from hearth.core.messages import Pong, StepDone
from hearth.core.types import ModelId
from hearth.system.spin import SpinningQueue
from tests.worker.harness import CONFIG, limits_of
from tests.worker.in_process import LoopGateway


@pytest.fixture
def gateway() -> LoopGateway:
    return LoopGateway(SpinningQueue(), Queue(), limits_of(CONFIG))


def test_a_worker_that_tells_of_all_but_the_end_is_not_heard_for_ever(gateway: LoopGateway) -> None:
    run = gateway.start("a", [5, 6], sampling=None)  # type: ignore[arg-type] # nobody looks at it
    step = StepDone(ModelId("a"), [run], [7])
    for _ in range(3):
        gateway.facts.put(step)
    gateway.hear()
    gateway.deadline_s = 0.0

    with pytest.raises(TimeoutError, match=rf"did not end, by run: \{{{run}: 1\}}") as caught:
        gateway.until_ended(run)

    assert "StepDone" in str(caught.value)
    assert "test_a_worker_that_tells" in str(caught.value), "where its thread stands"


def test_all_is_heard_of_a_worker_that_has_ended_and_nothing_is_waited_for(gateway: LoopGateway) -> None:
    gateway.thread = threading.Thread(target=lambda: None)
    gateway.thread.start()
    gateway.thread.join()
    step = StepDone(ModelId("a"), [], [])
    gateway.facts.put(step)

    with pytest.raises(RuntimeError, match=r"the worker has ended; it said .*StepDone"):
        gateway.until(Pong)
