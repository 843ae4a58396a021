"""Has a model's kernels compiled and on the device before its first step. Compiles nothing in this process.

compiled before, by anybody   loaded from disk: some milliseconds for each variant
loaded here before            nothing to do
neither                       a process of its own compiles them (`engine/compile.py`), then as above
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress

import msgspec

from hearth.engine.compile import CompileTask, list_key
from hearth.engine.dry_run import KernelNeeds
from hearth.kernels.kernel_cache import KernelCache

log = logging.getLogger(__name__)


class KernelWarmup:
    """The kernels that are ready on one device. Mutable; any thread calls it."""

    def __init__(self, cache: KernelCache) -> None:
        self._cache = cache
        #: Lists that are on the device.
        self._loaded: set[str] = set()
        #: Lists that could not be compiled, which is tried once.
        self._failed: set[str] = set()
        #: By list: two models that need the same variants have them loaded once. Guarded by `_lock` itself.
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def load(self, needs: KernelNeeds) -> bool:
        """Bring the kernels onto the current device if they are compiled; waits for nobody.

        Returns False if some are not, or if another thread is at it: see `compile`.
        """
        key = list_key(needs)
        if key in self._loaded:
            return True
        lock = self._lock_of(key)
        if not lock.acquire(blocking=False):
            return False
        try:
            return self._load(key)
        finally:
            lock.release()

    def compile(self, needs: KernelNeeds) -> None:
        """Have the kernels compiled, where they are not, and bring them onto the current device.

        If that fails the model can run all the same: what is missing is compiled when a step asks for it.
        """
        key = list_key(needs)
        with self._lock_of(key):
            if key in self._failed or self._load(key):
                return
            began_s = time.perf_counter()
            failure = _compile_apart(CompileTask(str(self._cache.path), needs))
            if failure is None and self._load(key):
                log.info("kernels_compiled list=%s seconds=%.3f", key, time.perf_counter() - began_s)
                return
            self._failed.add(key)
            log.warning(
                "fallback kernels=compiled_while_serving list=%s reason=`%s`",
                *(key, failure or "what was compiled is not there"),
            )

    def _lock_of(self, key: str) -> threading.Lock:
        with self._lock:
            return self._locks[key]

    def _load(self, key: str) -> bool:
        if key in self._loaded:
            return True
        began_s = time.perf_counter()
        num_variants = self._cache.load(key)
        if num_variants is None:
            return False
        self._loaded.add(key)
        seconds = time.perf_counter() - began_s
        log.info("kernels_loaded list=%s variants=%d seconds=%.3f", key, num_variants, seconds)
        return True


def _compile_apart(task: CompileTask) -> str | None:
    """Compile in a process of its own; return why that failed, None if it did not."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hearth.engine.compile"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,  # else what a process that died has not read would be sent once more at the end
        )
    except OSError as error:
        return str(error)
    with process:
        assert process.stdin is not None, "asked for a pipe"
        with suppress(BrokenPipeError):  # its exit code tells
            # Left open, for the process ends with its input, so it never outlives this one.
            process.stdin.write(msgspec.json.encode(task) + b"\n")
        code = process.wait()
    return None if code == 0 else f"the compiler ended with code {code}; see its messages above"
