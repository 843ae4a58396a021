"""Where does the time of restoring graphs go, and what else would be quicker? A trial, run by hand on a GPU.

python -m bench.coldstart.restore_parts [SHAPE]

One process captures all graphs of a model, packs them, and makes them again in several ways. Prints as it goes.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import ctypes
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from bench.coldstart.graph_process import GraphTask, Rig, _capture_s, _replay_s
from bench.coldstart.shapes import SHAPES
from hearth.config import EngineConfig
from hearth.cuda_driver import CudaDriver
from hearth.cuda_graphs import CudaGraphs
from hearth.engine.assemble import own_limits
from hearth.engine.step_shape import StepShape
from hearth.kernels.variants import loaded_functions
from hearth.models.dtypes import DTYPES
from hearth.native_code import native_library
from hearth.snapshot import native_rebuild
from hearth.snapshot.graph_nodes import GraphNodes
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.snapshot.native_rebuild import NativeRebuild
from hearth.snapshot.rebuild import InterpretedRebuild, Rebuild
from hearth.snapshot.restored_graphs import RestoredGraphs
from hearth.snapshot.trial_mark import TrialMark
from hearth.worker.__main__ import SWITCH_S

BEGAN_S = time.perf_counter()


def say(**what: object) -> None:
    print(f"{time.perf_counter() - BEGAN_S:6.1f}", json.dumps(what), flush=True)


@contextmanager
def guarded(what: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        print(f"{what} FAILED\n{traceback.format_exc()}", flush=True)


def variant_source(variant: int) -> str:
    """The C file, changed so that nodes are added with what they wait for.

    2: those of plain edges, and the others later; 3: all of them, by the call that takes their data as well.
    """
    text = Path(native_rebuild._SOURCE).read_text()

    def swap(old: str, new: str) -> None:
        nonlocal text
        assert text.count(old) == 1, (text.count(old), old)
        text = text.replace(old, new)

    swap(
        "static int add_kernel(builder *build,",
        """#define VARIANT %d
