"""Traces: files that hold them, requests that are drawn, and what is done to them before a simulation."""

from __future__ import annotations

import gzip
import math
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.errors import ConfigError
from hearth.sim.arrivals import CountedPeriod, Lengths, RatedPeriod, RequestLength, draw_trace, steady
from hearth.sim.trace_files import read_counts, read_lengths, read_trace
from hearth.sim.traces import Trace, TracedRequest

DATA = Path(__file__).parents[2] / "bench" / "data"
ARENA = DATA / "lmsys_arena" / "requests.csv"
LENGTHS = Lengths.fixed(100, 10)

TRACES = st.lists(
    st.builds(
        TracedRequest,
        st.floats(0.0, 1e5),
        st.sampled_from("abcdefg"),
        st.integers(1, 10_000),
        st.integers(1, 10_000),
    ),
    max_size=40,
).map(lambda requests: Trace.of("any", requests))


def read(folder: Path, text: str, name: str = "trace.csv", **window: float) -> Trace:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_trace(path, LENGTHS, Random(0), **window)


def arrivals(trace: Trace) -> list[float]:
    return [request.arrival_s for request in trace.requests]


# Files.


def test_the_arena_is_read_as_benchmarks_use_it() -> None:
    trace = read_trace(ARENA, LENGTHS, Random(0), length_s=240.0).at_speed(3.0).cut(1500, 300)

    assert len(trace.requests) == 553
    assert len(read_trace(ARENA, LENGTHS, Random(0)).tenants) == 27
    assert max(arrivals(trace)) < 80.0
    assert max(request.num_output_tokens for request in trace.requests) == 300


@pytest.mark.parametrize(("name", "num_requests"), [("conv", 19_366), ("code", 8_819)])
def test_compressed_traces_of_one_service_are_read(name: str, num_requests: int) -> None:
    trace = read_trace(DATA / "azure_llm" / f"{name}.csv.gz", LENGTHS, Random(0))

    assert trace.tenants == ["all"]
    assert num_requests - 60 < len(trace.requests) <= num_requests  # some have no output


def test_dates_become_seconds_from_the_first_request(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
        "2023-11-16 18:15:46.6805900,374,44\n",
    )

    assert arrivals(trace) == pytest.approx([0.0, 4.314579], abs=1e-5)
    assert trace.requests[0].num_input_tokens == 374


def test_failed_requests_and_columns_that_nobody_needs_are_left_out(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,GPT-4,1087,0,1087,API log\n",
    )

    assert trace.requests == (TracedRequest(5.0, "ChatGPT", 472, 18),)


