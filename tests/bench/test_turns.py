"""The benchmark of turns judges right: what was on time, who was paused, what a switch took."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.host_pages import HostPages
from bench.service.client import Answer, Event, Reply, completion
from bench.turns import beside, host_time, lock
from bench.turns.__main__ import append_run, read_runs
from bench.turns.arms import Run, Traffic
from bench.turns.first_tokens import summed_up, told_parts
from bench.turns.journal import doings, entries
from bench.turns.outcome import hear, measures, outcome, outcomes, token_times
from bench.turns.replay import Gate, Replayed, replay
from bench.turns.setting import SMALL, Arm
from bench.turns.simulated import (
    Simulated,
    SimulatedRun,
    TraceSimulator,
    compared,
    highest,
    simulated_runs,
)
from bench.turns.switches import Calibration, SeenRequest, switches
from bench.turns.table import Judged, document, judge, measured_lines
from bench.turns.workload import (
    NUM_CALIBRATIONS,
    Question,
    calibrated_lengths,
    warm_batches,
    warm_lengths,
)
from hearth.control.observe.views import Explanation
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


def test_the_first_in_line_has_the_device_with_those_that_directly_follow_it() -> None:
    gate = Gate(["a", "a", "b", "a"], one_at_a_time=True)

    assert [gate.arrived(number) for number in range(4)] == [[0], [1], [], []]
    assert gate.ended(0) == []
    assert gate.ended(1) == [2]
    assert gate.ended(2) == [3]


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


def test_without_it_everybody_is_asked_on_arrival() -> None:
    gate = Gate(["a", "b"], one_at_a_time=False)
    assert [gate.arrived(0), gate.arrived(1)] == [[0], [1]]


# The client.

_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def answer_or_hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a token; whoever asks model `a` gets the end as well."""
    asked = await reader.readuntil(b"}}")
    event = b'data: {"choices": [{"text": " w1", "finish_reason": null}]}\n\n'
    writer.write(_HEAD + b"%x\r\n%b\r\n" % (len(event), event))
    if b'"model": "a"' in asked:
        writer.write(b"0\r\n\r\n")
    await reader.read()
    writer.close()


def test_what_hangs_is_cut_off_after_the_last_arrival_and_what_came_of_it_is_kept() -> None:
    async def replayed() -> Replayed:
        server = await asyncio.start_server(answer_or_hang, "127.0.0.1")
        async with server:
            port = server.sockets[0].getsockname()[1]
            asked = [
                replace(question(model=model), arrival_s=at_s, body=completion(model, [1], 1))
                for model, at_s in (("a", 0.0), ("b", 0.01), ("c", 0.02))
            ]
            return await replay(port, asked, Arm.ONE_AT_A_TIME, cutoff_s=0.3)

    found = asyncio.run(replayed())

    assert [reply and reply.is_whole for reply in found.replies] == [True, False, None]
    assert [len(hear(reply).token_times_s) for reply in found.replies] == [1, 1, 0]
    assert found.ended_s >= found.began_s + 0.32
    asked = [question(model=model) for model in "abc"]
    late_s = [one.asked_s for one in outcomes(asked, [hear(reply) for reply in found.replies], found)]
    assert late_s[1] >= 0.0
    assert late_s[2] == 0.0, "never asked"


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


def test_only_the_time_of_the_run_counts(tmp_path: Path) -> None:
    found = entries(journal_of(tmp_path, HAPPENED), 1.05, 1.3)
    assert [entry.event.now_s for entry in found] == [1.1, 1.2]


def test_a_switch_counts_from_the_end_of_a_turn_that_gave_way_to_the_other_model_s_first_token(
    tmp_path: Path,
) -> None:
    seen = [
        SeenRequest(A, "1B", 1.0, 10, [1.1, 1.9, 3.5]),
        SeenRequest(B, "1B", 1.2, 200, [2.6, 2.7]),
        SeenRequest(B, "1B", 2.2, 1000, []),  # came later, so nobody had to compute its prompt
    ]
    (found,) = switches(entries(journal_of(tmp_path, HAPPENED), 0.0, 10.0), seen, CALIBRATION)

    assert (found.model, found.missing_bytes, found.num_prompt_tokens) == (B, 500_000_000, 200)
    assert found.took_s == pytest.approx(0.6)
    assert found.beyond_s == pytest.approx(0.6 - 0.5 - 0.03)
    parts = found.parts
    assert parts is not None
    assert (parts.start_s, parts.load_s) == pytest.approx((-0.1, 0.1))  # it began before the other had ended
    assert parts.start_s + parts.load_s + parts.step_s == pytest.approx(found.beyond_s)


