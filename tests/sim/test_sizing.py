"""The least number of devices is found, and a sample stands for its whole workload."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ctypes import c_double, c_int64
from multiprocessing import Array, Value, active_children

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.sim import sizing
from hearth.sim.sampling import SampledWindow, sample
from hearth.sim.setting import OnTime, SimulationSetting
from hearth.sim.sizing import MAX_GPUS, Missed, Outcome, SizingPool, Tried, find_least, is_met
from hearth.sim.traces import Trace, TracedRequest
from tests.sim.small_machine import MACHINE, MEMORY_BYTES, REQUESTS, SHAPES, trace_of

TARGET = 0.99


def tried(num_gpus: int, on_time: float) -> Tried:
    return Tried(num_gpus, 1, 0, on_time, None, 0.0, 0.0, 0.0, 0, {})


@given(needed=st.integers(1, MAX_GPUS), first=st.integers(1, 64), width=st.integers(1, 16))
def test_the_least_number_is_found_and_few_are_tried(needed: int, first: int, width: int) -> None:
    asked = list[int]()

    def attempt(nums: Sequence[int], ends_early: bool) -> list[Outcome | None]:
        assert 1 <= len(nums) <= width
        asked.extend(nums)
        outcomes: list[Outcome | None] = []
        for num in nums:
            if outcomes and (last := outcomes[-1]) is not None and is_met(last, TARGET):
                outcomes += [None] * (len(nums) - len(outcomes))
                break
            is_complete = num >= needed or not ends_early
            whole = tried(num, min(1.0, 0.99 * num / needed))
            outcomes.append(whole if is_complete else Missed(num, 1, 0))
        return outcomes

    found = find_least(attempt, TARGET, first, MAX_GPUS, 4 * first, width)
    assert list(found) == sorted(set(found))
    assert set(found) <= set(asked)
    assert len(asked) == len(set(asked))
    met = [num for num in found if num >= needed]
    assert met[0] == needed
    assert len(asked) <= 2 * width + 2 * MAX_GPUS.bit_length() * width


@pytest.mark.parametrize("on_time", [0.0, 0.9])
def test_the_search_ends_where_more_devices_do_not_help(on_time: float) -> None:
    found = find_least(lambda nums, _: [tried(num, on_time) for num in nums], TARGET, 2, MAX_GPUS, 10, 2)
    assert max(found) <= 32


@given(
    arrivals=st.lists(st.floats(0, 5000), min_size=1, max_size=200),
    max_requests=st.integers(1, 200),
)
def test_windows_stand_for_all_requests_and_the_busiest_is_whole(
    arrivals: list[float], max_requests: int
) -> None:
    trace = Trace.of("drawn", [TracedRequest(at, "a", 10, 10) for at in arrivals])
    sampled = sample(trace, lambda _: 1.0, max_requests)
    counted = sum(part.weight * part.num_counted for part in sampled.parts)
    assert counted == pytest.approx(len(arrivals))
    counts = [part.num_counted for part in sampled.parts]
    assert counts == sorted(counts, reverse=True)
    assert sampled.parts[0].weight == 1.0
    if len(arrivals) <= max_requests:
        assert sampled.is_whole
        assert sampled.parts[0].trace == trace


@given(REQUESTS, st.integers(0, 14), st.floats(0.05, 1.0), st.integers(0, 13))
def test_a_simulation_ends_early_only_if_too_many_requests_are_late(
    requests: list[TracedRequest], most_late: int, first_token_s: float, num_before: int
) -> None:
    part = SampledWindow(trace_of(requests), min(num_before, len(requests)), weight=2.0)
    setting = SimulationSetting(SHAPES, MEMORY_BYTES, on_time=OnTime(first_token_s, 50.0))

    def simulate(late_weight: float) -> sizing._WindowResult | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sizing, "_num_ended", Value(c_int64, 0), raising=False)
            patch.setattr(sizing, "_late", Array(c_double, 1), raising=False)
            return sizing._simulate(part, setting, MACHINE, 0, late_weight)

    whole, early = simulate(sys.float_info.max), simulate(2.0 * most_late)
    assert whole is not None
    if early is None:
        assert sum(whole.late) > most_late
    else:
        assert early == whole


def test_processes_end_with_the_command() -> None:
    requests = [TracedRequest(0.001 * number, "a", 400, 400) for number in range(4000)]
    workload = sample(Trace.of("long", requests), lambda _: 1.0, len(requests))

    def interrupt(_done: int, _total: int) -> None:
        sys.exit(1)

    with pytest.raises(SystemExit), SizingPool(workload, MACHINE, 1, interrupt) as pool:
        pool.attempt([SimulationSetting(SHAPES, MEMORY_BYTES)], 0.99, ends_early=False)
    assert not active_children()
