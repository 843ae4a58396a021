"""Steps that have no graph yet take longer: a size is captured once, but not behind a load."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hearth.core.sizes import StepLimits, mixed_sizes
from hearth.core.types import Pace, RequestId
from hearth.policy.batch.batch_limits import BatchLimits
from hearth.policy.memory.kv_range import KvRange
from hearth.sim.profile import NO_LEAST, LeastSeconds
from hearth.sim.stepped_engine import SteppedEngine, StepSeconds
from tests.sim.small_machine import MACHINE

CAPTURE_S, EAGER_S, START_S = 0.3, 0.5, 0.1
LIMITS = StepLimits(max_batch_tokens=2048, max_seqs=64, block_tokens=16)


def new_engine() -> SteppedEngine:
    known = MACHINE.shape("3B")
    times = replace(known.times, start_s=START_S)
    shape = replace(known, times=times, capture_s=CAPTURE_S, eager_s=EAGER_S)
    block_bytes = shape.kv_bytes_per_token * LIMITS.block_tokens
    limits = BatchLimits(LIMITS.max_batch_tokens, LIMITS.max_seqs, 2048, mixed_sizes(LIMITS))
    kv = KvRange(block_bytes, 16 << 20, 512)
    engine = SteppedEngine(shape, limits, kv, LIMITS.block_tokens, 128, max_step_s=0.1)
    engine.kv.place_sink()
    engine.kv.grow(256, free_bytes=1 << 32)
    return engine


def prompt_s(engine: SteppedEngine, name: str, num_tokens: int, load_end_s: float | None = None) -> float:
    """Have a prompt computed by an engine that rests, on a device that rests; return when its token came."""
    engine.add(RequestId(name), num_tokens, 1, 0, Pace(), 0.0, 0.0)
    call = engine.launch(0.0, 0.0, load_end_s)
    assert call.launched is not None
    assert call.launch_s <= call.launched.end_s
    flushed = engine.flush()
    assert flushed is call.launched
    engine.take_in(flushed)
    return call.launched.end_s


def step_s(engine: SteppedEngine, num_tokens: int) -> float:
    return START_S + engine.shape.step_s(num_tokens, 1, num_tokens)


def test_only_the_first_step_of_a_size_is_captured() -> None:
    engine = new_engine()

    assert prompt_s(engine, "first", 100) == pytest.approx(CAPTURE_S + step_s(engine, 100))
    assert prompt_s(engine, "of the same size", 120) == pytest.approx(step_s(engine, 120))
    assert prompt_s(engine, "larger", 200) == pytest.approx(CAPTURE_S + step_s(engine, 200))


def test_a_step_behind_a_load_runs_without_a_graph_and_leaves_none() -> None:
    engine = new_engine()
    for _ in range(2):
        engine.is_behind_load = True
        assert prompt_s(engine, "behind", 100) == pytest.approx(EAGER_S)
    assert prompt_s(engine, "later", 100) == pytest.approx(CAPTURE_S + step_s(engine, 100))
    engine.is_behind_load = True
    assert prompt_s(engine, "behind, with a graph", 100) == pytest.approx(step_s(engine, 100))


def timed_s(
    engine: SteppedEngine, num_tokens: int, *, is_behind: bool = False, device_free_s: float = 0.0
) -> float | None:
    """Have a prompt computed by an engine that rests; return what its timer tells of the step."""
    engine.is_behind_load = is_behind
    engine.add(RequestId("asked"), num_tokens, 1, 0, Pace(), 0.0, 0.0)
    launched = engine.launch(0.0, device_free_s).launched
    assert launched is not None
    engine.flush()
    engine.take_in(launched)
    return launched.seconds.device_s


def test_an_engine_times_steps_that_have_a_graph_unless_they_are_the_first_behind_a_load() -> None:
    engine = new_engine()

    assert timed_s(engine, 100) is None, "captured"
    assert timed_s(engine, 100) == pytest.approx(engine.shape.device_s(100, 1, 100))
    assert timed_s(engine, 100, is_behind=True) is None, "a gate was there, though open"
    assert timed_s(engine, 200, is_behind=True) is None, "without a graph"


def with_start(engine: SteppedEngine, start_s: float) -> SteppedEngine:
    """Have a timer see so much of each launch that the device rests for."""
    engine.shape = replace(engine.shape, device_times=replace(engine.shape.device_times, start_s=start_s))
    return engine


def test_an_engine_times_the_launch_of_its_first_step_while_the_device_rests() -> None:
    engine = with_start(new_engine(), 0.06)
    timed_s(engine, 100)  # captured
    device_s = engine.shape.device_s(100, 1, 100)

    assert timed_s(engine, 100) == pytest.approx(0.06 + device_s)
    assert timed_s(engine, 100, device_free_s=0.04) == pytest.approx(0.02 + device_s)
    assert timed_s(engine, 100, device_free_s=1.0) == pytest.approx(device_s)


def test_a_timer_sees_the_launch_alone_of_what_a_step_waits_for_the_host() -> None:
    engine = with_start(new_engine(), 0.06)
    sizes = (2, 2, 600)
    device_s = engine.shape.device_s(*sizes)

    assert engine.step_seconds(*sizes, NO_LEAST) == StepSeconds(engine.shape.step_s(*sizes), device_s)
    assert engine.step_seconds(*sizes, LeastSeconds(0.7, 0.7)) == StepSeconds(0.7, device_s + 0.06)
    told_s = device_s + 0.01  # as it was measured, which is less
    assert engine.step_seconds(*sizes, LeastSeconds(0.7, told_s)) == StepSeconds(0.7, told_s)
    assert engine.step_seconds(*sizes, LeastSeconds(0.7, 0.7), timed_start_s=0.06).device_s == pytest.approx(
        device_s + 0.06
    )


def test_a_step_with_prompts_takes_as_long_as_the_host_of_a_worker_needs_for_it() -> None:
    engine = with_start(new_engine(), 0.06)
    engine.shape = replace(engine.shape, with_prompts=LeastSeconds(0.5, 0.5))
    rows, prompts = (2, 2, 600), (64, 2, 660)

    assert engine.step_seconds(*rows, NO_LEAST).step_s == engine.shape.step_s(*rows)
    device_s = engine.shape.device_s(*prompts)
    assert engine.step_seconds(*prompts, NO_LEAST) == StepSeconds(0.5, device_s + 0.06)
    assert engine.step_seconds(*prompts, LeastSeconds(0.7, 0.0)) == StepSeconds(0.7, device_s)


def first_piece_tokens(rows_share: float) -> int:
    """Return how much of a long prompt is computed at first beside a row, of which a timer tells a share."""
    engine = new_engine()
    times = engine.shape.device_times
    device_times = replace(times, rows_s=times.rows_s.scaled(rows_share))
    engine.shape = replace(engine.shape, capture_s=0.0, eager_s=0.0, device_times=device_times)
    engine.add(RequestId("decodes"), 1800, 200, 0, Pace(), 0.0, 0.0)
    for _ in range(40):
        if (awaited := engine.launch(0.0, 0.0).awaited) is not None:
            engine.take_in(awaited)
    engine.add(RequestId("long"), 300, 1, 0, Pace(), 0.0, 0.0)
    launched = engine.launch(0.0, 0.0).launched
    assert launched is not None
    return launched.plan.num_prompt_tokens


def test_prompts_are_cut_by_what_an_engine_times_not_by_what_steps_take() -> None:
    assert 0 < first_piece_tokens(0.25) < first_piece_tokens(1.0)


def test_a_step_that_follows_its_weights_ends_with_the_last_of_them() -> None:
    engine = new_engine()
    engine.is_behind_load = True

    assert prompt_s(engine, "follows", 100, load_end_s=2.0) == pytest.approx(2.0)
    assert engine.is_behind_load, "some of them were still to come"
