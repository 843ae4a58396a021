"""Where does the time of restoring graphs go, and what do steps beside it notice?

    python -m bench.coldstart.restore_parts [--shape 7B]

One process captures all graphs of a model, packs them as a snapshot does, and makes them again: by native
code, by the interpreter, and by several threads. Then a model makes steps without graphs, as it does until
they are there, while a thread restores. Needs a CUDA device; `graphs.py` measures it across processes.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from bench.coldstart.graph_process import GraphTask, Rig, capture_seconds
from bench.coldstart.shapes import SHAPES
from bench.report import arguments, emit, step
from hearth.core.config import EngineConfig
from hearth.engine.assemble import own_limits
from hearth.engine.step_shape import StepShape
from hearth.kernels.variants import loaded_functions
from hearth.models.dtypes import DTYPES
from hearth.snapshot.graph_nodes import ALIGNMENT, GraphNodes
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.snapshot.native_rebuild import NativeRebuild, RebuildTimes
from hearth.snapshot.rebuild import InterpretedRebuild, Rebuild, RestoredGraph
from hearth.system.cuda.driver import CudaDriver
from hearth.system.cuda.graphs import CudaGraphs
from hearth.worker.__main__ import SWITCH_S

ROUNDS = 3  #: of everything; the least counts
NUM_THREADS = (1, 2, 4)
BESIDE_S = 1.5  #: in which steps are made while a thread restores


@dataclass(frozen=True, slots=True)
class PackedGraph:
    """A graph as a snapshot has it, and the functions of its kernels in this process."""

    data: memoryview
    functions: npt.NDArray[np.uint64]


def packed_graphs(rig: Rig, driver: CudaGraphs) -> list[PackedGraph]:
    """Pack all captured graphs, each where a mapped file would have it."""
    handles, graphs, parts = (
        KernelHandles(driver, loaded_functions),
        rig.engine.runner.layers.graphs,
        rig.parts_of(rig.engine),
    )
    assert graphs is not None
    assert parts is not None
    for graph in graphs.captured.values():
        handles.learn(graph.raw_cuda_graph())
    found = []
    for section in parts.save().values():
        room = np.empty(len(section) + ALIGNMENT, np.uint8)
        begin = -room.ctypes.data % ALIGNMENT
        room[begin : begin + len(section)] = np.frombuffer(section, np.uint8)
        data = memoryview(room)[begin : begin + len(section)]
        found.append(PackedGraph(data, handles.resolve(GraphNodes.unpack(data).kernels)))
    return found


def restore_s(graphs: Sequence[PackedGraph], rebuild: Rebuild, num_threads: int = 1) -> float:
    """Make all graphs, and return the seconds of the quickest round."""
    rounds = []
    with ThreadPoolExecutor(num_threads, initializer=lambda: torch.cuda.set_device(0)) as threads:
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            kept = list(threads.map(lambda one: rebuild(one.data, one.functions), graphs))
            rounds.append(time.perf_counter() - began_s)
            del kept
    return min(rounds)


def part_seconds(graphs: Sequence[PackedGraph], native: NativeRebuild) -> dict[str, float]:
    """Return what the parts of restoring took, of all graphs together, and destroying them."""
    built = [native.timed(one.data, one.functions) for one in graphs]
    names = [field.name for field in fields(RebuildTimes)]
    parts = {name: sum(getattr(times, name) for _, times in built) for name in names}
    began_s = time.perf_counter()
    del built
    return {**parts, "destroy_executables_s": time.perf_counter() - began_s}


@torch.inference_mode()
def steps_beside(rig: Rig, restore: Callable[[], Iterable[RestoredGraph]] | None) -> dict[str, float]:
    """Make steps of one row without graphs while a thread restores all graphs, again and again."""
    runner, shape, is_over = rig.engine.runner, StepShape.decode(1), threading.Event()
    num_restores = 0

    def work() -> None:
        nonlocal num_restores
        torch.cuda.set_device(0)
        while restore is not None and not is_over.is_set():
            list(restore())
            num_restores += 1

    thread, steps_s = threading.Thread(target=work), list[float]()
    thread.start()
    until_s = time.perf_counter() + BESIDE_S
    while time.perf_counter() < until_s:
        began_s = time.perf_counter()
        runner.run_padding(shape)
        runner.synchronize()
        steps_s.append(time.perf_counter() - began_s)
    is_over.set()
    thread.join()
    steps_s.sort()
    return {
        "steps_per_s": len(steps_s) / sum(steps_s),
        "p99_s": steps_s[len(steps_s) * 99 // 100],
        "restores": num_restores,
    }


def measure(name: str, place: Path) -> dict[str, object]:
    shape, device = SHAPES[name], torch.device("cuda", 0)
    limits = own_limits(EngineConfig(), shape.arch, DTYPES[shape.dtype], device)
    task = GraphTask(
        *(True, shape.config, shape.dtype, "cuda", asdict(limits)),
        kernels=str(place / "kernels"),
        snapshots=str(place / "snapshots"),
        num_requests=1,
        num_tokens=16,
    )
    rig, driver = Rig(task), CudaGraphs(CudaDriver(0))
    with step("capture"):
        captured = capture_seconds(rig)
        graphs = packed_graphs(rig, driver)
    native = NativeRebuild.load(driver, None)
    if native is None:
        raise RuntimeError("there is no C compiler (cc)")
    ways: dict[str, Rebuild] = {"native": native, "interpreted": InterpretedRebuild(driver)}
    with step("restore"):
        restored_s = {way: restore_s(graphs, rebuild) for way, rebuild in ways.items()}
        threads_s = {str(count): restore_s(graphs, native, count) for count in NUM_THREADS}
        parts = part_seconds(graphs, native)
    rig.engine.runner.layers.graphs = None  # whose steps run kernel by kernel from here on
    with step("beside"), ThreadPoolExecutor(2, initializer=lambda: torch.cuda.set_device(0)) as threads:
        beside = {"nothing": steps_beside(rig, None)}
        for way, rebuild in ways.items():
            one_by_one = partial(map, lambda one, make=rebuild: make(one.data, one.functions), graphs)
            beside[way] = steps_beside(rig, one_by_one)
        by_two = partial(threads.map, lambda one: native(one.data, one.functions), graphs)
        beside["native, two threads"] = steps_beside(rig, by_two)
    return {
        "shape": name,
        "num_graphs": len(graphs),
        "num_bytes": sum(len(one.data) for one in graphs),
        "capture_s": captured.again_s,
        "restore_s": restored_s,
        "native_parts_s": parts,
        "native_threads_s": threads_s,
        "steps_beside": beside,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7B")
    chosen = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as place:
        emit("restore_parts", measure(chosen.shape, Path(place)), save=chosen.save)
        sys.stdout.flush()
    os._exit(0)  # as a worker: what the device has goes with the process


if __name__ == "__main__":
    main()
