"""A captured CUDA graph as plain values, packed into bytes and back. Builds no graph.

Parameters of kernels are opaque bytes. They hold addresses, so a graph can be used only where everything that
it points at has the same address.

    packed:   header | kernels | parameters | names | nodes | attributes | edges | blobs

Each section is an array, begins at a multiple of 64 bytes, and refers to others by index. An unpacked graph
has views of the bytes: nothing is copied. Indices are not checked: the bytes come from an authentic section,
which is as trusted as code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hearth.core.errors import GraphUnreadable
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
    MEMCPY_NODE,
    MEMSET_NODE,
    CudaGraphs,
)

Table = npt.NDArray[np.void]

NODE: Final = np.dtype(
    [
        ("kind", "<u4"),
        ("kernel", "<u4"),
        ("grid", "<u4", 3),
        ("block", "<u4", 3),
        ("shared_bytes", "<u4"),
        ("is_one_buffer", "<u4"),
        ("blob", "<u4"),
        ("blob_bytes", "<u4"),
        ("first_attribute", "<u4"),
        ("num_attributes", "<u4"),
    ]
)
ATTRIBUTE: Final = np.dtype([("id", "<u4"), ("value", "u1", ATTRIBUTE_BYTES)])
EDGE: Final = np.dtype([("source", "<u4"), ("target", "<u4"), ("data", EDGE_DATA)])
PARAMETER: Final = np.dtype([("offset", "<u4"), ("bytes", "<u4")])
_KERNEL: Final = np.dtype(
    [
        ("name_bytes", "<u4"),
        ("binary_bytes", "<u4"),
        ("first_parameter", "<u4"),
        ("num_parameters", "<u4"),
        ("registers", "<u4"),
        ("static_shared_bytes", "<u4"),
        ("dynamic_shared_bytes", "<u4"),
        ("has_large_clusters", "<u4"),
    ]
)
_KERNEL_ROW, _PARAMETER_ROW = struct.Struct("<8I"), struct.Struct("<2I")
_SECTIONS: Final = (_KERNEL, PARAMETER, np.dtype("u1"), NODE, ATTRIBUTE, EDGE, np.dtype("u1"))
_MAGIC: Final = b"hgraph01"
_HEADER: Final = struct.Struct(f"<8s{len(_SECTIONS)}Q")
#: The driver copies tensor descriptors by words of this size.
ALIGNMENT: Final = 64
#: Device addresses are larger than any count, and aligned parameters hold them in whole words.
_LEAST_ADDRESS: Final = 1 << 32
_WORD_BYTES: Final = 8
#: The size of the driver's structure of a node that is not a kernel, by kind.
STRUCTURE_BYTES: Final = {
    GRAPH_NODE_TYPE_MEMCPY: MEMCPY_NODE.itemsize,
    GRAPH_NODE_TYPE_MEMSET: MEMSET_NODE.itemsize,
    GRAPH_NODE_TYPE_EMPTY: 0,
}


@dataclass(frozen=True, slots=True)
class KernelId:
    """A kernel of a graph: how its function is found in another process, and its properties there."""

    name: str  #: mangled
    #: The hash of source, variant and compiler of a Triton kernel, whose variants share one name. None: a
    #: library's kernel, whose name is unique in its library.
    binary: str | None
    parameters: tuple[tuple[int, int], ...]  #: offset and size of each
    registers: int
    static_shared_bytes: int
    dynamic_shared_bytes: int  #: limit of a launch
    has_large_clusters: bool  #: clusters may exceed the size that every device supports

    @property
    def parameter_bytes(self) -> int:
        return max((offset + size for offset, size in self.parameters), default=0)

    def is_same_code(self, other: KernelId) -> bool:
        """True if the properties that the driver reports agree; limits can be set and are not compared."""
        return (
            self.parameters == other.parameters
            and self.registers == other.registers
            and self.static_shared_bytes == other.static_shared_bytes
        )

    @staticmethod
    def unpack(packed: bytes) -> KernelId:
        name_bytes, _, _, count, registers, static, dynamic, large = _KERNEL_ROW.unpack_from(packed)
        begin = _KERNEL_ROW.size + count * PARAMETER.itemsize
        parameters = tuple(_PARAMETER_ROW.iter_unpack(packed[_KERNEL_ROW.size : begin]))
        name, binary = packed[begin : begin + name_bytes].decode(), packed[begin + name_bytes :].decode()
        return KernelId(name, binary or None, parameters, registers, static, dynamic, bool(large))

    @staticmethod
    def of(driver: CudaGraphs, function: int, binary: str | None) -> KernelId:
        return KernelId(
            driver.name(function),
            binary,
            tuple(driver.parameters(function)),
            driver.function_attribute(function, FUNC_ATTRIBUTE_NUM_REGS),
            driver.function_attribute(function, FUNC_ATTRIBUTE_SHARED_SIZE_BYTES),
            driver.function_attribute(function, FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES),
            bool(driver.function_attribute(function, FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED)),
        )


@dataclass(frozen=True, slots=True)
class Address:
    value: int
    kernel: str | None  #: None: of a copy or a fill
    offset: int  #: in the parameters
    #: True: a parameter by itself. False: part of a larger one, where two adjacent numbers, or uninitialised
    #: bytes, can look like an address.
    is_whole: bool


@dataclass(frozen=True, slots=True, eq=False)
class GraphNodes:
    """A graph as arrays. Nodes are in topological order."""

    kernels: tuple[KernelId, ...]
    nodes: Table  #: of `NODE`
    attributes: Table  #: of `ATTRIBUTE`, without those that a new node of the kernel has by default
    edges: Table  #: of `EDGE`
    #: Each node's parameters: of a kernel, packed as it reads them; of others, the driver's structure.
    blobs: npt.NDArray[np.uint8]

    def pack(self) -> bytes:
        names = b"".join(kernel.name.encode() + (kernel.binary or "").encode() for kernel in self.kernels)
        parameters = np.array([one for kernel in self.kernels for one in kernel.parameters], PARAMETER)
        rows, first = [], 0
        for kernel in self.kernels:
            rows.append(
                (
                    len(kernel.name.encode()),
                    len((kernel.binary or "").encode()),
                    first,
                    len(kernel.parameters),
                    kernel.registers,
                    kernel.static_shared_bytes,
                    kernel.dynamic_shared_bytes,
                    kernel.has_large_clusters,
                )
            )
            first += len(kernel.parameters)
        arrays = (
            np.array(rows, _KERNEL),
            parameters,
            np.frombuffer(names, np.uint8),
            self.nodes,
            self.attributes,
            self.edges,
            self.blobs,
        )
        pieces = [padded(_HEADER.pack(_MAGIC, *map(len, arrays)))]
        pieces += [padded(array.tobytes()) for array in arrays]
        return b"".join(pieces)

    @staticmethod
    def unpack(packed: memoryview) -> GraphNodes:
        *_, nodes, attributes, edges, blobs = _sections(packed)
        kernels = tuple(map(KernelId.unpack, packed_kernels(packed)))
        return GraphNodes(kernels, nodes, attributes, edges, blobs.view(np.uint8))

    def addresses(self, but: range) -> Iterator[Address]:
        """Yield each number in the parameters that may be an address, except those in `but`, once."""
        seen = set[Address]()
        for node in self.nodes:
            blob = self.blobs[node["blob"] : node["blob"] + node["blob_bytes"]]
            words = blob[: len(blob) // _WORD_BYTES * _WORD_BYTES].view(np.uint64)
            is_kernel = node["kind"] == GRAPH_NODE_TYPE_KERNEL
            kernel = self.kernels[node["kernel"]] if is_kernel else None
            is_known = (words >= but.start) & (words < but.stop)
            for index in np.flatnonzero((words >= _LEAST_ADDRESS) & ~is_known).tolist():
                at = index * _WORD_BYTES
                is_whole = kernel is None or (at, _WORD_BYTES) in kernel.parameters
                found = Address(int(words[index]), kernel and kernel.name, at, is_whole)
                if found not in seen:
                    seen.add(found)
                    yield found


def packed_kernels(packed: memoryview) -> list[bytes]:
    """Return the kernels of a packed graph, as bytes that are equal in all graphs. Raises GraphUnreadable."""
    rows, parameters, names, *_ = _sections(packed)
    offsets, text, at, kernels = parameters.tobytes(), names.tobytes(), 0, []
    for name_bytes, binary_bytes, first, count, *rest in _KERNEL_ROW.iter_unpack(rows.tobytes()):
        begin, end = first * PARAMETER.itemsize, at + name_bytes + binary_bytes
        own = offsets[begin : begin + count * PARAMETER.itemsize]
        kernels.append(_KERNEL_ROW.pack(name_bytes, binary_bytes, 0, count, *rest) + own + text[at:end])
        at = end
    return kernels


def _sections(packed: memoryview) -> list[Table]:
    if len(packed) < _HEADER.size:
        raise GraphUnreadable(f"a packed graph has {len(packed)} bytes, its header takes {_HEADER.size}")
    magic, *lengths = _HEADER.unpack_from(packed)
    if magic != _MAGIC:
        raise GraphUnreadable(f"a packed graph begins with {magic!r} instead of {_MAGIC!r}")
    arrays, at = [], _aligned(_HEADER.size)
    for length, dtype in zip(lengths, _SECTIONS, strict=True):
        end = at + length * dtype.itemsize
        if end > len(packed):
            raise GraphUnreadable(f"a packed graph has {len(packed)} bytes, its header says {end}")
        arrays.append(np.frombuffer(packed[at:end], dtype))
        at = _aligned(end)
    if at != len(packed):
        raise GraphUnreadable(f"a packed graph has {len(packed)} bytes, its header says {at}")
    return arrays


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def padded(data: bytes) -> bytes:
    return data.ljust(_aligned(len(data)), b"\0")