@pytest.mark.parametrize("header", ["func,1,2,3", "HashOwner,HashApp,HashFunction,Trigger,1,2,3"])
def test_counts_per_minute_become_requests_of_that_minute(tmp_path: Path, header: str) -> None:
    ids = "f" if header.startswith("func") else "o,a,f,http"
    trace = read(tmp_path, f"{header}\n{ids},2,0,3\n")

    assert trace.tenants == ["f"]
    assert [int(at_s // 60) for at_s in arrivals(trace)] == [0, 0, 2, 2, 2]
    assert {request.num_input_tokens for request in trace.requests} == {100}


def test_counts_per_hour_keep_conversations_and_programs_apart(tmp_path: Path) -> None:
    trace = read(tmp_path, "day,hour,conversation,api,all\n0,23,1,2,3\n1,0,1,0,1\n")

    assert trace.tenants == ["api", "conversation"]
    assert [int(at_s // 3600) for at_s in arrivals(trace)] == [23, 23, 23, 24]


def test_rates_of_ten_minutes_become_requests_of_each_client(tmp_path: Path) -> None:
    text = "model,client,t_s,rate_rps,cv,dist,p1,p2\nm,0,0,1,1,Gamma,1,1\nm,7,600,2,3,Gamma,1,1\n"
    trace = read(tmp_path, text)
    first = [request.arrival_s for request in trace.requests if request.tenant == "m/0"]

    assert set(trace.tenants) == {"m/0", "m/7"}
    assert 0.0 <= min(first) <= max(first) < 600.0
    assert 500 < len(first) < 700


def test_a_window_draws_only_what_lies_in_it(tmp_path: Path) -> None:
    text = "model,t_s,rate_rps,active_clients\n" + "".join(f"m,{600 * n},1e5,3\n" for n in range(1, 2000))
    trace = read(
        tmp_path, "model,t_s,rate_rps,active_clients\nm,0,1,1\n" + text.partition("\n")[2], length_s=60.0
    )

    assert 20 < len(trace.requests) < 120
    assert max(arrivals(trace)) < 60.0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is no trace: its first line must name the columns"),
        ("a,b\n1,2\n", "is no trace: its first line must name the columns"),
        (
            "arrival_s,input_tokens,output_tokens\n0,1,1\n1,2\n",
            "line 3: it has 2 fields, the first line names 3",
        ),
        ("arrival_s,input_tokens,output_tokens\n\nsoon,1,1\n", r"line 3: column `arrival_s`.*'soon'"),
        ("arrival_s,input_tokens,output_tokens\nnan,1,1\n", r"line 2: column `arrival_s`.*0 or more.*'nan'"),
        ("arrival_s,input_tokens,output_tokens\n0,-1,1\n", r"line 2: column `input_tokens`.*'-1'"),
        ("arrival_s,input_tokens,output_tokens\n0,1,1.5\n", r"line 2: column `output_tokens`.*whole.*'1.5'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", r"line 2: column `TIMESTAMP`.*'noon'"),
        ("model,t_s,rate_rps,cv\nm,0,1,0\n", r"line 2: column `cv`.*above 0.*'0'"),
        ("func,1,2\nf,1,x\n", r"line 2: column `2`.*'x'"),
        ('arrival_s,input_tokens,output_tokens\n"0,1,1\n', "cannot be read as a CSV file"),
    ],
)
def test_a_bad_file_is_refused_with_the_line_that_is_wrong(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)trace\.csv.*{complaint}"):
        read(tmp_path, text)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b"arrival_s,input_tokens,output_tokens\n" + b"0,1,1\n" * 999)
    (tmp_path / "cut.csv.gz").write_bytes(whole[:-9])
    (tmp_path / "bad.csv.gz").write_bytes(whole[:20] + b"\xff" * 9 + whole[29:])
    (tmp_path / "plain.csv.gz").write_text("arrival_s,input_tokens,output_tokens\n", encoding="utf-8")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")

    for name in ("cut.csv.gz", "bad.csv.gz", "plain.csv.gz", "binary.csv", "absent.csv"):
        with pytest.raises(ConfigError, match=rf"{name} cannot be read as a CSV file"):
            read_trace(tmp_path / name, LENGTHS, Random(0))


def test_lengths_are_read_with_and_without_times(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("task_id,input_tokens,output_tokens\nx,133,60\ny,0,5\n", encoding="utf-8")

    assert read_lengths(path) == Lengths.fixed(133, 60)
    assert len(read_lengths(ARENA).choices) == 1500
    path.write_text("task_id,input_tokens,output_tokens\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lengths\.csv has no requests"):
        read_lengths(path)
    path.write_text("func,1\nf,1\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"lengths\.csv has no lengths"):
        read_lengths(path)


# Drawing.


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_have_the_wanted_mean_and_variation(cv: float) -> None:
    trace = draw_trace("gamma", steady({"a": 2.0}, 20_000.0, cv), LENGTHS, Random(3))
    gaps = [late_s - early_s for early_s, late_s in pairwise(arrivals(trace))]

    assert fmean(gaps) == pytest.approx(0.5, rel=0.1)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize("cv", [0.3, 1.0, 5.0])
def test_short_periods_have_the_wanted_mean_number_of_requests(cv: float) -> None:
    chooser, period = Random(5), RatedPeriod("a", 100.0, 10.0, rate_per_s=0.5, cv=cv)
    counts = [len(list(period.draw_arrivals(chooser))) for _ in range(4000)]

    assert fmean(counts) == pytest.approx(5.0, rel=0.1)


def test_tenants_come_at_their_own_rates() -> None:
    trace = draw_trace("poisson", steady({"rare": 0.1, "often": 1.0}, 2000.0), LENGTHS, Random(1))

    assert trace.tenants == ["often", "rare"]
    assert sum(request.tenant == "rare" for request in trace.requests) == pytest.approx(200, rel=0.3)


@given(st.integers(0, 99), st.floats(0.2, 5.0), st.integers(0, 30))
def test_what_is_drawn_lies_in_its_period_and_is_the_same_for_one_seed(
    seed: int, cv: float, num_requests: int
) -> None:
    periods = [CountedPeriod("a", 5.0, 2.0, num_requests), RatedPeriod("b", 5.0, 2.0, 10.0, cv)]
    lengths = Lengths((RequestLength(1, 2), RequestLength(3, 4)))
    trace = draw_trace("any", periods, lengths, Random(seed))

    assert sum(request.tenant == "a" for request in trace.requests) == num_requests
    assert all(5.0 <= at_s <= 7.0 for at_s in arrivals(trace))
    assert all(
        RequestLength(one.num_input_tokens, one.num_output_tokens) in lengths.choices
        for one in trace.requests
    )
    assert trace == draw_trace("any", periods, lengths, Random(seed))


@pytest.mark.parametrize(("rate", "cv", "length_s"), [(0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, math.inf)])
def test_arrivals_without_rate_variation_or_end_are_refused(rate: float, cv: float, length_s: float) -> None:
    with pytest.raises(ConfigError, match="arrivals need a rate and a CV above 0 and an end"):
        steady({"a": rate}, length_s, cv)


# What is done to them.


@given(TRACES, st.floats(0.0, 1e5), st.floats(1e-3, 1e5))
def test_a_window_has_what_came_in_it_counted_from_its_beginning(
    trace: Trace, begin_s: float, length_s: float
) -> None:
    window = trace.window(begin_s, length_s)

    assert len(window.requests) == sum(begin_s <= at_s < begin_s + length_s for at_s in arrivals(trace))
    assert all(0.0 <= at_s <= length_s for at_s in arrivals(window))


@given(TRACES, st.floats(0.01, 100.0))
def test_at_another_speed_everything_comes_as_before_only_sooner(trace: Trace, speed: float) -> None:
    faster = trace.at_speed(speed)

    assert arrivals(faster) == [at_s / speed for at_s in arrivals(trace)]
    assert [one.tenant for one in faster.requests] == [one.tenant for one in trace.requests]


@given(TRACES, st.integers(1, 100), st.integers(1, 100))
def test_cutting_shortens_only_what_is_longer(trace: Trace, max_input: int, max_output: int) -> None:
    for before, after in zip(trace.requests, trace.cut(max_input, max_output).requests, strict=True):
        assert after.num_input_tokens == min(before.num_input_tokens, max_input)
        assert after.num_output_tokens == min(before.num_output_tokens, max_output)
    assert trace.cut() == trace


@given(TRACES, st.lists(st.text(max_size=2), min_size=1, max_size=9, unique=True))
def test_tenants_get_models_by_how_busy_they_are(trace: Trace, models: list[str]) -> None:
    mapped, ranks = trace.mapped(models), {tenant: rank for rank, tenant in enumerate(trace.tenants)}

    assert arrivals(mapped) == arrivals(trace)
    for before, after in zip(trace.requests, mapped.requests, strict=True):
        assert after.tenant == models[ranks[before.tenant] % len(models)]


def test_a_trace_cannot_be_cut_sped_up_or_mapped_by_nothing() -> None:
    trace = Trace.of("one", [TracedRequest(0.0, "a", 1, 1)])

    with pytest.raises(ConfigError, match="speed of a trace is above 0, given: 0"):
        trace.at_speed(0.0)
    with pytest.raises(ConfigError, match="given: from -1 s"):
        trace.window(-1.0)
    with pytest.raises(ConfigError, match="`max_output_tokens` leaves at least 1 token, given: 0"):
        trace.cut(5, 0)
    with pytest.raises(ConfigError, match="at least 1 model"):
        trace.mapped([])


def test_requests_before_a_time_are_counted_by_steps(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    rows = ["5,a,1,1", "109,a,1,1", "120,b,1,1", "299,a,1,1", "320,a,1,1"]
    path.write_text("\n".join(["arrival_s,model,input_tokens,output_tokens", *rows]) + "\n")
    counts = {tenant: list(map(round, steps)) for tenant, steps in read_counts(path, 310.0, 100.0).items()}
    assert counts == {"a": [1, 0, 1], "b": [0, 1, 0]}, "from 10 s, 110 s and 210 s"


def test_counted_requests_are_spread_over_steps(tmp_path: Path) -> None:
    path = tmp_path / "hours.csv"
    path.write_text("day,hour,conversation,api\n0,0,60,0\n0,1,6,12\n")
    counts = read_counts(path, 5400.0, 600.0)
    assert counts["conversation"] == pytest.approx([10.0] * 6 + [1.0] * 3)
    assert counts["api"] == pytest.approx([0.0] * 6 + [2.0] * 3)
