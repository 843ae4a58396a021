"""Which errors lose a model, and which lose the device."""

from __future__ import annotations

import pytest
import torch

from hearth.core.errors import DeviceError
from hearth.worker.failure import failure_of


def refused(what: str) -> DeviceError:
    """In the words of `system/cuda/driver.py`."""
    return DeviceError(f"CUDA's driver refused cuMemMap(1, 2): {what}; see `nvidia-smi`")


@pytest.mark.parametrize(
    "error",
    [
        refused("CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
        refused("CUDA_ERROR_LAUNCH_FAILED (719)"),
        refused("CUDA_ERROR_ECC_UNCORRECTABLE (214)"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
)
def test_an_error_of_the_context_loses_the_device(error: Exception) -> None:
    assert failure_of(error).is_fatal


@pytest.mark.parametrize(
    "error",
    [
        refused("CUDA_ERROR_OUT_OF_MEMORY (2)"),
        refused("CUDA_ERROR_INVALID_VALUE (1)"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        ValueError("something is off"),
    ],
)
def test_any_other_loses_one_model(error: Exception) -> None:
    assert not failure_of(error).is_fatal
