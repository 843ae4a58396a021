from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import pytest

from hearth.core.forecast_messages import RecordedRequests, RequestForecast
from hearth.core.types import ModelId
from hearth.forecast.__main__ import forecasts
from hearth.forecast.choice import Chosen, choose
from hearth.forecast.forecaster import HOUR_S
from hearth.forecast.series import DAY_S, Series

A, B = ModelId("a"), ModelId("b")
STEP_S = 600.0
STEPS_PER_DAY = 144


def line(model: ModelId, counts: list[float | None]) -> bytes:
    return msgspec.json.encode(RecordedRequests(model, STEP_S, counts)) + b"\n"


def days(num: int) -> list[float | None]:
    """Requests that come at the same time every day."""
    day: list[float | None] = [
        600.0 * (step % 7 == step % STEPS_PER_DAY % 5) for step in range(STEPS_PER_DAY)
    ]
    return day * num


def test_methods_are_chosen_daily_and_for_models_with_too_little_history_hourly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, chosen = 0.0, list[tuple[float, set[ModelId]]]()

    def recorded(series: Mapping[ModelId, Series]) -> dict[ModelId, Chosen]:
        if series:
            chosen.append((now_s, set(series)))
        return choose(series)

    def lines() -> Iterator[bytes]:
        nonlocal now_s
        for now_s, short in ((0.0, True), (60.0, True), (HOUR_S, False), (DAY_S, False)):
            yield line(A, days(2))
            if now_s:
                yield line(B, [None, None, 6.0] if short else days(1))
            yield b"\n"

    monkeypatch.setattr("hearth.forecast.forecaster.choose", recorded)
    told: list[dict[ModelId, RequestForecast]] = [{}]
    for one in forecasts(lines(), lambda: now_s):
        if one is None:
            told.append({})
        else:
            told[-1][one.model] = one
    assert chosen == [(0.0, {A}), (60.0, {B}), (HOUR_S, {B}), (DAY_S, {A, B})]
    assert [set(batch) for batch in told] == [{A}, {A, B}, {A, B}, {A, B}, set()]
    assert set(told[1][B].mean_per_s) == {0.01}, "the last value"
    assert told[1][B].mase is None
    assert told[2][B].mase is not None
