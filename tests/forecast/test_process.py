from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from hearth.core.forecast_messages import RecordedRequests, RequestForecast
from hearth.core.types import ModelId
from hearth.forecast.__main__ import DAY_S, HOUR_S, forecasts

A, B = ModelId("a"), ModelId("b")
LAST, REGRESSION = "last value", "regression"
STEP_S = 600.0
STEPS_PER_DAY = 144


def line(model: ModelId, counts: Sequence[float | None]) -> bytes:
    return msgspec.json.encode(RecordedRequests(model, STEP_S, list(counts))) + b"\n"


def days(num: int) -> list[float | None]:
    """Requests that come in every other step."""
    return [0.0, 600.0] * (num * STEPS_PER_DAY // 2)


def test_methods_are_chosen_daily_and_for_models_with_too_little_history_hourly() -> None:
    now_s = 0.0

    def lines() -> Iterator[bytes]:
        nonlocal now_s
        for at_s, counts in ((0.0, days(4)), (60.0, [1.0]), (HOUR_S, days(4)), (DAY_S, [600.0] * 40)):
            now_s = at_s
            yield line(A, counts)
            if at_s:
                yield line(B, [None, None, *([6.0] if at_s < HOUR_S else days(4))])
            yield b"\n"

    told: list[dict[ModelId, RequestForecast]] = [{}]
    for one in forecasts(lines(), lambda: now_s):
        if one is None:
            told.append({})
        else:
            told[-1][one.model] = one
    methods = [{model: one.method for model, one in batch.items()} for batch in told]
    assert methods == [
        {A: REGRESSION},
        {A: REGRESSION, B: LAST},
        {A: REGRESSION, B: REGRESSION},
        {A: LAST, B: REGRESSION},
        {},
    ]
    assert told[1][B].mean_per_s == (0.01,) * len(told[1][B].mean_per_s)
    assert told[1][B].mase is None
    mase = told[0][A].mase
    assert mase is not None
    assert mase < 0.5
