"""The process that compiles a model's kernels: `python -m hearth.engine.compile`, told by a `CompileTask`.

Compilers keep Python's lock for many milliseconds at a time, and steps of other models would wait for it; so
nobody compiles in a process that serves. It touches no device: the task says for which one. It ends when its
standard input does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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

#: Steps of models on the same machine go first.
_NICENESS = 5

log = logging.getLogger(__name__)


class CompileTask(msgspec.Struct, frozen=True):
    """The one line that the process reads."""

    cache: str  #: directory of compiled kernels
    needs: KernelNeeds


def list_key(needs: KernelNeeds) -> str:
    """Return the name of the list of a model's variants, a new one for new versions of code or compiler."""
    return hashlib.sha256(msgspec.json.encode(needs) + _software().encode()).hexdigest()[:32]


@cache
def _software() -> str:
    """Return a digest of all that decides which variants there are, and of the compiler."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256(triton.__version__.encode())
    for path in sorted(
        path for room in ("kernels", "models", "engine") for path in (package / room).glob("*.py")
    ):
        digest.update(path.read_bytes())
    digest.update((package / "sizes.py").read_bytes())
    return digest.hexdigest()


def compile_all(task: CompileTask) -> int:
    """Compile all variants that are not in the cache, list them there, and return how many were compiled.

    If another process is at it, its work is waited for.
    """
    kernels, key = KernelCache.open(Path(task.cache)), list_key(task.needs)
    with kernels.compiling(key):
        if kernels.find(key) is not None:
            return 0
        TargetDriver(task.needs.capability).activate()
        COMPILATIONS.watch()
        with recording() as variants:
            dry_run(task.needs)
        launcher = _launcher_builder()
        with ThreadPoolExecutor(max(1, min(len(variants), len(os.sched_getaffinity(0))))) as pool:
            cached = pool.map(lambda variant: _compile(variant, launcher), variants)
        kernels.save(key, [one for one in cached if one is not None])
    return COMPILATIONS.num_ahead


def _compile(variant: Variant, build_launcher: Callable[[Any], None]) -> CachedVariant | None:
    """Compile a variant; None: it cannot be, and whoever launches it is told why."""
    try:
        with COMPILATIONS.ahead():
            compiled = variant.compiled()
    except triton.errors.TritonError:
        log.exception("kernel_not_compiled kernel=%s", variant.kernel)
        return None
    build_launcher(compiled)
    return CachedVariant.of(variant, compiled)


def _launcher_builder() -> Callable[[Any], None]:
    """Return what makes the C code that launches a kernel, which Triton 3.6 compiles for each signature."""
    if not torch.cuda.is_available():
        return lambda compiled: None
    from triton.backends.nvidia.driver import CudaDriver

    driver = CudaDriver()  # its own C code is compiled with it
    return lambda compiled: driver.launcher_cls(compiled.src, compiled.metadata)


def _end_with_input() -> None:
    while os.read(0, 4096):  # past Python's own buffer, whose lock must be free when the process ends
        pass
    os._exit(1)


def main() -> None:
    logging.basicConfig(level="ERROR", format="%(asctime)s %(levelname)s %(name)s %(message)s")
    task = msgspec.json.decode(sys.stdin.buffer.readline(), type=CompileTask)
    threading.Thread(target=_end_with_input, name="hearth-lifeline", daemon=True).start()
    os.nice(_NICENESS)
    compile_all(task)


if __name__ == "__main__":
    main()
    os._exit(0)  # at its end Triton's binding would report leaks, which nobody can mend
