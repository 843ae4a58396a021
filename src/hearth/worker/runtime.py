"""Brings up a worker's device before the first model: threads, context, libraries, memory.

Memory comes last: a worker that replaces another waits for that one's memory to become free.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from hearth.core.config import EngineConfig
from hearth.core.errors import ConfigError, DeviceError
from hearth.core.messages import WorkerSetup
from hearth.core.types import ModelId
from hearth.engine.graph_capture import use_library_memory
from hearth.memory.arena import ArenaPool
from hearth.memory.cuda_pages import PAGE_BYTES, CudaPages, can_map
from hearth.memory.library_memory import LibraryMemory
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.memory.vmm import MappedPool
from hearth.models.layout import ALIGNMENT_BYTES
from hearth.policy.turns.turn_policy import TurnRules
from hearth.snapshot.memory_profile import MemoryProfile
from hearth.store.transfer.lease_client import LeaseClient
from hearth.store.transfer.transfer import Loader
from hearth.system.host_memory import machine_bytes
from hearth.worker.background import FirstTokens
from hearth.worker.model_kernels import ModelKernels
from hearth.worker.model_marks import WorkerMarks
from hearth.worker.model_snapshots import ModelSnapshots
from hearth.worker.stage_connections import StageConnections

#: For needs of requests that no measurement saw, such as sorting the logits of a large batch.
SPARE_BYTES = 2 << 30
#: Device memory besides the pool: graphs, uploads, the sampler's temporaries. Until it is measured, torch may
#: take this much, and a share of the budget.
UNBOOKED_BYTES, UNBOOKED_SHARE = SPARE_BYTES, 0.1
#: Library memory that captured steps use, besides the pool and torch: cuBLAS takes some 32 MiB.
LIBRARY_BYTES = 64 << 20
#: Share of the machine's memory for all workers together.
_CPU_SHARE = 0.5

_CPU_INFORMATION = Path("/proc/cpuinfo")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    device: torch.device
    name: str  #: for people
    device_bytes: int  #: of the whole device
    budget_bytes: int  #: of the pool
    new_pool: Callable[[EvictionTermsOf], Pool]  #: allocates the memory, or raises DeviceError
    shares_workspace: bool  #: all models share one workspace
    torch_limit: TorchLimit | None = None  #: None: torch is not limited
    #: Captured steps refer to the same addresses in every process.
    has_fixed_addresses: bool = False


@dataclass(frozen=True, slots=True)
class HostingResources:
    """The device, configuration and sources shared by all models of a worker."""

    device: torch.device
    config: EngineConfig
    new_pool: Callable[[EvictionTermsOf], Pool]
    lease_client: LeaseClient
    loader: Loader
    turns: TurnRules | None = None  #: None: models take no turns
    kernels: ModelKernels | None = None  #: None: nothing to compile on this device
    marks: WorkerMarks = field(default_factory=WorkerMarks)
    snapshots: ModelSnapshots | None = None  #: None: snapshots are off
    torch_limit: TorchLimit | None = None  #: None: torch is not limited
    first_tokens: FirstTokens = field(default_factory=FirstTokens)
    connections: StageConnections | None = None  #: None: it is in no pipelines


def start(setup: WorkerSetup, config: EngineConfig, times: StartTimes) -> Runtime:
    """Bring up the device, except for the pool's memory, and note how long each part took.

    Raises ConfigError if the device can never be used as configured, DeviceError if it cannot be used now.
    """
    if setup.num_threads is not None:
        torch.set_num_threads(setup.num_threads)
    return _start_cuda(setup, config, times) if setup.kind == "cuda" else _start_cpu(setup, times)


def _start_cpu(setup: WorkerSetup, times: StartTimes) -> Runtime:
    budget_bytes = setup.budget_bytes or int(machine_bytes() * _CPU_SHARE) // setup.num_sharing
    device, budget_bytes = torch.device("cpu"), budget_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    new_pool = partial(ArenaPool, device, budget_bytes)
    name = processor_name(_CPU_INFORMATION.read_text(encoding="utf-8"), platform.machine())
    _multiply(device, torch.float32)
    times.note("products")
    return Runtime(device, name, machine_bytes(), budget_bytes, new_pool, shares_workspace=False)


def _start_cuda(setup: WorkerSetup, config: EngineConfig, times: StartTimes) -> Runtime:
    num_devices = torch.cuda.device_count()
    if setup.device_index >= num_devices:
        raise ConfigError(
            f"the driver shows CUDA device {setup.device_index}, and torch {torch.__version__} sees "
            f"{num_devices} devices; install a torch that fits the driver, or use `--device cpu`"
        )
    torch.cuda.set_device(setup.device_index)
    device = torch.device("cuda", setup.device_index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    times.note("context")
    if setup.budget_bytes is not None and setup.budget_bytes > total_bytes:
        raise ConfigError(
            f"`service.memory_bytes` must be at most the {total_bytes} bytes of {device}, given: "
            f"{setup.budget_bytes}; lower it"
        )
    # Read once, before anything is allocated: later the pool keeps the books.
    budget_bytes = setup.budget_bytes or int(free_bytes * config.memory_fraction) // setup.num_sharing
    most_bytes = UNBOOKED_BYTES + int(budget_bytes * UNBOOKED_SHARE)
    name = torch.cuda.get_device_name(device)
    if not can_map(device):
        log.warning("fallback pool=arena reason=`%s cannot map memory by pages`", device)
        _multiply(device, torch.bfloat16)
        times.note("products")
        # The pool is allocated by torch as well.
        limit = TorchLimit(most_bytes + budget_bytes, partial(_limit_torch, total_bytes, device))
        return Runtime(
            device,
            name,
            total_bytes,
            budget_bytes,
            partial(_new_arena, device, budget_bytes),
            shares_workspace=False,
            torch_limit=limit,
        )
    limit = TorchLimit(most_bytes, partial(_limit_torch, total_bytes, device))
    fallbacks = _take_library_memory(device) if config.graphs != "off" else {}
    times.note("libraries")
    _multiply(device, torch.bfloat16)
    times.note("products")
    return Runtime(
        device,
        name,
        total_bytes,
        budget_bytes // PAGE_BYTES * PAGE_BYTES,
        new_pool=lambda terms: MappedPool(CudaPages(device, budget_bytes), terms, fallbacks=fallbacks),
        shares_workspace=True,
        torch_limit=limit,
        has_fixed_addresses=config.graphs != "off" and not any(fallbacks.values()),
    )


def _new_arena(device: torch.device, budget_bytes: int, eviction_terms: EvictionTermsOf) -> ArenaPool:
    _check_free(budget_bytes, device)
    return ArenaPool(device, budget_bytes, eviction_terms, fallbacks={"arena": 1})


def _multiply(device: torch.device, dtype: torch.dtype) -> None:
    tile = torch.zeros(128, 128, dtype=dtype, device=device)
    torch.mm(tile, tile)[0, 0].item()


def _take_library_memory(device: torch.device) -> Mapping[str, int]:
    library = LibraryMemory(CudaPages(device, LIBRARY_BYTES))
    use_library_memory(library.torch_pool())
    return {"library_address": library.num_fallbacks}


def _check_free(budget_bytes: int, device: torch.device) -> None:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if budget_bytes > free_bytes:
        raise DeviceError(
            f"{device} has {free_bytes} of {total_bytes} bytes free, and the budget is {budget_bytes}; "
            "end what else uses the device, or lower `service.memory_bytes`"
        )


def _limit_torch(total_bytes: int, device: torch.device, num_bytes: int) -> None:
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total_bytes), device)


def processor_name(information: str, machine: str) -> str:
    """Return a processor's name from /proc/cpuinfo. Processors with the same name are equally fast."""
    told: dict[str, str] = {}  # of the first processor
    for line in information.splitlines():
        name, _, value = line.partition(":")
        told.setdefault(name.strip(), value.strip())
    if "model name" in told:
        return told["model name"]
    # ARM's are named by two numbers.
    numbers = [told[one] for one in ("CPU implementer", "CPU part") if one in told]
    return " ".join([machine, *numbers])


