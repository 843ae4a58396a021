"""What do rehearsals of graphs wait for in a new process, at rest and beside host memory that is pinned?

    python -m bench.coldstart.rehearsals [--shape 7B] [--bytes N] [--only WAY ...]

    rest          every graph of a model is rehearsed, one after the other, and nothing else is done
    touch         beside threads that have the kernel find the pages of host memory
    register      beside a thread that has the driver pin pages that were found before
    pin           beside both, as a worker pins its host memory
    ..., heap     the same, with heaps of threads that grow by large pieces, as a worker's do
    products, N   the products of all sizes are run first, by N threads

Every way has a process of its own, forked before anything has touched the device, as a worker is. While a
thread rehearses, this process looks what it waits for, by `/proc`. Needs a CUDA device.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

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
from pathlib import Path

import torch

from bench.coldstart.graph_process import GraphTask, worker_setup
from bench.coldstart.shapes import SHAPES
from bench.report import arguments, emit, tell
from hearth.core.config import EngineConfig
from hearth.engine.assemble import own_limits
from hearth.engine.dry_run import KernelNeeds, dry_runner
from hearth.engine.graph_capture import GraphCapture
from hearth.engine.kernel_warmup import KernelWarmup
from hearth.engine.runner import Runner
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.kernel_cache import KernelCache, prepare_to_load
from hearth.kernels.variants import loaded_functions
from hearth.memory.cuda_pages import PAGE_BYTES, CudaPages
from hearth.models.dtypes import DTYPES
from hearth.snapshot.graph_names import num_rows_of
from hearth.store.format.manifest import CHUNK_BYTES
from hearth.store.tiers.segment import Segment
from hearth.system.cuda.driver import CudaDriver
from hearth.system.cuda.graphs import GRAPH_NODE_TYPE_KERNEL, CudaGraphs
from hearth.system.die_with_parent import die_with_parent
from hearth.worker.__main__ import SWITCH_S
from hearth.worker.process import grow_by_pieces
from hearth.worker.runtime import StartTimes, start
from hearth.worker.step_rehearsal import aliased_memory

NUM_BYTES = 12 << 30  #: of host memory
WAYS = (
    *("rest", "touch", "register", "pin", "rest, heap", "touch, heap", "register, heap", "pin, heap"),
    *("products, 1", "products, 4"),
)
_COMPILE = "compile"  #: a way that only has kernels compiled
_LOOK_S, _PATIENCE_S = 0.0005, 60
_SYSTEM_CALLS = {9: "mmap", 10: "mprotect", 11: "munmap", 12: "brk", 16: "ioctl", 28: "madvise", 202: "futex"}

Say = Callable[[object], None]


class Rehearser:
    """A process with a device, all of whose models have one page of memory."""

    def __init__(self, shape: str, place: Path) -> None:
        self.shape, config, times = SHAPES[shape], EngineConfig(), StartTimes()
        task = GraphTask(
            *(True, self.shape.config, self.shape.dtype, "cuda", {}, str(place / "kernels")),
            *(str(place / "snapshots"), 1, 1),
        )
        self.device = start(worker_setup(task, config, 1 << 30), config, times).device
        COMPILATIONS.watch()
        arch, dtype = self.shape.arch, DTYPES[self.shape.dtype]
        limits = own_limits(config, arch, dtype, self.device)
        self.needs = KernelNeeds.on(self.device, arch, self.shape.dtype, self.shape.quant, limits)
        cache = KernelCache.open(place / "kernels")
        prepare_to_load()
        KernelWarmup(cache).compile(self.needs)
        times.note("kernels")
        self.start_s = times.seconds
        self._driver = CudaGraphs(CudaDriver(0))

    @contextmanager
    def runner(self) -> Iterator[Runner]:
        with (
            closing(CudaPages(self.device, PAGE_BYTES)) as pages,
            aliased_memory(pages, self.device) as memory,
        ):
            runner = dry_runner(self.needs, memory)
            yield runner
            runner.synchronize()
            del runner  # before its memory

    def rehearse_all(self, runner: Runner) -> dict[str, object]:
        """Rehearse every graph, the smallest first, and say what each took and brought."""
        rows, kernels, modules = list[str](), set[str](), set[int]()
        names = sorted(runner.layers.sizes.all_names(), key=num_rows_of)
        began_s, before, seconds = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD), 0.0
        for name in names:
            at_s, at_cpu_s = time.perf_counter(), time.thread_time()
            graph = runner.layers.rehearse(name, GraphCapture())
            assert graph is not None
            took_s, cpu_s = time.perf_counter() - at_s, time.thread_time() - at_cpu_s
            functions = self._library_functions(graph.raw_cuda_graph())
            new = {self._driver.module_of(function) for function in functions} - modules
            modules, kernels = modules | new, kernels | {self._driver.name(one) for one in functions}
            rows.append(f"{name}: {1e3 * took_s:.1f} ms, cpu {1e3 * cpu_s:.1f}, {len(new)} modules")
            seconds += took_s
        after = resource.getrusage(resource.RUSAGE_THREAD)
        return {
            "rehearsals_s": seconds,
            "all_s": time.perf_counter() - began_s,
            "user_s": after.ru_utime - before.ru_utime,
            "system_s": after.ru_stime - before.ru_stime,
            "page_faults": after.ru_minflt - before.ru_minflt,
            "graphs": len(names),
            "library_modules": len(modules),
            "library_kernels": len(kernels),
            "rows": rows,
        }

    def _library_functions(self, graph: int) -> set[int]:
        """Return the functions of a graph that are not ours."""
        nodes, driver = self._driver.nodes(graph), self._driver
        kernels = nodes[driver.kinds(nodes) == GRAPH_NODE_TYPE_KERNEL]
        rows = driver.kernel_nodes(kernels)
        functions = {int(row["function"]) or driver.function_of(int(row["kernel"])) for row in rows}
        return functions - set(loaded_functions().values())

    def run_products(self, num_threads: int) -> dict[str, object]:
        """Run the products of all sizes, as layers and the head have them."""
        with self.runner() as runner:
            sizes = sorted({num_rows_of(name) for name in runner.layers.sizes.all_names()})
            num_logits = max(runner.layers.sizes.samples)
        arch, dtype = self.shape.arch, DTYPES[self.shape.dtype]
        hidden, inner, heads = arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim
        qkv = heads + 2 * arch.num_kv_heads * arch.head_dim
        shapes = [(qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner)]
        weights = [torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes]
        head = torch.empty(arch.vocab_size, hidden, dtype=dtype, device=self.device)
        x = torch.empty(max(sizes), max(hidden, inner, heads), dtype=dtype, device=self.device)
        torch.cuda.synchronize()

        def multiply(size: int) -> None:
            for weight in (*weights, *([head] if size <= num_logits else [])):
                torch.nn.functional.linear(x[:size, : weight.shape[1]], weight)

        began_s = time.perf_counter()
        with ThreadPoolExecutor(num_threads, initializer=lambda: torch.cuda.set_device(0)) as threads:
            list(threads.map(multiply, sizes))
        seconds = time.perf_counter() - began_s
        torch.cuda.synchronize()
        return {"products_s": seconds, "sizes": len(sizes)}


@contextmanager
def beside(way: str, segment: Segment) -> Iterator[None]:
    """Have pages of host memory found or pinned, again and again, until this process ends."""
    began = threading.Event()

    def work() -> None:
        torch.cuda.set_device(0)
        while True:
            with closing(Segment(os.dup(segment.fd), segment.num_cells, segment.cell_bytes)) as own:
                own.touch_in_background()
                if way == "register":
                    own.wait_pinned()  # until they are found
                if way != "touch":
                    own.pin_in_background()
                began.set()
                own.wait_pinned()

    if way in ("touch", "register", "pin"):
        threading.Thread(target=work, daemon=True).start()
        began.wait()
        time.sleep(0.05)  # until its threads are at it
    yield


def run(way: str, shape: str, place: Path, segment: Segment, say: Say, look: Callable[[bool], None]) -> None:
    """Take one way, in a process of its own. `look` is told when the calling thread rehearses."""
    kind, _, rest = way.partition(", ")
    if rest == "heap":
        grow_by_pieces()
    rehearser = Rehearser(shape, place)
    say({"start_s": rehearser.start_s})
    if way == _COMPILE:
        return
    if kind == "products":
        say(rehearser.run_products(int(rest)))

    def rehearse() -> None:
        torch.cuda.set_device(0)
        with rehearser.runner() as runner:
            GraphCapture()  # which brings the library up
            look(True)
            found = rehearser.rehearse_all(runner)
            look(False)
        say(found)

    with beside(kind, segment), ThreadPoolExecutor(1) as thread:  # as a worker does
        thread.submit(rehearse).result()


def in_own_process(way: str, shape: str, place: Path, segment: Segment) -> list[object]:
    """Take a way in a new process, look what its thread waits for, and return what it says."""
    told, teller = os.pipe()
    pid = os.fork()
    if pid == 0:

        def say(what: object) -> None:
            os.write(teller, json.dumps(what).encode() + b"\n")

        try:
            os.close(told)
            die_with_parent()
            signal.alarm(_PATIENCE_S)
            sys.setswitchinterval(SWITCH_S)
            run(way, shape, place, segment, say, lambda is_on: say(threading.get_native_id() * is_on))
        except BaseException as error:  # whatever it is: this must not go on as a second parent
            traceback.print_exc()
            say(repr(error)[:2000])
        finally:
            os._exit(0)
    os.close(teller)
    found = _heard(told, pid)
    os.close(told)
    os.waitpid(pid, 0)
    return found


def _heard(told: int, pid: int) -> list[object]:
    """Return what a process says until it ends, and what its thread waited for while it was looked at."""
    found, waits, thread_id, rest = list[object](), Counter[str](), 0, b""
    os.set_blocking(told, False)
    while True:
        try:
            read = os.read(told, 1 << 20)
        except BlockingIOError:
            if thread_id:
                waits[_wait_of(pid, thread_id)] += 1
            time.sleep(_LOOK_S if thread_id else 0.01)
            continue
        if not read:
            break
        *lines, rest = (rest + read).split(b"\n")
        for said in map(json.loads, lines):
            if isinstance(said, int):  # the thread that is looked at; 0: none any more
                thread_id = said
            else:
                found.append(said)
    if waits:
        found.append({"waits": {name: count / waits.total() for name, count in waits.most_common(8)}})
    return found


def _wait_of(pid: int, thread_id: int) -> str:
    """Return the system call that a thread is in, and where in the kernel it waits."""
    where = Path(f"/proc/{pid}/task/{thread_id}")
    try:
        number, *_ = (where / "syscall").read_text().split()
        channel = (where / "wchan").read_text()
    except (OSError, ValueError) as error:
        return f"unknown: {type(error).__name__}"
    return number if number == "running" else f"{_SYSTEM_CALLS.get(int(number), number)} {channel}"


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7B")
    parser.add_argument("--bytes", type=int, default=NUM_BYTES, help="of host memory")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=WAYS, metavar="WAY")
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
        in_own_process(_COMPILE, flags.shape, Path(place), segment)
        os.waitpid(making, 0)
        for way in flags.only:
            found[way] = in_own_process(way, flags.shape, Path(place), segment)
            tell(f"{way}: {json.dumps(found[way])[:1000]}")
    emit("rehearsals", {"ways": found}, save=flags.save)


if __name__ == "__main__":
    main()
