"""CUDA graphs made again from plain values, by another process than the one that captured them.

All nodes of a graph are prepared at once, in a few arrays of the driver's structures whose pointers lead into
one copy of the parameters; then each node takes one call. Restored graphs run what was captured, where that
lay: nothing here knows what that is, or whether it is there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from hearth.cuda_graphs import (
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
from hearth.snapshot.graph_nodes import ALIGNMENT, GraphNodes

_NOTHING = np.zeros(0, np.uint64)


class RestoredGraph:
    """An executable graph, destroyed with this object."""

    def __init__(self, driver: CudaGraphs, executable: int, num_nodes: int) -> None:
        self._driver, self._executable = driver, executable
        self.num_nodes = num_nodes

    def upload(self, stream: int) -> None:
        """Queue on a stream what the first launch would have to do before it starts."""
        self._driver.upload(self._executable, stream)

    def launch(self, stream: int) -> None:
        self._driver.launch(self._executable, stream)

    def replay(self) -> None:
        """Launch the graph on torch's current stream."""
        self.launch(torch.cuda.current_stream().cuda_stream)

    def __del__(self) -> None:
        self._driver.destroy_executable(self._executable)


def rebuild(driver: CudaGraphs, graph: GraphNodes, functions: npt.NDArray[np.uint64]) -> RestoredGraph:
    """Make a graph whose kernels have these `functions`, in the order of `graph.kernels`.

    Raises:
        DeviceError: the driver refuses a node or the whole.
    """
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
    """Add all nodes, without edges, and return their handles."""
    prepared = _Prepared(graph, functions)
    structures, blobs = prepared.structures.ctypes.data, prepared.blob_at.tolist()
    handles = np.zeros(len(graph.nodes), np.uint64)
    for index, kind in enumerate(graph.nodes["kind"].tolist()):
        if kind == GRAPH_NODE_TYPE_KERNEL:
            handles[index] = driver.add_kernel(handle, structures + index * KERNEL_NODE.itemsize)
        elif kind == GRAPH_NODE_TYPE_MEMSET:
            handles[index] = driver.add_memset(handle, blobs[index])
        elif kind == GRAPH_NODE_TYPE_MEMCPY:
            handles[index] = driver.add_memcpy(handle, blobs[index])
        else:
            assert kind == GRAPH_NODE_TYPE_EMPTY, f"a node of another kind: {kind=}"
            handles[index] = driver.add_empty(handle)
    return handles


class _Prepared:
    """The structures of all kernels of a graph, and what they point at, for as long as this object lives."""

    def __init__(self, graph: GraphNodes, functions: npt.NDArray[np.uint64]) -> None:
        nodes = graph.nodes
        self._blobs = np.empty(len(graph.blobs) + ALIGNMENT, np.uint8)
        base = -(-self._blobs.ctypes.data // ALIGNMENT) * ALIGNMENT
        begin = base - self._blobs.ctypes.data
        self._blobs[begin : begin + len(graph.blobs)] = graph.blobs
        self.blob_at = nodes["blob"].astype(np.uint64) + np.uint64(base)  #: where each node's parameters lie
        self.structures = np.zeros(len(nodes), KERNEL_NODE)
        is_kernel = nodes["kind"] == GRAPH_NODE_TYPE_KERNEL
        self.structures["function"][is_kernel] = functions[nodes["kernel"][is_kernel]]
        for field in ("grid", "block", "shared_bytes"):
            self.structures[field] = nodes[field]
        is_one_buffer = nodes["is_one_buffer"] != 0
        self._extra = self._point_at_buffers(nodes["blob_bytes"])
        self.structures["extra"][is_kernel & is_one_buffer] = _row_addresses(self._extra)[
            is_kernel & is_one_buffer
        ]
        apart = np.flatnonzero(is_kernel & ~is_one_buffer)
        self._parameters, begins = self._point_at_parameters(graph, apart)
        self.structures["parameters"][apart] = begins

    def _point_at_buffers(self, num_bytes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """Return for each node the words that say: a buffer here, of that size."""
        self._sizes = num_bytes.astype(np.uint64)
        words = np.zeros((len(num_bytes), 5), np.uint64)
        words[:, 0], words[:, 1] = LAUNCH_PARAM_BUFFER_POINTER, self.blob_at
        words[:, 2], words[:, 3] = LAUNCH_PARAM_BUFFER_SIZE, _row_addresses(self._sizes)
        words[:, 4] = LAUNCH_PARAM_END
        return words

    def _point_at_parameters(
        self, graph: GraphNodes, nodes: npt.NDArray[np.intp]
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Return a pointer to each parameter of all these nodes, and for each node where its own begin."""
        offsets = [np.array([at for at, _ in one.parameters], np.uint64) for one in graph.kernels]
        kernels = graph.nodes["kernel"][nodes].tolist()
        counts = np.array([len(offsets[kernel]) for kernel in kernels], np.uint64)
        pointers = np.concatenate([_NOTHING, *(offsets[kernel] for kernel in kernels)])
        pointers += np.repeat(self.blob_at[nodes], counts.astype(np.intp))
        begins = np.cumsum(counts, dtype=np.uint64) - counts
        return pointers, begins * np.uint64(pointers.itemsize) + np.uint64(pointers.ctypes.data)


def _set_attributes(driver: CudaGraphs, graph: GraphNodes, handles: npt.NDArray[np.uint64]) -> None:
    """Set the attributes in which a node differs from one that was just made, for each takes a call."""
    attributes = np.ascontiguousarray(graph.attributes)
    ids, values = attributes["id"].tolist(), [value.tobytes() for value in attributes["value"]]
    value_at = attributes.ctypes.data + attributes.dtype.fields["value"][1]
    fresh: dict[int, dict[int, bytes]] = {}  # by kernel
    for handle, node in zip(handles.tolist(), graph.nodes, strict=True):
        first, kernel = int(node["first_attribute"]), int(node["kernel"])
        if not node["num_attributes"]:
            continue
        if kernel not in fresh:
            fresh[kernel] = driver.attributes(handle)
        for index in range(first, first + int(node["num_attributes"])):
            if fresh[kernel][ids[index]] != values[index]:
                driver.set_attribute(handle, ids[index], value_at + index * attributes.itemsize)


def _row_addresses(array: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the address of each row of an array."""
    rows = np.arange(len(array), dtype=np.uint64) * np.uint64(array.strides[0])
    return rows + np.uint64(array.ctypes.data)
