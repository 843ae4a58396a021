"""The process that forecasts requests, see `core/forecast_messages.py`. It ends with its standard input."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from hearth.core.forecast_messages import ForecastSetup, RecordedRequests, RequestForecast
from hearth.core.messages import ProcessAnswer
from hearth.core.types import ModelId
from hearth.system.die_with_parent import die_with_parent

if TYPE_CHECKING:
    from hearth.forecast.choice import Chosen

HOUR_S, DAY_S = 3600.0, 86_400.0

log = logging.getLogger(__name__)


def forecasts(
    lines: Iterable[bytes], clock: Callable[[], float] = time.monotonic
) -> Iterable[RequestForecast | None]:
    """Yield a forecast for each model at each empty line, and then None."""
    import numpy as np

    from hearth.forecast.choice import choose
    from hearth.forecast.series import Series

    series: dict[ModelId, Series] = {}
    chosen: dict[ModelId, Chosen] = {}
    chosen_s = refitted_s = -DAY_S + clock()
    for line in lines:
        if line.strip():
            recorded = msgspec.json.decode(line, type=RecordedRequests)
            series[recorded.model] = Series(np.array(recorded.counts, dtype=float), recorded.step_s)
            continue
        now_s = clock()
        if now_s - chosen_s >= DAY_S:
            chosen, chosen_s, refitted_s = choose(series), now_s, now_s
            log.info("methods_chosen num_models=%d seconds=%.1f", len(series), clock() - now_s)
        elif now_s - refitted_s >= HOUR_S:
            known = {model: one for model, one in chosen.items() if model in series and one.mase is not None}
            chosen = {model: one.refit(series[model]) for model, one in known.items()}
            refitted_s = now_s
        # Also those that had too little history an hour ago.
        chosen |= choose({model: one for model, one in series.items() if model not in chosen})
        for model, one in series.items():
            found = chosen[model].forecast(one)
            yield RequestForecast(
                model, found.method, found.step_s, found.mean_per_s, found.high_per_s, found.mase
            )
        yield None
        series = {}


def main() -> int:
    die_with_parent()
    os.nice(19)
    os.environ["OMP_NUM_THREADS"] = "1"  # before numpy is imported
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=ForecastSetup)
    logging.basicConfig(
        level=setup.log_level.upper(), format="%(asctime)s %(levelname)s forecast %(name)s %(message)s"
    )
    _say(ProcessAnswer())
    for forecast in forecasts(sys.stdin.buffer):
        _say(forecast)
    return 0


def _say(message: msgspec.Struct | None) -> None:
    sys.stdout.buffer.write((b"" if message is None else msgspec.json.encode(message)) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
