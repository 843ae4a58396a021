"""What has to be in place before the first model: threads, the device's context and its libraries.

All of it takes seconds, which no request should wait for. It hosts nothing.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from hearth.config import EngineConfig
from hearth.engine.assemble import machine_bytes
from hearth.errors import DeviceError
from hearth.messages import WorkerSetup

#: Blocks above this are never cut up by torch's allocator. Else a small tensor could settle in what a model
#: has left, and the whole of it could not be given to the next model.
_MAX_SPLIT_MB = 64
#: What is on a device and in no book: graphs, the sampler's temporaries, workspaces of libraries.
UNBOOKED_BYTES = 2 << 30
#: Of the machine's memory, for all workers together; the rest is the store's, the system's and others'.
_CPU_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Runtime:
    device: torch.device
    name: str  #: for people
    budget_bytes: int


def start(setup: WorkerSetup, config: EngineConfig) -> Runtime:
    """Raises DeviceError where there is no such device."""
    if setup.num_threads is not None:
        torch.set_num_threads(setup.num_threads)
    runtime = _start_cuda(setup, config) if setup.kind == "cuda" else _start_cpu(setup)
    dtype = torch.float32 if runtime.device.type == "cpu" else torch.bfloat16
    tile = torch.ones(128, 128, dtype=dtype, device=runtime.device)
    (tile @ tile).sum().item()  # the library of products comes up with the first one
    return runtime


def _start_cpu(setup: WorkerSetup) -> Runtime:
    budget_bytes = setup.budget_bytes or int(machine_bytes() * _CPU_SHARE) // setup.num_sharing
    return Runtime(torch.device("cpu"), _processor(), budget_bytes)


def _start_cuda(setup: WorkerSetup, config: EngineConfig) -> Runtime:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", f"max_split_size_mb:{_MAX_SPLIT_MB}")
    num_devices = torch.cuda.device_count()
    if setup.device_index >= num_devices:
        raise DeviceError(
            f"CUDA device {setup.device_index} was asked for, torch sees {num_devices}; use `--device cpu`"
        )
    torch.cuda.set_device(setup.device_index)
    device = torch.device("cuda", setup.device_index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    # Read once, when nothing of ours is there: from here on the pool's own books count.
    budget_bytes = setup.budget_bytes or int(free_bytes * config.memory_fraction) // setup.num_sharing
    # torch gives back what it keeps of dropped models before it takes more than this.
    most_bytes = budget_bytes + UNBOOKED_BYTES
    torch.cuda.set_per_process_memory_fraction(min(1.0, most_bytes / total_bytes), device)
    return Runtime(device, torch.cuda.get_device_name(device), budget_bytes)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
