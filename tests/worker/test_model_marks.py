"""Whose step is under way on a worker, and that it advances: what its supervisor goes by."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from hearth.core.beacon import Beacon, new_beacon_file
from hearth.core.errors import DeviceError
from hearth.core.types import ModelId, RequestId, SamplingParams
from hearth.engine.pending_step import PendingStep
from hearth.memory.arena import ArenaPool
from hearth.models.decoder import Decoder
from hearth.policy.batch.plan import StepPlan
from hearth.worker.background import StepLaunches
from hearth.worker.model_marks import ModelMarks, WorkerMarks
from tests.engine.harness import engine_for, prompts_for
from tests.store.stored import PATIENCE_S, converted, tiers_at
from tests.worker.harness import BUDGET_BYTES, greedy
from tests.worker.in_process import working_in_process

A, B = ModelId("a"), ModelId("b")


@pytest.fixture
def shared() -> tuple[Beacon, Beacon]:
    """A beacon as its worker has it, and as its supervisor does."""
    descriptor = new_beacon_file()
    pair = Beacon.at(descriptor), Beacon.at(descriptor)
    os.close(descriptor)
    return pair


def begin(marks: ModelMarks) -> Callable[[], None]:
    return lambda: marks.begun([RequestId("1")])


def test_the_step_under_way_is_the_oldest_that_is_not_done(shared: tuple[Beacon, Beacon]) -> None:
    """The host is ahead of the device, and waits for one model while the device may hang in another."""
    written, seen = shared
    worker = WorkerMarks(written)
    a, b = worker.of(A), worker.of(B)
    assert seen.read().model is None
    shown = []
    for act in (begin(a), begin(a), a.done, begin(b), begin(b), b.done, begin(a), b.done, a.done, a.done):
        act()
        shown.append(seen.read().model)
    assert shown == ["a", "a", "a", "a", "a", "b", "b", "a", "a", None]


def test_the_runs_of_the_step_under_way_are_told_as_far_as_there_is_room(
    shared: tuple[Beacon, Beacon],
) -> None:
    written, seen = shared
    a = WorkerMarks(written).of(A)
    many = range(10**6, 10**6 + 4096)
    for runs in ((7, 12), (9,), many):
        a.begun([RequestId(str(run)) for run in runs])
    assert seen.read().runs == (7, 12)
    a.layer_passed()
    assert seen.read().runs == (7, 12)
    a.done()
    assert seen.read().runs == (9,)
    a.done()
    assert (seen.read().model, seen.read().runs) == ("a", None)
    a.done()
    assert (seen.read().model, seen.read().runs) == (None, None)


def test_a_step_that_is_waited_for_late_takes_no_later_one_along(shared: tuple[Beacon, Beacon]) -> None:
    """The last step of a model whose turn ends is waited for before older ones of others are."""
    written, seen = shared
    worker = WorkerMarks(written)
    a, b = worker.of(A), worker.of(B)
    shown = []
    for act in (begin(b), begin(a), a.done, begin(b), b.done, b.done):
        act()
        shown.append(seen.read().model)
    assert shown == ["b", "b", None, "b", "b", None]


def test_steps_of_an_engine_that_was_closed_are_not_under_way(shared: tuple[Beacon, Beacon]) -> None:
    written, seen = shared
    worker = WorkerMarks(written)
    a, b = worker.of(ModelId("a-long-name")), worker.of(B)
    begin(a)()
    begin(b)()
    a.closed()
    assert seen.read().model == "b"
    b.closed()
    assert seen.read().model is None


def test_marks_are_counted_and_the_longest_between_two_is_that_of_the_model(
    shared: tuple[Beacon, Beacon],
) -> None:
    written, seen = shared
    worker = WorkerMarks(written)
    a, b = worker.of(A), worker.of(B)
    b.layer_passed()  # as when graphs are captured between steps
    begin(a)()
    assert (seen.read().num_marks, seen.read().longest_s) == (1, None)
    a.layer_passed()
    assert seen.read().num_marks == 2
    assert seen.read().longest_s == a.longest_s > 0
    a.done()
    begin(b)()
    assert (seen.read().num_marks, seen.read().longest_s) == (3, None)


def test_a_worker_in_a_long_step_advances_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped in its second layer, where its supervisor sees one mark, and whose step it is."""
    is_there, may_go_on = threading.Event(), threading.Event()
    attend = Decoder.attend

    def slow_attend(self: Decoder, layer: int, *others: object) -> torch.Tensor:
        if layer == 1 and not is_there.is_set():
            is_there.set()
            assert may_go_on.wait(PATIENCE_S)
        return attend(self, layer, *others)  # type: ignore[arg-type] # passed on

    monkeypatch.setattr(Decoder, "attend", slow_attend)
    marks = WorkerMarks()
    with (
        tiers_at(tmp_path) as tiers,
        working_in_process(
            tiers, lambda terms: ArenaPool(torch.device("cpu"), BUDGET_BYTES, terms), marks=marks
        ) as gateway,
    ):
        gateway.load("a", converted("llama-gqa"))
        run = gateway.start("a", (3, 14, 15), greedy(2))
        assert is_there.wait(PATIENCE_S)
        signs = marks.beacon.read()
        assert (signs.num_marks, signs.model, signs.runs) == (1, "a", (run,))
        may_go_on.set()
        gateway.until_ended(run)
        gateway.ping()
        assert marks.beacon.read().num_marks > 1
        assert marks.beacon.read().model is None


@pytest.mark.parametrize("breaks", [False, True])
def test_a_launch_is_told_of_from_its_beginning_to_its_end_also_where_it_breaks(
    monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    launches, seen = StepLaunches(), list[bool]()
    engine = engine_for("llama-gqa")
    engine._marks = WorkerMarks(None, launches).of(A)
    launch = engine.runner.launch

    def launched(plan: StepPlan) -> PendingStep:
        seen.append(launches.is_launching)
        if breaks:
            raise DeviceError("no more of it")
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", launched)
    (prompt,) = prompts_for(100, [5])
    engine.add(engine.request(RequestId("1"), prompt, SamplingParams(temperature=0.0)))
    with pytest.raises(DeviceError) if breaks else nullcontext():
        engine.step()
    assert seen == [True]
    assert not launches.is_launching
