"""The forecast process as the service keeps it: series go out, forecasts become events of the brain."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy.deployed import Deployed
from hearth.control.forecasts import Forecasts
from hearth.control.request_history import STEP_S, RequestHistory
from hearth.control.requests.caller import OPERATOR
from hearth.core.errors import RequestError, UnknownModel
from hearth.core.forecast_messages import LONG_STEP_S
from hearth.core.types import ModelId, RequestId
from hearth.node import processes
from hearth.policy.fleet.events import DemandForecast, RequestArrived
from tests.control.gateway_rig import GatewayRig, with_rig

TINY = ModelId("tiny")


def recorded(path: Path, rig: GatewayRig, num_long_steps: int) -> RequestHistory:
    """Return a history with a request in each step until now."""
    history = RequestHistory(path, rig.metrics)
    begin_s = (time.time() // LONG_STEP_S - num_long_steps) * LONG_STEP_S
    for step in range(round(num_long_steps * LONG_STEP_S / STEP_S) + 1):
        history.tick(begin_s + step * STEP_S, step * STEP_S)
        history.observe(RequestArrived(0.0, RequestId("r"), TINY, 1, 1), ())
    return history


def process_id() -> int:
    (found,) = (one for one in psutil.Process().children() if "hearth.forecast" in one.cmdline())
    return found.pid


def test_without_the_setting_no_forecast_is_shown(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(rig: GatewayRig) -> None:
        with pytest.raises(UnknownModel):
            rig.gateway.views.forecast("nothing", OPERATOR)
        with pytest.raises(RequestError, match=r"restart it with `--set service\.prewarm=advise`"):
            rig.gateway.views.forecast("tiny", OPERATOR)

    with_rig(data_dir, scene)


@pytest.mark.timeout(1000)  # the process has the lowest priority
def test_forecasts_become_events_also_after_the_process_was_killed(
    data_dir: DataDir, deployed: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "FIRST_DELAY_S", 0.01)

    async def scene(rig: GatewayRig) -> None:
        forecasts = Forecasts(
            recorded(data_dir.request_history_path, rig, 20), rig.driver, "info", 400.0, None
        )
        told: asyncio.Queue[DemandForecast] = asyncio.Queue()
        rig.driver.add_sink(
            lambda event, _: told.put_nowait(event) if isinstance(event, DemandForecast) else None
        )
        running = asyncio.create_task(forecasts.run())
        for is_first in (True, False):
            event = await told.get()
            assert (event.model, event.step_s) == (TINY, LONG_STEP_S)
            assert event.mean_per_s[0] == pytest.approx(1 / STEP_S)
            assert 0.0 <= event.age_s < 3 * LONG_STEP_S
            assert forecasts.by_model[TINY].mean_per_s == event.mean_per_s
            assert forecasts.note is None
            if is_first:
                os.kill(process_id(), signal.SIGKILL)
        pid = process_id()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not psutil.pid_exists(pid)
        assert "does not run" in (forecasts.note or "")

    with_rig(data_dir, scene)
