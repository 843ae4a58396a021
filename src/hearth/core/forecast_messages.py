"""Messages between the service and the process that forecasts requests, each a line of JSON.

service                               process
ForecastSetup                         ProcessAnswer
RecordedRequests, of each model
an empty line                         RequestForecast, of each model; an empty line
"""

from __future__ import annotations

from msgspec import Struct

from hearth.core.types import ModelId

#: Requests are forecast in steps of so long, from so many at most.
LONG_STEP_S, NUM_STEPS = 600.0, 2160


class ForecastSetup(Struct, frozen=True):
    log_level: str


class RecordedRequests(Struct, frozen=True):
    model: ModelId
    step_s: float
    counts: list[float | None]  #: requests in each step, the newest last; None: not recorded


class RequestForecast(Struct, frozen=True):
    model: ModelId
    method: str
    step_s: float
    mean_per_s: tuple[float, ...]  #: requests per second in each of the next steps
    high_per_s: tuple[float, ...]  #: more come with a probability of 10%
    #: Mean absolute error one step ahead, on the recent past, relative to the last value as the forecast.
    mase: float | None = None  #: None: there is too little to compare
