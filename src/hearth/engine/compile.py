"""The process that compiles a model's kernels: `python -m hearth.engine.compile`. Touches no device.

Reads a `CompileTask` from standard input and ends when that is closed. Compilers hold Python's lock for long,
so a serving process compiles nothing.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from hearth.engine.dry_run import KernelNeeds, dry_run
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.jit import triton
from hearth.kernels.kernel_cache import CachedVariant, KernelCache
from hearth.kernels.variants import TargetDriver, Variant, recording

_NICENESS = 5  #: steps of models on the same machine go first

log = logging.getLogger(__name__)


class CompileTask(msgspec.Struct, frozen=True):
    cache: str  #: directory of compiled kernels
    needs: KernelNeeds


def list_key(needs: KernelNeeds) -> str:
    """Return the name of a model's list of variants, which changes with Hearth's code and the compiler."""
    return hashlib.sha256(msgspec.json.encode(needs) + _software().encode()).hexdigest()[:32]


@cache
def _software() -> str:
    package = Path(__file__).parents[1]
    digest = hashlib.sha256(triton.__version__.encode())
    for path in sorted(
        path for room in ("kernels", "models", "engine") for path in (package / room).glob("*.py")
    ):
        digest.update(path.read_bytes())
    digest.update((package / "core" / "sizes.py").read_bytes())
    return digest.hexdigest()


def compile_all(task: CompileTask) -> int:
    """Compile all variants that are not in the cache, list them there, and return how many were compiled.

    Blocks while another process compiles the same list.
    """
    kernels, key = KernelCache.open(Path(task.cache)), list_key(task.needs)
    with kernels.compiling(key):
        if kernels.find(key) is not None:
            return 0
        TargetDriver(task.needs.capability).activate()
        COMPILATIONS.watch()
        with recording() as variants:
            dry_run(task.needs)
        results = compile_each(variants)
        kernels.save(key, [cached for cached, _ in results if cached is not None])
    return sum(num_compiled for _, num_compiled in results)


def compile_each(variants: Collection[Variant]) -> list[tuple[CachedVariant | None, int]]:
    """Compile variants on all cores. For each, None: it failed; and 1 if it was not in the cache, else 0.

    Raises:
        BrokenProcessPool: the compiler crashed or ran out of memory.
    """
    _cuda_driver()  # before the fork: once CUDA was queried, a forked process finds no device
    num_processes = max(1, min(len(variants), len(os.sched_getaffinity(0))))
    # Forked: importing torch takes longer than most kernels do, and no device is in use.
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(num_processes, forked, _watch_input) as pool:
        return list(pool.map(_compile, variants))


def _compile(variant: Variant) -> tuple[CachedVariant | None, int]:
    num_before = COMPILATIONS.num_ahead
    try:
        with COMPILATIONS.ahead():
            compiled = variant.compiled()
    except (triton.errors.TritonError, ValueError):
        log.exception("kernel_not_compiled kernel=%s", variant.kernel)
        return None, 0
    _build_launcher(compiled)
    return CachedVariant.of(variant, compiled), COMPILATIONS.num_ahead - num_before


def _build_launcher(compiled: Any) -> None:
    """Have Triton 3.6 compile the C code that launches a kernel, one per signature."""
    if (driver := _cuda_driver()) is not None:
        driver.launcher_cls(compiled.src, compiled.metadata)


@cache
def _cuda_driver() -> Any | None:
    if not torch.cuda.is_available():
        return None
    from triton.backends.nvidia.driver import CudaDriver

    return CudaDriver()  # its own C code is compiled with it


def _watch_input() -> None:
    threading.Thread(target=_end_with_input, name="hearth-lifeline", daemon=True).start()


def _end_with_input() -> None:
    while os.read(0, 4096):  # not by sys.stdin, whose lock must be free when the process ends
        pass
    os._exit(1)


def main() -> None:
    logging.basicConfig(level="ERROR", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=CompileTask)
    _watch_input()
    os.nice(_NICENESS)
    compile_all(task)


if __name__ == "__main__":
    main()
    os._exit(0)  # else Triton's binding reports leaks at exit
