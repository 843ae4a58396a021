from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from hearth.cli.figures import size
from hearth.control.datadir import DataDir
from hearth.control.journal import Journal
from hearth.core.types import ModelId, RequestId, WorkerId
from hearth.policy.fleet.events import (
    BrainConfig,
    Event,
    ModelDeployed,
    RequestArrived,
    RequestFinished,
    WorkerJoined,
)
from hearth.sim.setting import KIND, SimulationSetting
from tests.cli.shell import Hearth
from tests.sim.small_machine import MACHINE, MEMORY_BYTES, SHAPES


def machine(directory: Path) -> str:
    """Return the path of a profile whose times are round numbers."""
    path = directory / "machine.json"
    path.write_bytes(msgspec.json.encode(MACHINE.measured))
    return str(path)


def trace(directory: Path) -> str:
    """Return the path of a trace: three tenants, of which `x` is the busiest and `z` comes late."""
    rows = [f"{0.2 * number:.1f},{'xxyxxy'[number % 6]},100,20" for number in range(24)]
    path = directory / "trace.csv"
    path.write_text("\n".join(["arrival_s,model,input_tokens,output_tokens", *rows, "90,z,100,20"]) + "\n")
    return str(path)


def test_a_trace_is_simulated_and_its_figures_shown(hearth: Hearth, tmp_path: Path) -> None:
    told = hearth(*("simulate", trace(tmp_path), "--models", "7b,3b", "--profile", machine(tmp_path)))
    assert told.code == 0
    assert told.err == ""  # a bar is for terminals
    for name in ("first token", "completion", "longest pause", "on time", "turns", "pauses", "moved"):
        assert name in told.out
    assert "trace.csv at 1x, turns" in told.out
    assert "GPU time by model" in told.out
    assert "GPU time by key" not in told.out


def test_models_that_nobody_asks_for_are_told(hearth: Hearth, tmp_path: Path) -> None:
    asked = ("simulate", trace(tmp_path), "--models", "3b*5", "--profile", machine(tmp_path))
    told = hearth(*asked, "--json")
    assert "2 of 5 models get no request" in told.err
    assert json.loads(told.out)["num_requests"] == 25


def test_refused_requests_are_counted_by_reason(hearth: Hearth, tmp_path: Path) -> None:
    asked = ("simulate", trace(tmp_path), "--models", "7b,3b", "--profile", machine(tmp_path))
    assert "17 never_fits" in hearth(*asked, "--memory", "10GiB").out
    report = json.loads(hearth(*asked, "--memory", "10GiB", "--json").out)
    assert (report["num_refused"], report["refusals"]) == (17, {"never_fits": 17})


def test_the_same_seed_draws_the_same_workload(hearth: Hearth, tmp_path: Path) -> None:
    asked = [
        *("simulate", "gamma:2:3", "--models", "7b*3", "--length", "10", "--json"),
        *("--profile", machine(tmp_path)),
    ]
    first, again, other = (json.loads(hearth(*asked, "--seed", seed).out) for seed in ("1", "1", "2"))
    assert first == again
    assert first["completion_s"] != other["completion_s"]
    assert first["num_models"] == 3


def test_windows_speed_and_cuts_change_what_arrives(hearth: Hearth, tmp_path: Path) -> None:
    asked = ("simulate", trace(tmp_path), "--profile", machine(tmp_path), "--json")
    window = json.loads(hearth(*asked, "--length", "2.4").out)
    assert window["num_requests"] == 12
    fast = json.loads(hearth(*asked, "--length", "2.4", "--speed", "4").out)
    assert fast["simulated_s"] < window["simulated_s"]
    cut = json.loads(hearth(*asked, "--length", "2.4", "--max-output", "1").out)
    assert cut["tokens_per_s"] < window["tokens_per_s"]


def test_a_policy_is_chosen(hearth: Hearth, tmp_path: Path) -> None:
    asked = [
        *("simulate", trace(tmp_path), "--profile", machine(tmp_path)),
        *("--models", "7b,7b", "--speed", "8"),
    ]
    turns, drain, alone = (
        json.loads(hearth(*asked, "--json", "--policy", policy).out)
        for policy in ("turns", "drain", "one-at-a-time")
    )
    assert turns["num_turns"] > 0 == drain["num_turns"] == alone["num_turns"]
    assert turns["first_token_s"]["p99"] < alone["first_token_s"]["p99"]


