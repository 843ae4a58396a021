"""The checks of `hearth doctor`, apart from the command because they import torch."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hearth.core.config import CPU_HOST_BYTES, StoreConfig
from hearth.kernels.cublas_workspace import capture_obstacle
from hearth.kernels.jit import HAS_TRITON, triton
from hearth.kernels.kernel_cache import CacheUsage, KernelCache, usage_of
from hearth.kernels.prefill_hopper import gluon_obstacle, is_hopper
from hearth.snapshot.native_rebuild import native_obstacle
from hearth.store.tiers.read_hashed import is_native
from hearth.system.cpus import num_usable_cores, queued_s, wait_policy

#: A lower limit of open files is too low for a service with many streams.
MANY_OPEN_FILES = 4096


@dataclass(frozen=True, slots=True)
class DeviceReport:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class StoreReport:
    path: str
    free_bytes: int
    has_direct_reads: bool  #: O_DIRECT, which is faster for files outside the page cache
    locked_bytes: int | None  #: limit of pinned host memory; None: no limit


@dataclass(frozen=True, slots=True)
class Report:
    python: str
    platform: str
    torch: str
    cuda: str | None  #: the version that torch was built for
    triton: str | None
    kernels: str
    max_open_files: int  #: per process; every connection takes one
    store: StoreReport  #: for models given by path or URL
    service_store: StoreReport  #: for deployed models
    kernel_caches: tuple[CacheUsage, ...]  #: of both stores
    devices: tuple[DeviceReport, ...]
    notes: tuple[str, ...]  #: what is missing, and the remedy


def examine(store: StoreConfig, data_dir: Path) -> Report:
    has_cuda = torch.cuda.is_available()
    devices = [cpu_report()]
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        devices.append(DeviceReport(torch.cuda.get_device_name(index), total_bytes, free_bytes))
    notes = []
    if not has_cuda:
        notes.append(
            "no CUDA device: models run on the CPU in float32, without CUDA graphs; bfloat16 and float16 "
            "weights are widened at every load; convert them with `--dtype float32`"
        )
        if store.unused_host_bytes:
            notes.append(
                f"`store.host_bytes` is {store.host_bytes}, of which a CPU uses {CPU_HOST_BYTES}: its models "
                "are in `service.memory_bytes`; raise that instead"
            )
    elif not HAS_TRITON:
        notes.append("no Triton: kernels fall back to plain torch; install `hearth-inference[gpu]`")
    else:
        if (obstacle := capture_obstacle(torch.__version__)) is not None:
            notes.append(f"{obstacle}: steps run without CUDA graphs; install `hearth-inference[gpu]`")
        if is_hopper() and (obstacle := gluon_obstacle()) is not None:
            notes.append(f"{obstacle}: long prompts are slower; install `hearth-inference[gpu]`")
    found, of_service = _store(store), _store(replace(store, path=str(data_dir)))
    for one in (found, of_service):
        if not one.has_direct_reads:
            notes.append(f"no direct reads in {one.path}: chunks are read through the page cache")
    if has_cuda and found.locked_bytes is not None and found.locked_bytes < store.host_bytes:
        notes.append(
            f"only {found.locked_bytes} bytes of host memory can be pinned, `store.host_bytes` is "
            f"{store.host_bytes}: copies from unpinned memory are slow; raise `ulimit -l`"
        )
    if not is_native():
        notes.append(
            "no C compiler (cc): chunks are read in Python, which is slower for concurrent reads; on a CPU, "
            "quantised models are many times slower; on a GPU, loads slow down other models, and the first "
            "loads wait until host memory is pinned; install one, Triton needs it too"
        )
    if has_cuda and (obstacle := native_obstacle()) is not None:
        notes.append(
            "graphs of snapshots are captured again instead of restored, so models start more slowly: "
            f"{obstacle}; install a C compiler (cc)"
        )
    if (spin_reason := wait_policy().spin_reason) is not None:
        notes.append(f"waiting threads spin, which is slow when other processes are busy: {spin_reason}")
    if queued_s(os.getpid()) is None:
        notes.append(
            "the kernel does not report how long processes wait for a core (no /proc/PID/schedstat): on a "
            "busy machine a slow worker may be replaced as if it hung; raise `service.max_missed`"
        )
    _, max_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # the service raises its soft limit
    if max_open_files < MANY_OPEN_FILES:
        notes.append(
            f"only {max_open_files} files can be open, and every connection to the service takes one: raise "
            f"`ulimit -Hn` to {MANY_OPEN_FILES} or more"
        )
    return Report(
        store=found,
        service_store=of_service,
        kernel_caches=_kernel_caches(Path(found.path), data_dir),
        max_open_files=max_open_files,
        python=platform.python_version(),
        platform=platform.platform(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        triton=triton.__version__ if HAS_TRITON else None,
        kernels="triton" if has_cuda and HAS_TRITON else "torch reference",
        devices=tuple(devices),
        notes=tuple(notes),
    )


def _store(config: StoreConfig) -> StoreReport:
    path = Path(config.path).expanduser()
    existing = next(parent for parent in (path, *path.parents) if parent.is_dir())
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return StoreReport(
        path=str(path),
        free_bytes=shutil.disk_usage(existing).free,
        has_direct_reads=_has_direct_reads(existing),
        locked_bytes=None if soft_limit == resource.RLIM_INFINITY else soft_limit,
    )


def _kernel_caches(*places: Path) -> tuple[CacheUsage, ...]:
    paths = dict.fromkeys(KernelCache.directory(place / "kernels") for place in places)
    return tuple(usage_of(path) for path in paths)


def _has_direct_reads(directory: Path) -> bool:
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
    except OSError:  # not on this file system, or not writable
        return False
    return True


def cpu_report(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> DeviceReport:
    """Report this machine, or its container if that has less. The page cache counts as free memory."""
    machine = _figures(meminfo)
    total_bytes, free_bytes = machine["MemTotal"] * 1024, machine["MemAvailable"] * 1024
    try:
        limit_bytes = int((cgroup / "memory.max").read_text())
        taken_bytes = int((cgroup / "memory.current").read_text())
        taken_bytes -= _figures(cgroup / "memory.stat")["inactive_file"]
    except (FileNotFoundError, ValueError):  # no container; `max`: one without a limit
        return DeviceReport(f"cpu, {_cores()}", total_bytes, free_bytes)
    free_bytes = min(free_bytes, max(0, limit_bytes - taken_bytes))
    return DeviceReport(f"cpu, {_cores()}", min(total_bytes, limit_bytes), free_bytes)


def _figures(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}


def _cores() -> str:
    num_usable, num_cores = num_usable_cores(), os.cpu_count()
    return f"{num_cores} cores" if num_usable == num_cores else f"{num_usable} of {num_cores} cores"
