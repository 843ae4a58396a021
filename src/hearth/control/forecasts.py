"""Keeps the process that forecasts requests, and tells the brain its forecasts after each long step."""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from hearth.control.driver import Driver
from hearth.control.observe.observer import describe_prewarm
from hearth.control.observe.views import ForecastView
from hearth.control.request_history import STEP_S, RequestHistory
from hearth.core.errors import HearthError
from hearth.core.forecast_messages import LONG_STEP_S, ForecastSetup, RecordedRequests, RequestForecast
from hearth.core.types import ModelId
from hearth.node import processes
from hearth.policy.fleet.events import Action, DemandForecast, Event, ModelRemoved, Prewarm
from hearth.policy.fleet.prewarm import expected_demand

#: A process that takes longer for its forecasts is replaced. Once a day it trains models.
ANSWER_S = 3600.0

log = logging.getLogger(__name__)


class Forecasts:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        history: RequestHistory,
        driver: Driver,
        log_level: str,
        start_s: float,
        errors: processes.ErrorFile,
    ) -> None:
        """`start_s`: how long the process may take to start. `errors`: its standard error."""
        self.by_model: dict[ModelId, RequestForecast] = {}
        self.begin_s = 0.0  #: when the first step of all of them begins, since the epoch
        self.is_running = False
        self._trouble = "it is starting"
        self._history, self._driver = history, driver
        self._setup, self._start_s, self._errors = ForecastSetup(log_level), start_s, errors
        self._last_orders: dict[ModelId, tuple[float, Prewarm]] = {}  #: with their times since the epoch
        self._is_due = asyncio.Event()
        self._num_failures = 0  #: processes in a row that ended without an answer

    @property
    def note(self) -> str | None:
        """Why there are no new forecasts; None: the process runs."""
        return None if self.is_running else f"the forecast process does not run: {self._trouble}"

    def update(self) -> None:
        self._is_due.set()

    def observe(self, event: Event, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Prewarm):
                self._last_orders[action.model] = time.time(), action
        if isinstance(event, ModelRemoved):
            self._last_orders.pop(event.model, None)

    def view(self, name: ModelId) -> ForecastView:
        fleet, history = self._driver.fleet, self._history
        prewarming, model = fleet.config.prewarming, fleet.models.get(name)
        assert prewarming is not None, "without it there are no forecasts"
        forecast, last = self.by_model.get(name), self._last_orders.get(name)
        expected = expected_demand(fleet, name)
        reason = None if forecast is not None else self.note or "too little is recorded, try in 10 minutes"
        return ForecastView(
            model=name,
            prewarm="advise" if prewarming.is_advice else "on",
            recent_step_s=STEP_S,
            recent_counts=tuple(history.counts(name)),
            step_s=LONG_STEP_S,
            counts=tuple(history.long_counts(name)),
            begin_at_s=self.begin_s,
            forecast=forecast,
            reason=reason,
            num_loaded=0 if model is None else model.num_held,
            num_wanted=None if expected is None else expected.num_replicas,
            lead_s=None if expected is None else expected.lead_s,
            expected_per_s=None if expected is None else expected.per_s,
            budget_s=fleet.prewarm_budget.device_s,
            last_prewarm=None if last is None else describe_prewarm(last[1]),
            last_prewarm_at_s=None if last is None else last[0],
        )

    async def run(self) -> None:
        """Keep a process running, for ever."""
        while True:
            try:
                self._trouble = await self._run_process()
            except (HearthError, OSError, ValueError) as error:  # the next try may do better
                self._trouble = str(error)
            self._num_failures += 1
            delay_s = processes.restart_delay_s(self._num_failures)
            log.error("forecast_process_ended next_try_s=%g reason=`%s`", delay_s, self._trouble)
            await asyncio.sleep(delay_s)

    async def _run_process(self) -> str:
        """Use one process until it ends, and say why it did. Raises HearthError: it did not start."""
        process = await processes.spawn("hearth.forecast", self._setup, self._errors)
        asking = None
        try:
            await processes.answer_of(
                process, "the forecast process", self._start_s, "check that the machine is not overloaded"
            )
            self.is_running = True
            asking = asyncio.create_task(self._ask(process))
            code = await process.wait()
            return processes.ending_of(code, b"", None).reason
        finally:
            self.is_running = False
            if asking is not None:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            processes.kill(process)  # nothing of it is kept
            await process.wait()

    async def _ask(self, process: Process) -> None:
        self._is_due.set()
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            begin_s = self._history.ended_at_s
            sending = asyncio.create_task(self._send(process))
            try:
                async with asyncio.timeout(ANSWER_S):
                    found = await self._receive(process)
            except (OSError, ValueError) as error:  # TimeoutError is an OSError
                log.error("forecasts_not_received reason=%r", error)
                processes.kill(process)
                return
            finally:
                sending.cancel()
            self.begin_s, self.by_model, self._num_failures = begin_s, found, 0
            for forecast in found.values():
                self._tell(forecast)
                await asyncio.sleep(0)  # there may be a thousand

    async def _send(self, process: Process) -> None:
        assert process.stdin is not None, "asked for a pipe"
        models = self._driver.fleet.models
        with suppress(ConnectionError, RuntimeError):  # it has just ended, by asyncio and by uvloop
            for name in [name for name, model in models.items() if model.profile is not None]:
                if counts := self._history.long_counts(name):
                    recorded = RecordedRequests(name, LONG_STEP_S, list(counts))
                    process.stdin.write(msgspec.json.encode(recorded) + b"\n")
                    await process.stdin.drain()
                    await asyncio.sleep(0)
            process.stdin.write(b"\n")

    async def _receive(self, process: Process) -> dict[ModelId, RequestForecast]:
        assert process.stdout is not None, "asked for a pipe"
        found = {}
        while (line := await process.stdout.readline()) != b"\n":
            forecast = msgspec.json.decode(line, type=RequestForecast)  # also where the process has ended
            found[forecast.model] = forecast
        return found

    def _tell(self, forecast: RequestForecast) -> None:
        age_s = max(0.0, time.time() - self.begin_s)
        if age_s < forecast.step_s * len(forecast.mean_per_s):
            now_s = self._driver.now_s
            self._driver.post(
                DemandForecast(
                    now_s=now_s,
                    model=forecast.model,
                    step_s=forecast.step_s,
                    mean_per_s=forecast.mean_per_s,
                    high_per_s=forecast.high_per_s,
                    age_s=age_s,
                )
            )
