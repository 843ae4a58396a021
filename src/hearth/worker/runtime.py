"""Brings up a worker's device before the first model: threads, context, libraries, memory.

All of it takes a second or so, which no request should wait for. Memory comes last, and takes least of it:
so a worker that replaces another is all but up when that one's memory is free. It hosts nothing.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from hearth.core.config import EngineConfig
from hearth.core.errors import ConfigError, DeviceError
from hearth.core.messages import WorkerSetup
from hearth.engine.graph_capture import use_library_memory
from hearth.memory.arena import ArenaPool
from hearth.memory.cuda_pages import PAGE_BYTES, CudaPages, can_map
from hearth.memory.library_memory import LibraryMemory
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.memory.vmm import MappedPool
from hearth.models.layout import ALIGNMENT_BYTES
from hearth.policy.turns.turn_policy import TurnRules
from hearth.store.transfer.lease_client import LeaseClient
from hearth.store.transfer.transfer import Loader
from hearth.system.host_memory import machine_bytes
from hearth.worker.first_tokens import FirstTokens
from hearth.worker.model_kernels import ModelKernels
from hearth.worker.model_marks import WorkerMarks
from hearth.worker.model_snapshots import ModelSnapshots
from hearth.worker.start_times import StartTimes
from hearth.worker.torch_limit import SPARE_BYTES, TorchLimit

#: Memory on a device besides the pool: graphs of engines, what is sent for a step, the sampler's temporaries.
#: torch may take this much, and a share of the budget, until it has been measured.
UNBOOKED_BYTES, UNBOOKED_SHARE = SPARE_BYTES, 0.1
#: Memory of libraries that captured steps use, beside the pool and torch: cuBLAS takes some 32 MiB of it.
LIBRARY_BYTES = 64 << 20
#: Share of the machine's memory for all workers together; the rest is the store's, the system's and others'.
_CPU_SHARE = 0.5

_CPU_INFORMATION = Path("/proc/cpuinfo")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Runtime:
    """A device that is up, and its memory."""

    device: torch.device
    name: str  #: for people
    device_bytes: int  #: all of the device's memory
    budget_bytes: int  #: of the pool
    new_pool: Callable[[EvictionTermsOf], Pool]  #: takes the memory, or raises DeviceError
    shares_workspace: bool  #: the pool is sure to need one workspace for all models
    torch_limit: TorchLimit | None = None  #: None: torch is not limited
    #: All that captured steps point at lies at the same addresses in every process.
    has_fixed_addresses: bool = False


@dataclass(frozen=True, slots=True)
class HostingResources:
    """Device, configuration and sources that all models of a worker are hosted with."""

    device: torch.device
    config: EngineConfig
    new_pool: Callable[[EvictionTermsOf], Pool]
    lease_client: LeaseClient
    loader: Loader
    turns: TurnRules | None = None  #: by which models that do not fit together take turns; None: they do not
    kernels: ModelKernels | None = None  #: None: the device runs none that have to be compiled
    marks: WorkerMarks = field(default_factory=WorkerMarks)  #: told how the steps of all models advance
    snapshots: ModelSnapshots | None = None  #: None: none are made or used
    torch_limit: TorchLimit | None = None  #: None: torch is not limited
    first_tokens: FirstTokens = field(default_factory=FirstTokens)  #: that requests of all models wait for


def start(setup: WorkerSetup, config: EngineConfig, times: StartTimes) -> Runtime:
    """Bring the device up, but for the memory of the pool. `times` is told how long that took.

    Raises:
        ConfigError: the device can never be had as it was asked for.
        DeviceError: it cannot be had now.
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
    # Read once, when nothing of ours is there: from here on the pool's own books count.
    budget_bytes = setup.budget_bytes or int(free_bytes * config.memory_fraction) // setup.num_sharing
    most_bytes = UNBOOKED_BYTES + int(budget_bytes * UNBOOKED_SHARE)
    name = torch.cuda.get_device_name(device)
    if not can_map(device):
        log.warning("fallback pool=arena reason=`%s cannot map memory by pages`", device)
        _multiply(device, torch.bfloat16)
        times.note("products")
        # The pool is torch's as well.
        limit = TorchLimit(most_bytes + budget_bytes, partial(_limit_torch, total_bytes, device))
        return Runtime(
            *(device, name, total_bytes, budget_bytes, partial(_new_arena, device, budget_bytes)),
            shares_workspace=False,
            torch_limit=limit,
        )
    limit = TorchLimit(most_bytes, partial(_limit_torch, total_bytes, device))
    fallbacks = _take_library_memory(device) if config.graphs != "off" else {}
    times.note("libraries")
    _multiply(device, torch.bfloat16)
    times.note("products")
    return Runtime(
        *(device, name, total_bytes, budget_bytes // PAGE_BYTES * PAGE_BYTES),
        new_pool=lambda terms: MappedPool(CudaPages(device, budget_bytes), terms, fallbacks=fallbacks),
        shares_workspace=True,
        torch_limit=limit,
        has_fixed_addresses=config.graphs != "off" and not any(fallbacks.values()),
    )


def _new_arena(device: torch.device, budget_bytes: int, eviction_terms: EvictionTermsOf) -> ArenaPool:
    _check_free(budget_bytes, device)
    return ArenaPool(device, budget_bytes, eviction_terms, fallbacks={"arena": 1})


def _multiply(device: torch.device, dtype: torch.dtype) -> None:
    """Have the library of products come up, as it does with the first one."""
    tile = torch.zeros(128, 128, dtype=dtype, device=device)
    torch.mm(tile, tile)[0, 0].item()


def _take_library_memory(device: torch.device) -> Mapping[str, int]:
    """Have captured steps find what libraries need at fixed addresses; return what could not be as wished."""
    library = LibraryMemory(CudaPages(device, LIBRARY_BYTES))
    use_library_memory(library.torch_pool())
    return {"library_address": library.num_fallbacks}


def _check_free(budget_bytes: int, device: torch.device) -> None:
    """Refuse a budget that the device has not now: whoever holds the rest may end."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if budget_bytes > free_bytes:
        raise DeviceError(
            f"{device} has {free_bytes} of {total_bytes} bytes free, and the budget is {budget_bytes}; "
            "end what else uses the device, or lower `service.memory_bytes`"
        )


def _limit_torch(total_bytes: int, device: torch.device, num_bytes: int) -> None:
    """Have torch give back what it keeps to itself before it takes more than so much of the device."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total_bytes), device)


def processor_name(information: str, machine: str) -> str:
    """Return the name of a processor by what /proc/cpuinfo says: processors of one name are equally fast."""
    told: dict[str, str] = {}  # of the first processor
    for line in information.splitlines():
        name, _, value = line.partition(":")
        told.setdefault(name.strip(), value.strip())
    if "model name" in told:
        return told["model name"]
    # ARM's are named by two numbers.
    numbers = [told[one] for one in ("CPU implementer", "CPU part") if one in told]
    return " ".join([machine, *numbers])