def test_bytes_that_came_ahead_are_none_that_a_switch_had_to_wait_for(tmp_path: Path) -> None:
    loaded = replace(ready(2.5, B, 500_000_000), ahead_bytes=400_000_000)
    happened = [loaded if isinstance(one, events.ModelReady) else one for one in HAPPENED]
    (found,) = switches(
        entries(journal_of(tmp_path, happened), 0.0, 10.0),
        [SeenRequest(B, "1B", 1.2, 200, [2.6, 2.7])],
        CALIBRATION,
    )
    assert found.missing_bytes == 100_000_000
    assert found.beyond_s == pytest.approx(0.6 - 0.1 - 0.03)


@pytest.mark.parametrize(("num_tokens", "seconds"), [(0, 0.02), (150, 0.025), (300, 0.05), (500, 0.09)])
def test_a_prefill_takes_what_the_measured_ones_say(num_tokens: int, seconds: float) -> None:
    assert CALIBRATION.bound_s("1B", 0, num_tokens) == pytest.approx(seconds)


# Results.


def test_a_simulated_service_is_warmed_up_by_what_a_measured_one_is_asked() -> None:
    batches = list(warm_batches(SMALL))
    rows = [(one.num_input_tokens, one.num_output_tokens) for one in batches[0]]
    assert rows == warm_lengths(SMALL)
    assert len(rows) == SMALL.warm_rows
    alone = [batch[0].num_input_tokens for batch in batches if len(batch) == 1]
    assert alone == [tokens for tokens in calibrated_lengths(SMALL) for _ in range(NUM_CALIBRATIONS)]
    assert {one.tenant for batch in batches for one in batch} == SMALL.shapes.keys()

    shapes, memory_bytes = {"x": "1B", "y": "1B"}, 24 << 30
    simulator = TraceSimulator(
        shapes, memory_bytes, 10.0, Profile.load("h200"), [[TracedRequest(0.0, "x", 64, 2)] * 3]
    )
    assert simulator.start(Arm.TURNS).num_asked == 3


def test_the_simulator_is_asked_when_it_is_warm_and_judged_as_a_service_is() -> None:
    requests = [TracedRequest(at_s, name, 20, 5) for at_s, name in ((0.0, "x"), (0.1, "y"), (0.2, "x"))]
    simulator = TraceSimulator({"x": "1B", "y": "1B"}, 24 << 30, 10.0, Profile.load("h200"))

    found = simulator.run(Trace("three", tuple(requests)), Arm.TURNS)

    assert (found.seen.num_requests, found.seen.num_unfinished, found.seen.errors) == (3, 0, {})
    assert (found.seen.requests_on_time, found.seen.tokens_on_time) == (1.0, 1.0)
    assert found.seen.first_token_s["max"] < 0.1
    assert (found.num_turns, found.moved_bytes) == (3, 0)  # all bytes had come before


def test_the_parts_of_a_first_token_follow_each_other_and_make_it_up() -> None:
    marks = {"queued": 0.0, "turn": 0.1, "loaded": 0.25, "started": 0.27, "first_token": 0.3, "ended": 0.9}
    waited = told_parts(explanation(marks), first_s=0.305)
    followed = told_parts(
        explanation({"queued": 0.0, "started": 0.1, "loaded": 0.5, "first_token": 0.4}), 0.41
    )
    there = told_parts(
        explanation({"queued": 0.0, "started": 0.002, "first_token": 0.01, "turn": 2.0}), 0.013
    )

    assert waited is not None
    assert asdict(waited) == pytest.approx(
        {"way_s": 0.005, "turn_s": 0.1, "load_s": 0.15, "start_s": 0.02, "steps_s": 0.03}
    )
    assert followed is not None
    assert (followed.load_s, followed.start_s, followed.steps_s) == pytest.approx((0.4, 0.0, 0.0))
    assert there is not None
    assert (there.turn_s, there.load_s) == (0.0, 0.0), "its first turn came behind the token"
    assert told_parts(explanation({"queued": 0.0}), 1.0) is None


