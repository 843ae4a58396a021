"""Sizes of steps are captured ahead once each, and for as long as somebody wants it."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hearth.engine.graph_capture import CaptureAhead, capture_sizes
from hearth.engine.step_shape import PaddedSizes, StepShape
from tests.engine.harness import ask, engine_for, greedy, prompts_for

SIZES = PaddedSizes(decode=(1, 2), mixed=(64, 128), samples=(1, 8))
PATIENCE_S = 30


@dataclass(slots=True)
class FakeRunner:
    """Notes which shapes are captured. Mutable."""

    graphs: object | None = ()
    sizes: PaddedSizes = SIZES
    kv: torch.Tensor = field(default_factory=lambda: torch.zeros(1))
    shapes: list[StepShape] = field(default_factory=list)
    error: Exception | None = None
    may_capture: threading.Event = field(default_factory=threading.Event)

    def capture_ahead(self, shape: StepShape) -> None:
        assert self.may_capture.wait(PATIENCE_S)
        self.shapes.append(shape)
        if self.error is not None:
            raise self.error


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    made = FakeRunner()
    made.may_capture.set()
    return made


def test_every_size_is_captured_small_ones_before_large_ones(runner: Any) -> None:
    assert capture_sizes(runner) == len(SIZES.all_shapes())
    assert set(runner.shapes) == set(SIZES.all_shapes())
    for has_prompts in (False, True):
        sizes = [shape.num_rows for shape in runner.shapes if shape.has_prompts is has_prompts]
        assert sizes == sorted(sizes)


def test_nothing_is_done_where_steps_are_not_captured(runner: Any) -> None:
    runner.graphs = None
    assert capture_sizes(runner) == 0
    assert runner.shapes == []


def test_captures_end_when_they_may_not_go_on(runner: Any) -> None:
    assert capture_sizes(runner, lambda: len(runner.shapes) < 2) == 2
    assert len(runner.shapes) == 2


def test_captures_that_are_stopped_end_behind_the_size_at_hand(runner: Any) -> None:
    runner.may_capture.clear()
    captures = CaptureAhead(runner, lambda: True)
    stopping = threading.Thread(target=captures.stop)
    stopping.start()
    while not captures._is_stopped:
        pass
    runner.may_capture.set()
    stopping.join(PATIENCE_S)
    assert not stopping.is_alive()
    assert len(runner.shapes) <= 1
    captures.stop()


def test_a_size_that_fails_is_logged_and_harms_nobody(runner: Any, caplog: pytest.LogCaptureFixture) -> None:
    runner.error = RuntimeError("no memory for a graph")
    captures = CaptureAhead(runner, lambda: True)
    captures._thread.join(PATIENCE_S)
    captures.stop()
    assert len(runner.shapes) == 1
    assert "sizes_not_captured" in caplog.text


@pytest.mark.gpu
def test_steps_that_another_thread_has_captured_give_the_same_tokens() -> None:
    lazy, ahead = (engine_for("llama-gqa", device="cuda", dtype="bfloat16") for _ in range(2))
    asked = prompts_for(100, [1, 3, 17, 40, 5])
    expected = [answer.tokens for answer in ask(lazy, asked, greedy(8))]

    thread = threading.Thread(target=capture_sizes, args=(ahead.runner.layers,))
    thread.start()
    thread.join()
    graphs = ahead.runner.layers.graphs
    assert graphs is not None
    captured = dict(graphs.captured)
    assert set(captured) == {key for shape in ahead.runner.layers.sizes.all_shapes() for key in shape.keys}

    assert [answer.tokens for answer in ask(ahead, asked, greedy(8))] == expected
    assert graphs.captured == captured, "nothing was left to be captured"
