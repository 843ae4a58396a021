"""CUDA graphs rebuilt from plain values, in another process than the one that captured them.

Native code does it where it can be compiled (`native_rebuild.py`), else Python, here: all nodes of a graph
are prepared in arrays of the driver's structures, whose pointers lead into one copy of the parameters; then
each node takes one call. A restored graph uses the captured addresses; nothing here checks them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from hearth.snapshot.graph_nodes import ALIGNMENT, GraphNodes
from hearth.system.cuda.graphs import (
    GRAPH_NODE_TYPE_EMPTY,
    GRAPH_NODE_TYPE_KERNEL,
    GRAPH_NODE_TYPE_MEMCPY,
    GRAPH_NODE_TYPE_MEMSET,
    KERNEL_NODE,
    LAUNCH_PARAM_BUFFER_POINTER,
    LAUNCH_PARAM_BUFFER_SIZE,
    LAUNCH_PARAM_END,
    CudaGraphs,
)

_NOTHING = np.zeros(0, np.uint64)


class Rebuild(Protocol):
    """Rebuilds graphs: native code (`native_rebuild.py`), or else Python."""

    @property
    def is_native(self) -> bool:
        """True if it releases the interpreter."""

    def __call__(self, packed: memoryview, functions: npt.NDArray[np.uint64]) -> RestoredGraph:
        """Rebuild a graph whose kernels have these `functions`, in the order in which it names them.

        Raises:
            DeviceError: the driver rejects a node or the graph.
            GraphUnreadable: the bytes are not those of a graph.
        """


class RestoredGraph:
    """An executable graph, destroyed with this object."""

    def __init__(self, driver: CudaGraphs, executable: int, num_nodes: int) -> None:
        self._driver, self._executable = driver, executable
        self.num_nodes = num_nodes

    def launch(self, stream: int) -> None:
        self._driver.launch(self._executable, stream)

    def replay(self) -> None:
        """Launch the graph on torch's current stream."""
        self.launch(torch.cuda.current_stream().cuda_stream)

    def __del__(self) -> None:
        self._driver.destroy_executable(self._executable)


class InterpretedRebuild:
    """Rebuilds graphs node by node, in Python. Any thread calls it."""

    is_native = False

    def __init__(self, driver: CudaGraphs) -> None:
        self._driver = driver

    def __call__(self, packed: memoryview, functions: npt.NDArray[np.uint64]) -> RestoredGraph:
        return rebuild(self._driver, GraphNodes.unpack(packed), functions)


def rebuild(driver: CudaGraphs, graph: GraphNodes, functions: npt.NDArray[np.uint64]) -> RestoredGraph:
    """As `Rebuild`, of an unpacked graph."""
    handle = driver.create()
    try:
        nodes = _add_nodes(driver, handle, graph, functions)
        _set_attributes(driver, graph, nodes)
        sources, targets = nodes[graph.edges["source"]], nodes[graph.edges["target"]]
        driver.add_edges(handle, sources, targets, np.ascontiguousarray(graph.edges["data"]))
        return RestoredGraph(driver, driver.instantiate(handle), len(nodes))
    finally:
        driver.destroy(handle)


