"""Examines this machine: devices, versions, limits, kernels. Repairs nothing and loads no model."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from hearth.config import StoreConfig
from hearth.kernels.jit import HAS_TRITON

#: With fewer descriptors a service that has many streams open would run out of them.
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
    has_direct_reads: bool  #: past the page cache, which is faster for what is not in it
    locked_bytes: int | None  #: how much host memory may be pinned; None: all of it


@dataclass(frozen=True, slots=True)
class Report:
    python: str
    platform: str
    torch: str
    cuda: str | None  #: the version that torch was built for
    triton: str | None
    kernels: str
    max_open_files: int  #: of one process; every connection takes one
    store: StoreReport
    devices: tuple[DeviceReport, ...]
    notes: tuple[str, ...]  #: what has to be done without, and the remedy


def examine(store: StoreConfig) -> Report:
    has_cuda = torch.cuda.is_available()
    devices = [_cpu()]
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        devices.append(DeviceReport(torch.cuda.get_device_name(index), total_bytes, free_bytes))
    notes = []
    if not has_cuda:
        notes.append(
            "no CUDA device: models run on the CPU, without graphs, and in float32: "
            "those in bfloat16 or float16 are widened as they load; convert them with `--dtype float32`"
        )
    elif not HAS_TRITON:
        notes.append("no Triton: kernels fall back to plain torch; install `hearth[gpu]`")
    found = _store(store)
    if not found.has_direct_reads:
        notes.append(f"no direct reads in {found.path}: chunks are read through the page cache")
    if has_cuda and found.locked_bytes is not None and found.locked_bytes < store.host_bytes:
        notes.append(
            f"only {found.locked_bytes} bytes of host memory may be pinned, `store.host_bytes` is "
            f"{store.host_bytes}: copies from the rest are slow; raise `ulimit -l`"
        )
    max_open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if max_open_files < MANY_OPEN_FILES:
        notes.append(
            f"only {max_open_files} files may be open at a time, and every connection to the service takes "
            f"one: raise `ulimit -n` to {MANY_OPEN_FILES} or more"
        )
    return Report(
        store=found,
        max_open_files=max_open_files,
        python=platform.python_version(),
        platform=platform.platform(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        triton=metadata.version("triton") if HAS_TRITON else None,
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


def _has_direct_reads(directory: Path) -> bool:
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as file:
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
    except OSError:  # none on this file system, or nothing may be written there
        return False
    return True


def _cpu() -> DeviceReport:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return DeviceReport(
        name=f"cpu, {os.cpu_count()} cores",
        total_bytes=os.sysconf("SC_PHYS_PAGES") * page_bytes,
        free_bytes=os.sysconf("SC_AVPHYS_PAGES") * page_bytes,
    )
