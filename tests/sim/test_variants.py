"""Settings to compare with do what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from hearth.core.types import ModelId
from hearth.policy.fleet.events import DemandForecast, Prewarming
from hearth.sim.report import SimulationReport, cold_starts_of, report_of
from hearth.sim.run import serve_trace
from hearth.sim.setting import Policy, SimulationSetting
from hearth.sim.traces import Trace, TracedRequest
from hearth.sim.variants import OWN, variants
from tests.sim.small_machine import MACHINE, trace_of

pytestmark = pytest.mark.slow

A, B, C = ModelId("a"), ModelId("b"), ModelId("c")
#: Two of the models fit together.
SETTING = SimulationSetting(
    {A: "3B", B: "3B", C: "3B"}, 16 << 30, num_workers=3, keep_alive_s=5.0, may_drop=True
)


def asked(*requests: tuple[float, ModelId]) -> Trace:
    return trace_of([TracedRequest(at_s, model, 100, 10) for at_s, model in requests])


def reports(trace: Trace, setting: SimulationSetting = SETTING) -> Mapping[str, SimulationReport]:
    return {name: report_of(serve_trace(trace, one, MACHINE)) for name, one in variants(setting).items()}


def test_each_mechanism_that_a_setting_has_is_left_out_once() -> None:
    names = [name for name in variants(replace(SETTING, prewarming=Prewarming())) if "without" in name]
    assert names == [
        "without pre-warming",
        "without turns",
        "without reuse of weights",
        "without drop",
    ]
    bare = variants(replace(SETTING, may_drop=False, policy=Policy.DRAIN))
    assert [name for name in bare if "without" in name] == ["without reuse of weights"]


def test_one_model_per_gpu_takes_a_gpu_for_each_and_static_keeps_it() -> None:
    found = reports(asked((0.0, A), (1.0, B), (100.0, A)))
    assert found[OWN].most_gpus == 1
    assert found["one model per GPU"].most_gpus == found["keep-alive"].most_gpus == 2
    static = found["static"]
    assert static.most_gpus == 3
    assert static.gpu_s == pytest.approx(3 * static.simulated_s, rel=0.01)
    assert sum(static.gpu_s_by_model.values()) == pytest.approx(static.gpu_s)
    assert static.gpu_s > 5 * found["keep-alive"].gpu_s > 5 * found[OWN].gpu_s


def test_weights_of_an_idle_model_leave_the_device_without_reuse() -> None:
    found = reports(asked((0.0, A), (20.0, A), (22.0, A)))
    assert found[OWN].num_loads == 1
    assert sum(found[OWN].cold_starts.values()) == 1
    for name in ("without reuse of weights", "keep-alive"):
        assert sum(found[name].cold_starts.values()) == 2, "once more after `keep_alive`, not within it"
        assert found[name].bytes_moved == 2 * found[OWN].bytes_moved


def test_the_least_recently_used_model_leaves_first() -> None:
    """`a` is asked for often, but `b` last."""
    often = [(10.0 * number, A) for number in range(20)]
    trace = asked(*often, (196.0, B), (210.0, C), (220.0, A))
    one = replace(SETTING, num_workers=1, may_drop=False, policy=Policy.DRAIN)
    found = reports(trace, one)
    assert found["LRU"].bytes_moved > found[OWN].bytes_moved
    assert sum(found[OWN].cold_starts.values()) == 3


def test_a_forecast_model_is_loaded_before_its_requests() -> None:
    trace = asked((0.0, B), *[(1210.0 + number, A) for number in range(5)])
    setting = replace(SETTING, prewarming=Prewarming(budget=0.5), keep_alive_s=60.0)
    forecast = DemandForecast(1.0, A, 600.0, (0.0, 0.0, 0.1), (0.0, 0.0, 0.2))
    ahead = serve_trace(trace, setting, MACHINE, forecasts=[forecast])
    late = serve_trace(trace, variants(setting)["without pre-warming"], MACHINE)
    assert sum(cold_starts_of(ahead).values()) == 1
    assert sum(cold_starts_of(late).values()) == 2
    assert report_of(ahead).num_prewarmed == 1
