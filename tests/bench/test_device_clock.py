"""What a GPU's clock was while something was measured, without a GPU."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from bench import device_clock
from bench.device_clock import ClockWatch

DRIVER = SimpleNamespace(
    NVMLError=RuntimeError,
    NVML_CLOCK_SM=1,
    nvmlClocksThrottleReasonSwPowerCap=4,
    nvmlInit=lambda: None,
    nvmlDeviceGetHandleByUUID=str,
    nvmlDeviceGetClockInfo=lambda *_: 1500,
    nvmlDeviceGetMaxClockInfo=lambda *_: 1980,
    nvmlDeviceGetPowerUsage=lambda _: 700_000,
    nvmlDeviceGetEnforcedPowerLimit=lambda _: 700_000,
    nvmlDeviceGetCurrentClocksThrottleReasons=lambda _: 4,
)


def test_a_watch_tells_the_clock_since_it_was_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_clock, "pynvml", DRIVER)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="one"))

    watch = ClockWatch(torch.device("cuda", 0))
    while (found := watch.take()) is None:
        time.sleep(0.01)
    watch.close()
    watch.take()

    expected = {"mhz": 1500, "min_mhz": 1500, "watts": 700, "power_capped_share": 1}
    assert found == {**expected, "max_mhz": 1980, "max_watts": 700}
    assert watch.take() is None  # nobody looks any more


def test_a_driver_that_cannot_be_asked_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("driver not loaded")

    monkeypatch.setattr(device_clock, "pynvml", SimpleNamespace(**{**vars(DRIVER), "nvmlInit": fail}))

    watch = ClockWatch(torch.device("cuda", 0))
    watch.close()

    assert watch.take() is None
    assert "driver not loaded" in capsys.readouterr().err


def test_a_cpu_has_no_clock_to_watch() -> None:
    watch = ClockWatch(torch.device("cpu"))
    watch.close()
    assert watch.take() is None
