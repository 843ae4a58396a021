"""The process that forecasts requests, see `core/forecast_messages.py`. It ends with its standard input."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable

import msgspec

from hearth.core.forecast_messages import ForecastSetup, RecordedRequests, RequestForecast
from hearth.core.messages import ProcessAnswer
from hearth.core.types import ModelId
from hearth.system.die_with_parent import die_with_parent


def forecasts(
    lines: Iterable[bytes], clock: Callable[[], float] = time.monotonic
) -> Iterable[RequestForecast | None]:
    """Yield a forecast for each model at each empty line, and then None."""
    import numpy as np

    from hearth.forecast.forecaster import Forecaster
    from hearth.forecast.series import Series

    forecaster, series = Forecaster(), dict[ModelId, Series]()
    for line in lines:
        if line.strip():
            recorded = msgspec.json.decode(line, type=RecordedRequests)
            series[recorded.model] = Series(np.array(recorded.counts, dtype=float), recorded.step_s)
            continue
        yield from forecaster.forecast(series, clock())
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
