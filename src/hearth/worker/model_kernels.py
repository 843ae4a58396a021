"""Prepares the kernels of models that a worker hosts or may host, while it runs steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import torch

from hearth.core.errors import HearthError
from hearth.core.messages import PrepareModel
from hearth.core.sizes import StepLimits
from hearth.engine.compile import list_key
from hearth.engine.dry_run import KernelNeeds
from hearth.engine.graphs import CapturedGraph
from hearth.engine.kernel_warmup import KernelWarmup
from hearth.engine.runner import Runner
from hearth.engine.step_shape import GraphKey
from hearth.kernels.kernel_cache import KernelCache, prepare_to_load
from hearth.memory.cuda_pages import PAGE_BYTES, CudaPages
from hearth.store.format.manifest import Manifest
from hearth.worker.step_rehearsal import first_step_keys, other_keys, rehearse

MAX_PAUSE_S = 5.0

log = logging.getLogger(__name__)


class ModelKernels:
    """Kernels on a worker's CUDA device. Any thread may call it; its own thread prepares other models."""

    def __init__(
        self,
        cache: KernelCache,
        device: torch.device,
        describe: Callable[[str], Manifest],
        give_way: Callable[[float], Callable[[], None]],
        learn: Callable[[CapturedGraph], None] | None = None,
    ) -> None:
        """`describe` reads a model's description, and keeps it for its first start.

        `give_way(most_s)` returns a function that rehearsals call to let requests go first. `learn` is given
        each rehearsed graph.
        """
        self._give_way, self._learn = give_way, learn or _forget
        self._warmup, self._device, self._describe = KernelWarmup(cache), device, describe
        self._rehearsed: set[str] = set()  #: lists of kernels that were rehearsed, or failed
        self._thread = ThreadPoolExecutor(1, "hearth-kernels", lambda: torch.cuda.set_device(device))
        self._thread.submit(prepare_to_load)
        self._thread.submit(_prune, cache)

    def compile(self, manifest: Manifest, limits: StepLimits) -> None:
        self._warmup.compile(self._needs(manifest, limits))

    def prepare(self, order: PrepareModel) -> None:
        self._thread.submit(self._prepare, order)

    def _prepare(self, order: PrepareModel) -> None:
        try:
            manifest = self._describe(order.where)
            self.compile(manifest, order.limits)
            self._rehearse(self._needs(manifest, order.limits))
        except (HearthError, OSError) as error:  # the first request reports it
            log.warning("model_not_prepared model=%s reason=%s", order.model, error)
        except Exception:  # the thread's top: go on with the next model
            log.exception("model_not_prepared model=%s", order.model)

    def _rehearse(self, needs: KernelNeeds) -> None:
        """Rehearse steps, once per list of kernels, if all are compiled; first steps come first."""
        if (key := list_key(needs)) in self._rehearsed or not self._warmup.load(needs):
            return
        self._rehearsed.add(key)
        self._capture(needs, first_step_keys)
        self._thread.submit(self._rehearse_others, needs)

    def _rehearse_others(self, needs: KernelNeeds) -> None:
        try:
            self._capture(needs, other_keys)
        except Exception:  # the thread's top: steps load kernels themselves
            log.exception("steps_not_rehearsed")

    def _capture(self, needs: KernelNeeds, keys_of: Callable[[Runner], Sequence[GraphKey]]) -> None:
        with closing(CudaPages(self._device, PAGE_BYTES)) as pages:
            rehearse(needs, pages, self._device, self._give_way(MAX_PAUSE_S), self._learn, keys_of)

    def _needs(self, manifest: Manifest, limits: StepLimits) -> KernelNeeds:
        return KernelNeeds.on(self._device, manifest.arch, manifest.dtype, manifest.quant, limits)


def _forget(graph: CapturedGraph) -> None: ...


def _prune(cache: KernelCache) -> None:
    try:
        if num_removed := cache.prune():
            log.info("kernels_pruned entries=%d", num_removed)
    except OSError as error:
        log.warning("kernels_not_pruned reason=%s", error)
