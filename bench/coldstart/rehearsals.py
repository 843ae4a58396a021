"""What do rehearsals of graphs wait for in a new process, at rest and beside host memory that is pinned?

    python -m bench.coldstart.rehearsals [--shape 7B] [--bytes N] [--only WAY ...]

    rest          every graph of a model is rehearsed, one after the other, and nothing else is done
    touch         beside threads that have the kernel find the pages of host memory
    register      beside a thread that has the driver pin pages that were found before
    pin           beside both, as a worker pins its host memory
    ..., heap     the same, with heaps of threads that grow by large pieces
    ..., one heap the same, with one heap for all threads
    products, N   only the products of all sizes are run, by N threads; then every graph is rehearsed
    captures, N   every graph is rehearsed by N threads at once, each with a stream of its own
    traced        as `rest`, with torch's profiler telling of the driver's calls
    instantiate   whole graphs are made executable, by one thread and by four, with edges of several kinds

Every way has a process of its own, forked before anything has touched the device, as a worker is. While a
thread rehearses, this process looks what it waits for, by `/proc`. Needs a CUDA device.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import ctypes
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback
from argparse import RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.coldstart.graph_process import GraphTask, _setup
from bench.coldstart.shapes import SHAPES
from bench.report import arguments, emit, tell
from hearth.config import EngineConfig
from hearth.cuda_driver import CudaDriver
from hearth.cuda_graphs import EDGE_DATA, GRAPH_NODE_TYPE_KERNEL, CudaGraphs
from hearth.engine import runner as runner_module
from hearth.engine.assemble import own_limits
from hearth.engine.dry_run import KernelNeeds, dry_runner
from hearth.engine.graph_capture import GraphCapture, _multiply
from hearth.engine.kernel_warmup import KernelWarmup
from hearth.engine.runner import Runner
from hearth.errors import DeviceError
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.kernel_cache import KernelCache, prepare_to_load
from hearth.kernels.variants import loaded_functions
from hearth.memory.cuda_pages import PAGE_BYTES, CudaPages
from hearth.models.dtypes import DTYPES
from hearth.snapshot.graph_names import num_rows_of
from hearth.snapshot.graph_nodes import read_graph
from hearth.snapshot.kernel_handles import KernelHandles
from hearth.snapshot.rebuild import rebuild
from hearth.store.die_with_parent import die_with_parent
from hearth.store.manifest import CHUNK_BYTES
from hearth.store.pinning import Pinning, Touching, cuda_registration
from hearth.store.segment import Segment
from hearth.worker.__main__ import SWITCH_S
from hearth.worker.heaps import grow_by_pieces
from hearth.worker.runtime import start
from hearth.worker.start_times import StartTimes
from hearth.worker.step_rehearsal import _aliased

NUM_BYTES = 12 << 30  #: of host memory
NUM_THREADS = 4
_LOOK_S = 0.0005
_PATIENCE_S = 30
_SYSTEM_CALLS = {9: "mmap", 10: "mprotect", 11: "munmap", 12: "brk", 16: "ioctl", 28: "madvise", 202: "futex"}
_M_ARENA_MAX = -8  # from malloc.h

Say = Callable[[object], None]


class Used:
    """Resources that a thread or process has used since then."""

    def __init__(self, who: int = resource.RUSAGE_THREAD) -> None:
        self._who, self._before = who, resource.getrusage(who)

    def __str__(self) -> str:
        now, then = resource.getrusage(self._who), self._before
        times = f"user {now.ru_utime - then.ru_utime:.3f} system {now.ru_stime - then.ru_stime:.3f} s"
        return f"{times}, {now.ru_minflt - then.ru_minflt} page faults"


class Bench:
    """A process with a device and a runner that computes nothing, over one page of memory."""

    def __init__(self, shape: str, place: Path) -> None:
        self.shape, config, times = SHAPES[shape], EngineConfig(), StartTimes()
        task = GraphTask(
            *(True, self.shape.config, self.shape.dtype, "cuda", {}, str(place / "kernels")),
            *(str(place / "snapshots"), 1, 1),
        )
        self.device = start(_setup(task, config, 1 << 30), config, times).device
        COMPILATIONS.watch()
        arch, dtype = self.shape.arch, DTYPES[self.shape.dtype]
        limits = own_limits(config, arch, dtype, self.device)
        self.needs = KernelNeeds.on(self.device, arch, self.shape.dtype, self.shape.quant, limits)
        began_s = time.perf_counter()
        cache = KernelCache.open(place / "kernels")
        prepare_to_load()
        KernelWarmup(cache).compile(self.needs)
        self.start_s = {**times.seconds, "kernels": time.perf_counter() - began_s}
        self.driver = CudaGraphs(CudaDriver(0))
        self.handles = KernelHandles(self.driver, loaded_functions)

    @contextmanager
    def runner(self, *, is_whole: bool = False) -> Iterator[Runner]:
        needs = replace(self.needs, arch=self.shape.arch) if is_whole else self.needs
        with (
            closing(CudaPages(self.device, PAGE_BYTES)) as pages,
            _aliased(pages, self.device) as memory,
        ):
            runner = dry_runner(needs, memory)
            yield runner
            runner.synchronize()
            del runner

    def rehearse_all(self, runner: Runner) -> dict[str, object]:
        """Rehearse every graph, the smallest first, and say what each took and brought."""
        names = sorted(runner.sizes.all_names(), key=num_rows_of)
        rows, modules, capture_s, learn_s = list[str](), set[int](), 0.0, 0.0
        kernels = set[str]()
        began_s, began_cpu_s, used = time.perf_counter(), time.thread_time(), Used()
        for name in names:
            at_s, at_cpu_s = time.perf_counter(), time.thread_time()
            graph = runner.rehearse(name, GraphCapture())
            assert graph is not None
            captured_s, cpu_s = time.perf_counter() - at_s, time.thread_time() - at_cpu_s
            at_s = time.perf_counter()
            self.handles.learn(graph.raw_cuda_graph())
            learned_s = time.perf_counter() - at_s
            capture_s, learn_s = capture_s + captured_s, learn_s + learned_s
            new = self.handles._known_modules - modules
            modules |= new
            num_functions = sum(len(self.driver.functions(module)) for module in new)
            kernels |= self._names(graph.raw_cuda_graph())
            rows.append(
                f"{name} {captured_s * 1e3:.1f} cpu {cpu_s * 1e3:.1f} learn {learned_s * 1e3:.1f} ms "
                f"modules {len(new)} functions {num_functions}"
            )
        return {
            "seconds": round(time.perf_counter() - began_s, 3),
            "cpu_s": round(time.thread_time() - began_cpu_s, 3),
            "capture_s": round(capture_s, 3),
            "learn_s": round(learn_s, 3),
            "names": len(names),
            "modules": len(modules),
            "library_kernels": len(kernels),
            "used": str(used),
            "rows": rows,
        }

    def _names(self, graph: int) -> set[str]:
        ours = set(loaded_functions().values())
        nodes = self.driver.nodes(graph)
        kernels = nodes[self.driver.kinds(nodes) == GRAPH_NODE_TYPE_KERNEL]
        functions = {
            int(row["function"]) or self.driver.function_of(int(row["kernel"]))
            for row in self.driver.kernel_nodes(kernels)
        }
        return {self.driver.name(function) for function in functions - ours}

    def products(self, num_threads: int) -> dict[str, object]:
        """Run the products of all sizes, with one row and with many, as layers have them."""
        arch, dtype, sizes = self.shape.arch, DTYPES[self.shape.dtype], self._sizes()
        hidden, inner = arch.hidden_size, arch.intermediate_size
        heads, kv_heads = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        pairs = [(hidden, heads + 2 * kv_heads), (heads, hidden), (hidden, 2 * inner), (inner, hidden)]
        weights = [torch.empty(n, k, dtype=dtype, device=self.device) for k, n in pairs]
        head = torch.empty(arch.vocab_size, hidden, dtype=dtype, device=self.device)
        x = torch.empty(max(sizes), max(hidden, inner, heads), dtype=dtype, device=self.device)
        torch.cuda.synchronize()

        def run(size: int) -> float:
            began_s = time.perf_counter()
            for weight in (*weights, *([head] if size <= 1024 else [])):
                torch.nn.functional.linear(x[:size, : weight.shape[1]], weight)
            return time.perf_counter() - began_s

        began_s = time.perf_counter()
        with ThreadPoolExecutor(num_threads, initializer=lambda: torch.cuda.set_device(0)) as threads:
            each_s = list(threads.map(run, sizes))
        seconds = time.perf_counter() - began_s
        torch.cuda.synchronize()
        again_s = time.perf_counter()
        for size in sizes:
            run(size)
        again_s = time.perf_counter() - again_s
        torch.cuda.synchronize()
        return {
            "products_s": round(seconds, 3),
            "again_s": round(again_s, 3),
            "each_ms": [round(one * 1e3, 1) for one in each_s],
        }

    def captures(self, num_threads: int) -> dict[str, object]:
        """Rehearse every graph on several threads, without torch's graphs: it makes one at a time."""
        driver, own = self.driver._driver, threading.local()

        class Captured:
            def __init__(self, handle: int) -> None:
                self._handle = handle

            def raw_cuda_graph(self) -> int:
                return self._handle

        class Capture:
            def capture(self, work: Callable[[], None]) -> Captured:
                handle = ctypes.c_void_p()
                with torch.cuda.stream(own.stream):
                    stream = ctypes.c_void_p(own.stream.cuda_stream)
                    driver.call("cuStreamBeginCapture_v2", stream, ctypes.c_int(2))
                    try:
                        work()
                    finally:
                        driver.call("cuStreamEndCapture", stream, ctypes.byref(handle))
                return Captured(handle.value or 0)

        def begin() -> None:
            torch.cuda.set_device(0)
            own.stream = torch.cuda.Stream()
            with torch.cuda.stream(own.stream):
                _multiply()

        def rehearse(name: str) -> float:
            began_s = time.perf_counter()
            graph = runner.rehearse(name, Capture())  # type: ignore[arg-type] # all that is asked here
            assert graph is not None
            self.handles.learn(graph.raw_cuda_graph())
            self.driver.destroy(graph.raw_cuda_graph())
            return time.perf_counter() - began_s

        with (
            self.runner() as runner,
            ThreadPoolExecutor(num_threads, initializer=begin) as threads,
        ):
            names = sorted(runner.sizes.all_names(), key=num_rows_of)
            list(threads.map(lambda _: time.sleep(0.05), range(num_threads)))
            began_s = time.perf_counter()
            each_s = list(threads.map(rehearse, names))
            seconds = time.perf_counter() - began_s
        return {"captures_s": round(seconds, 3), "each_ms": [round(one * 1e3, 1) for one in each_s]}

    def _sizes(self) -> list[int]:
        with self.runner() as runner:
            return sorted({num_rows_of(name) for name in runner.sizes.all_names()})

    def instantiate(self, say: Say) -> None:
        """Make graphs of all layers executable, in several ways."""
        runner_module._REHEARSED_LAYERS = 1 << 20
        with self.runner(is_whole=True) as runner:
            names = sorted(runner.sizes.all_names(), key=num_rows_of)
            for turn in ("first", "second"):
                began_s = time.perf_counter()
                graphs = [runner.rehearse(name, GraphCapture()) for name in names]
                say({f"{turn}_capture_s": time.perf_counter() - began_s})
            raw = [graph.raw_cuda_graph() for graph in graphs if graph is not None]
            say({"nodes": sum(len(self.driver.nodes(one)) for one in raw), "graphs": len(raw)})
            for num_threads in (1, 1, 4):
                say({f"instantiate_{num_threads}_s": self._instantiate_s(raw, num_threads)})
            self._edges(raw[len(raw) // 2], say)

    def _instantiate_s(self, graphs: list[int], num_threads: int) -> str:
        driver = self.driver._driver

        def make(graph: int) -> int:
            executable = ctypes.c_void_p()
            driver.call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, 0)
            return executable.value or 0

        with ThreadPoolExecutor(num_threads, initializer=lambda: torch.cuda.set_device(0)) as threads:
            list(threads.map(lambda _: time.sleep(0.01), range(num_threads)))
            used = Used(resource.RUSAGE_SELF)
            began_s = time.perf_counter()
            made = list(threads.map(make, graphs))
            seconds = time.perf_counter() - began_s
            text = f"{seconds:.4f} {used}"
        for one in made:
            self.driver.destroy_executable(one)
        return text

    def _edges(self, raw: int, say: Say) -> None:
        """Make one graph ten times, as it is and with plain edges."""
        binaries = {function: binary for binary, function in loaded_functions().items()}
        self.handles.learn(raw)
        graph = read_graph(self.driver, raw, binaries)
        plain = graph.edges.copy()
        plain["data"] = np.zeros(1, EDGE_DATA)
        bare = graph.nodes.copy()
        bare["num_attributes"] = 0
        kinds = {
            "as it is": graph,
            "plain edges": replace(graph, edges=plain),
            "plain edges, no attributes": replace(graph, edges=plain, nodes=bare),
        }
        functions = self.handles.resolve(graph.kernels)
        instantiate, seconds = self.driver.instantiate, list[float]()

        def timed(handle: int) -> int:
            began_s = time.perf_counter()
            made = instantiate(handle)
            seconds.append(time.perf_counter() - began_s)
            return made

        self.driver.instantiate = timed  # type: ignore[method-assign] # to time it
        for kind, one in kinds.items():
            seconds.clear()
            try:
                kept = [rebuild(self.driver, one, functions) for _ in range(10)]
                say({f"one graph of {len(one.nodes)} nodes, {kind}, instantiate_ms": 1e3 * min(seconds)})
                del kept
            except DeviceError as error:  # which may refuse a kernel without its attributes
                say(f"{kind}: {error}")


@contextmanager
def beside(way: str, segment: Segment) -> Iterator[None]:
    """Have pages of host memory found or pinned, again and again."""
    is_over = threading.Event()

    def work() -> None:
        torch.cuda.set_device(0)
        register = cuda_registration()
        while not is_over.is_set():
            own = Segment(os.dup(segment.fd), segment.num_cells, segment.cell_bytes)
            regions, memory, address = own._regions(), own._bytes, own.address
            touching = Touching(memory, address, regions, makes_pages=False)
            if way == "register":
                touching.wait()
                began.set()
            pinning = None if way == "touch" else Pinning(address, regions, touching, *register)
            began.set()
            while not is_over.is_set() and not all(touching._is_touched):
                time.sleep(0.002)
            while not is_over.is_set() and pinning is not None and not pinning.is_complete:
                time.sleep(0.002)
            touching.stop()
            if pinning is not None:
                pinning.close()
            del touching, pinning, memory
            own.close()

    began = threading.Event()
    thread = threading.Thread(target=work)
    if way:
        thread.start()
        began.wait()
        time.sleep(0.05)
    try:
        yield
    finally:
        is_over.set()
        if way:
            thread.join()


def run(way: str, shape: str, place: Path, segment: Segment, say: Say, look: Callable[[bool], None]) -> None:
    """Take one way, in a process of its own."""
    if way.endswith("heap"):
        grow_by_pieces()
    if way.endswith("one heap"):
        assert ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1) == 1
    bench = Bench(shape, place)
    say({"start_s": {name: round(seconds, 3) for name, seconds in bench.start_s.items()}})
    if way == "compile":
        return
    if way.startswith("instantiate"):
        bench.instantiate(say)
        return
    if way.startswith("products"):
        say(bench.products(int(way.rpartition(" ")[2])))
    if way.startswith("captures"):
        say(bench.captures(int(way.rpartition(" ")[2])))

    def rehearse() -> None:
        torch.cuda.set_device(0)
        with bench.runner() as runner:
            GraphCapture()
            look(True)
            say(bench.rehearse_all(runner))
            look(False)

    aside = way.partition(",")[0]
    with beside(aside if aside in ("touch", "register", "pin") else "", segment):
        if way == "traced":
            _traced(rehearse, say)
        else:
            _on_thread(rehearse)


