from __future__ import annotations

import pytest

from hearth.core.config import EngineConfig
from hearth.core.errors import ConfigError
from hearth.core.sizes import WantedLimits
from hearth.core.types import ModelId
from hearth.sim.report import Percentiles
from hearth.sim.setting import KIND, SimulationSetting, parse_models
from tests.sim.small_machine import MACHINE


def test_models_are_listed_by_shape_and_number() -> None:
    assert parse_models("1b, 7b*2") == {"1b-0": "1b", "7b-1": "7b", "7b-2": "7b"}


@pytest.mark.parametrize("text", ["", "7b,,1b", "7b*", "7b*0", "*3", "7b 1b"])
def test_what_is_no_list_of_shapes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"shapes like `1b,7b,3b` or `7b\*40`, given:"):
        parse_models(text)


def test_a_model_is_promised_one_context_and_keeps_its_tables_and_its_sink() -> None:
    setting = SimulationSetting({}, 0, context=64, wanted_limits=WantedLimits(256, 8, 16))
    shape = MACHINE.shape("3B")
    profile = setting.model_profile(ModelId("a"), shape)
    footprint = profile.footprints[KIND]
    assert profile.num_bytes == shape.weights_bytes <= footprint.weights_bytes
    assert footprint.min_kv_bytes >= 5 * 16 * shape.kv_bytes_per_token
    assert footprint.promise.standing_bytes == footprint.tables_bytes + footprint.sink_bytes
    assert footprint.max_seqs == 8


def test_a_larger_machine_has_larger_limits_as_a_service_has() -> None:
    small, large = (SimulationSetting({}, num_gib << 30).limits for num_gib in (24, 120))
    assert (small.max_batch_tokens, small.max_seqs) == (4096, 256)
    assert (large.max_batch_tokens, large.max_seqs) == (8192, 1024)


def test_engines_are_simulated_as_they_are_configured_by_default() -> None:
    setting, config = SimulationSetting({}, 0), EngineConfig()
    assert (setting.wanted_limits, setting.max_step_s) == (config.wanted_limits, config.max_step)


def test_percentiles_are_values_that_so_many_percent_do_not_exceed() -> None:
    assert Percentiles.of([float(number) for number in range(100, 0, -1)]) == Percentiles(50, 90, 99, 100)
    assert Percentiles.of([3.0]) == Percentiles(3, 3, 3, 3)
    assert Percentiles.of([]) is None
