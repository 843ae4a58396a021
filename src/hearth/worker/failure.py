"""Describes why a model failed, and whether the device is lost with it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hearth.core.errors import EngineFailed, HearthError
from hearth.core.types import ModelId
from hearth.system.standing_threads import StandingThreads

#: Driver errors that break the context, as `system/cuda/driver.py` names them.
_FATAL_CODES = (
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "CUDA_ERROR_EXTERNAL_DEVICE",
    "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_MISALIGNED_ADDRESS",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_UNKNOWN",
)


@dataclass(frozen=True, slots=True)
class Failure:
    label: str
    reason: str
    is_fatal: bool = False  #: the device's context is broken: every model in this process is lost
    trace: str = ""  #: for the log; empty if the reason suffices


class ModelBroke(Exception):
    """A model failed while giving way to another one."""

    def __init__(self, model: ModelId, error: Exception) -> None:
        super().__init__(f"`{model}`: {error!r}")
        self.model, self.error = model, error


@contextmanager
def blaming(model: ModelId) -> Iterator[None]:
    """Blame this model for errors, not the one that the work is done for."""
    try:
        yield
    except Exception as error:  # only wrapped: the step loop handles it
        raise ModelBroke(model, error) from error


def blame(model: ModelId, error: Exception) -> tuple[ModelId, Failure]:
    if isinstance(error, ModelBroke):
        error.__traceback__ = None  # as in `failure_of`
        return error.model, failure_of(error.error)
    return model, failure_of(error)


def failure_of(error: Exception) -> Failure:
    """Describe an error, and drop its traceback: frames hold the model's memory, which must be freed."""
    trace = "" if isinstance(error, HearthError) else "".join(traceback.format_exception(error))
    error.__traceback__ = None
    label, reason = EngineFailed.label, f"its engine failed: {error!r}"
    if isinstance(error, HearthError):  # its message suffices
        label, reason = error.label, str(error)
    return Failure(label, reason, _is_fatal(error), trace)


def start_thread(
    threads: StandingThreads, act: Callable[[], object], on_failure: Callable[[Failure], None]
) -> None:
    """Run `act` beside the steps; `on_failure`, called by that thread, receives what it raises."""

    def run() -> None:
        try:
            act()
        except Exception as error:  # the thread's top
            on_failure(failure_of(error))

    threads.start(run)


def _is_fatal(error: Exception) -> bool:
    """True if the device's context is broken, so that every later call fails as well."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text:
        return False
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in text or "[CUDA]" in text:
        return True
    return any(name in text for name in _FATAL_CODES)
