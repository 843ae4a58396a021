"""Has a model's kernels compiled and loaded before its first step. Compiles nothing in this process."""

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
    """The kernels that are loaded on one device. Mutable; any thread calls it."""

    def __init__(self, cache: KernelCache) -> None:
        self._cache = cache
        self._loaded: set[str] = set()  #: lists that are on the device
        self._failed: set[str] = set()  #: lists that could not be compiled, which is tried once
        #: By list: two models that need the same variants load them once. Guarded by `_lock`.
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def load(self, needs: KernelNeeds) -> bool:
        """Load the kernels onto the current device if they are compiled, without blocking.

        Returns False if some are not compiled, or if another thread loads them: see `compile`.
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
        """Compile the kernels where needed, and load them onto the current device.

        If that fails the model still runs: steps compile what they need.
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
                key,
                failure or "the compiled kernels are not in the cache",
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
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hearth.engine.compile"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,  # else input that a dead process has not read would be sent again at close
        )
    except OSError as error:
        return str(error)
    with process:
        assert process.stdin is not None, "asked for a pipe"
        with suppress(BrokenPipeError):  # its exit code says why
            # Left open: the process ends with its input, so it never outlives this one.
            process.stdin.write(msgspec.json.encode(task) + b"\n")
        code = process.wait()
    return None if code == 0 else f"the compiler ended with code {code}; see its messages above"