def test_the_least_number_of_devices_is_found(hearth: Hearth, tmp_path: Path) -> None:
    asked = [
        *("simulate", trace(tmp_path), "--profile", machine(tmp_path), "--models", "7b,7b,3b"),
        *("--speed", "8", "--on-time", "0.35", "--find", "--target", "90", "--device-hour-price", "2"),
    ]
    found = json.loads(hearth(*asked, "--json").out)
    tried = {(one["num_gpus"], one["host_bytes"]): one["requests_on_time"] for one in found["tried"]}
    num_gpus, host_bytes = found["num_gpus"], found["host_bytes"]
    assert tried[num_gpus, host_bytes] >= 0.9
    all_bytes = max(given for _, given in tried)
    assert tried[num_gpus - 1, all_bytes] is None
    less = [share for (num, given), share in tried.items() if num == num_gpus and given < host_bytes]
    assert less == [None] * len(less) != []
    assert found["cost_per_day"] == 48 * num_gpus
    told = hearth(*asked)
    assert told.out.startswith(f"{num_gpus} GPUs with {size(host_bytes)} of host memory")
    assert f"for {found['cost_per_day']:.2f} a day" in told.out
    assert "all 25 requests" in told.out
    sampled = hearth(*asked, "--speed", "0.1", "--sample", "10")
    assert "of 25 requests. The busiest window is among them" in sampled.out


def test_wrong_input_is_explained(hearth: Hearth, tmp_path: Path) -> None:
    path, profile = trace(tmp_path), machine(tmp_path)
    for words, complaint in [
        (("poisson:often",), "poisson:RATE or gamma:RATE:CV, given: `poisson:often`"),
        (("gamma:2",), "poisson:RATE or gamma:RATE:CV, given: `gamma:2`"),
        ((path, "--models", "7b*0"), "given: '7b*0'"),
        ((path, "--models", "huge"), "`huge`"),
        ((path, "--memory", "much"), "a size is a number"),
        ((path, "--begin", "1000"), "no request"),
        ((str(tmp_path / "none.csv"),), "none.csv"),
        ((path, "--pace", "-1"), "greater than or equal to 0"),
    ]:
        refused = hearth("simulate", "--profile", profile, *words)
        assert (refused.code, refused.out) == (2, "")
        assert complaint in " ".join(refused.err.split())


def test_recorded_traffic_is_simulated_with_fewer_devices(hearth: Hearth, tmp_path: Path) -> None:
    setting = SimulationSetting(SHAPES, MEMORY_BYTES)
    events: list[Event] = [
        ModelDeployed(0.0, setting.model_profile(model, MACHINE.shape(shape)))
        for model, shape in SHAPES.items()
    ]
    events += [WorkerJoined(0.0, WorkerId(f"w{number}"), KIND, MEMORY_BYTES) for number in range(2)]
    ids = [RequestId(f"r{number}") for number in range(41)]
    for number, request_id in enumerate(ids):
        model, key = ModelId("abcd"[number % 4]), ("alice", "bob", None, "bob")[number % 4]
        events.append(RequestArrived(100 + number / 10, request_id, model, 100, None, key=key))
    events += [RequestFinished(104 + number / 10, one, 20) for number, one in enumerate(ids[:40])]
    path = DataDir(tmp_path / "data").journal_path
    path.parent.mkdir(parents=True)
    with Journal(path, BrainConfig(), 1 << 30) as journal:
        for event in sorted(events, key=lambda event: event.now_s):
            journal.record(event, [])
    asked = ("simulate", "--journal", str(tmp_path / "data"), "--profile", machine(tmp_path), "--json")
    same, fewer = (hearth(*asked, *words) for words in ((), ("--workers", "1")))
    assert "2 workers of 24.0 GiB, 40 requests; 1 without an end" in same.err
    two, one = json.loads(same.out), json.loads(fewer.out)
    assert (two["num_workers"], two["num_models"], two["num_requests"]) == (2, 4, 40)
    assert (one["num_workers"], one["num_requests"]) == (1, 40)
    assert one["first_token_s"]["p99"] > two["first_token_s"]["p99"]
    _check_charges_by_key(hearth, asked[:-1], two, tmp_path / "out.html")


