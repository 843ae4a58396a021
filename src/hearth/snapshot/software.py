"""The versions of driver, libraries and sources that snapshots depend on. Initialises no device."""

from __future__ import annotations

import ctypes
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from hearth.kernels.jit import HAS_TRITON, triton

#: Folders and files whose code decides which kernels a step launches, with which parameters and addresses,
#: what is measured, and how a snapshot stores it.
_SOURCES = (
    "engine",
    "kernels",
    "models",
    "core/sizes.py",
    "memory",
    "policy/memory/space_slots.py",
    "snapshot",
    "system/cuda",
    "worker/snapshot_graphs.py",
    "worker/snapshot_maker.py",
    "worker/measured_costs.py",
)
_SUFFIXES = (".py", ".c")
_PACKAGE = Path(__file__).parents[1]
_DRIVER = Path("/proc/driver/nvidia/version")
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Software:
    driver: str
    cuda: str
    cublas: str
    torch: str
    triton: str
    sources: str


@cache
def software(kind: str) -> Software:
    """Return the versions in this process, for a `kind` of device, cpu or cuda, that is initialised."""
    is_cuda = kind == "cuda"
    return Software(
        driver=_driver_version() if is_cuda else "",
        cuda=(torch.version.cuda or "") if is_cuda else "",
        cublas=_cublas_version() if is_cuda else "",
        torch=str(torch.__version__),
        triton=str(triton.__version__) if is_cuda and HAS_TRITON else "",
        sources=own_sources(),
    )


@cache
def own_sources() -> str:
    """Return a digest of the files at the first call, right after imports: an upgrade may replace them."""
    return sources_digest(_PACKAGE)


def sources_digest(package: Path) -> str:
    found = hashlib.blake2b(digest_size=16)
    for name in _SOURCES:
        place = package / name
        files = (one for one in place.rglob("*") if one.suffix in _SUFFIXES)
        for path in sorted(files) if place.is_dir() else [place]:
            content = path.read_bytes()
            found.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _driver_version() -> str:
    """Return the version of the kernel driver; where that is hidden, as in some containers, CUDA's."""
    try:
        match = re.search(r"(?:Module|Kernel Module for \S+)\s+(\d+[.\d]+)", _DRIVER.read_text())
    except OSError:
        match = None
    if match is not None:
        return match[1]
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"CUDA {version.value}"


def _cublas_version() -> str:
    """Return the version of the loaded library: torch's own, or one that the user has put first."""
    paths = {line.split()[-1] for line in _MAPS.read_text().splitlines() if "/libcublas.so" in line}
    return " ".join(_library_version(path) for path in sorted(paths)) or "not loaded"


def _library_version(path: str) -> str:
    library, value = ctypes.CDLL(path), ctypes.c_int()
    numbers = []
    for part in range(3):  # major, minor, patch
        library.cublasGetProperty(part, ctypes.byref(value))
        numbers.append(str(value.value))
    return ".".join(numbers)
