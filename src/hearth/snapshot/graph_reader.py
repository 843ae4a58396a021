"""Captured CUDA graphs read from the driver as plain values. Packs none."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hearth.core.errors import GraphUnreadable
from hearth.snapshot.graph_nodes import (
    ATTRIBUTE,
    EDGE,
    NODE,
    STRUCTURE_BYTES,
    GraphNodes,
    KernelId,
    Table,
    padded,
)
from hearth.system.cuda.graphs import (
    GRAPH_NODE_TYPE_KERNEL,
    GRAPH_NODE_TYPE_MEMCPY,
    GRAPH_NODE_TYPE_MEMSET,
    LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
    LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
    LAUNCH_PARAM_BUFFER_POINTER,
    LAUNCH_PARAM_BUFFER_SIZE,
    LAUNCH_PARAM_END,
    NODE_ATTRIBUTES,
    CudaGraphs,
)


def read_graph(driver: CudaGraphs, graph: int, binary_by_function: Mapping[int, str]) -> GraphNodes:
    """Read a graph, which must not change meanwhile. `binary_by_function`: as in `KernelId.binary`. Raises
    GraphUnreadable: it has a node that cannot be rebuilt elsewhere, such as a host call.
    """
    handles = _in_order(driver, graph)
    kinds = driver.kinds(handles)
    others = set(kinds.tolist()) - {GRAPH_NODE_TYPE_KERNEL, *STRUCTURE_BYTES}
    if others:
        raise GraphUnreadable(f"the graph has nodes of type {min(others)}, not a kernel, copy or fill")
    kernels, nodes, blobs = _Kernels(driver, binary_by_function), np.zeros(len(handles), NODE), _Blobs()
    nodes["kind"] = kinds
    is_kernel = kinds == GRAPH_NODE_TYPE_KERNEL
    params = driver.kernel_nodes(handles[is_kernel])
    for field in ("grid", "block", "shared_bytes"):
        nodes[field][is_kernel] = params[field]
    nodes["kernel"][is_kernel] = [kernels.index(row) for row in params]
    nodes["is_one_buffer"][is_kernel] = params["parameters"] == 0
    _keep_parameters(nodes, is_kernel, params, kernels.ids, blobs)
    for kind, structures in _structures(driver, handles, kinds).items():
        nodes["blob"][kinds == kind] = [blobs.keep(structure.tobytes()) for structure in structures]
        nodes["blob_bytes"][kinds == kind] = STRUCTURE_BYTES[kind]
    attributes = _keep_attributes(driver, nodes, is_kernel, handles, params)
    sources, targets, data = driver.edges(graph)
    index_of = {handle: index for index, handle in enumerate(handles.tolist())}
    edges = np.zeros(len(data), EDGE)
    edges["source"] = [index_of[handle] for handle in sources.tolist()]
    edges["target"] = [index_of[handle] for handle in targets.tolist()]
    edges["data"] = data
    return GraphNodes(tuple(kernels.ids), nodes, attributes, edges, blobs.array())


def _in_order(driver: CudaGraphs, graph: int) -> npt.NDArray[np.uint64]:
    handles = driver.nodes(graph)
    sources, targets, _ = driver.edges(graph)
    waiting = dict.fromkeys(handles.tolist(), 0)
    followers: dict[int, list[int]] = {handle: [] for handle in waiting}
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        waiting[target] += 1
        followers[source].append(target)
    ready = [handle for handle, count in waiting.items() if count == 0]
    for handle in ready:  # grows meanwhile
        for follower in followers[handle]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    assert len(ready) == len(handles), f"the graph has a cycle: {len(ready)=} {len(handles)=}"
    return np.array(ready, np.uint64)


class _Kernels:
    def __init__(self, driver: CudaGraphs, binary_by_function: Mapping[int, str]) -> None:
        self._driver, self._binary_by_function = driver, binary_by_function
        self.ids: list[KernelId] = []
        self._index_by_function: dict[int, int] = {}

    def index(self, params: np.void) -> int:
        function = int(params["function"]) or self._driver.function_of(int(params["kernel"]))
        if function not in self._index_by_function:
            self._index_by_function[function] = len(self.ids)
            self.ids.append(KernelId.of(self._driver, function, self._binary_by_function.get(function)))
        return self._index_by_function[function]


class _Blobs:
    def __init__(self) -> None:
        self._bytes = bytearray()

    def keep(self, blob: bytes) -> int:
        at = len(self._bytes)
        self._bytes += padded(blob)
        return at

    def array(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(bytes(self._bytes), np.uint8)


def _keep_parameters(
    nodes: Table, is_kernel: npt.NDArray[np.bool_], params: Table, kernels: Sequence[KernelId], blobs: _Blobs
) -> None:
    at, sizes = [], []
    for kernel, extra, pointers in zip(
        nodes["kernel"][is_kernel].tolist(),
        params["extra"].tolist(),
        params["parameters"].tolist(),
        strict=True,
    ):
        blob = _gathered(pointers, kernels[kernel]) if pointers else _buffer(extra)
        at.append(blobs.keep(blob))
        sizes.append(len(blob))
    nodes["blob"][is_kernel], nodes["blob_bytes"][is_kernel] = at, sizes


def _structures(
    driver: CudaGraphs, handles: npt.NDArray[np.uint64], kinds: npt.NDArray[np.int32]
) -> dict[int, Table]:
    copies = driver.memcpy_nodes(handles[kinds == GRAPH_NODE_TYPE_MEMCPY])
    if copies["source_array"].any() or copies["target_array"].any():
        raise GraphUnreadable("the graph copies from or to an array, whose handle cannot be kept")
    fills = driver.memset_nodes(handles[kinds == GRAPH_NODE_TYPE_MEMSET])
    return {GRAPH_NODE_TYPE_MEMCPY: copies, GRAPH_NODE_TYPE_MEMSET: fills}


def _keep_attributes(
    driver: CudaGraphs,
    nodes: Table,
    is_kernel: npt.NDArray[np.bool_],
    handles: npt.NDArray[np.uint64],
    params: Table,
) -> Table:
    """Return attributes in which nodes differ from new ones, shared if equal, and note their indices."""
    _, firsts, kernels = np.unique(nodes["kernel"][is_kernel], return_index=True, return_inverse=True)
    scratch = driver.create()
    try:
        fresh = driver.attributes(driver.add_kernels(scratch, params[firsts]))
    finally:
        driver.destroy(scratch)
    values = driver.attributes(handles[is_kernel])
    differs = (values != fresh[kernels]).any(axis=-1)
    cluster = NODE_ATTRIBUTES.index(LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
    policy = NODE_ATTRIBUTES.index(LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE)
    differs[:, policy] &= values[:, cluster].any(axis=-1)  # without clusters it means nothing
    kept, begin_by_set = list[tuple[int, npt.NDArray[np.uint8]]](), dict[bytes, int]()
    begins = []
    for own, is_kept in zip(values, differs, strict=True):
        key = is_kept.tobytes() + own[is_kept].tobytes()
        if key not in begin_by_set:
            begin_by_set[key] = len(kept)
            kept += [(NODE_ATTRIBUTES[index], own[index]) for index in np.flatnonzero(is_kept)]
        begins.append(begin_by_set[key])
    nodes["first_attribute"][is_kernel], nodes["num_attributes"][is_kernel] = begins, differs.sum(axis=-1)
    return np.array(kept, ATTRIBUTE)


def _buffer(extra: int) -> bytes:
    """Return the parameters of a node that passes them as one buffer. `extra`: pairs of key and value."""
    words = ctypes.cast(extra, ctypes.POINTER(ctypes.c_size_t))
    values = dict[int, int]()
    while words[2 * len(values)] != LAUNCH_PARAM_END:
        at = 2 * len(values)
        if words[at] not in (LAUNCH_PARAM_BUFFER_POINTER, LAUNCH_PARAM_BUFFER_SIZE) or words[at] in values:
            raise GraphUnreadable(f"a kernel's parameters have an unknown part: {words[at]}")
        values[words[at]] = words[at + 1]
    size = ctypes.cast(values[LAUNCH_PARAM_BUFFER_SIZE], ctypes.POINTER(ctypes.c_size_t))[0]
    return ctypes.string_at(values[LAUNCH_PARAM_BUFFER_POINTER], size)


def _gathered(parameters: int, kernel: KernelId) -> bytes:
    pointers = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_size_t))
    blob = bytearray(kernel.parameter_bytes)
    for index, (offset, size) in enumerate(kernel.parameters):
        blob[offset : offset + size] = ctypes.string_at(pointers[index], size)
    return bytes(blob)
