"""The devices that workers run on, found without torch and without a CUDA context."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hearth.core.config import CPU_HOST_BYTES, ServiceConfig, StoreConfig
from hearth.core.errors import ConfigError, DeviceError
from hearth.system.cpus import num_usable_cores
from hearth.system.host_memory import machine_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of the workers. Worker n takes index n, modulo the number of devices."""

    kind: Literal["cpu", "cuda"]
    indices: tuple[int, ...]
    num_workers: int

    @property
    def num_sharing(self) -> int:
        return -(-self.num_workers // len(self.indices))

    def names(self) -> tuple[str, ...]:
        """Return the device of each worker, for people."""
        found = {gpu.index: gpu.name for gpu in gpus()} if self.kind == "cuda" else {}
        num_devices = len(self.indices)
        return tuple(found.get(self.indices[n % num_devices], "CPU") for n in range(self.num_workers))

    @property
    def threads_per_worker(self) -> int:
        return max(1, num_usable_cores() // self.num_workers)


def resolve(service: ServiceConfig) -> Devices:
    """Raises ConfigError if the devices never have the memory asked for, and DeviceError."""
    found = [] if service.device == "cpu" else gpus()
    obstacle = "torch was built without CUDA" if found and not _torch_has_cuda() else None
    if found and obstacle is None:
        num_workers = len(found) if service.workers is None else service.workers
        devices = Devices("cuda", tuple(gpu.index for gpu in found), num_workers)
        for gpu in found[: devices.num_workers]:
            _check_memory(service, devices.num_sharing, gpu.total_bytes, f"CUDA device {gpu.index}")
        return devices
    if service.device == "cuda":
        reason = obstacle or "the driver shows no CUDA device"
        raise DeviceError(f"device `cuda` was asked for, but {reason}; use `cpu` or `auto`")
    if obstacle is not None:
        log.warning("fallback device=cpu reason=`%s`", obstacle)
    devices = Devices("cpu", (0,), 1 if service.workers is None else service.workers)
    _check_memory(service, devices.num_sharing, machine_bytes(), "this machine or its cgroup")
    return devices


def check_host_memory(store: StoreConfig, devices: Devices) -> None:
    """Raises ConfigError if the machine never has it; logs that a CPU does not use it."""
    if devices.kind == "cpu" and store.unused_host_bytes:
        log.warning(
            "fallback host_bytes=%d reason=`a CPU holds models in its own memory alone, given: %d` "
            "remedy=`raise service.memory_bytes instead`",
            CPU_HOST_BYTES,
            store.host_bytes,
        )
    limit_bytes = machine_bytes()
    if devices.kind == "cuda" and store.host_bytes > limit_bytes:
        raise ConfigError(
            f"`store.host_bytes` must be at most {_gib(limit_bytes)}, the memory of this machine or its "
            f"cgroup, given: {_gib(store.host_bytes)}; lower it (`--host-memory`)"
        )


def _check_memory(service: ServiceConfig, num_sharing: int, limit_bytes: int, whose: str) -> None:
    if service.memory_bytes is None or service.memory_bytes * num_sharing <= limit_bytes:
        return
    shared = "" if num_sharing == 1 else f", which {num_sharing} workers share"
    raise ConfigError(
        f"`service.memory_bytes` must be at most {_gib(limit_bytes // num_sharing)}, by the memory of {whose}"
        f"{shared}, given: {_gib(service.memory_bytes)}; lower it (`--memory`), or leave it out"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB ({num_bytes} bytes)"


def gpus() -> list[Gpu]:
    """Return the GPUs that the CUDA driver shows to this process; none where there is no driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_gpu(cuda, index) for index in range(count.value)]


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, name, total_bytes = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    codes = [
        cuda.cuDeviceGet(ctypes.byref(device), index),
        cuda.cuDeviceGetName(name, len(name), device),
        cuda.cuDeviceTotalMem_v2(ctypes.byref(total_bytes), device),
    ]
    if any(codes):
        raise DeviceError(f"CUDA device {index} gives no account of itself, codes: {codes}; see `nvidia-smi`")
    return Gpu(index, name.value.decode(errors="replace"), total_bytes.value)


def _torch_has_cuda() -> bool:
    torch = importlib.util.find_spec("torch")  # looks for it, and does not load it
    if torch is None or torch.origin is None:
        return False
    return (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").is_file()
