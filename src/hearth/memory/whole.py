"""The simplest pool: a model is there whole or not at all, in memory of its own, within a budget."""

from __future__ import annotations

import logging
import threading

import torch

from hearth.errors import DeviceError
from hearth.memory.pool import Need, Space
from hearth.types import ModelId

log = logging.getLogger(__name__)


class WholePool:
    """A `Pool` over torch's own allocator. Mutable; any thread may call it."""

    def __init__(self, device: torch.device, budget_bytes: int) -> None:
        self._device = device
        self.budget_bytes = budget_bytes
        #: Of every model that has a space. Its sum is at most the budget.
        self._needs: dict[ModelId, Need] = {}
        #: Models are put together on threads of their own, while others are dropped.
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._used_bytes()

    def take(self, model: ModelId, need: Need) -> Space:
        with self._lock:
            return self._take(model, need)

    def give_back(self, model: ModelId) -> None:
        with self._lock:
            del self._needs[model]

    def _used_bytes(self) -> int:
        return sum(need.num_bytes for need in self._needs.values())

    def _take(self, model: ModelId, need: Need) -> Space:
        assert model not in self._needs, f"`{model}` has its space already"
        free_bytes = self.budget_bytes - self._used_bytes()
        if need.num_bytes > free_bytes:
            raise DeviceError(
                f"`{model}` needs {need.num_bytes} bytes of device memory ({need.weights_bytes} for weights, "
                f"{need.workspace_bytes} for the workspace, {need.kv_bytes} for KV), {free_bytes} of "
                f"{self.budget_bytes} are free; drop another model, or raise `service.memory_bytes`"
            )
        space = self._allocate(model, need)
        self._needs[model] = need
        return space

    def _allocate(self, model: ModelId, need: Need) -> Space:
        try:
            return self._try_allocate(need)
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, the bare class on a CPU
            log.warning("fallback device_memory=defragmented model=%s reason=%s", model, error)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what earlier models left in pieces that are too small
        try:
            return self._try_allocate(need)
        except RuntimeError as error:
            raise DeviceError(
                f"{need.num_bytes} bytes for `{model}` are within the budget of {self.budget_bytes}, but "
                f"{self._device} does not have them: {error}; end what else uses it, or lower "
                "`service.memory_bytes`"
            ) from error

    def _try_allocate(self, need: Need) -> Space:
        # Apart, so that each is aligned as torch aligns.
        sizes = (need.weights_bytes, need.workspace_bytes, need.kv_bytes)
        return Space(*(torch.empty(size, dtype=torch.uint8, device=self._device) for size in sizes))
