from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.control import request_history
from hearth.control.observe.metrics import Metrics
from hearth.control.request_history import STEP_S, RequestHistory
from hearth.core.forecast_messages import LONG_STEP_S, NUM_STEPS
from hearth.core.types import ModelId, RequestId
from hearth.policy.fleet.events import RequestArrived

#: The beginning of a long step.
BEGIN_S = 1_800_000_000.0
TINY = ModelId("tiny")


@dataclass
class Clocked:
    """A history and its two clocks. Mutable."""

    path: Path
    at_s: float = BEGIN_S
    now_s: float = 0.0
    history: RequestHistory = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.history = RequestHistory(self.path, Metrics())
        self.tick()

    def tick(self) -> None:
        self.history.tick(self.at_s, self.now_s)

    def request(self, num: int = 1, model: ModelId = TINY) -> None:
        for _ in range(num):
            self.history.observe(RequestArrived(self.now_s, RequestId("r"), model, 1, 1), ())

    def wait(self, num_steps: int = 1, *, num_each: int = 0) -> None:
        for _ in range(num_steps):
            self.request(num_each)
            self.at_s, self.now_s = self.at_s + STEP_S, self.now_s + STEP_S
            self.tick()

    def recorded(self) -> list[float]:
        return [count for count in self.history.counts(TINY) if not math.isnan(count)]


@pytest.fixture
def clocked(tmp_path: Path) -> Clocked:
    return Clocked(tmp_path / "request_history")


def test_long_steps_are_the_sums_of_short_ones(clocked: Clocked) -> None:
    clocked.wait(59, num_each=2)
    clocked.wait(1, num_each=5)
    clocked.wait(60)
    assert clocked.recorded() == [2.0] * 59 + [5.0] + [0.0] * 60
    long_counts = clocked.history.long_counts(TINY)
    assert math.isnan(long_counts[-3])
    assert long_counts[-2:] == [123.0, 0.0]
    assert clocked.history.ended_at_s == BEGIN_S + 2 * LONG_STEP_S
    assert clocked.history.counts(ModelId("other")) == []


def test_a_restart_leaves_a_gap_and_loses_nothing_else(clocked: Clocked) -> None:
    clocked.wait(40, num_each=3)
    asyncio.run(clocked.history.write())
    clocked.request()  # in a step that the restart cuts short
    clocked.at_s, clocked.now_s = clocked.at_s + 95.0, 7.0
    clocked.restart()
    clocked.at_s, clocked.now_s = clocked.at_s + 5.0, clocked.now_s + 5.0
    clocked.tick()
    clocked.wait(10, num_each=3)
    assert clocked.recorded() == [3.0] * 50
    assert sum(map(math.isnan, clocked.history.counts(TINY)[-60:])) == 10
    assert clocked.history.long_counts(TINY)[-1] == 180.0, "as if the gap were as the rest"
    clocked.at_s += 20 * 86_400.0
    clocked.restart()
    assert clocked.recorded() == []


@pytest.mark.parametrize("content", [b"", b"no file of a history"])
def test_an_unreadable_file_is_begun_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "request_history"
    path.write_bytes(content)
    clocked = Clocked(path)
    clocked.wait(num_each=1)
    asyncio.run(clocked.history.write())
    clocked.restart()
    assert clocked.recorded() == [1.0]


def test_the_model_that_was_asked_for_longest_ago_makes_room(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_history, "MAX_MODELS", 2)
    for name in ("a", "b", "a", "c"):
        clocked.request(model=ModelId(name))
        clocked.wait()
    kept = [name for name in "abc" if clocked.history.counts(ModelId(name))]
    assert kept == ["a", "c"]


def test_a_clock_that_stays_behind_is_believed_after_an_hour(clocked: Clocked) -> None:
    clocked.wait(10, num_each=1)
    clocked.at_s -= 3 * 86_400.0
    clocked.wait(360, num_each=1)
    assert sum(clocked.recorded()) == 10
    clocked.wait(10, num_each=1)
    assert clocked.history.ended_at_s <= clocked.at_s
    assert clocked.history.counts(TINY)[-5:] == [1.0] * 5


#: Requests, seconds until the next tick, and seconds by which the clock jumps meanwhile.
TICKS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.floats(0.1, 40.0),
        st.one_of(st.just(0.0), st.just(0.0), st.floats(-3e5, 3e5), st.floats(-30.0, 30.0)),
    ),
    max_size=120,
)


@given(TICKS)
def test_no_request_is_counted_twice_however_the_clock_jumps(
    tmp_path_factory: pytest.TempPathFactory, ticks: list[tuple[int, float, float]]
) -> None:
    clocked = Clocked(tmp_path_factory.getbasetemp() / "no history")
    clocked.wait(2, num_each=1)
    num_requests, latest_s = 2, clocked.at_s
    for num, seconds, jump_s in ticks:
        clocked.request(num)
        num_requests += num
        newest_at_s = clocked.history.ended_at_s
        clocked.at_s, clocked.now_s = clocked.at_s + seconds + jump_s, clocked.now_s + seconds
        clocked.tick()
        latest_s = max(latest_s, clocked.at_s)
        assert clocked.history.ended_at_s >= newest_at_s, "it has not been behind for an hour"
        counts, long_counts = clocked.history.counts(TINY), clocked.history.long_counts(TINY)
        assert len(counts) == NUM_STEPS
        assert all(math.isnan(count) or count >= 0.0 for count in counts + long_counts)
        assert sum(clocked.recorded()) <= num_requests
    clocked.at_s = (latest_s // STEP_S + 1) * STEP_S
    clocked.tick()
    clocked.wait(num_each=7)
    assert clocked.recorded()[-1] == 7.0, "the clock has caught up"