static __thread uint32_t *FIRST, *ORDER;
static __thread void *BEFORE[4096];
static __thread edge_data BEFORE_DATA[4096];
static int is_plain(const edge_row *edge) { uint64_t word; memcpy(&word, &edge->data, 8); return word == 0; }
typedef struct { int type; int reserved[3]; kernel_params kernel; char rest[160]; long long reserved2; } any_params;
typedef int (*add_node)(void **, void *, void *const *, const edge_data *, size_t, any_params *);
static size_t before(builder *build, const packed_graph *graph, uint64_t at) {
    size_t count = 0;
    for (uint32_t one = FIRST[at]; one < FIRST[at + 1]; one++) {
        const edge_row *edge = &graph->edges[ORDER[one]];
        if (VARIANT == 2 && !is_plain(edge)) continue;
        BEFORE[count] = build->nodes[edge->source];
        BEFORE_DATA[count++] = edge->data;
    }
    return count;
}
static void sort_edges(const packed_graph *graph) {
    FIRST = calloc(graph->num_nodes + 2, 4); ORDER = calloc(graph->num_edges + 1, 4);
    for (uint64_t at = 0; at < graph->num_edges; at++) FIRST[graph->edges[at].target + 2 > graph->num_nodes + 1 ?
        graph->num_nodes + 1 : graph->edges[at].target + 2]++;
    for (uint64_t at = 2; at <= graph->num_nodes + 1; at++) FIRST[at] += FIRST[at - 1];
    for (uint64_t at = 0; at < graph->num_edges; at++) ORDER[FIRST[graph->edges[at].target + 1]++] = at;
}
static int add_kernel(builder *build,"""
        % variant,
    )
    swap(
        "    return is_refused(build, ADD_KERNEL, build->calls->add_kernel(handle, build->graph, NULL, 0, &params));",
        """    size_t num = before(build, graph, (uint64_t)(node - graph->nodes));
    if (VARIANT == 2)
        return is_refused(build, ADD_KERNEL, build->calls->add_kernel(handle, build->graph, BEFORE, num, &params));
    any_params any = {.type = 0, .kernel = params};
    return is_refused(build, ADD_KERNEL, ((add_node)build->calls->add_kernel)(handle, build->graph, BEFORE,
        BEFORE_DATA, num, &any));""",
    )
    swap(
        "    const driver_calls *calls = build->calls;\n    for",
        "    const driver_calls *calls = build->calls;\n    sort_edges(graph);\n    for",
    )
    swap(
        """    for (uint64_t at = 0; at < graph->num_edges; at++) {
        build->sources[at] = build->nodes[graph->edges[at].source];
        build->targets[at] = build->nodes[graph->edges[at].target];
        build->data[at] = graph->edges[at].data;
    }
    if (!graph->num_edges)
        return 1;""",
        """    size_t left = 0;
    free(FIRST); free(ORDER);
    for (uint64_t at = 0; at < graph->num_edges; at++) {
        const edge_row *edge = &graph->edges[at];
        if (graph->nodes[edge->target].kind == KERNEL && (VARIANT == 3 || is_plain(edge))) continue;
        build->sources[left] = build->nodes[edge->source];
        build->targets[left] = build->nodes[edge->target];
        build->data[left++] = edge->data;
    }
    if (!left)
        return 1;""",
    )
    swap(
        "build->data,\n                                                      graph->num_edges));",
        "build->data, left));",
    )
    return text


class Variant(NativeRebuild):
    def __init__(self, driver: CudaGraphs, variant: int, folder: Path) -> None:
        source = folder / f"variant{variant}.c"
        source.write_text(variant_source(variant))
        super().__init__(driver, native_library(source))
        if variant == 3:
            add = getattr(driver._driver._library, "cuGraphAddNode_v2")  # noqa: B009
            self._calls[1] = ctypes.cast(add, ctypes.c_void_p).value


Packed = list[tuple[str, memoryview, np.ndarray]]


def timed(name: str, rebuild: Rebuild, packed: Packed, rounds: int = 3) -> None:
    with guarded(name):
        seconds, parts = [], {}
        for _ in range(rounds):
            kept, began_s = [], time.perf_counter()
            sums: dict[str, float] = {}
            for _, one, functions in packed:
                if isinstance(rebuild, NativeRebuild):
                    graph, times = rebuild.timed(one, functions)
                    for part, value in asdict(times).items():
                        sums[part] = sums.get(part, 0.0) + value
                else:
                    graph = rebuild(one, functions)
                kept.append(graph)
            seconds.append(round(time.perf_counter() - began_s, 4))
            parts = {part: round(value, 4) for part, value in sums.items()}
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            del kept, graph
            destroy_s = round(time.perf_counter() - began_s, 4)
        say(way=name, seconds=seconds, last_parts=parts, destroying_executables_s=destroy_s)


def threaded(rebuild: Rebuild, packed: Packed, device: torch.device) -> None:
    for count in (1, 2, 4, 8):
        with (
            guarded(f"{count} threads"),
            ThreadPoolExecutor(count, initializer=lambda: torch.cuda.set_device(device)) as pool,
        ):
            list(pool.map(lambda _: time.sleep(0.02), range(count)))
            seconds = []
            for _ in range(3):
                began_s = time.perf_counter()
                kept = list(pool.map(lambda one: rebuild(one[1], one[2]), packed))
                seconds.append(round(time.perf_counter() - began_s, 4))
                del kept
            say(threads=count, seconds=seconds)


def beside(rig: Rig, restore: Callable[[], None] | None, name: str) -> None:
    """Steps of one row, one after the other, while another thread restores all graphs again and again."""
    with guarded(name):
        runner, shape = rig.engine.runner, StepShape.decode(1)
        ended, rounds = threading.Event(), [0.0]

        def work() -> None:
            torch.cuda.set_device(rig.runtime.device)
            while restore is not None and not ended.is_set():
                began_s = time.perf_counter()
                restore()
                rounds.append(time.perf_counter() - began_s)

        thread = threading.Thread(target=work)
        thread.start()
        steps_s, until_s = [], time.perf_counter() + 1.5
        with torch.inference_mode():
            while time.perf_counter() < until_s:
                began_s = time.perf_counter()
                runner.run_padding(shape)
                runner.synchronize()
                sum(range(2000))  # the host's part of a step
                steps_s.append(time.perf_counter() - began_s)
        ended.set()
        thread.join()
        steps_s.sort()
        say(
            beside=name,
            steps_per_s=round(len(steps_s) / sum(steps_s)),
            median_ms=round(1e3 * statistics.median(steps_s), 3),
            p99_ms=round(1e3 * steps_s[int(0.99 * len(steps_s))], 3),
            max_ms=round(1e3 * steps_s[-1], 3),
            restores_s=[round(one, 3) for one in rounds[1:4]],
        )


def whole(
    name: str, rebuild: Rebuild, handles: KernelHandles, sections: dict[str, bytes], rig: Rig
) -> Callable[[], None]:
    from hearth.engine.graph_capture import GraphCapture

    def rehearse(graph: str) -> None:
        captured = rig.engine.runner.rehearse(graph, GraphCapture())
        if captured is not None:
            handles.learn(captured.raw_cuda_graph())

    def restore() -> None:
        views = {key: memoryview(value) for key, value in sections.items()}
        graphs = RestoredGraphs(handles, views, TrialMark(Path("nowhere")), print)
        graphs.restore(rebuild, rehearse, lambda: None)
        assert graphs.num_failed == 0, graphs.num_failed

    return restore


def main(name: str) -> None:
    sys.setswitchinterval(SWITCH_S)
    shape, device = SHAPES[name], torch.device("cuda", 0)
    limits = own_limits(EngineConfig(), shape.arch, DTYPES[shape.dtype], device)
    place = Path(tempfile.mkdtemp(prefix="hearth-parts-"))
    task = GraphTask(
        *(True, shape.config, shape.dtype, "cuda", asdict(limits)),
        kernels=str(place / "kernels"),
        snapshots=str(place / "snapshots"),
        num_requests=1,
        num_tokens=16,
    )
    rig = Rig(task)
    say(rig=name, start_s=rig.start_s, kernels_s=rig.kernels_s, assemble_s=rig.assemble_s)
    graphs = rig.engine.runner.graphs
    assert graphs is not None
    first_s, replay_s = _capture_s(rig), _replay_s(rig)
    graphs.forget()
    again_s = _capture_s(rig)
    say(first_capture_s=first_s - replay_s, capture_s=again_s - replay_s, replay_s=replay_s)
    parts = rig.parts_of(rig.engine)
    assert parts is not None
    began_s = time.perf_counter()
    sections = dict(parts.save())
    say(pack_s=time.perf_counter() - began_s, graphs=len(sections), bytes=sum(map(len, sections.values())))

    driver = CudaGraphs(CudaDriver(0))
    handles = KernelHandles(driver, loaded_functions)
    for graph in graphs.captured.values():
        handles.learn(graph.raw_cuda_graph())
    packed: Packed = []
    stats = dict.fromkeys(
        (
            "nodes",
            "with_attributes",
            "attributes_set",
            "edges",
            "edges_with_data",
            "one_buffer",
            "blob_bytes",
        ),
        0,
    )
    tables, kernels, ids = set(), 0, set()
    for key, data in sections.items():
        one = GraphNodes.unpack(memoryview(data))
        aligned = np.empty(len(data) + 64, np.uint8)
        begin = -aligned.ctypes.data % 64
        aligned[begin : begin + len(data)] = np.frombuffer(data, np.uint8)
        packed.append((key, memoryview(aligned)[begin : begin + len(data)], handles.resolve(one.kernels)))
        own = one.nodes["num_attributes"] > 0
        stats["nodes"] += len(one.nodes)
        stats["with_attributes"] += int(own.sum())
        stats["attributes_set"] += int(one.nodes["num_attributes"].sum())
        stats["edges"] += len(one.edges)
        stats["edges_with_data"] += int((one.edges["data"]["type"] != 0).sum())
        stats["one_buffer"] += int((one.nodes["is_one_buffer"] != 0).sum())
        stats["blob_bytes"] += len(one.blobs)
        tables.add(one.kernels)
        kernels += len(one.kernels)
        ids |= set(one.kernels)
        stats.setdefault("ids", []).extend(one.attributes["id"].tolist())  # type: ignore[attr-defined]
    stats["ids"] = sorted(set(stats["ids"]))  # type: ignore[arg-type]
    say(**stats, tables=len(tables), kernels=kernels, different_kernels=len(ids))

    native, interpreted = (
        NativeRebuild(driver, native_library(native_rebuild._SOURCE)),
        InterpretedRebuild(driver),
    )
    timed("interpreted", interpreted, packed)
    timed("native", native, packed)
    for variant in (2, 3):
        with guarded(f"variant {variant}"):
            timed(f"native, variant {variant}", Variant(driver, variant, place), packed)
    timed("native again", native, packed)
    threaded(native, packed, device)
    restores = {
        way: whole(way, rebuild, handles, sections, rig)
        for way, rebuild in (("native", native), ("interpreted", interpreted))
    }
    for way, restore in restores.items():
        with guarded(f"whole restore, {way}"):
            seconds = []
            for _ in range(3):
                began_s = time.perf_counter()
                restore()
                seconds.append(round(time.perf_counter() - began_s, 4))
            say(whole_restore=way, seconds=seconds)
    beside(rig, None, "nothing")
    for way, restore in restores.items():
        beside(rig, restore, way)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "7B")
    sys.stdout.flush()
    os._exit(0)
