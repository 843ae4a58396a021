"""Short lists of numbers, sent to the device without waiting for it. Knows nothing of their meaning."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch


def upload(device: torch.device, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Each column as an int64 tensor on the device; all of them travel together."""
    packed = _send(list(chain.from_iterable(columns)), torch.int64, device)
    return packed.split_with_sizes([len(column) for column in columns])


def upload_floats(device: torch.device, values: Sequence[float]) -> torch.Tensor:
    return _send(values, torch.float32, device)


def _send(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # From pinned memory the copy returns at once; torch keeps the pages until the device has read them.
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