def _add_nodes(
    driver: CudaGraphs, handle: int, graph: GraphNodes, functions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    prepared, kinds = _Prepared(graph, functions), graph.nodes["kind"]
    handles = np.zeros(len(graph.nodes), np.uint64)
    handles[kinds == GRAPH_NODE_TYPE_KERNEL] = driver.add_kernels(handle, prepared.kernels)
    for index in np.flatnonzero(kinds != GRAPH_NODE_TYPE_KERNEL).tolist():
        params = int(prepared.blob_at[index])
        if kinds[index] == GRAPH_NODE_TYPE_MEMSET:
            handles[index] = driver.add_memset(handle, params)
        elif kinds[index] == GRAPH_NODE_TYPE_MEMCPY:
            handles[index] = driver.add_memcpy(handle, params)
        else:
            assert kinds[index] == GRAPH_NODE_TYPE_EMPTY, f"unknown kind of node: {kinds[index]}"
            handles[index] = driver.add_empty(handle)
    return handles


class _Prepared:
    """The structures of all kernels of a graph, and the memory that they point at."""

    def __init__(self, graph: GraphNodes, functions: npt.NDArray[np.uint64]) -> None:
        self._blobs = np.empty(len(graph.blobs) + ALIGNMENT, np.uint8)
        base = -(-self._blobs.ctypes.data // ALIGNMENT) * ALIGNMENT
        begin = base - self._blobs.ctypes.data
        self._blobs[begin : begin + len(graph.blobs)] = graph.blobs
        self.blob_at = graph.nodes["blob"].astype(np.uint64) + np.uint64(base)  #: of each node's parameters
        is_kernel = graph.nodes["kind"] == GRAPH_NODE_TYPE_KERNEL
        nodes, blob_at = graph.nodes[is_kernel], self.blob_at[is_kernel]
        self.kernels = np.zeros(len(nodes), KERNEL_NODE)  #: in the order of those nodes
        self.kernels["function"] = functions[nodes["kernel"]]
        for field in ("grid", "block", "shared_bytes"):
            self.kernels[field] = nodes[field]
        is_one_buffer = nodes["is_one_buffer"] != 0
        self._sizes = nodes["blob_bytes"][is_one_buffer].astype(np.uint64)
        self._extra = _buffer_words(blob_at[is_one_buffer], self._sizes)
        self.kernels["extra"][is_one_buffer] = _row_addresses(self._extra)
        self._parameters, begins = _parameter_words(
            graph, nodes["kernel"][~is_one_buffer], blob_at[~is_one_buffer]
        )
        self.kernels["parameters"][~is_one_buffer] = begins


def _buffer_words(blob_at: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return for each node the words that describe its parameters as one buffer."""
    words = np.zeros((len(sizes), 5), np.uint64)
    words[:, 0], words[:, 1] = LAUNCH_PARAM_BUFFER_POINTER, blob_at
    words[:, 2], words[:, 3] = LAUNCH_PARAM_BUFFER_SIZE, _row_addresses(sizes)
    words[:, 4] = LAUNCH_PARAM_END
    return words


def _parameter_words(
    graph: GraphNodes, kernels: npt.NDArray[np.uint32], blob_at: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return pointers to all parameters of some nodes, and the address of each node's first pointer."""
    offsets = [np.array([at for at, _ in one.parameters], np.uint64) for one in graph.kernels]
    counts = np.array([len(one) for one in offsets], np.uint64)[kernels]
    pointers = np.concatenate([_NOTHING, *(offsets[kernel] for kernel in kernels.tolist())])
    pointers += np.repeat(blob_at, counts.astype(np.intp))
    begins = np.cumsum(counts, dtype=np.uint64) - counts
    return pointers, begins * np.uint64(pointers.itemsize) + np.uint64(pointers.ctypes.data)


def _set_attributes(driver: CudaGraphs, graph: GraphNodes, handles: npt.NDArray[np.uint64]) -> None:
    """Set the attributes of one node of each kind, and copy them to the others in one call each."""
    ids, values = graph.attributes["id"].tolist(), [one.tobytes() for one in graph.attributes["value"]]
    columns = (graph.nodes[name].tolist() for name in ("kernel", "first_attribute", "num_attributes"))
    model_by_kind, pairs = dict[tuple[int, ...], int](), []
    for handle, *kind in zip(handles.tolist(), *columns, strict=True):
        _, first, count = kind
        if not count:
            continue
        model = model_by_kind.setdefault(tuple(kind), handle)
        if model != handle:
            pairs.append((handle, model))
            continue
        for index in range(first, first + count):
            driver.set_attribute(handle, ids[index], values[index])
    driver.copy_attributes(pairs)


def _row_addresses(array: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    rows = np.arange(len(array), dtype=np.uint64) * np.uint64(array.strides[0])
    return rows + np.uint64(array.ctypes.data)
