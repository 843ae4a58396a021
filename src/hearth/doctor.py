"""What this machine offers and which kernels run on it. It repairs nothing and loads no model."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata

import torch

from hearth.kernels.jit import HAS_TRITON


@dataclass(frozen=True, slots=True)
class DeviceReport:
    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    python: str
    platform: str
    torch: str
    cuda: str | None  #: the version that torch was built for
    triton: str | None
    kernels: str
    devices: tuple[DeviceReport, ...]
    notes: tuple[str, ...]  #: what has to be done without, and the remedy


def examine() -> Report:
    has_cuda = torch.cuda.is_available()
    devices = [_cpu()]
    for index in range(torch.cuda.device_count()):
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        devices.append(DeviceReport(torch.cuda.get_device_name(index), total_bytes, free_bytes))
    notes = []
    if not has_cuda:
        notes.append("no CUDA device: models run on the CPU, without graphs")
    elif not HAS_TRITON:
        notes.append("no Triton: kernels fall back to plain torch; install `hearth[gpu]`")
    return Report(
        python=platform.python_version(),
        platform=platform.platform(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        triton=metadata.version("triton") if HAS_TRITON else None,
        kernels="triton" if has_cuda and HAS_TRITON else "torch reference",
        devices=tuple(devices),
        notes=tuple(notes),
    )


def _cpu() -> DeviceReport:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    return DeviceReport(
        name=f"cpu, {os.cpu_count()} cores",
        total_bytes=os.sysconf("SC_PHYS_PAGES") * page_bytes,
        free_bytes=os.sysconf("SC_AVPHYS_PAGES") * page_bytes,
    )
