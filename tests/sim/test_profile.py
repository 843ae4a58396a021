"""Profiles of machines: what a file must hold, how times follow from it, and the profiles that are kept."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from hearth.core.errors import ConfigError
from hearth.core.types import Rung
from hearth.sim.estimates import SPECS
from hearth.sim.profile import LeastSeconds, Profile, kept_names
from hearth.sim.step_times import StepTimes
from hearth.snapshot.cost_profile import MeasuredStep
from tests.sim.small_machine import MACHINE


def a_step(num_tokens: int, num_rows: int, context_tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "num_tokens": num_tokens,
        "num_rows": num_rows,
        "context_tokens": context_tokens,
        "seconds": seconds,
    }


def a_shape(name: str, weights_bytes: int, kv_bytes_per_token: int = 1000) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "dtype": "bfloat16",
        "weights_bytes": weights_bytes,
        "kv_bytes_per_token": kv_bytes_per_token,
        "steps": [a_step(1, 1, 100, 0.011), a_step(8, 8, 800, 0.018), a_step(64, 1, 64, 0.0206)],
    }


def a_profile(**changes: object) -> dict[str, Any]:
    return {
        "version": 1,
        "origin": {
            "command": "python -m bench.profile",
            "commit": None,
            "date": "2026-01-01",
            "device": "none",
            "num_cores": 1,
            "versions": {"python": "3.11"},
            "is_tiny": False,
            "assumed": {},
        },
        "bytes_per_s": {"host": 5e10, "disk": 3e9, "object": 1e9},
        "mapping": {"page_bytes": 1 << 24, "page_s": 1e-5},
        "switch": {"how": "by hand", "give_way_s": 0.003, "begin_s": 0.002},
        "assemble_s": 0.05,
        "host_step_s": 0.0,
        "shapes": [a_shape("1B", 2_000_000_000), a_shape("7B", 14_000_000_000)],
        **changes,
    }


def load(folder: Path, document: object) -> Profile:
    path = folder / "machine.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return Profile.load(path)


SECONDS = st.floats(1e-5, 10.0)
COUNTS = st.integers(1, 5000)


@st.composite
def measured_steps(draw: st.DrawFn) -> list[MeasuredStep]:
    """Steps of both kinds with any times, as if something had always disturbed the measuring."""
    decode = draw(st.lists(st.tuples(COUNTS, COUNTS, SECONDS), min_size=1, max_size=8))
    prompts = draw(st.lists(st.tuples(COUNTS, COUNTS, COUNTS, SECONDS), min_size=1, max_size=8))
    return [
        *(MeasuredStep(rows, rows, rows * context, seconds) for rows, context, seconds in decode),
        *(
            MeasuredStep(rows + more, rows, rows + more + context, seconds)
            for rows, more, context, seconds in prompts
        ),
    ]


@given(measured_steps(), COUNTS, st.integers(0, 5000), COUNTS, COUNTS)
def test_a_row_or_a_token_or_context_more_never_makes_a_step_shorter(
    steps: list[MeasuredStep], num_rows: int, num_more: int, context: int, more: int
) -> None:
    times = StepTimes.fitted(steps)
    num_tokens = num_rows + num_more
    step_s = times.step_s(num_tokens, num_rows, context)

    assert 0.0 <= step_s < math.inf
    assert times.step_s(num_tokens, num_rows, context + more) >= step_s
    assert times.step_s(num_tokens + more, num_rows, context) >= step_s
    assert times.step_s(num_tokens + more, num_rows + more, context) >= step_s


@given(
    st.floats(1e-4, 0.1),
    st.floats(1e-6, 1e-3),
    st.floats(1e-9, 1e-6),
    st.floats(1e-5, 1e-3),
    st.integers(1, 256),
    st.integers(1, 8192),
)
def test_a_machine_that_follows_the_rule_is_found_again(
    base_s: float, row_s: float, context_s: float, token_s: float, num_rows: int, context: int
) -> None:
    def decode(rows: int, tokens: int) -> MeasuredStep:
        return MeasuredStep(rows, rows, tokens, base_s + rows * row_s + tokens * context_s)

    steps = [decode(rows, rows * each) for rows in (1, 16, 256) for each in (64, 1024, 8192)]
    steps += [
        MeasuredStep(tokens, 1, tokens, base_s + row_s + tokens * (token_s + context_s))
        for tokens in (16, 4096)
    ]
    times = StepTimes.fitted(steps)

    wanted_s = decode(num_rows, num_rows * context).seconds
    assert times.step_s(num_rows, num_rows, num_rows * context) == pytest.approx(wanted_s, rel=1e-3)
    assert times.step_s(1000, 1, 1000) == pytest.approx(
        base_s + row_s + 1000 * (token_s + context_s), rel=1e-3
    )


def test_noise_that_falls_is_put_at_its_mean() -> None:
    steps = [MeasuredStep(rows, rows, rows, seconds) for rows, seconds in ((1, 0.2), (2, 0.1), (3, 0.3))]
    times = StepTimes.fitted([*steps, MeasuredStep(8, 1, 8, 0.1)])

    assert [times.step_s(rows, rows, rows) for rows in (1, 2, 3)] == pytest.approx([0.15, 0.15, 0.3])


def test_prompts_alone_took_longer_because_no_step_was_under_way_before() -> None:
    def seconds(tokens: int, context: int) -> float:
        return 0.002 + tokens * 1e-5 + context * 1e-7

    decode = [
        MeasuredStep(rows, rows, rows * each, 0.001 + rows * each * 1e-7)
        for rows in (1, 64)
        for each in (1, 999)
    ]
    sizes = (16, 64, 256, 1024, 4096)
    alone = [MeasuredStep(tokens, 1, tokens, 0.0008 + seconds(tokens, tokens)) for tokens in sizes]
    beside = [MeasuredStep(8 + tokens, 9, 4000, seconds(8 + tokens, 4000)) for tokens in sizes]
    times = StepTimes.fitted([*decode, *alone, *beside])

    assert times.start_s == pytest.approx(0.0008, rel=1e-2)
    assert times.step_s(256, 1, 256) == pytest.approx(seconds(256, 256), rel=1e-2)
    assert times.step_s(2000, 3, 5000) == pytest.approx(seconds(2000, 5000), rel=1e-2)
    assert times.measured_s(alone[2]) == pytest.approx(alone[2].seconds, rel=1e-2)
    assert StepTimes.fitted([*decode, *alone]).start_s == 0.0, "nothing tells it from computing"


def test_a_prompt_of_few_tokens_takes_as_long_as_the_shortest_that_was_measured() -> None:
    steps = [MeasuredStep(1, 1, 1, 0.001), MeasuredStep(16, 1, 16, 0.003), MeasuredStep(64, 1, 64, 0.003)]

    assert StepTimes.fitted(steps).step_s(3, 2, 3) == pytest.approx(0.003, rel=1e-2)


def test_a_profile_tells_times_rates_and_sizes(tmp_path: Path) -> None:
    profile = load(tmp_path, a_profile(host_step_s=0.001))
    shape = profile.shape("1B")

    assert profile.bytes_per_s[Rung.HOST] == 5e10
    assert profile.give_way_s + profile.begin_s == pytest.approx(0.005)
    assert profile.assemble_s == 0.05
    assert (shape.weights_bytes, shape.kv_bytes_per_token) == (2_000_000_000, 1000)
    assert shape.step_s(1, 1, 100) == pytest.approx(0.012)
    assert shape.step_s(64, 1, 64) == pytest.approx(0.0216)


def test_what_engines_time_of_steps_is_what_they_take_unless_it_was_measured(tmp_path: Path) -> None:
    timed = [{**step, "device_s": step["seconds"] / 2} for step in a_shape("1B", 1)["steps"]]
    shapes = [{**a_shape("1B", 2_000_000_000), "steps": timed}, a_shape("7B", 14_000_000_000)]
    profile = load(tmp_path, a_profile(shapes=shapes))

    assert profile.shape("1B").step_s(8, 8, 800) == pytest.approx(0.018)
    assert profile.shape("1B").device_s(8, 8, 800) == pytest.approx(0.009)
    assert profile.shape("7B").device_s(64, 1, 64) == profile.shape("7B").step_s(64, 1, 64)
    twice = profile.scaled("other", 4_000_000_000, 2000)
    assert twice.device_s(8, 8, 800) == pytest.approx(0.018)


def test_steps_behind_loads_take_what_they_took_in_a_worker_if_that_was_measured(tmp_path: Path) -> None:
    shapes = [
        {**a_shape("1B", 2_000_000_000), "eager_s": 0.006, "behind_load_s": 0.011},
        {**a_shape("7B", 14_000_000_000), "eager_s": 0.01},
    ]
    profile = load(tmp_path, a_profile(shapes=shapes))

    assert [profile.shape(name).eager_s for name in ("1B", "7B")] == [0.011, 0.01]


def test_a_model_is_found_however_its_name_is_spelled(tmp_path: Path) -> None:
    profile = load(tmp_path, a_profile())

    assert profile.shape("7b") is profile.shape("7B")


def test_a_size_that_was_not_measured_is_scaled_from_the_nearest(tmp_path: Path) -> None:
    profile = load(tmp_path, a_profile())
    measured, twice = profile.shape("7B"), profile.shape("14B")

    assert twice.weights_bytes == 2 * measured.weights_bytes
    assert twice.kv_bytes_per_token == 2 * measured.kv_bytes_per_token
    assert twice.step_s(3, 3, 500) == pytest.approx(2 * measured.step_s(3, 3, 500))
    less_kv = profile.scaled("other", measured.weights_bytes, measured.kv_bytes_per_token // 4)
    assert less_kv.times.rows_s == measured.times.rows_s
    assert less_kv.times.context_s_per_token == pytest.approx(measured.times.context_s_per_token / 4)


@pytest.mark.parametrize("name", ["eight", "0B", "B", "-3B"])
def test_a_model_that_is_neither_measured_nor_a_size_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"no model `{name}`; name one of `1B`, `7B`, or a size"):
        load(tmp_path, a_profile()).shape(name)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"version": 2}, "version"),
        ({"bytes_per_s": {"host": 5e10, "disk": 3e9}}, "lacks `object`"),
        ({"bytes_per_s": {"host": 0.0, "disk": 3e9, "object": 1e9}}, r"\$\.bytes_per_s"),
        ({"assemble_s": -1.0}, r"\$\.assemble_s"),
        ({"assemble_s": "soon"}, r"\$\.assemble_s"),
        ({"colour": "red"}, "colour"),
        ({"shapes": []}, r"\$\.shapes"),
        ({"shapes": [a_shape("1B", 1), a_shape("1B", 2)]}, "names a model twice"),
        ({"shapes": [a_shape("1B", 1) | {"steps": [a_step(1, 1, 1, 0.1)]}]}, "steps with prompts"),
        ({"shapes": [a_shape("1B", 1) | {"steps": [a_step(1, 2, 1, 0.1)]}]}, "rows <= tokens"),
        ({"shapes": [a_shape("1B", 1) | {"steps": [a_step(1, 1, 1, 0.0)]}]}, "takes time"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_its_name_and_field(
    tmp_path: Path, changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=rf"machine\.json.*{complaint}"):
        load(tmp_path, a_profile(**changes))


def test_a_profile_that_was_cut_off_says_what_it_lacks(tmp_path: Path) -> None:
    document = a_profile()
    del document["switch"]

    with pytest.raises(
        ConfigError, match=r"machine\.json is no profile of version 1: .*`switch`.*bench\.profile"
    ):
        load(tmp_path, document)


def test_an_unknown_profile_is_refused_with_those_that_are_kept() -> None:
    with pytest.raises(ConfigError, match=r"there is no profile `b300`; name one of .*`cpu2`"):
        Profile.load("b300")


@pytest.mark.parametrize("name", SPECS)
def test_an_estimate_is_slower_by_what_its_specification_says(name: str) -> None:
    base, estimated = Profile.load("h200"), Profile.load(name)
    spec, base_spec = SPECS[name], SPECS["h200"]

    assert estimated.is_estimate == (name != "h200")
    assert estimated.measured.origin.device.startswith("NVIDIA")
    before, after = base.shape("7B"), estimated.shape("7B")
    for sizes, slower in [
        ((1, 1, 64), base_spec.memory_bytes_per_s / spec.memory_bytes_per_s),
        ((8192, 1, 8192), base_spec.flops / spec.flops),
    ]:
        assert after.step_s(*sizes) == pytest.approx(slower * before.step_s(*sizes), rel=0.05)
    bus = spec.bus_bytes_per_s / base_spec.bus_bytes_per_s
    assert estimated.bytes_per_s[Rung.HOST] == pytest.approx(bus * base.bytes_per_s[Rung.HOST])


@pytest.mark.parametrize("name", kept_names())
def test_a_kept_profile_was_measured_and_its_times_fit(name: str) -> None:
    profile = Profile.load(name)

    assert not profile.measured.origin.is_tiny
    for measured in profile.measured.shapes:
        times = profile.shapes[measured.name].times
        errors = [abs(times.measured_s(one) / one.seconds - 1) for one in measured.steps]
        assert sum(errors) / len(errors) < 0.2, f"`{measured.name}` is off by {errors}"


def test_a_timer_that_was_not_asked_tells_no_more_than_the_clock() -> None:
    asked = Profile(replace_struct(MACHINE.measured, beside_load_told_s=0.001))

    assert MACHINE.beside_load == LeastSeconds(0.005, 0.005)
    assert asked.beside_load == LeastSeconds(0.005, 0.001)
