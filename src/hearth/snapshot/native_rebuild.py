"""CUDA graphs rebuilt from packed bytes, in another process than the one that captured them.

Each takes one call of native code (`native_rebuild.c`), which releases the interpreter for steps of other
models. A restored graph uses the captured addresses; nothing here checks them.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from hearth.snapshot.graph_nodes import ALIGNMENT, GraphNodes
from hearth.system.cuda.graphs import CudaGraphs
from hearth.system.native_code import native_library

_SOURCE = Path(__file__).with_suffix(".c")
#: The driver's calls, in the order of the C file.
CALLS = (
    "cuGraphCreate",
    "cuGraphAddKernelNode_v2",
    "cuGraphAddMemsetNode",
    "cuGraphAddMemcpyNode",
    "cuGraphAddEmptyNode",
    "cuGraphKernelNodeSetAttribute",
    "cuGraphKernelNodeCopyAttributes",
    "cuGraphAddDependencies_v2",
    "cuGraphInstantiateWithFlags",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
)
_BUILT, _DAMAGED, _REFUSED = 0, 1, 2

log = logging.getLogger(__name__)


def native_obstacle() -> str | None:
    try:
        native_library(_SOURCE)
    except OSError as error:
        return _reason(error)
    return None


def _reason(error: OSError) -> str:
    return str(error).partition("\n")[0].replace("`", "")


class _Rebuilt(ctypes.Structure):
    _fields_ = (
        ("executable", ctypes.c_void_p),
        ("call", ctypes.c_int32),
        ("code", ctypes.c_int32),
    )


class RestoredGraph:
    """An executable graph, destroyed with this object."""

    def __init__(self, driver: CudaGraphs, executable: int) -> None:
        self._driver, self._executable = driver, executable

    def launch(self, stream: int) -> None:
        self._driver.launch(self._executable, stream)

    def replay(self) -> None:
        self.launch(torch.cuda.current_stream().cuda_stream)

    def __del__(self) -> None:
        self._driver.destroy_executable(self._executable)


class NativeRebuild:
    def __init__(self, graphs: CudaGraphs, library: ctypes.CDLL) -> None:
        self._graphs = graphs
        self._calls = (ctypes.c_void_p * len(CALLS))(*map(graphs.driver.address, CALLS))
        self._function: Callable[..., int] = library.hearth_rebuild_graph
        library.hearth_rebuild_graph.argtypes = (
            ctypes.c_void_p,  # calls
            ctypes.c_void_p,  # context
            ctypes.c_void_p,  # packed graph
            ctypes.c_uint64,
            ctypes.c_void_p,  # functions
            ctypes.c_uint64,
            ctypes.POINTER(_Rebuilt),
        )

    @staticmethod
    def load(graphs: CudaGraphs, cache: Path | None) -> NativeRebuild | None:
        """Compile the native code, or find it in `cache`; None, logged: it cannot be compiled."""
        try:
            return NativeRebuild(graphs, native_library(_SOURCE, cache))
        except OSError as error:
            remedy = "install a C compiler (cc)"
            log.warning("fallback graphs=captured reason=`%s` remedy=`%s`", _reason(error), remedy)
            return None

    def __call__(self, packed: memoryview, functions: npt.NDArray[np.uint64]) -> RestoredGraph:
        """Rebuild a graph whose kernels have these `functions`, in the order in which it names them. Threads
        may call this at the same time. Raises DeviceError if the driver refuses, and GraphUnreadable.
        """
        result, context, data = _Rebuilt(), self._graphs.driver.enter_context(), _aligned(packed)
        outcome = self._function(
            self._calls,
            context,
            data.ctypes.data,
            len(data),
            functions.ctypes.data,
            len(functions),
            ctypes.byref(result),
        )
        if outcome == _REFUSED:
            self._graphs.refused(CALLS[result.call], result.code)
        if outcome == _DAMAGED:
            GraphNodes.unpack(packed)  # raises with the reason
            raise AssertionError(f"a graph that Python can read is damaged to C: {len(packed)=}")
        if outcome != _BUILT:
            raise MemoryError(f"no memory for the handles of a graph of {len(packed)} bytes")
        return RestoredGraph(self._graphs, result.executable or 0)


def _aligned(packed: memoryview) -> npt.NDArray[np.uint8]:
    data = np.frombuffer(packed, np.uint8)
    if data.ctypes.data % ALIGNMENT == 0:
        return data
    room = np.empty(len(data) + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    room[begin : begin + len(data)] = data
    return room[begin : begin + len(data)]