def test_simulated_requests_wait_for_what_they_lack_and_count_from_their_arrival() -> None:
    simulator = TraceSimulator({"x": "7B", "y": "7B"}, 24 << 30, 10.0, Profile.load("h200"))
    requests = [TracedRequest(0.0, "x", 20, 500), TracedRequest(1.0, "x", 20, 5)]
    arm = simulator.start(Arm.TURNS)  # which has asked `y` last
    found = arm.run(requests, 10.0, late_s=[0.0, 0.003])

    first, second = found.parts
    assert first is not None
    assert second is not None
    bytes_s = found.moved_bytes / Profile.load("h200").bytes_per_s[Rung.HOST]
    assert bytes_s < first.load_s < bytes_s + 0.02
    assert (second.turn_s, second.load_s) == (0.0, 0.0)
    assert second.way_s == pytest.approx(Profile.load("h200").request_s + 0.003)
    sums = sorted(sum(asdict(one).values()) for one in (first, second))
    assert sums == pytest.approx([found.seen.first_token_s["min"], found.seen.first_token_s["max"]])
    assert summed_up(found.parts)["there"]["requests"] == 1
    late = arm.run([TracedRequest(0.0, "x", 20, 5)], cutoff_s=0.5, late_s=[1.0])
    assert late.seen.num_unfinished == 1, "cut off behind its arrival, before it was asked"


def explanation(marks: dict[str, float]) -> Explanation:
    told = {"request_id": "r", "model": "m", "arrived_at_s": 0.0, "outcome": "length", "queue_s": 0.0}
    names = [field.name for field in fields(Explanation) if field.default is MISSING]
    empty: dict[str, object] = dict.fromkeys(names, 0)
    shown = [{"at_s": at_s, "what": what} for what, at_s in sorted(marks.items(), key=lambda mark: mark[1])]
    lists: dict[str, object] = {"options": [], "rungs": [], "spans": [], "marks": shown}
    nothing = dict.fromkeys(("error", "worker", "why", "load_s", "first_token_s", "total_s", "tokens_per_s"))
    return msgspec.convert({**empty, **told, **nothing, **lists}, Explanation)


def test_simulated_runs_find_what_those_before_them_left_as_measured_ones_did(tmp_path: Path) -> None:
    """Two of 7B do not fit together: after a run of the one, the other has to be loaded, and not before."""
    simulator = TraceSimulator({"x": "7B", "y": "7B"}, 24 << 30, 10.0, Profile.load("h200"))
    part = [TracedRequest(0.0, "x", 20, 5), TracedRequest(20.0, "y", 20, 5)]
    short = replace(run(tmp_path, Arm.TURNS, 1.0, 0.1), traffic=Traffic("trace", 10.0, 1.0, 60.0))
    later = replace(short, calibration=replace(CALIBRATION, bytes_per_s=1.0))
    runs = judge([short, short, replace(short, arm=Arm.DRAIN), later])

    found = simulated_runs(runs, simulator, Trace("two", tuple(part)), warm_window_s=30.0)

    first, second, *others = found
    assert all(draw.moved_bytes > 0 for draw in first.draws)  # what came last before it was `y`
    assert [draw.moved_bytes for draw in second.draws] == [0] * len(second.draws)
    assert [each.measured for each in found] == runs
    assert all(draw.moved_bytes > 0 for each in others for draw in each.draws)  # on services of their own


def test_a_run_is_compared_with_the_typical_one_of_its_simulations(tmp_path: Path) -> None:
    (measured,) = judge([run(tmp_path, Arm.TURNS, 3.0, 0.1)])
    doings = measured.run.doings
    draws = [
        Simulated(replace(measured.seen, first_token_s=first_s), doings.num_turns, doings.moved_bytes)
        for first_s in (dict.fromkeys(("p50", "p90", "p99"), share * 0.1) for share in (0.5, 1.25, 3.0))
    ]
    simulated = SimulatedRun(measured, draws)

    assert simulated.differences() == pytest.approx(
        {
            "first token p50": 0.25,
            "first token p90": 0.25,
            "first token p99": 0.25,
            "turns": 0,
            "bytes moved": 0,
        }
    )
    lines = {line.measure: line for line in compared([simulated])}
    assert lines["first token p90 at 3x, simulated, difference from measured"].is_missed
    assert not lines["turns at 3x, simulated, difference from measured"].is_missed
    assert len(simulated.as_json()["simulated"]["first token p50"]) == 3  # type: ignore[index]


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


