from __future__ import annotations

from collections.abc import Iterator

import msgspec

from hearth.core.forecast_messages import RecordedRequests, RequestForecast
from hearth.core.types import ModelId
from hearth.forecast.__main__ import DAY_S, HOUR_S, forecasts

A, B = ModelId("a"), ModelId("b")
LAST, YESTERDAY = "last value", "same time yesterday"
STEP_S = 600.0
STEPS_PER_DAY = 144


def line(model: ModelId, counts: list[float | None]) -> bytes:
    return msgspec.json.encode(RecordedRequests(model, STEP_S, counts)) + b"\n"


def days(num: int) -> list[float | None]:
    """Requests that come at the same time every day."""
    return [600.0 * (step % 7 == step % STEPS_PER_DAY % 5) for step in range(STEPS_PER_DAY)] * num


def test_methods_are_chosen_daily_and_for_models_with_too_little_history_hourly() -> None:
    now_s = 0.0

    def lines() -> Iterator[bytes]:
        nonlocal now_s
        for at_s, counts in ((0.0, days(5)), (60.0, [1.0]), (HOUR_S, days(5)), (DAY_S, [600.0] * 40)):
            now_s = at_s
            yield line(A, counts)
            if at_s:
                yield line(B, [None, None, *([6.0] if at_s < HOUR_S else days(5))])
            yield b"\n"

    told: list[dict[ModelId, RequestForecast]] = [{}]
    for one in forecasts(lines(), lambda: now_s):
        if one is None:
            told.append({})
        else:
            told[-1][one.model] = one
    methods = [{model: one.method for model, one in batch.items()} for batch in told]
    assert methods == [
        {A: YESTERDAY},
        {A: YESTERDAY, B: LAST},
        {A: YESTERDAY, B: YESTERDAY},
        {A: LAST, B: YESTERDAY},
        {},
    ]
    assert told[1][B].mean_per_s == (0.01,) * len(told[1][B].mean_per_s)
    assert told[1][B].mase is None
    assert told[0][A].mase == 0.0
