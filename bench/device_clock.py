"""At which clock and power a GPU computed what was measured. Changes neither.

A GPU that reaches its power limit lowers its clock, and products take as much longer: whether a figure is the
software's or the power supply's cannot be told without this.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from bench.report import tell

try:
    import pynvml
except ImportError:  # where there is no GPU, there is nothing to ask
    pynvml = None

_PERIOD_S = 0.1  #: seldom: what asks the driver takes time of those who launch


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One look at a device."""

    mhz: int  #: of its multiprocessors
    watts: float
    is_power_capped: bool  #: the clock was lowered, and for that reason


class ClockWatch:
    """Looks at a device again and again, on a thread of its own. Mutable; one thread takes what it saw."""

    def __init__(self, device: torch.device) -> None:
        """Look at nothing if the device is no GPU, or its driver cannot be asked."""
        self._samples: list[ClockSample] = []
        self._handle = _handle_of(device)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-clock", daemon=True)
        if self._handle is not None:
            self._thread.start()

    def take(self) -> dict[str, float] | None:
        """Return what was seen since the last call; None: nothing."""
        samples, self._samples = self._samples, []
        if not samples or self._handle is None:
            return None
        return {
            **described(samples),
            "max_mhz": pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_SM),
            "max_watts": pynvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1e3,
        }

    def close(self) -> None:
        self._is_closed.set()
        if self._handle is not None:
            self._thread.join()

    def _watch(self) -> None:
        while not self._is_closed.wait(_PERIOD_S):
            self._samples.append(_sample(self._handle))


def described(samples: Sequence[ClockSample]) -> dict[str, float]:
    return {
        "mhz": round(fmean(one.mhz for one in samples)),
        "min_mhz": min(one.mhz for one in samples),
        "watts": round(fmean(one.watts for one in samples)),
        "power_capped_share": round(fmean(one.is_power_capped for one in samples), 3),
    }


def _handle_of(device: torch.device) -> Any:
    """Return by what a driver knows a device; None: it is no GPU, or nobody can ask."""
    if pynvml is None or device.type != "cuda":
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError as error:
        tell(f"the clock of {device} is not watched: {error}")
        return None


def _sample(handle: Any) -> ClockSample:
    reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return ClockSample(
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        bool(reasons & pynvml.nvmlClocksThrottleReasonSwPowerCap),
    )
