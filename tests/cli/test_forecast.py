from __future__ import annotations

import json
from dataclasses import replace

from tests.cli.fake_service import FORECAST, FakeService
from tests.cli.shell import Hearth


def test_the_plot_has_a_bar_for_each_step_and_the_upper_bound_shaded(
    hearth: Hearth, service: FakeService
) -> None:
    lines = hearth("forecast", "smol", "--url", service.url).out.splitlines()
    begin = lines.index("the last day and the forecast")
    assert lines[begin + 1 : begin + 7] == [
        "      60   ██|░",
        "           ██|░",
        "           ██|░",
        "          ███|█░",
        "          ███|█▄",
        "       0 ·███|██",
    ]
    assert "method: last value" in lines
    assert any("0.88 of that of the last value" in line for line in lines)
    assert "replicas worth loading: 1, loaded: 0" in lines
    assert any(line.endswith("ago: would have been loaded on w0") for line in lines)


def test_without_a_forecast_the_reason_is_shown(hearth: Hearth, service: FakeService) -> None:
    service.forecast = replace(FORECAST, forecast=None, reason="it is early", recent_counts=(), counts=())
    shown = hearth("forecast", "smol", "--url", service.url)
    assert "no forecast: it is early" in shown.out.splitlines()
    assert shown.code == 0


def test_json_is_what_the_service_says(hearth: Hearth, service: FakeService) -> None:
    view = json.loads(hearth("forecast", "smol", "--url", service.url, "--json").out)
    assert view["forecast"]["mase"] == 0.875
    assert view["counts"] == [None, 300.0, 600.0, 600.0]
