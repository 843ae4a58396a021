"""Finds the functions of this process for the kernels that a graph of another process names.

A Triton kernel is found by its hash among those loaded from the kernel cache. A library's kernel has only a
name, and libraries load their modules on first use. So `learn` is shown graphs that use a library, and finds
all functions of the same modules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hearth.core.errors import KernelsMissing
from hearth.snapshot.graph_nodes import KernelId
from hearth.system.cuda.graphs import (
    FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
    FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
    GRAPH_NODE_TYPE_KERNEL,
    CudaGraphs,
)


class KernelHandles:
    """Functions on one device. Mutable; any thread calls it. Functions are never unloaded."""

    def __init__(self, driver: CudaGraphs, function_by_binary: Callable[[], Mapping[str, int]]) -> None:
        self._driver = driver
        self._function_by_binary = function_by_binary
        #: Several models may be restored at a time.
        self._lock = threading.Lock()
        self._known_modules: set[int] = set()
        #: Several libraries may have a kernel of the same name.
        self._functions_by_name: dict[str, list[int]] = {}
        self._resolved: dict[KernelId, int] = {}

    def learn(self, graph: int) -> None:
        """Find all functions in the modules of a captured graph's kernels. The graph need never run."""
        with self._lock:
            nodes = self._driver.nodes(graph)
            kernels = nodes[self._driver.kinds(nodes) == GRAPH_NODE_TYPE_KERNEL]
            for row in self._driver.kernel_nodes(kernels):
                function = int(row["function"]) or self._driver.function_of(int(row["kernel"]))
                module = self._driver.module_of(function)
                if module not in self._known_modules:
                    self._known_modules.add(module)
                    for sibling in self._driver.functions(module):
                        self._functions_by_name.setdefault(self._driver.name(sibling), []).append(sibling)

    def resolve(self, kernels: Sequence[KernelId]) -> npt.NDArray[np.uint64]:
        """Return the loaded function of each kernel, its limits raised. Raises KernelsMissing."""
        found = self._find_all(kernels)
        missing = [kernel.name for kernel, function in found.items() if function is None]
        if missing:
            raise KernelsMissing(
                f"{len(missing)} of {len(kernels)} kernels of a graph are not in this process, "
                f"first `{missing[0]}`: the graph is captured anew"
            )
        return np.array([found[kernel] for kernel in kernels], np.uint64)

    def has(self, kernels: Sequence[KernelId]) -> bool:
        return all(function is not None for function in self._find_all(kernels).values())

    def _find_all(self, kernels: Sequence[KernelId]) -> dict[KernelId, int | None]:
        with self._lock:
            is_new = any(kernel.binary is not None and kernel not in self._resolved for kernel in kernels)
            binaries = self._function_by_binary() if is_new else {}
            return {kernel: self._find(kernel, binaries) for kernel in kernels}

    def _find(self, kernel: KernelId, binaries: Mapping[str, int]) -> int | None:
        if kernel in self._resolved:
            return self._resolved[kernel]
        if kernel.binary is not None:
            candidates = [binaries[kernel.binary]] if kernel.binary in binaries else []
        else:
            candidates = self._functions_by_name.get(kernel.name, [])
        for function in candidates:
            self._driver.load(function)  # a library loads only what it has used
            present = KernelId.of(self._driver, function, kernel.binary)
            if kernel.is_same_code(present):
                self._allow(function, kernel, present)
                self._resolved[kernel] = function
                return function
        return None

    def _allow(self, function: int, kernel: KernelId, present: KernelId) -> None:
        if present.dynamic_shared_bytes < kernel.dynamic_shared_bytes:
            attribute = FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._driver.set_function_attribute(function, attribute, kernel.dynamic_shared_bytes)
        if kernel.has_large_clusters and not present.has_large_clusters:
            attribute = FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            self._driver.set_function_attribute(function, attribute, 1)
