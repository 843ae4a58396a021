"""What is said of a model that broke, and whether more is lost with it. Drops nothing and logs nothing."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch

from hearth.errors import EngineFailed, HearthError


@dataclass(frozen=True, slots=True)
class Failure:
    label: str
    reason: str
    is_fatal: bool = False  #: the device's context is broken, and with it every model in this process
    trace: str = ""  #: for the log; empty where the reason says it all


def failure_of(error: Exception) -> Failure:
    """Also has the error let go of its frames: they hold the model's memory, which is to be given back."""
    trace = "" if isinstance(error, HearthError) else "".join(traceback.format_exception(error))
    error.__traceback__ = None
    label, reason = EngineFailed.label, f"its engine broke: {error!r}"
    if isinstance(error, HearthError):  # it says itself what is wrong
        label, reason = error.label, str(error)
    return Failure(label, reason, _is_fatal(error), trace)


def _is_fatal(error: Exception) -> bool:
    """An error of the device's context makes every later call fail as well."""
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error) or "[CUDA]" in str(error)
