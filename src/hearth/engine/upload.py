"""Sends short lists of numbers to the device without waiting for it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hearth.kernels.host_read import read_host

Ints = Sequence[int] | npt.NDArray[np.int64] | npt.NDArray[np.int32]


def int32s(numbers: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return non-negative numbers as an array, three times as fast as numpy."""
    return np.frombuffer(array("I", numbers), np.int32)


def int64s(numbers: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.frombuffer(array("q", numbers), np.int64)


class Uploads:
    """Sends an engine's numbers to its device. Mutable; one thread calls it, `next_step` before each step.

    The device reads host memory on its own, and torch does not know when. So sent memory is kept until the
    event behind the step that reads it has passed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._sent: list[torch.Tensor] = []
        #: Host memory of earlier steps, oldest first, each with the event behind its step.
        self._kept: deque[tuple[torch.cuda.Event, list[torch.Tensor]]] = deque()

    def next_step(self) -> None:
        """Begin a step: release host memory that the device has read. All readers so far are queued."""
        if self._sent:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
            event.record()
            self._kept.append((event, self._sent))
            self._sent = []
        while self._kept and self._kept[0][0].query():  # type: ignore[no-untyped-call] # likewise
            self._kept.popleft()

    def ints(self, *columns: Ints) -> tuple[torch.Tensor, ...]:
        lengths = [len(column) for column in columns]
        host = torch.empty(sum(lengths), dtype=torch.int64, pin_memory=self._is_cuda)
        np.concatenate([np.asarray(column, np.int64) for column in columns], out=host.numpy())
        return self._send(host).split_with_sizes(lengths)

    def floats(self, values: Sequence[float]) -> torch.Tensor:
        return self._send(torch.tensor(values, dtype=torch.float32, pin_memory=self._is_cuda))

    def words(self, rows: Sequence[bytes]) -> torch.Tensor:
        """Return rows of equal length, in whole words, as an int32 tensor [rows, words]."""
        words = torch.frombuffer(bytearray().join(rows), dtype=torch.int32).view(len(rows), -1)
        return self._send(words.pin_memory() if self._is_cuda else words)

    def _send(self, host: torch.Tensor) -> torch.Tensor:
        if not self._is_cuda:
            return host.to(self.device)
        out = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        read_host(out, host)
        self._sent.append(host)
        return out