def _on_thread(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1, "hearth-graphs") as thread:
        thread.submit(work).result()


def _traced(work: Callable[[], None], say: Say) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
    events = sorted(found.key_averages(), key=lambda one: -one.self_cpu_time_total)
    for one in events[:24]:
        say(f"{one.key[:60]}: {one.count} times, {one.self_cpu_time_total / 1e3:.1f} ms of its own")


def in_own_process(way: str, shape: str, place: Path, segment: Segment) -> list[object]:
    """Take a way in a new process, look what its thread waits for, and return what it says."""
    told, teller = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(told)

        def say(what: object) -> None:
            os.write(teller, json.dumps(what).encode() + b"\n")

        def look(is_on: bool) -> None:
            say({"look": threading.get_native_id() if is_on else 0})

        try:
            die_with_parent()
            signal.alarm(_PATIENCE_S)
            sys.setswitchinterval(SWITCH_S)
            run(way, shape, place, segment, say, look)
        except BaseException as error:  # whatever it is: this must not go on as a second parent
            traceback.print_exc()
            say(repr(error)[:2000])
        finally:
            os._exit(0)
    os.close(teller)
    found, waits, thread_id = list[object](), Counter[str](), 0
    os.set_blocking(told, False)
    rest = b""
    while True:
        try:
            read = os.read(told, 1 << 20)
            if not read:
                break
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                said = json.loads(line)
                if isinstance(said, dict) and "look" in said:
                    thread_id = said["look"]
                else:
                    found.append(said)
                    tell(f"{way}: {json.dumps(said)[:6000]}")
        except BlockingIOError:
            if thread_id:
                waits[_wait_of(pid, thread_id)] += 1
            time.sleep(_LOOK_S if thread_id else 0.01)
    os.close(told)
    os.waitpid(pid, 0)
    if waits:
        shares = {name: round(count / waits.total(), 3) for name, count in waits.most_common(8)}
        tell(f"{way}: {waits.total()} looks: {shares}")
        found.append({"waits": shares})
    return found