def _check_charges_by_key(hearth: Hearth, asked: tuple[str, ...], report: dict[str, Any], page: Path) -> None:
    gpu_s_by_key, gpu_s_by_model = report["gpu_s_by_key"], report["gpu_s_by_model"]
    assert gpu_s_by_key.keys() == {"alice", "bob"}
    assert sum(gpu_s_by_model.values()) == pytest.approx(report["gpu_s"])
    # `a` is asked by alice alone, `b` and `d` by bob, and `c` without a key.
    assert 0 < gpu_s_by_key["alice"] <= gpu_s_by_model["a"]
    assert 0 < gpu_s_by_key["bob"] <= gpu_s_by_model["b"] + gpu_s_by_model["d"]
    assert gpu_s_by_key["bob"] > gpu_s_by_key["alice"]
    assert set(report["cost_by_key"].values()) == {None}
    priced = json.loads(hearth(*asked, "--device-hour-price", "3600", "--json").out)
    assert priced["cost_by_key"] == pytest.approx(gpu_s_by_key)  # a second costs 1
    assert priced["cost_by_model"] == pytest.approx(gpu_s_by_model)
    shown = hearth(*asked, "--device-hour-price", "3600", "--report", str(page)).out
    for told in (" ".join(shown.split()), page.read_text()):
        assert f"(cost {gpu_s_by_key['bob']:.2f}), alice" in told


def test_the_page_stands_alone_and_draws_what_was_simulated(hearth: Hearth, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    asked = [
        *("simulate", trace(tmp_path), "--profile", machine(tmp_path), "--models", "7b,7b", "--speed", "8"),
        *("--device-hour-price", "2", "--report", str(page)),
    ]
    assert hearth(*asked).code == 0
    text = page.read_text().removeprefix("<!doctype html>").replace('<meta charset="utf-8">', "")
    root = ElementTree.fromstring(text)
    titles = [title.text for title in root.iter("h2")]
    assert [title and title.split(" in ")[0] for title in titles] == [
        "First token by time of arrival (s)",
        "GPUs",
        "Loads and turns",
        "Cost so far",
    ]
    assert len([*root.iter("svg")]) == 4
    for line in root.iter("polyline"):
        points = [[float(number) for number in point.split(",")] for point in line.attrib["points"].split()]
        assert points
        assert all(60 <= x <= 700 and 24 <= y <= 168 for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert "http" not in text
    assert "cold starts" in {row.text for row in root.iter("th")}


def test_systems_are_compared_in_one_table(hearth: Hearth, tmp_path: Path) -> None:
    asked = ("simulate", trace(tmp_path), "--profile", machine(tmp_path), "--models", "3b,3b", "--compare")
    told = hearth(*asked, "--prewarm", "--device-hour-price", "2")
    assert told.code == 0, told.err
    names = ["Hearth", "without pre-warming", "without turns", "LRU", "keep-alive", "static"]
    assert [name for name in names if name not in told.out] == []
    shown = json.loads(hearth(*asked, "--json").out)
    assert "without pre-warming" not in shown["systems"]
    assert shown["systems"]["Hearth"]["requests_on_time"] == 1.0
    refused = hearth(*asked[:-1], "--prewarm", "--find")
    assert refused.code == 2
    assert "too short" in refused.err


def test_requests_before_the_window_are_the_past_of_forecasts(hearth: Hearth, tmp_path: Path) -> None:
    """`late` comes at the same time of each of the hours before, and again in the one that is simulated."""
    rows = [f"{3600 * hour + 1500 + 10 * number},late,100,5" for hour in range(12) for number in range(20)]
    rows += [f"{3600 * hour + 600 * step},early,100,5" for hour in range(12) for step in range(6)]
    path = tmp_path / "hourly.csv"
    rows.sort(key=lambda row: float(row.split(",")[0]))
    path.write_text("\n".join(["arrival_s,model,input_tokens,output_tokens", *rows]) + "\n")
    asked = ["simulate", str(path), "--profile", machine(tmp_path), "--models", "3b,3b", "--begin", "36000"]
    report = json.loads(hearth(*asked, "--prewarm", "--json").out)
    assert report["num_prewarmed"] > 0
    assert json.loads(hearth(*asked, "--json").out)["num_prewarmed"] == 0
