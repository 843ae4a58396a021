"""Graphs as a driver keeps them, in plain memory. Follows every pointer that it is given, as the real one."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hearth.system.cuda.graphs import (
    ATTRIBUTE_BYTES,
    EDGE_DATA,
    FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
    FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
    FUNC_ATTRIBUTE_NUM_REGS,
    FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
    GRAPH_NODE_TYPE_EMPTY,
    GRAPH_NODE_TYPE_KERNEL,
    GRAPH_NODE_TYPE_MEMCPY,
    GRAPH_NODE_TYPE_MEMSET,
    KERNEL_NODE,
    MEMCPY_NODE,
    MEMSET_NODE,
    NODE_ATTRIBUTES,
    CudaGraphs,
    Handles,
)


@dataclass
class Function:
    """A kernel's function: `attributes` by the driver's number."""

    name: str
    module: int
    parameters: list[tuple[int, int]]
    attributes: dict[int, int] = field(default_factory=dict)


@dataclass
class Node:
    kind: int
    #: Kept, with all that it points at.
    params: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(1, KERNEL_NODE))
    keep: list[object] = field(default_factory=list)
    attributes: dict[int, bytes] = field(
        default_factory=lambda: dict.fromkeys(NODE_ATTRIBUTES, bytes(ATTRIBUTE_BYTES))
    )


@dataclass
class Graph:
    nodes: list[int] = field(default_factory=list)
    edges: list[tuple[int, int, bytes]] = field(default_factory=list)


class FakeDriver(CudaGraphs):
    """A driver without a device. Handles count up, so that no two are ever the same."""

    def __init__(self) -> None:
        self._next = 0x7F00_0000_0000
        self.graphs: dict[int, Graph] = {}
        self.executables: dict[int, Graph] = {}
        self.node_by_handle: dict[int, Node] = {}
        self.function_by_handle: dict[int, Function] = {}
        self.unloaded: set[int] = set()  #: functions that no library has used yet
        self.launched: list[tuple[int, int]] = []

    def handle(self) -> int:
        self._next += 16
        return self._next

    def add_function(self, name: str, module: int, parameters: list[tuple[int, int]], **known: int) -> int:
        numbers = {
            "registers": FUNC_ATTRIBUTE_NUM_REGS,
            "static_shared_bytes": FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            "dynamic_shared_bytes": FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            "has_large_clusters": FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
        }
        attributes = dict.fromkeys(numbers.values(), 0) | {numbers[key]: known[key] for key in known}
        handle = self.handle()
        self.function_by_handle[handle] = Function(name, module, parameters, attributes)
        return handle

    def nodes(self, graph: int) -> Handles:
        return np.array(self.graphs[graph].nodes, np.uint64)

    def edges(self, graph: int) -> tuple[Handles, Handles, npt.NDArray[np.void]]:
        edges = self.graphs[graph].edges
        sources, targets = (np.array([edge[side] for edge in edges], np.uint64) for side in (0, 1))
        return sources, targets, np.frombuffer(b"".join(data for *_, data in edges), EDGE_DATA)

    def kinds(self, nodes: Handles) -> npt.NDArray[np.int32]:
        return np.array([self.node_by_handle[node].kind for node in nodes.tolist()], np.int32)

    def kernel_nodes(self, nodes: Handles) -> npt.NDArray[np.void]:
        return self._params_of(nodes, KERNEL_NODE)

    def memset_nodes(self, nodes: Handles) -> npt.NDArray[np.void]:
        return self._params_of(nodes, MEMSET_NODE)

    def memcpy_nodes(self, nodes: Handles) -> npt.NDArray[np.void]:
        return self._params_of(nodes, MEMCPY_NODE)

    def _params_of(self, nodes: Handles, dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
        rows = [self.node_by_handle[node].params for node in nodes.tolist()]
        return np.concatenate([np.zeros(0, dtype), *rows])

    def attributes(self, nodes: Handles) -> npt.NDArray[np.uint8]:
        values = [b"".join(self.node_by_handle[node].attributes.values()) for node in nodes.tolist()]
        shape = (len(nodes), len(NODE_ATTRIBUTES), ATTRIBUTE_BYTES)
        return np.frombuffer(b"".join(values), np.uint8).reshape(shape)

    def create(self) -> int:
        handle = self.handle()
        self.graphs[handle] = Graph()
        return handle

    def add_kernels(self, graph: int, params: npt.NDArray[np.void]) -> Handles:
        return np.array(
            [self._add_kernel(graph, params[at : at + 1].copy()) for at in range(len(params))], "u8"
        )

    def _add_kernel(self, graph: int, given: npt.NDArray[np.void]) -> int:
        node = Node(GRAPH_NODE_TYPE_KERNEL, given)
        row, parameters = given[0], self.function_by_handle[int(given[0]["function"])].parameters
        assert bool(row["parameters"]) != bool(row["extra"]) or not parameters
        if row["extra"]:
            *pairs, end = (ctypes.c_size_t * 5).from_address(int(row["extra"]))
            pointer, size = (dict(zip(pairs[::2], pairs[1::2], strict=True))[key] for key in (1, 2))
            assert end == 0
            num_bytes = ctypes.c_size_t.from_address(size)
            buffer = ctypes.create_string_buffer(ctypes.string_at(pointer, num_bytes.value), num_bytes.value)
            # The real one has been seen to tell of the size first.
            words = (ctypes.c_size_t * 5)(2, ctypes.addressof(num_bytes), 1, ctypes.addressof(buffer), 0)
            num_bytes = ctypes.c_size_t(num_bytes.value)
            words[1] = ctypes.addressof(num_bytes)
            node.keep += [buffer, num_bytes, words]
            row["extra"] = ctypes.addressof(words)
        else:
            given_at = (ctypes.c_size_t * len(parameters)).from_address(int(row["parameters"]))
            copies = [
                ctypes.create_string_buffer(ctypes.string_at(at, size), size)
                for at, (_, size) in zip(given_at, parameters, strict=True)
            ]
            pointers = (ctypes.c_size_t * max(1, len(copies)))(*map(ctypes.addressof, copies))
            node.keep += [copies, pointers]
            row["parameters"] = ctypes.addressof(pointers)
        return self._add(graph, node)

    def add_memset(self, graph: int, params: int) -> int:
        given = np.frombuffer(ctypes.string_at(params, MEMSET_NODE.itemsize), MEMSET_NODE).copy()
        return self._add(graph, Node(GRAPH_NODE_TYPE_MEMSET, given))

    def add_memcpy(self, graph: int, params: int) -> int:
        given = np.frombuffer(ctypes.string_at(params, MEMCPY_NODE.itemsize), MEMCPY_NODE).copy()
        return self._add(graph, Node(GRAPH_NODE_TYPE_MEMCPY, given))

    def add_empty(self, graph: int) -> int:
        return self._add(graph, Node(GRAPH_NODE_TYPE_EMPTY))

    def _add(self, graph: int, node: Node) -> int:
        handle = self.handle()
        self.node_by_handle[handle] = node
        self.graphs[graph].nodes.append(handle)
        return handle

    def set_attribute(self, node: int, attribute: int, value: bytes) -> None:
        self.node_by_handle[node].attributes[attribute] = value

    def copy_attributes(self, target: int, source: int) -> None:
        assert self._function(target) == self._function(source)
        self.node_by_handle[target].attributes = dict(self.node_by_handle[source].attributes)

    def _function(self, node: int) -> int:
        return int(self.node_by_handle[node].params["function"][0])

    def add_edges(self, graph: int, sources: Handles, targets: Handles, data: npt.NDArray[np.void]) -> None:
        assert data.flags.c_contiguous
        for source, target, one in zip(sources.tolist(), targets.tolist(), data, strict=True):
            self.graphs[graph].edges.append((source, target, one.tobytes()))

    def instantiate(self, graph: int) -> int:
        handle = self.handle()
        self.executables[handle] = self.graphs[graph]
        return handle

    def launch(self, executable: int, stream: int) -> None:
        assert executable in self.executables
        self.launched.append((executable, stream))

    def destroy(self, graph: int) -> None:
        del self.graphs[graph]

    def destroy_executable(self, executable: int) -> None:
        del self.executables[executable]

    def load(self, function: int) -> None:
        self.unloaded.discard(function)

    def name(self, function: int) -> str:
        return self.function_by_handle[function].name

    def parameters(self, function: int) -> list[tuple[int, int]]:
        return self.function_by_handle[function].parameters

    def function_attribute(self, function: int, attribute: int) -> int:
        assert function not in self.unloaded, "the real one refuses: CUDA_ERROR_FUNCTION_NOT_LOADED"
        return self.function_by_handle[function].attributes[attribute]

    def set_function_attribute(self, function: int, attribute: int, value: int) -> None:
        self.function_by_handle[function].attributes[attribute] = value

    def module_of(self, function: int) -> int:
        return self.function_by_handle[function].module

    def functions(self, module: int) -> list[int]:
        return [handle for handle, one in self.function_by_handle.items() if one.module == module]
