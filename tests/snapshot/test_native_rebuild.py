"""Graphs rebuilt from packed bytes by native code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from hearth.core.errors import DeviceError, GraphUnreadable, OutOfDeviceMemory
from hearth.snapshot.graph_nodes import (
    ATTRIBUTE,
    EDGE,
    NODE,
    GraphNodes,
    KernelId,
)
from hearth.snapshot.graph_reader import read_graph
from hearth.snapshot.native_rebuild import CALLS, NativeRebuild
from hearth.system.cuda.graphs import (
    GRAPH_NODE_TYPE_EMPTY,
    GRAPH_NODE_TYPE_KERNEL,
    GRAPH_NODE_TYPE_MEMCPY,
    GRAPH_NODE_TYPE_MEMSET,
    MEMCPY_NODE,
)
from tests.snapshot.fake_driver import FakeDriver
from tests.snapshot.fake_library import CONTEXT, FakeLibrary, graphs_over, rebuild_over
from tests.snapshot.random_graphs import functions_of, graphs, meaning_of


class Process:
    """One that makes graphs, over a library of its own, with functions for all kernels of one graph."""

    def __init__(self, graph: GraphNodes) -> None:
        self.fake = FakeDriver()
        self.library = FakeLibrary(self.fake)
        self.functions = functions_of(self.fake, graph)
        self.rebuild = rebuild_over(self.library)

    def built(self, packed: memoryview) -> GraphNodes:
        """The one graph that was made, read again and let go of."""
        kernels = GraphNodes.unpack(packed).kernels
        restored = self.rebuild(packed, self.functions)
        assert not self.library.errors, self.library.errors
        assert not self.fake.graphs, "the graph itself is kept"
        assert self.library.contexts <= {CONTEXT}
        (self.fake.graphs[1],) = self.fake.executables.values()
        binaries = zip(self.functions.tolist(), kernels, strict=True)
        again = read_graph(self.fake, 1, {at: one.binary for at, one in binaries if one.binary is not None})
        del restored
        assert not self.fake.executables
        return again


@given(graphs())
def test_the_graph_that_was_packed_is_made(graph: GraphNodes) -> None:
    assert meaning_of(Process(graph).built(memoryview(graph.pack()))) == meaning_of(graph)


def test_bytes_of_another_length_are_refused(example: GraphNodes) -> None:
    process, packed = Process(example), example.pack()
    for damaged in (b"", packed[:100], packed[:-64], packed + bytes(64), b"x" + packed[1:]):
        with pytest.raises(GraphUnreadable, match="a packed graph"):
            process.rebuild(memoryview(damaged), process.functions)


@pytest.fixture(scope="module")
def example() -> GraphNodes:
    """A graph with nodes of all kinds, three of one kernel with the same attributes, and edges with data."""
    kernels = (
        KernelId("product", None, ((0, 8), (8, 56), (64, 128)), 40, 0, 99_000, False),
        KernelId("norm", "hash", ((0, 8),), 32, 16, 0, False),
    )
    kinds = [*[GRAPH_NODE_TYPE_KERNEL] * 5, GRAPH_NODE_TYPE_MEMSET, GRAPH_NODE_TYPE_MEMCPY]
    nodes, blobs = np.zeros(8, NODE), np.random.default_rng(0).integers(0, 255, 8 * 256, np.uint8)
    nodes["kind"] = [*kinds, GRAPH_NODE_TYPE_EMPTY]
    nodes["kernel"], nodes["is_one_buffer"] = [0, 1, 0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]
    nodes["blob"] = np.arange(8) * 256
    nodes["blob_bytes"] = [192, 8, 200, 8, 192, 40, 200, 0]
    nodes["num_attributes"], nodes["grid"][:5], nodes["block"][:5] = [2, 1, 2, 0, 2, 0, 0, 0], 3, 128
    copy = blobs[6 * 256 :][:200].view(MEMCPY_NODE)
    copy["source_array"] = copy["target_array"] = 0
    attributes = np.zeros(2, ATTRIBUTE)
    attributes["id"], attributes["value"] = [2, 4], np.arange(64)
    edges = np.zeros(8, EDGE)
    edges["source"], edges["target"] = [0, 0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 3, 4, 5, 6, 7]
    edges["data"]["from_port"][:4] = edges["data"]["type"][:4] = 1
    return GraphNodes(kernels, nodes, attributes, edges, blobs)


@pytest.mark.parametrize("call", [name for name in CALLS if name != "cuGraphExecDestroy"])
def test_a_call_that_the_driver_refuses_is_told_and_leaves_nothing(call: str, example: GraphNodes) -> None:
    process = Process(example)
    process.library.refusals[call] = (0, 719)
    with pytest.raises(DeviceError, match=rf"{call}.*CUDA_ERROR_OF_A_TEST \(719\)"):
        process.rebuild(memoryview(example.pack()), process.functions)
    assert not process.fake.executables
    # A graph that cannot be destroyed stays.
    assert bool(process.fake.graphs) == (call == "cuGraphDestroy")


def test_memory_that_runs_out_half_way_is_told_as_such(example: GraphNodes) -> None:
    process = Process(example)
    process.library.refusals["cuGraphAddKernelNode_v2"] = (1, 2)
    with pytest.raises(OutOfDeviceMemory):
        process.rebuild(memoryview(example.pack()), process.functions)
    assert not process.fake.graphs


def test_each_node_with_attributes_takes_one_call_but_the_first_of_its_kind(example: GraphNodes) -> None:
    process = Process(example)
    process.built(memoryview(example.pack()))
    calls = process.library.num_calls
    # Kinds: three nodes of one kernel with two attributes each, and one of another kernel with one.
    assert calls["cuGraphKernelNodeSetAttribute"] == 2 + 1
    assert calls["cuGraphKernelNodeCopyAttributes"] == 2


def test_bytes_that_lie_anywhere_are_taken(example: GraphNodes) -> None:
    packed = bytes(3) + example.pack()
    process = Process(example)
    assert meaning_of(process.built(memoryview(packed)[3:])) == meaning_of(example)


def test_without_a_compiler_there_is_none_which_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = graphs_over(FakeLibrary(FakeDriver()))
    tmp_path.chmod(0o700)
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert NativeRebuild.load(driver, tmp_path) is None
    (record,) = caplog.records
    assert record.message.startswith("fallback graphs=captured reason=")
    monkeypatch.delenv("CC")
    assert NativeRebuild.load(driver, tmp_path) is not None
