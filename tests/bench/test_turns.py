"""The benchmark of turns judges right: what was on time, who was paused, what a switch took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.host_pages import HostPages
from bench.service.client import Answer, Event, Reply
from bench.turns import beside
from bench.turns.arms import Run, Traffic
from bench.turns.journal import doings, entries
from bench.turns.outcome import measures, outcome, token_times
from bench.turns.replay import Gate
from bench.turns.setting import Arm
from bench.turns.simulated import (
    TraceSimulator,
    highest,
)
from bench.turns.switches import Calibration
from bench.turns.workload import (
    Question,
)
from hearth.core.types import ModelId, RequestId, Rung, TurnEnd, WorkerId
from hearth.policy.fleet import events
from hearth.sim.profile import Profile
from hearth.sim.traces import Trace, TracedRequest

W, A, B = WorkerId("w0"), ModelId("a"), ModelId("b")
CALIBRATION = Calibration(1e9, {"1B": {100: 0.02, 200: 0.03, 400: 0.07}})


def question(num_output_tokens: int = 3, model: str = "a") -> Question:
    return Question(0.0, model, "1B", 10, num_output_tokens, b"")


# Requests.


@pytest.mark.parametrize(
    ("times_s", "num_on_time"),
    [([1.0, 1.1, 1.2], 3), ([0.1, 0.2, 1.21], 2), ([1.01, 1.11, 1.19], 1), ([], 0)],
)
def test_a_token_is_on_time_a_second_after_arrival_and_a_tenth_later_for_each_before_it(
    times_s: list[float], num_on_time: int
) -> None:
    assert outcome(question(), times_s, 5.0, None).num_on_time == num_on_time


def test_what_has_not_come_when_a_run_is_cut_off_counts_as_late_and_as_if_it_came_then() -> None:
    found = outcome(question(), [0.5, 0.6], until_s=9.0, error=None)

    assert (found.is_whole, found.is_on_time) == (False, False)
    assert found.first_s == 0.5
    assert found.longest_pause_s == pytest.approx(8.4)
    assert found.total_s == 9.0

    never = outcome(question(), [], until_s=9.0, error=None)
    assert (never.first_s, never.longest_pause_s, never.total_s) == (9.0, 0.0, 9.0)


def test_a_run_is_summed_up_over_what_was_asked_for_not_over_what_came() -> None:
    found = [
        outcome(question(4), [0.1, 0.2, 0.3, 0.4], 10.0, None),
        outcome(question(4), [0.1], 10.0, None),
        outcome(question(4), [], 10.0, "overloaded"),
    ]
    seen = measures(found, seconds=2.0)

    assert (seen.num_requests, seen.num_unfinished, seen.errors) == (3, 1, {"overloaded": 1})
    assert seen.requests_on_time == pytest.approx(1 / 3)
    assert seen.tokens_on_time == pytest.approx(5 / 12)
    assert seen.tokens_per_s == 2.5


def test_an_event_with_several_tokens_gives_each_of_them_its_time() -> None:
    told = [Event(1.0, " w1", None), Event(2.0, " w22!", None), Event(3.0, " w7", "length")]
    answer = Answer(Reply(0.0), told, 5, None, "length")

    # The fifth cannot be told from its neighbour: the digit of a word may be a token of its own.
    assert token_times(answer) == [1.0, 2.0, 2.0, 3.0, 3.0]


# One at a time.


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_one_at_a_time_runs_one_model_in_order_of_arrival_and_forgets_nobody(models: list[str], draw) -> None:
    gate = Gate(models, one_at_a_time=True)
    asked: list[int] = []
    running: list[int] = []
    arriving = list(range(len(models)))
    while arriving or running:
        if arriving and (not running or draw.random() < 0.5):
            released = gate.arrived(arriving.pop(0))
        else:
            released = gate.ended(running.pop(draw.randrange(len(running))))
        asked += released
        running += released
        assert len({models[number] for number in running}) <= 1
    assert asked == list(range(len(models)))


# The client.


# The journal.


def journal_of(tmp_path: Path, happened: Sequence[events.Event]) -> Path:
    path = tmp_path / "events.jsonl"
    lines = [b'{"version": 0, "config": {}}']
    for event in happened:
        recorded = {"event": [type(event).__name__, event], "actions": []}
        lines.append(msgspec.json.encode(recorded))
    path.write_bytes(b"\n".join(lines) + b'\n{"event": ["Torn')
    return path


def arrived(now_s: float, name: str, model: ModelId) -> events.RequestArrived:
    return events.RequestArrived(now_s, RequestId(name), model, 10, 10)


def ready(now_s: float, model: ModelId, num_bytes: int) -> events.ModelReady:
    rungs = (events.RungUse(Rung.HOST, num_bytes, 0.5),) if num_bytes else ()
    return events.ModelReady(now_s, W, model, rungs, 0.6)


#: A gives way to B, whose bytes come, and later goes on; B is idle at the end.
HAPPENED = [
    arrived(1.0, "r1", A),
    events.TurnBegan(1.0, W, A),
    arrived(1.1, "r2", A),
    arrived(1.2, "r3", B),
    events.RequestFinished(1.5, RequestId("r2"), 10),
    events.TurnEnded(2.0, W, A, TurnEnd.TIME),
    events.TurnBegan(2.0, W, B),
    ready(2.5, B, 500_000_000),
    events.RequestFinished(3.0, RequestId("r3"), 10),
    events.TurnEnded(3.0, W, B, TurnEnd.IDLE),
    events.TurnBegan(3.0, W, A),
    events.RequestFinished(4.0, RequestId("r1"), 10),
]


def test_the_journal_tells_loads_turns_and_who_was_paused(tmp_path: Path) -> None:
    found = doings(entries(journal_of(tmp_path, HAPPENED), 0.0, 10.0))

    assert (found.num_loads, found.moved_bytes, found.bus_s) == (1, 500_000_000, 0.5)
    assert (found.num_turns, found.turn_ends) == (3, {"time": 1, "idle": 1})
    assert (found.num_pauses, found.most_pauses) == (1, 1)
    assert found.pauses_per_request == pytest.approx(1 / 3)


# Results.


def test_the_simulator_is_asked_when_it_is_warm_and_judged_as_a_service_is() -> None:
    requests = [TracedRequest(at_s, name, 20, 5) for at_s, name in ((0.0, "x"), (0.1, "y"), (0.2, "x"))]
    simulator = TraceSimulator({"x": "1B", "y": "1B"}, 24 << 30, 10.0, Profile.load("h200"))

    found = simulator.run(Trace("three", tuple(requests)), Arm.TURNS)

    assert (found.seen.num_requests, found.seen.num_unfinished, found.seen.errors) == (3, 0, {})
    assert (found.seen.requests_on_time, found.seen.tokens_on_time) == (1.0, 1.0)
    assert found.seen.first_token_s["max"] < 0.1
    assert (found.num_turns, found.moved_bytes) == (3, 0)  # all bytes had come before


@given(st.floats(0.01, 100.0))
def test_a_search_finds_about_the_highest_value_that_is_good(limit: float) -> None:
    found = highest(lambda value: value <= limit, 0.125, 64.0)

    assert found <= limit
    assert found > min(limit, 64.0) / 1.06 or limit < 0.125


def run(tmp_path: Path, arm: Arm, speed: float, first_s: float) -> Run:
    found = outcome(question(2), [first_s, first_s + 0.1], 10.0, None)
    path = journal_of(tmp_path, HAPPENED)
    happened = doings(entries(path, 0.0, 10.0))
    return Run(arm, Traffic("trace", 240.0, speed, 60.0), 10.0, [found], happened, None, CALIBRATION, {}, [])


def test_a_model_answers_while_all_bytes_of_another_come_and_both_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spaces, map_pages = set[int](), HostPages.map

    def noted(pages: HostPages, address: int, *numbers: int) -> None:
        spaces.add((address - pages.base_address) // pages.space_bytes)
        map_pages(pages, address, *numbers)

    monkeypatch.setattr(HostPages, "map", noted)
    part = replace(beside.SMALL, seconds=0.1, num_prompts=5, long_prompt_tokens=40)
    times = beside.measured(part, torch.device("cpu"))

    assert times.crossings
    assert 0 < len(times.beside_told) <= len(times.beside)
    pieces = [gap.told.num_prompt_tokens for gap in times.prompts if gap.told is not None]
    assert len(pieces) == len(times.prompts) > 0, "steps whose timers are silent do not count"
    assert all(0 < piece <= 40 for piece in pieces)
    assert len(spaces) == min(2 + len(times.crossings), 1 + len(beside.WAITING)), "mapped anew each time"
    assert len(times.alone) == len(times.beside)