def result(runs: Sequence[Run]) -> dict[str, object]:
    judged = judge(runs)
    return document(judged, list(measured_lines(judged)))


def test_runs_are_read_back_as_they_were_and_a_result_compares_the_arms(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for one in (run(tmp_path, Arm.DRAIN, 3.0, 1.5), run(tmp_path, Arm.TURNS, 3.0, 0.05)):
        append_run(path, one)
    runs = read_runs(path)
    assert runs[0] == replace(run(tmp_path, Arm.DRAIN, 3.0, 1.5), environment=runs[0].environment)

    found = json.loads(json.dumps(result(runs)))

    rows = {row["measure"]: row for row in found["rows"]}
    first = rows["first token p90 at 3x"]
    assert (first["value"], first["peers"], first["aim"]) == (0.05, {"drain": 1.5}, "at most 0.4")
    assert rows["highest measured speed with 90% of requests on time"]["peers"] == {}
    assert found["missed"] == []
    assert len(found["runs"]) == 2


def test_a_run_that_is_repeated_stands_beside_the_first_with_how_far_it_is_from_it(tmp_path: Path) -> None:
    runs = [
        replace(run(tmp_path, arm, 3.0, first_s), environment={"commit": commit, "python": "3"})
        for arm, first_s, commit in (
            *((Arm.TURNS, 0.2, "new"), (Arm.TURNS, 0.15, "new")),
            *((Arm.DRAIN, 1.5, "old"), (Arm.DRAIN, 1.2, "older")),
        )
    ]
    judged = judge(runs)
    found = result(runs)

    rows = {row["measure"]: row for row in found["rows"]}  # type: ignore[attr-defined]
    assert (rows["first token p90 at 3x"]["value"], rows["first token p90 at 3x"]["peers"]) == (
        0.2,
        {"drain": 1.5},
    )
    assert rows["first token p90 at 3x, asked again"]["value"] == 0.15
    spread = rows["first token p90 at 3x, asked again, difference from the first run"]["value"]
    assert spread == pytest.approx(0.25)
    assert found["environment"] == {"commit": "turns new, drain old and older", "python": "3"}
    lines = [line.measure for line in compared([SimulatedRun(each, [simulated_as(each)]) for each in judged])]
    assert "turns at 3x, simulated, difference from measured" in lines
    assert "turns at 3x, asked again, simulated, difference from measured" in lines
    assert len(set(lines)) == len(lines)


def simulated_as(measured: Judged) -> Simulated:
    return Simulated(measured.seen, measured.run.doings.num_turns, measured.run.doings.moved_bytes)


def test_a_result_names_the_aims_that_were_missed(tmp_path: Path) -> None:
    found = result([run(tmp_path, Arm.TURNS, 3.0, 1.5), run(tmp_path, Arm.TURNS, 2.0, 1.5)])

    missed = found["missed"]
    assert isinstance(missed, list)
    assert "first token p99 at 3x" in missed
    assert "first token p99 at 2x" not in missed  # which is reported, and no aim


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


def test_models_come_in_turn_while_steps_of_python_are_timed(tmp_path: Path) -> None:
    with lock._Rig.of(beside.SMALL.scale, torch.device("cpu"), tmp_path) as rig:
        alone, beside_loads, crossings = rig.measure(0.1)
    assert len(crossings) > 1
    assert len(alone) + len(beside_loads) <= len(rig._steps)
    assert rig._steps


def test_the_time_of_a_workers_loop_is_told_by_its_parts_while_models_take_turns() -> None:
    found = host_time.measured(num_requests=16, num_pages=host_time.NUM_PAGES, seconds=1.0)

    assert found.num_turns > 1
    assert found.calls["engine"] > 10
    assert found.beside_us > 0.0
    assert sum(found.us_per_step.values()) == pytest.approx(found.beside_us + found.engine_us)
