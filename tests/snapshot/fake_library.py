"""A library of the driver's calls that C can make as well, over the graphs of a `FakeDriver`."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache

import numpy as np

from hearth.snapshot import native_rebuild
from hearth.snapshot.native_rebuild import NativeRebuild
from hearth.system.cuda import graphs as cuda_graphs
from hearth.system.cuda.driver import CudaDriver
from hearth.system.cuda.graphs import EDGE_DATA, KERNEL_NODE, CudaGraphs
from hearth.system.native_code import native_library
from tests.snapshot.fake_driver import FakeDriver

CONTEXT = 0x5EED
UNKNOWN_ERROR = 999


class FakeLibrary:
    """Calls by the names that the real library exports. Refuses what it is told to."""

    def __init__(self, fake: FakeDriver) -> None:
        self.fake = fake
        self.refusals: dict[str, tuple[int, int]] = {}  #: by call: how many succeed before, and the code
        self.num_calls: Counter[str] = Counter()
        self.contexts: set[int] = set()  #: that copies and fills were added in
        self.errors: list[BaseException] = []  #: which cannot pass through C
        own: dict[str, Callable[..., None]] = {
            "cuGraphCreate": lambda out, _: self._store(out, fake.create()),
            "cuGraphAddKernelNode_v2": self._add_kernel,
            "cuGraphAddMemsetNode": self._add_memset,
            "cuGraphAddMemcpyNode": self._add_memcpy,
            "cuGraphAddEmptyNode": lambda out, graph, *_: self._store(out, fake.add_empty(graph)),
            "cuGraphKernelNodeSetAttribute": self._set_attribute,
            "cuGraphKernelNodeCopyAttributes": fake.copy_attributes,
            "cuGraphAddDependencies_v2": self._add_dependencies,
            "cuGraphInstantiateWithFlags": lambda out, graph, _: self._store(out, fake.instantiate(graph)),
            "cuGraphLaunch": fake.launch,
            "cuGraphDestroy": fake.destroy,
            "cuGraphExecDestroy": fake.destroy_executable,
            "cuCtxSetCurrent": lambda _: None,
            "cuGetErrorName": lambda code, out: self._store(out, ctypes.addressof(self._name)),
        }
        self._name = ctypes.create_string_buffer(b"CUDA_ERROR_OF_A_TEST")
        types = {
            **cuda_graphs._CALLS,
            "cuCtxSetCurrent": (ctypes.c_void_p,),
            "cuGetErrorName": (ctypes.c_int, ctypes.c_void_p),
        }
        for name, arguments in types.items():
            call = self._called(name, own.get(name, _unknown))
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(call))

    def _called(self, name: str, call: Callable[..., None]) -> Callable[..., int]:
        def exported(*arguments: int) -> int:
            num_before, self.num_calls[name] = self.num_calls[name], self.num_calls[name] + 1
            if name in self.refusals and num_before >= self.refusals[name][0]:
                return self.refusals[name][1]
            try:
                call(*arguments)
            except BaseException as error:
                self.errors.append(error)
                return UNKNOWN_ERROR
            return 0

        return exported

    def _store(self, out: int, handle: int) -> None:
        ctypes.c_size_t.from_address(out).value = handle

    def _add_kernel(self, out: int, graph: int, before: int | None, num_before: int, params: int) -> None:
        assert (before, num_before) == (None, 0)
        given = np.frombuffer(ctypes.string_at(params, KERNEL_NODE.itemsize), KERNEL_NODE)
        (handle,) = self.fake.add_kernels(graph, given).tolist()
        self._store(out, handle)

    def _add_memset(
        self, out: int, graph: int, before: int | None, num_before: int, params: int, context: int
    ) -> None:
        self.contexts.add(context)
        self._store(out, self.fake.add_memset(graph, params))

    def _add_memcpy(
        self, out: int, graph: int, before: int | None, num_before: int, params: int, context: int
    ) -> None:
        self.contexts.add(context)
        self._store(out, self.fake.add_memcpy(graph, params))

    def _set_attribute(self, node: int, attribute: int, value: int) -> None:
        self.fake.set_attribute(node, attribute, ctypes.string_at(value, cuda_graphs.ATTRIBUTE_BYTES))

    def _add_dependencies(self, graph: int, sources: int, targets: int, data: int, count: int) -> None:
        handles = (np.frombuffer(ctypes.string_at(at, 8 * count), np.uint64) for at in (sources, targets))
        edges = np.frombuffer(ctypes.string_at(data, EDGE_DATA.itemsize * count), EDGE_DATA)
        self.fake.add_edges(graph, *handles, edges)


def _unknown(*_: object) -> None:
    raise AssertionError("no such call is made while a graph is built")


class LibraryDriver(CudaDriver):
    """The driver itself, over another library than CUDA's."""

    def __init__(self, library: FakeLibrary) -> None:
        self._library = library
        self._thread = threading.local()
        self._context = ctypes.c_void_p(CONTEXT)


def graphs_over(library: FakeLibrary) -> CudaGraphs:
    return CudaGraphs(LibraryDriver(library))


@cache
def _native_code() -> ctypes.CDLL:
    return native_library(native_rebuild._SOURCE)


def rebuild_over(library: FakeLibrary) -> NativeRebuild:
    return NativeRebuild(graphs_over(library), _native_code())
