"""The graphs of one snapshot, packed into it and restored from it one by one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from hearth.core.errors import DeviceError, GraphUnreadable, KernelsMissing, SnapshotError
from hearth.snapshot.graph_names import GRAPH_PREFIX, graph_names, kind_of, num_rows_of
from hearth.snapshot.graph_nodes import Address, KernelId, packed_kernels
from hearth.snapshot.graph_reader import read_graph
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.snapshot.native_rebuild import NativeRebuild, RestoredGraph
from hearth.snapshot.trial_mark import TrialMark
from hearth.system.cuda.driver import MEMORYTYPE_HOST
from hearth.system.cuda.graphs import CudaGraphs

#: How long a rehearsal waits for memory to be mapped, and how often it is retried.
MEMORY_PATIENCE_S, MEMORY_LOOK_S = 5.0, 0.02

log = logging.getLogger(__name__)


def pack_graphs(
    driver: CudaGraphs,
    graph_by_name: Mapping[str, int],
    binary_by_function: Mapping[int, str],
    fixed: range,
) -> dict[str, bytes]:
    """Return sections of captured graphs. Raises GraphUnreadable: a graph cannot be stored, or points at
    memory outside of the `fixed` addresses, which another process has elsewhere.
    """
    sections = {}
    for name, handle in graph_by_name.items():
        graph = read_graph(driver, handle, binary_by_function)
        for address in graph.addresses(but=fixed):
            if _is_used(driver, address):
                raise GraphUnreadable(
                    f"graph `{name}` points at {address.value:#x}, which is not among the fixed addresses "
                    f"{fixed.start:#x} to {fixed.stop:#x}, so a snapshot cannot hold it "
                    f"(byte {address.offset} of the parameters of {address.kernel or 'a copy or fill'})"
                )
        sections[GRAPH_PREFIX + name] = graph.pack()
    return sections


def _is_used(driver: CudaGraphs, address: Address) -> bool:
    """True if a number must be treated as the address of memory that a graph uses.

    Part of a larger parameter counts only if it points at device memory: only kernels of libraries have such
    parameters, none of them reads host memory, and with gigabytes pinned random numbers hit it.
    """
    memory = driver.memory_at(address.value)
    return memory is not None and (address.is_whole or memory != MEMORYTYPE_HOST)


class RestoredGraphs:
    """Graphs by name. Mutable: one thread restores, another asks for them and may discard them."""

    def __init__(
        self,
        handles: KernelHandles,
        sections: Mapping[str, memoryview],
        mark: TrialMark,
        on_discard: Callable[[str], None],
        is_later: Callable[[str], bool] = lambda name: False,
        go_on: Callable[[RestoredGraphs], None] = lambda graphs: None,
        destroy: Callable[[list[object]], None] = list.clear,
    ) -> None:
        """List the graphs of a snapshot. `on_discard` is called once, with the reason, if it is wrong.

        Graphs for which `is_later` is true are restored only once wanted: then `go_on` has another thread
        call `restore` again. `destroy` empties a list that holds the last references to graphs, possibly
        later: destroying one takes 0.3 ms. Raises GraphUnreadable: a graph has an invalid name.
        """
        self._handles, self._on_discard = handles, on_discard
        self._sections, self._mark = sections, mark
        self._restored: dict[str, RestoredGraph] = {}
        self._function_by_kernel: dict[bytes, int] = {}  #: by packed kernel; graphs share most of theirs
        self._num_rehearsed, self._rehearsal_s = 0, 0.0
        self.num_failed = 0  #: graphs that could not be restored
        self._go_on, self._destroy = go_on, destroy
        # The smallest first: a model begins with one request at a time.
        names = sorted(graph_names(sections), key=num_rows_of)
        self._coming = dict.fromkeys(name for name in names if not is_later(name))
        self._wanted: dict[str, None] = {}  #: those that a step has needed, in that order
        self._later = dict.fromkeys(name for name in names if is_later(name))  #: not wanted so far

    def find(self, key: str) -> RestoredGraph | None:
        return self._restored.get(key)

    def is_coming(self, key: str) -> bool:
        return key in self._coming

    def want(self, key: str) -> None:
        if key in self._coming:
            self._wanted[key] = None

    def want_adapters(self) -> None:
        if self._later:
            self._coming.update(self._later)  # after those that are still coming
            self._later = {}  # not before: `restore` would think that all are done
            self._go_on(self)

    def stop(self) -> None:
        """Restore no more graphs; missing ones are captured when they are needed."""
        self.num_failed += len(self._coming)
        self._coming, self._later = {}, {}

    def begin_trial(self) -> None:
        self._mark.set()

    def end_trial(self) -> None:
        self._mark.clear()

    def discard(self, reason: str) -> None:
        self._coming, self._later = {}, {}
        self.let_go([])
        self._on_discard(reason)

    def let_go(self, others: list[object]) -> None:
        graphs = [*self._restored.values(), *others]
        self._restored = {}  # first: the last reference destroys a graph
        others.clear()
        if graphs:
            self._destroy(graphs)

    def restore(
        self, rebuild: NativeRebuild | None, rehearse: Callable[[str], None], give_way: Callable[[], None]
    ) -> None:
        """Restore all graphs that are coming.

        A graph that cannot be restored is skipped and captured when it is needed: all of them if `rebuild` is
        None, without a C compiler. `give_way` is called before each graph, and blocks while other threads
        need the interpreter more. `rehearse` shows to `handles` the library kernels of the named graph: where
        some are unknown, and for the first graph of each kind.
        """
        if rebuild is None:  # logged when it could not be compiled
            self.stop()
            self._sections = {}  # closes the file
            return
        began_s, tried, reasons = time.perf_counter(), list[str](), list[str]()
        coming = self._coming  # replaced by another dict once the graphs are not wanted
        shown = partial(self._rehearse, rehearse, give_up_s=began_s + MEMORY_PATIENCE_S)
        kinds, self._num_rehearsed, self._rehearsal_s = set[str](), 0, 0.0
        paused_s = 0.0  # before the first graph: requests that wait for a first token go first
        while coming and coming is self._coming:
            at_s = time.perf_counter()
            give_way()
            if not tried:
                paused_s = time.perf_counter() - at_s
            if not coming or coming is not self._coming:  # not wanted any more
                break
            name = self._next(coming)
            try:
                packed = self._sections[GRAPH_PREFIX + name]
                functions = self._functions(name, packed_kernels(packed), kinds, shown)
                if functions is None:
                    break
                self._restored[name] = rebuild(packed, functions)
            except (DeviceError, KernelsMissing) as error:
                reasons.append(f"{name}: {error}")
                self.num_failed += 1
            except SnapshotError as error:  # its bytes are not those of a graph
                self.discard(str(error))
            del coming[name]  # last: at any time a graph is coming or restored
            tried.append(name)
        if not self._later and not self._coming:  # in this order: `want_adapters` moves from one to the other
            self._sections = {}  # closes the file
        if tried or coming:  # else an earlier call restored them
            log.info(
                "graphs_restored graphs=%d of=%d seconds=%.3f paused_s=%.3f rehearsed=%d rehearsal_s=%.3f",
                sum(name in self._restored for name in tried),
                len(tried) + len(coming),
                time.perf_counter() - began_s,
                paused_s,
                self._num_rehearsed,
                self._rehearsal_s,
            )
        if reasons:
            log.warning("fallback graphs=captured count=%d reason=`%s`", len(reasons), reasons[0])

    @property
    def is_any_wanted(self) -> bool:
        return bool(self._wanted_of(self._coming))

    def _wanted_of(self, coming: Mapping[str, None]) -> list[str]:
        # Copied: the step thread may add some.
        return [name for name in list(self._wanted) if name in coming]

    def _next(self, coming: Mapping[str, None]) -> str:
        name, *_ = self._wanted_of(coming) or list(coming)
        return name

    def _functions(
        self, name: str, kernels: Sequence[bytes], kinds: set[str], rehearse: Callable[[str], bool]
    ) -> npt.NDArray[np.uint64] | None:
        kind, known = kind_of(name), self._function_by_kernel
        unknown = [kernel for kernel in kernels if kind not in kinds or kernel not in known]
        if unknown:
            ids = [KernelId.unpack(kernel) for kernel in unknown]
            # First Hearth's own: a rehearsal would compile one that is not loaded, in this process.
            self._handles.resolve([kernel for kernel in ids if kernel.binary is not None])
            if kind not in kinds or not self._handles.has(ids):
                if not rehearse(name):
                    return None
                kinds.add(kind)
            known.update(zip(unknown, self._handles.resolve(ids).tolist(), strict=True))
        return np.array([known[kernel] for kernel in kernels], np.uint64)

    def _rehearse(self, rehearse: Callable[[str], None], name: str, *, give_up_s: float) -> bool:
        """Rehearse a graph once its weights' memory is mapped; False: it is not wanted any more."""
        while self.is_coming(name):
            began_s = time.perf_counter()
            try:
                rehearse(name)
                self._num_rehearsed += 1
                self._rehearsal_s += time.perf_counter() - began_s
                return True
            except ValueError:  # Triton's, for an address that is not mapped yet
                if self.is_coming(name) and time.perf_counter() >= give_up_s:
                    raise
            time.sleep(MEMORY_LOOK_S)
        return False
