"""Graphs as plain values: packed and unpacked, read from a driver and made again by another."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.errors import GraphUnreadable, KernelsMissing
from hearth.snapshot.graph_nodes import ATTRIBUTE, EDGE, NODE, Address, GraphNodes, KernelId
from hearth.snapshot.graph_reader import read_graph
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.system.cuda.graphs import (
    EDGE_DATA,
    GRAPH_NODE_TYPE_KERNEL,
    KERNEL_NODE,
    MEMCPY_NODE,
    MEMSET_NODE,
)
from tests.snapshot.fake_driver import FakeDriver
from tests.snapshot.random_graphs import graphs


def test_structures_have_the_sizes_of_cudas_header() -> None:
    """As a C compiler lays out `cuda.h` of CUDA 13.0 on 64 bits."""
    assert [dtype.itemsize for dtype in (KERNEL_NODE, MEMSET_NODE, MEMCPY_NODE, EDGE_DATA)] == [
        72,
        40,
        200,
        8,
    ]
    kernel, copy = KERNEL_NODE.fields, MEMCPY_NODE.fields
    assert kernel is not None
    assert copy is not None
    assert {name: kernel[name][1] for name in kernel} == {
        "function": 0,
        "grid": 8,
        "block": 20,
        "shared_bytes": 32,
        "parameters": 40,
        "extra": 48,
        "kernel": 56,
        "context": 64,
    }
    pointers = ("source_host", "source", "source_array", "target_at", "target", "target_array", "extent")
    assert [copy[name][1] for name in pointers] == [40, 48, 56, 88, 136, 144, 176]


@given(graphs())
def test_packing_and_unpacking_changes_nothing(graph: GraphNodes) -> None:
    packed = graph.pack()

    again = GraphNodes.unpack(memoryview(packed))

    assert again.kernels == graph.kernels
    assert again.pack() == packed
    for name in (field.name for field in fields(GraphNodes)[1:]):
        assert getattr(again, name).tobytes() == getattr(graph, name).tobytes(), name


@given(graphs(), st.data())
def test_a_truncated_or_longer_graph_is_refused(graph: GraphNodes, data: st.DataObject) -> None:
    packed = graph.pack()
    length = data.draw(st.integers(0, len(packed) - 1))
    for wrong in (packed[:length], packed + b"\0" * data.draw(st.integers(1, 200))):
        with pytest.raises(GraphUnreadable):
            GraphNodes.unpack(memoryview(wrong))


def test_nodes_are_kept_behind_those_that_they_wait_for() -> None:
    driver = FakeDriver()
    graph = driver.create()
    first, second, third = (driver.add_empty(graph) for _ in range(3))
    data = np.zeros(2, EDGE_DATA)
    driver.add_edges(graph, np.array([third, second], np.uint64), np.array([first, third], np.uint64), data)

    edges = read_graph(driver, graph, {}).edges

    assert edges[["source", "target"]].tolist() == [(1, 2), (0, 1)]


def test_a_node_that_calls_the_host_is_refused() -> None:
    driver = FakeDriver()
    graph = driver.create()
    driver.node_by_handle[driver.add_empty(graph)].kind = 3

    with pytest.raises(GraphUnreadable, match="type 3"):
        read_graph(driver, graph, {})


def test_addresses_are_found_wherever_parameters_hold_them() -> None:
    driver = FakeDriver()
    function = driver.add_function("one", 1, [(0, 8), (8, 4), (16, 8)])
    kernel = KernelId.of(driver, function, None)
    blob = np.array([0x7F00DEADBE00, 5, 0x600000000200], np.uint64).tobytes()
    node = (GRAPH_NODE_TYPE_KERNEL, 0, (1, 1, 1), (1, 1, 1), 0, 0, 0, len(blob), 0, 0)
    graph = GraphNodes(
        (kernel,),
        np.array([node], NODE),
        np.zeros(0, ATTRIBUTE),
        np.zeros(0, EDGE),
        np.frombuffer(blob.ljust(64, b"\0"), np.uint8),
    )

    assert list(graph.addresses(but=range(0))) == [
        Address(0x7F00DEADBE00, "one", 0, is_whole=True),
        Address(0x600000000200, "one", 16, is_whole=True),
    ]
    known = range(0x600000000000, 0x700000000000)
    assert [address.offset for address in graph.addresses(but=known)] == [0]


class TestKernelHandles:
    def shown(self, driver: FakeDriver, function: int) -> int:
        """A captured graph that launches a function."""
        graph = driver.create()
        params = np.zeros(1, KERNEL_NODE)
        params["function"] = function
        words = np.zeros(9, np.uint64)
        params["parameters"] = words.ctypes.data
        words[:] = words.ctypes.data
        driver.add_kernels(graph, params)
        return graph

    def test_what_lies_in_a_shown_module_is_found_and_nothing_else(self) -> None:
        driver = FakeDriver()
        shown, sibling = (driver.add_function(name, 1, [(0, 8)]) for name in ("shown", "sibling"))
        other = driver.add_function("other", 2, [])
        kernels = [KernelId.of(driver, function, None) for function in (sibling, shown, other)]
        handles = KernelHandles(driver, dict)
        with pytest.raises(KernelsMissing, match="3 of 3"):
            handles.resolve(kernels)
        handles.learn(self.shown(driver, shown))

        assert handles.resolve(kernels[:2]).tolist() == [sibling, shown]
        with pytest.raises(KernelsMissing, match=r"1 of 3 .* first `other`"):
            handles.resolve(kernels)

    def test_what_no_library_has_used_yet_is_loaded(self) -> None:
        driver = FakeDriver()
        shown, sibling = (driver.add_function(name, 1, [(0, 8)]) for name in ("shown", "sibling"))
        kernel = KernelId.of(driver, sibling, None)
        driver.unloaded.add(sibling)
        handles = KernelHandles(driver, dict)
        handles.learn(self.shown(driver, shown))

        assert handles.resolve([kernel]).tolist() == [sibling]

    def test_a_function_of_that_name_with_other_code_is_not_taken(self) -> None:
        driver = FakeDriver()
        kernel = KernelId.of(driver, driver.add_function("f", 0, [(0, 8)], registers=40), None)
        changed = driver.add_function("f", 1, [(0, 8)], registers=41)
        same = driver.add_function("f", 2, [(0, 8)], registers=40)
        handles = KernelHandles(driver, dict)
        handles.learn(self.shown(driver, changed))
        with pytest.raises(KernelsMissing):
            handles.resolve([kernel])
        handles.learn(self.shown(driver, same))

        assert handles.resolve([kernel]).tolist() == [same]

    def test_limits_are_raised_to_those_of_the_captured_kernel(self) -> None:
        driver = FakeDriver()
        function = driver.add_function("f", 1, [])
        wanted = replace(
            KernelId.of(driver, function, None), dynamic_shared_bytes=99_000, has_large_clusters=True
        )
        handles = KernelHandles(driver, dict)
        handles.learn(self.shown(driver, function))
        handles.resolve([wanted])

        assert KernelId.of(driver, function, None) == wanted

    def test_triton_kernels_are_found_by_their_hash(self) -> None:
        driver = FakeDriver()
        functions = [driver.add_function("kernel", module, []) for module in (1, 2)]
        loaded = {"a": functions[0]}
        handles = KernelHandles(driver, lambda: loaded)
        first, second = (KernelId.of(driver, at, binary) for at, binary in zip(functions, "ab", strict=True))
        assert handles.resolve([first]).tolist() == [functions[0]]
        with pytest.raises(KernelsMissing):
            handles.resolve([second])
        loaded["b"] = functions[1]  # loaded from the kernel cache meanwhile
        assert handles.resolve([second, first]).tolist() == functions[::-1]
