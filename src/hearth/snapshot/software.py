"""The device and the software of this process, as far as a snapshot depends on them. Brings nothing up."""

from __future__ import annotations

import ctypes
import hashlib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from hearth.kernels.jit import HAS_TRITON, triton

#: Rooms and files whose code decides which kernels a step launches, with which parameters and at which
#: addresses, what is measured of it all, and how a snapshot holds that.
_SOURCES = (
    *("engine", "kernels", "models", "core/sizes.py"),
    *("memory", "policy/memory/space_slots.py", "snapshot", "system/cuda"),
    *("worker/snapshot_graphs.py", "worker/snapshot_maker.py", "worker/measured_costs.py"),
)
_SUFFIXES = (".py", ".c")  #: of code, also of that which makes graphs again
_PACKAGE = Path(__file__).parents[1]
_DRIVER = Path("/proc/driver/nvidia/version")
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Software:
    """Versions, as a `Fingerprint` has them."""

    driver: str
    cuda: str
    cublas: str
    torch: str
    triton: str
    sources: str


@cache
def software(kind: str) -> Software:
    """Return what a device of a kind, cpu or cuda, is used with in this process, where it is up."""
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
    """Return a digest of what this process runs: of the files as they were at the first call, behind imports.

    Files may be replaced while a process runs, as when Hearth is upgraded, and all that is forked from it.
    """
    return sources_digest(_PACKAGE)


def sources_digest(package: Path) -> str:
    """Return a digest of all that steps are made of."""
    found = hashlib.blake2b(digest_size=16)
    for name in _SOURCES:
        place = package / name
        files = (one for one in place.rglob("*") if one.suffix in _SUFFIXES)
        for path in sorted(files) if place.is_dir() else [place]:
            content = path.read_bytes()
            found.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return found.hexdigest()


def _driver_version() -> str:
    """Return the version of the kernel's driver; where that is hidden, as in some containers, CUDA's."""
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
    """Return the version of the library that is loaded: torch's own, or one that the user has put first."""
    paths = {line.split()[-1] for line in _MAPS.read_text().splitlines() if "/libcublas.so" in line}
    return " ".join(_library_version(path) for path in sorted(paths)) or "not loaded"


def _library_version(path: str) -> str:
    library, value = ctypes.CDLL(path), ctypes.c_int()
    numbers = []
    for part in range(3):  # major, minor, patch
        library.cublasGetProperty(part, ctypes.byref(value))
        numbers.append(str(value.value))
    return ".".join(numbers)
