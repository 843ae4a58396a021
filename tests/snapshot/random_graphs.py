"""Graphs drawn at random, of all kinds of nodes, and what they say."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from hearth.snapshot.graph_nodes import ALIGNMENT, ATTRIBUTE, EDGE, NODE, GraphNodes, KernelId
from hearth.system.cuda.graphs import (
    ATTRIBUTE_BYTES,
    GRAPH_NODE_TYPE_EMPTY,
    GRAPH_NODE_TYPE_KERNEL,
    GRAPH_NODE_TYPE_MEMCPY,
    GRAPH_NODE_TYPE_MEMSET,
    MEMCPY_NODE,
)
from tests.snapshot.fake_driver import FakeDriver

words = st.integers(0, 2**32 - 1)


@st.composite
def kernel_ids(draw: st.DrawFn, at: int) -> KernelId:
    sizes = draw(st.lists(st.sampled_from([4, 8, 64, 128]), max_size=6))
    ends = np.cumsum([0, *sizes]).tolist()
    binary = draw(st.none() | st.text("0123456789abcdef", min_size=1, max_size=64))
    return KernelId(
        f"{draw(st.text(max_size=8))}_{at}",
        binary and f"{binary}{at}",
        tuple(zip(ends, sizes, strict=False)),
        draw(words),
        draw(words),
        draw(st.integers(0, 2**31 - 1)),
        draw(st.booleans()),
    )


@st.composite
def graphs(draw: st.DrawFn) -> GraphNodes:
    """Graphs of all kinds of nodes, in which every kernel is used."""
    kernels = [draw(kernel_ids(at)) for at in range(draw(st.integers(1, 3)))]
    kinds = [GRAPH_NODE_TYPE_KERNEL, GRAPH_NODE_TYPE_MEMSET, GRAPH_NODE_TYPE_MEMCPY, GRAPH_NODE_TYPE_EMPTY]
    others = draw(st.lists(st.sampled_from(kinds), max_size=6))
    nodes, blobs = [], b""
    attributes, first_by_set = list[tuple[int, np.ndarray]](), dict[tuple[int, ...], int]()
    for at, kind in enumerate([GRAPH_NODE_TYPE_KERNEL] * len(kernels) + others):
        kernel = at % len(kernels)
        is_one_buffer, first, count = False, 0, 0
        if kind == GRAPH_NODE_TYPE_KERNEL:
            least = kernels[kernel].parameter_bytes
            is_one_buffer = draw(st.booleans())
            size = least + (draw(st.integers(0, 99)) if is_one_buffer else 0)
            blob = draw(st.binary(min_size=size, max_size=size))
            value = np.frombuffer(b"\x01".ljust(ATTRIBUTE_BYTES, b"\0"), np.uint8)
            own = tuple(draw(st.sampled_from([(), (2,), (4, 5, 8)])))
            if own not in first_by_set:
                first_by_set[own] = len(attributes)
                attributes += [(attribute, value) for attribute in own]
            first, count = first_by_set[own], len(own)
        else:
            kernel = 0
            size = {GRAPH_NODE_TYPE_MEMSET: 40, GRAPH_NODE_TYPE_MEMCPY: 200}.get(kind, 0)
            blob = bytes([at]) * size
            if kind == GRAPH_NODE_TYPE_MEMCPY:
                copy = np.frombuffer(blob, MEMCPY_NODE).copy()
                copy["source_array"] = copy["target_array"] = 0
                blob = copy.tobytes()
        shape = (1, 1, 1) if kind == GRAPH_NODE_TYPE_KERNEL else (0, 0, 0)
        shared_bytes = draw(words) if kind == GRAPH_NODE_TYPE_KERNEL else 0
        where = (len(blobs), len(blob), first, count)
        nodes.append((kind, kernel, shape, shape, shared_bytes, is_one_buffer, *where))
        blobs += blob.ljust(-(-len(blob) // ALIGNMENT) * ALIGNMENT, b"\0")
    edges = np.zeros(len(nodes) - 1, EDGE)
    edges["source"], edges["target"] = np.arange(len(nodes) - 1), np.arange(1, len(nodes))
    edges["data"]["from_port"] = edges["data"]["type"] = draw(st.integers(0, 1))
    return GraphNodes(
        tuple(kernels),
        np.array(nodes, NODE),
        np.array(attributes, ATTRIBUTE),
        edges,
        np.frombuffer(blobs, np.uint8),
    )


def functions_of(driver: FakeDriver, graph: GraphNodes) -> np.ndarray:
    return np.array(
        [
            driver.add_function(
                one.name,
                module=1,
                parameters=list(one.parameters),
                registers=one.registers,
                static_shared_bytes=one.static_shared_bytes,
                dynamic_shared_bytes=one.dynamic_shared_bytes,
                has_large_clusters=one.has_large_clusters,
            )
            for one in graph.kernels
        ],
        np.uint64,
    )


def meaning_of(graph: GraphNodes) -> list[object]:
    """All that a graph says, wherever it keeps that."""
    nodes = []
    for node in graph.nodes:
        attributes = graph.attributes[node["first_attribute"] :][: node["num_attributes"]]
        blob = graph.blobs[node["blob"] :][: node["blob_bytes"]]
        launch = [node[name].tolist() for name in ("kind", "grid", "block", "shared_bytes", "is_one_buffer")]
        kernel = graph.kernels[node["kernel"]] if node["kind"] == GRAPH_NODE_TYPE_KERNEL else None
        nodes.append((kernel, *launch, blob.tobytes(), attributes.tobytes()))
    return [nodes, graph.edges.tobytes()]
