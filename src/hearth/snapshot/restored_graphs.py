"""The graphs of one snapshot: packed for it, and restored from it one by one. Does not know what they do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from hearth.cuda_graphs import CudaGraphs
from hearth.errors import DeviceError, GraphUnreadable, KernelsMissing, SnapshotError
from hearth.snapshot.graph_nodes import KernelId, packed_kernels, read_graph
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.snapshot.rebuild import Rebuild, RestoredGraph
from hearth.snapshot.trial_mark import TrialMark

#: For memory to be mapped that rehearsals of a snapshot refer to, and how often one is tried meanwhile.
MEMORY_PATIENCE_S, MEMORY_LOOK_S = 5.0, 0.02
#: Sections of a snapshot that hold graphs begin with this; the rest is a graph's name, as in `decode-8`.
_PREFIX = "graph/"

log = logging.getLogger(__name__)


def pack_graphs(
    driver: CudaGraphs,
    graph_by_name: Mapping[str, int],
    binary_by_function: Mapping[int, str],
    fixed: range,
) -> dict[str, bytes]:
    """Return sections of captured graphs. All that they point at must lie at `fixed` addresses.

    Raises:
        GraphUnreadable: a graph cannot be kept, or points at memory that lies elsewhere in another process.
    """
    sections = {}
    for name, handle in graph_by_name.items():
        graph = read_graph(driver, handle, binary_by_function)
        for address in graph.addresses().tolist():
            if address not in fixed and driver.is_address(address):
                raise GraphUnreadable(
                    f"graph `{name}` points at {address:#x}, which is not among the fixed addresses "
                    f"{fixed.start:#x} to {fixed.stop:#x}: no snapshot can hold it"
                )
        sections[_PREFIX + name] = graph.pack()
    return sections


class RestoredGraphs:
    """Graphs by name. Mutable: one thread restores, another asks for them and may discard them."""

    def __init__(
        self,
        handles: KernelHandles,
        sections: Mapping[str, memoryview],
        mark: TrialMark,
        on_discard: Callable[[str], None],
    ) -> None:
        """Look which graphs a snapshot has. `on_discard` is told once why nobody may use it again.

        Raises:
            GraphUnreadable: one has no name that graphs have.
        """
        self._handles, self._on_discard = handles, on_discard
        self._sections, self._mark = sections, mark
        self._restored: dict[str, RestoredGraph] = {}
        self._function_by_kernel: dict[bytes, int] = {}  #: as packed; graphs have most of theirs in common
        self.num_failed = 0  #: graphs that could not be restored
        self.num_interpreted = 0  #: graphs that were restored node by node, in Python
        names = [name.removeprefix(_PREFIX) for name in sections if name.startswith(_PREFIX)]
        #: The smallest first: one request at a time is what a model begins with.
        self._coming = dict.fromkeys(sorted(names, key=_size))

    def find(self, key: str) -> RestoredGraph | None:
        return self._restored.get(key)

    def is_coming(self, key: str) -> bool:
        return key in self._coming

    def stop(self) -> None:
        """Restore no more graphs; those that are missing are captured when they are needed."""
        self.num_failed += len(self._coming)
        self._coming = {}

    def begin_trial(self) -> None:
        self._mark.set()

    def end_trial(self) -> None:
        self._mark.clear()

    def discard(self, reason: str) -> None:
        self._coming, self._restored = {}, {}
        self._on_discard(reason)

    def restore(
        self, rebuild: Rebuild, rehearse: Callable[[str], None], give_way: Callable[[], None]
    ) -> None:
        """Restore all graphs. One that cannot be restored is left out, and so captured when it is needed.

        `give_way` is called before each, and waits while others need the interpreter more. `rehearse` shows
        to `handles` the kernels of libraries that a graph of that name needs. It is asked where some are not
        known, and for the first graph of each kind.
        """
        began_s, num_graphs, reasons = time.perf_counter(), len(self._coming), list[str]()
        coming = self._coming  # which is another one once nobody wants the graphs
        shown = partial(self._rehearse, rehearse, give_up_s=began_s + MEMORY_PATIENCE_S)
        kinds = set[str]()
        while coming and coming is self._coming:
            give_way()
            if not coming or coming is not self._coming:  # nobody wants them any more
                break
            name = next(iter(coming))
            try:
                packed = self._sections[_PREFIX + name]
                functions = self._functions(name, packed_kernels(packed), kinds, shown)
                if functions is None:
                    break
                self._restored[name] = rebuild(packed, functions)
                self.num_interpreted += not rebuild.is_native
            except (DeviceError, KernelsMissing) as error:
                reasons.append(f"{name}: {error}")
                self.num_failed += 1
            except SnapshotError as error:  # its bytes are not those of a graph
                self.discard(str(error))
            del coming[name]  # behind the other: it is either coming or there
        log.info(
            "graphs_restored graphs=%d of=%d seconds=%.3f",
            *(len(self._restored), num_graphs, time.perf_counter() - began_s),
        )
        if reasons:
            log.warning("fallback graphs=captured count=%d reason=`%s`", len(reasons), reasons[0])

    def _functions(
        self, name: str, kernels: Sequence[bytes], kinds: set[str], rehearse: Callable[[str], bool]
    ) -> npt.NDArray[np.uint64] | None:
        """Return the functions of a graph's kernels; None: nobody wants the graph any more.

        Raises:
            KernelsMissing: this process does not have all of them, even after a rehearsal.
        """
        kind, _, _ = name.rpartition("-")
        known = self._function_by_kernel
        unknown = [kernel for kernel in kernels if kind not in kinds or kernel not in known]
        if unknown:
            ids = [KernelId.unpack(kernel) for kernel in unknown]
            # First our own: one that is not loaded would be compiled by a rehearsal, in this process.
            self._handles.resolve([kernel for kernel in ids if kernel.binary is not None])
            if kind not in kinds or not self._handles.has(ids):
                if not rehearse(name):
                    return None
                kinds.add(kind)
            known.update(zip(unknown, self._handles.resolve(ids).tolist(), strict=True))
        return np.array([known[kernel] for kernel in kernels], np.uint64)

    def _rehearse(self, rehearse: Callable[[str], None], name: str, *, give_up_s: float) -> bool:
        """Rehearse a graph, once there is memory where weights arrive; False: nobody wants it any more."""
        while self.is_coming(name):
            try:
                rehearse(name)
                return True
            except ValueError:  # Triton's, of an address where nothing is mapped yet
                if self.is_coming(name) and time.perf_counter() >= give_up_s:
                    raise
            time.sleep(MEMORY_LOOK_S)
        return False


def _size(name: str) -> int:
    """Return the number of rows in the name of a graph."""
    _, _, rows = name.rpartition("-")
    if not rows.isdecimal():
        raise GraphUnreadable(f"the graph `{name}` has no number of rows in its name: it is damaged")
    return int(rows)
