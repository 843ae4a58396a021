"""The least number of devices is found, and a sample stands for its whole workload."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.sim.sampling import sample
from hearth.sim.sizing import MAX_GPUS, Tried, find_least
from hearth.sim.traces import Trace, TracedRequest

TARGET = 0.99


def tried(num_gpus: int, on_time: float) -> Tried:
    return Tried(num_gpus, 1, None, on_time, None, 0.0, 0.0, 0.0, 0, {})


@given(needed=st.integers(1, MAX_GPUS), first=st.integers(1, 64), width=st.integers(1, 16))
def test_the_least_number_is_found_and_few_are_tried(needed: int, first: int, width: int) -> None:
    asked = list[int]()

    def attempt(nums: Sequence[int]) -> list[Tried]:
        assert 1 <= len(nums) <= width
        asked.extend(nums)
        return [tried(num, min(1.0, 0.99 * num / needed)) for num in nums]

    found = find_least(attempt, TARGET, first, MAX_GPUS, 4 * first, width)
    assert list(found) == sorted(set(asked))
    assert len(asked) == len(set(asked))
    met = [num for num in found if num >= needed]
    assert met[0] == needed
    assert len(asked) <= 2 * width + 2 * MAX_GPUS.bit_length() * width


@pytest.mark.parametrize("on_time", [0.0, 0.9])
def test_the_search_ends_where_more_devices_do_not_help(on_time: float) -> None:
    found = find_least(lambda nums: [tried(num, on_time) for num in nums], TARGET, 2, MAX_GPUS, 10, 2)
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
    assert sampled.parts[0].weight == 1.0 or len(sampled.parts) == 3 or len(counts) < 4
    if len(arrivals) <= max_requests:
        assert sampled.is_whole
        assert sampled.parts[0].trace == trace
