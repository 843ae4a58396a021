"""Calls of CUDA's driver for graphs, their nodes and functions.

Nodes are read and written as arrays of the driver's structures. Constants are those of CUDA 13.0's `cuda.h`,
which names the calls without `_v2`; the library exports older versions under those names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from hearth.system.cuda.driver import POINTER_ATTRIBUTE_MEMORY_TYPE, CudaDriver

# From cuda.h, where these names have `CU_` in front.
GRAPH_NODE_TYPE_KERNEL = 0
GRAPH_NODE_TYPE_MEMCPY = 1
GRAPH_NODE_TYPE_MEMSET = 2
GRAPH_NODE_TYPE_EMPTY = 5
LAUNCH_PARAM_END = 0
LAUNCH_PARAM_BUFFER_POINTER = 1
LAUNCH_PARAM_BUFFER_SIZE = 2
FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
FUNC_ATTRIBUTE_NUM_REGS = 4
FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14

#: Attributes of a kernel's node: access policy window, cooperative, cluster dimension and scheduling,
#: priority, memory synchronisation domains, preferred cluster dimension, shared memory carve-out. All others
#: are for launches, or for nodes that the device updates.
NODE_ATTRIBUTES = (1, 2, 4, 5, 8, 9, 10, 11, 14)
LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4
LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE = 5
ATTRIBUTE_BYTES = 64

#: CUDA_KERNEL_NODE_PARAMS_v2
KERNEL_NODE = np.dtype(
    {
        "names": ["function", "grid", "block", "shared_bytes", "parameters", "extra", "kernel", "context"],
        "formats": ["<u8", ("<u4", 3), ("<u4", 3), "<u4", "<u8", "<u8", "<u8", "<u8"],
        "offsets": [0, 8, 20, 32, 40, 48, 56, 64],
        "itemsize": 72,
    }
)
#: CUDA_MEMSET_NODE_PARAMS_v1
MEMSET_NODE = np.dtype(
    [
        ("target", "<u8"),
        ("pitch", "<u8"),
        ("value", "<u4"),
        ("element_bytes", "<u4"),
        ("width", "<u8"),
        ("height", "<u8"),
    ]
)
#: CUDA_MEMCPY3D_v2. It has no gaps: numpy would leave them out of a copy.
MEMCPY_NODE = np.dtype(
    [
        ("source_at", "<u8", 4),
        ("source_kind", "<u8"),
        ("source_host", "<u8"),
        ("source", "<u8"),
        ("source_array", "<u8"),
        ("source_reserved", "<u8"),
        ("source_pitch", "<u8", 2),
        ("target_at", "<u8", 4),
        ("target_kind", "<u8"),
        ("target_host", "<u8"),
        ("target", "<u8"),
        ("target_array", "<u8"),
        ("target_reserved", "<u8"),
        ("target_pitch", "<u8", 2),
        ("extent", "<u8", 3),
    ]
)
#: CUgraphEdgeData
EDGE_DATA = np.dtype([("from_port", "u1"), ("to_port", "u1"), ("type", "u1"), ("reserved", "u1", 5)])

_CALLS: dict[str, tuple[type, ...]] = {
    "cuGraphGetNodes": (c_void_p, c_void_p, c_void_p),
    "cuGraphGetEdges_v2": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "cuGraphNodeGetType": (c_void_p, c_void_p),
    "cuGraphKernelNodeGetParams_v2": (c_void_p, c_void_p),
    "cuGraphKernelNodeGetAttribute": (c_void_p, c_int, c_void_p),
    "cuGraphKernelNodeSetAttribute": (c_void_p, c_int, c_void_p),
    "cuGraphKernelNodeCopyAttributes": (c_void_p, c_void_p),
    "cuGraphMemsetNodeGetParams": (c_void_p, c_void_p),
    "cuGraphMemcpyNodeGetParams": (c_void_p, c_void_p),
    "cuGraphCreate": (c_void_p, c_uint),
    "cuGraphAddKernelNode_v2": (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p),
    "cuGraphAddMemsetNode": (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p),
    "cuGraphAddMemcpyNode": (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p),
    "cuGraphAddEmptyNode": (c_void_p, c_void_p, c_void_p, c_size_t),
    "cuGraphAddDependencies_v2": (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t),
    "cuGraphInstantiateWithFlags": (c_void_p, c_void_p, c_ulonglong),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuKernelGetFunction": (c_void_p, c_void_p),
    "cuFuncLoad": (c_void_p,),
    "cuFuncGetName": (c_void_p, c_void_p),
    "cuFuncGetParamInfo": (c_void_p, c_size_t, c_void_p, c_void_p),
    "cuFuncGetAttribute": (c_void_p, c_int, c_void_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncGetModule": (c_void_p, c_void_p),
    "cuModuleGetFunctionCount": (c_void_p, c_void_p),
    "cuModuleEnumerateFunctions": (c_void_p, c_uint, c_void_p),
    "cuPointerGetAttribute": (c_void_p, c_int, c_ulonglong),
}
Handles = npt.NDArray[np.uint64]


class CudaGraphs:
    """The graph calls of one device's driver. Any thread may call it; a graph is used by one at a time."""

    def __init__(self, driver: CudaDriver) -> None:
        driver.declare(_CALLS)
        self.driver = driver

    # Reading a graph.

    def nodes(self, graph: int) -> Handles:
        count = c_size_t()
        self.driver.call("cuGraphGetNodes", graph, None, ctypes.byref(count))
        nodes = np.zeros(count.value, np.uint64)
        if count.value:
            self.driver.call("cuGraphGetNodes", graph, nodes.ctypes.data, ctypes.byref(count))
        return nodes

    def edges(self, graph: int) -> tuple[Handles, Handles, npt.NDArray[np.void]]:
        count = c_size_t()
        self.driver.call("cuGraphGetEdges_v2", graph, None, None, None, ctypes.byref(count))
        sources, targets = (np.zeros(count.value, np.uint64) for _ in range(2))
        data = np.zeros(count.value, EDGE_DATA)
        if count.value:
            arrays = (sources.ctypes.data, targets.ctypes.data, data.ctypes.data)
            self.driver.call("cuGraphGetEdges_v2", graph, *arrays, ctypes.byref(count))
        return sources, targets, data

    def kinds(self, nodes: Handles) -> npt.NDArray[np.int32]:
        kinds = np.zeros(len(nodes), np.int32)
        self.driver.call_each("cuGraphNodeGetType", zip(nodes.tolist(), _rows(kinds), strict=True))
        return kinds

    def kernel_nodes(self, nodes: Handles) -> npt.NDArray[np.void]:
        """Return `KERNEL_NODE` of each node. The graph owns the memory that they point at."""
        return self._params("cuGraphKernelNodeGetParams_v2", nodes, KERNEL_NODE)

    def memset_nodes(self, nodes: Handles) -> npt.NDArray[np.void]:
        return self._params("cuGraphMemsetNodeGetParams", nodes, MEMSET_NODE)

    def memcpy_nodes(self, nodes: Handles) -> npt.NDArray[np.void]:
        return self._params("cuGraphMemcpyNodeGetParams", nodes, MEMCPY_NODE)

    def _params(self, call: str, nodes: Handles, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
        params = np.zeros(len(nodes), dtype)
        self.driver.call_each(call, zip(nodes.tolist(), _rows(params), strict=True))
        return params

    def attributes(self, nodes: Handles) -> npt.NDArray[np.uint8]:
        """Return `NODE_ATTRIBUTES` of kernel nodes, [nodes, attributes, bytes]; 0: unknown to the driver."""
        values = np.zeros((len(nodes), len(NODE_ATTRIBUTES), ATTRIBUTE_BYTES), np.uint8)
        call = "cuGraphKernelNodeGetAttribute"
        for index, attribute in enumerate(NODE_ATTRIBUTES):
            rows = zip(nodes.tolist(), _rows(values[:, index]), strict=True)
            calls = ((node, attribute, value) for node, value in rows)
            if (first := next(calls, None)) is not None and self.driver.succeeds(call, *first):
                self.driver.call_each(call, calls)
        return values

    # Graphs made here: empty ones, and executables that native code has built.

    def create(self) -> int:
        graph = c_void_p()
        self.driver.call("cuGraphCreate", ctypes.byref(graph), 0)
        return graph.value or 0

    def add_kernels(self, graph: int, params: npt.NDArray[np.void]) -> Handles:
        nodes = np.zeros(len(params), np.uint64)
        calls = zip(_rows(nodes), _rows(params), strict=True)
        self.driver.call_each("cuGraphAddKernelNode_v2", ((node, graph, None, 0, at) for node, at in calls))
        return nodes

    def destroy(self, graph: int) -> None:
        self.driver.call("cuGraphDestroy", graph)

    def instantiate(self, graph: int) -> int:
        executable = c_void_p()
        self.driver.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, 0)
        return executable.value or 0

    def launch(self, executable: int, stream: int) -> None:
        self.driver.call("cuGraphLaunch", executable, stream)

    def destroy_executable(self, executable: int) -> None:
        self.driver.call("cuGraphExecDestroy", executable)

    def refused(self, call: str, code: int) -> NoReturn:
        self.driver.refused(call, len(_CALLS[call]), code)

    # Functions.

    def function_of(self, kernel: int) -> int:
        function = c_void_p()
        self.driver.call("cuKernelGetFunction", ctypes.byref(function), kernel)
        return function.value or 0

    def load(self, function: int) -> None:
        """Load a function unless it is loaded; libraries do so on first use."""
        self.driver.call("cuFuncLoad", function)

    def name(self, function: int) -> str:
        name = ctypes.c_char_p()
        self.driver.call("cuFuncGetName", ctypes.byref(name), function)
        return (name.value or b"").decode()

    def parameters(self, function: int) -> list[tuple[int, int]]:
        found = list[tuple[int, int]]()
        offset, size = c_size_t(), c_size_t()
        while self.driver.succeeds(
            "cuFuncGetParamInfo", function, len(found), ctypes.byref(offset), ctypes.byref(size)
        ):
            found.append((offset.value, size.value))
        return found

    def function_attribute(self, function: int, attribute: int) -> int:
        value = c_int()
        self.driver.call("cuFuncGetAttribute", ctypes.byref(value), attribute, function)
        return value.value

    def set_function_attribute(self, function: int, attribute: int, value: int) -> None:
        self.driver.call("cuFuncSetAttribute", function, attribute, value)

    def module_of(self, function: int) -> int:
        module = c_void_p()
        self.driver.call("cuFuncGetModule", ctypes.byref(module), function)
        return module.value or 0

    def functions(self, module: int) -> Sequence[int]:
        count = c_uint()
        self.driver.call("cuModuleGetFunctionCount", ctypes.byref(count), module)
        functions = np.zeros(count.value, np.uint64)
        if count.value:
            self.driver.call("cuModuleEnumerateFunctions", functions.ctypes.data, count.value, module)
        found: list[int] = functions.tolist()
        return found

    def memory_at(self, value: int) -> int | None:
        """Return the type of memory at an address, such as `MEMORYTYPE_HOST`; None: the driver has none."""
        kind = c_uint()
        attribute = POINTER_ATTRIBUTE_MEMORY_TYPE
        is_known = self.driver.succeeds("cuPointerGetAttribute", ctypes.byref(kind), attribute, value)
        return kind.value if is_known else None


def _rows(array: npt.NDArray[np.generic]) -> range:
    if not len(array):  # its strides may be 0
        return range(0)
    begin, step = array.ctypes.data, array.strides[0]
    return range(begin, begin + len(array) * step, step)