class StartTimes:
    def __init__(self) -> None:
        self._began_s = self._noted_s = time.perf_counter()
        self.seconds: dict[str, float] = {}  #: by part, in order

    @property
    def total_s(self) -> float:
        return self._noted_s - self._began_s

    def note(self, part: str) -> None:
        now_s = time.perf_counter()
        self.seconds[part], self._noted_s = now_s - self._noted_s, now_s

    def __str__(self) -> str:
        parts = (f"{part}_s={seconds:.3f}" for part, seconds in self.seconds.items())
        return " ".join((f"total_s={self.total_s:.3f}", *parts))


class TorchLimit:
    """How much of the device torch may take besides the pool. Mutable; the step thread alone calls it.

    If every engine's model has a memory profile, it is their sum and `SPARE_BYTES`, else a guess.
    """

    def __init__(self, guess_bytes: int, set_limit: Callable[[int], None]) -> None:
        self._guess_bytes, self._set_limit = guess_bytes, set_limit
        self.num_bytes, self.is_measured = guess_bytes, False
        set_limit(guess_bytes)

    def follow(self, profiles: Mapping[ModelId, MemoryProfile | None]) -> None:
        measured = [profile.torch_bytes for profile in profiles.values() if profile is not None]
        is_measured = bool(measured) and len(measured) == len(profiles)
        num_bytes = sum(measured) + SPARE_BYTES if is_measured else self._guess_bytes
        if (num_bytes, is_measured) != (self.num_bytes, self.is_measured):
            self.num_bytes, self.is_measured = num_bytes, is_measured
            self._set_limit(num_bytes)
            log.info("torch_limited num_bytes=%d is_measured=%s", num_bytes, is_measured)