def _wait_of(pid: int, thread_id: int) -> str:
    """Return the system call that a thread is in, and where in the kernel it waits."""
    where = f"/proc/{pid}/task/{thread_id}"
    try:
        number, *arguments = Path(where, "syscall").read_text().split()
        state = Path(where, "stat").read_text().rpartition(")")[2].split()[0]
        channel = Path(where, "wchan").read_text()
    except (OSError, ValueError) as error:
        return f"unknown: {type(error).__name__}"
    if number == "running":
        return f"running {state}"
    name = _SYSTEM_CALLS.get(int(number), number)
    return f"{name} {arguments[1] if name == 'ioctl' else ''} {channel} {state}"


WAYS = [
    *("rest", "touch", "register", "pin", "products, 1", f"products, {NUM_THREADS}", "captures, 1"),
    *(f"captures, {NUM_THREADS}", "instantiate", "traced", "rest, heap", "touch, heap", "pin, heap"),
    *("rest, one heap", "touch, one heap", "instantiate, heap"),
]


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7B")
    parser.add_argument("--bytes", type=int, default=NUM_BYTES, help="of host memory")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS)
    flags = parser.parse_args()
    torch.set_num_threads(1)  # a pool of threads would be broken in forked processes
    found: dict[str, list[object]] = {}
    with (
        tempfile.TemporaryDirectory() as place,
        closing(Segment.create(-(-flags.bytes // CHUNK_BYTES), CHUNK_BYTES)) as segment,
    ):
        Path(place, "kernels").mkdir(mode=0o700)
        making = os.fork()
        if making == 0:
            segment.touch_in_background()
            segment.wait_pinned()
            os._exit(0)
        in_own_process("compile", flags.shape, Path(place), segment)
        os.waitpid(making, 0)
        for way in flags.only:
            began_s = time.perf_counter()
            found[way] = in_own_process(way, flags.shape, Path(place), segment)
            tell(f"{way}: {time.perf_counter() - began_s:.1f} s in all")
    emit("rehearsals", {"ways": found}, save=flags.save)


if __name__ == "__main__":
    main()
