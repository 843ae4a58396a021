"""Settings that the parts of `bench.coldstart` share: how large everything is, models, and services.

A model is made ready once, for all parts that need it: written, deployed, its kernels compiled, and a
snapshot made by a service, which warms up all caches by that. Measures nothing but that, and the rate to the
device, against which the rest is held.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import shutil
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from bench.coldstart.shapes import SHAPES, TINY_SHAPES
from bench.coldstart.snapshot_use import SnapshotWatch, graphs_in
from bench.coldstart.start_log import breakdown, num_rehearsals
from bench.load.raw_readers import to_device_bytes_per_s
from bench.random_model import write_random
from bench.report import step, tell
from bench.service.client import uncollected
from bench.service.gpu import SEVEN, TINY, Asked, one
from bench.service.gpu import Scale as KillScale
from bench.service.process import Service, deploy, serving
from bench.service.streams import Prompts
from bench.shape import Shape
from hearth.control.datadir import DataDir
from hearth.control.observe.views import SnapshotView
from hearth.core.config import EngineConfig
from hearth.core.sizes import StepLimits
from hearth.core.types import Rung
from hearth.engine.assemble import own_limits
from hearth.engine.dry_run import KernelNeeds
from hearth.engine.kernel_warmup import KernelWarmup
from hearth.kernels.compilations import COMPILATIONS
from hearth.kernels.kernel_cache import KernelCache
from hearth.models.dtypes import DTYPES

GIB = 1 << 30
PROMPT_TOKENS, NEW_TOKENS = 128, 16
_NO_SNAPSHOTS = ("--set", "store.snapshot_bytes=0")
_LOOK_S = 0.02
#: Loads of each model until all stay in host memory: what is asked for again and again is kept there.
_MAX_LOADS = 5
#: For a worker to load kernels ahead: those of first steps of each model, then those of its other steps.
_NUM_REHEARSALS, _REHEARSAL_PATIENCE_S, _REHEARSAL_LOOK_S = 2, 15.0, 0.2


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of everything; the defaults are those of the real benchmark."""

    shapes: Mapping[str, Shape] = field(default_factory=lambda: SHAPES)
    kind: str = "cuda"
    host_bytes: int = 41 * 10**9
    small_host_bytes: int = 16 * 10**9  #: of services that need only the 7B: they come to rest sooner
    pinned_bytes: int = 8 * GIB  #: to measure what waits for that
    copied_bytes: int = 4 * GIB  #: to measure the rate to the device
    flags: tuple[str, ...] = ()
    rest_s: float = 8.0  #: for all of host memory to be pinned, once nobody loads
    small_rest_s: float = 3.0
    kill: KillScale = SEVEN
    burst_requests: int = 64  #: at once
    burst_tokens: int = 256  #: that each answers
    rates_per_s: tuple[float, ...] = (2.0, 10.0)
    arrivals_s: float = 15.0
    beside_streams: int = 16
    beside_tokens: int = 300
    beside_rounds: int = 4
    decode_requests: int = 64  #: of the throughput on graphs
    decode_tokens: int = 128


#: Runs through everything on a CPU; its numbers mean nothing.
TINY_SCALE = Scale(
    shapes=TINY_SHAPES,
    kind="cpu",
    host_bytes=GIB,
    copied_bytes=GIB // 16,
    pinned_bytes=GIB // 8,
    flags=("--memory", "1GiB"),
    small_host_bytes=GIB,
    rest_s=0.0,
    small_rest_s=0.0,
    kill=replace(TINY, kill_tokens=800),
    burst_requests=4,
    burst_tokens=8,
    rates_per_s=(2.0,),
    arrivals_s=2.0,
    beside_streams=2,
    beside_tokens=600,
    beside_rounds=1,
    decode_requests=4,
    decode_tokens=8,
)


@dataclass(frozen=True, slots=True)
class Start:
    """A start of `hearth serve`, until a worker can host models."""

    ready_s: float
    parts: dict[str, float]  #: see `breakdown`


@contextmanager
def _aside(directory: Path) -> Iterator[None]:
    """Move a directory away, out of the reach of a service that would clear it."""
    away = directory.with_name(f"{directory.name}-aside")
    directory.rename(away)
    try:
        yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        away.rename(directory)


@dataclass(frozen=True, slots=True)
class ServiceKind:
    """How a service is set up."""

    has_snapshots: bool = True  #: makes and uses them
    is_small: bool = False  #: has little host memory


USUAL = ServiceKind()


@dataclass(frozen=True, slots=True)
class _Running:
    service: Service
    kind: ServiceKind


class Setting:
    """The models and services of one run. Mutable; the parts call it, one after the other."""

    def __init__(self, scale: Scale, place: Path, environment: Mapping[str, str] | None = None) -> None:
        """`place` is where models and the data directory are made; services have `environment` besides."""
        self.scale, self.place, self.data_dir = scale, place, place / "data"
        self._environment = environment
        #: What it took to make each model ready, in seconds and bytes.
        self.made: dict[str, dict[str, object]] = {}
        self.failures: dict[str, str] = {}  #: why models could not be made ready
        self.starts: list[Start] = []  #: of services, all of them with warm caches but for the first
        self.compile_s: dict[str, float] = {}  #: of the kernels of each shape, all of them side by side
        #: The rate from pinned memory to the device in one copy, known when a model is ready.
        self.bytes_per_s = math.nan
        self._running: _Running | None = None
        self._is_rested = False  #: its worker, since it has started
        self._worker_since_s = 0.0  #: on the clock of `time.time`
        self._services = ExitStack()  #: of one at most

    @property
    def device(self) -> torch.device:
        return torch.device(self.scale.kind)

    @property
    def has_graphs(self) -> bool:
        """True if steps are captured, and so snapshots hold graphs."""
        return self.scale.kind == "cuda"

    @property
    def log(self) -> Path:
        return DataDir(self.data_dir).log_path

    def model_bytes(self, name: str) -> int:
        return self.scale.shapes[name].weights_bytes

    def limits(self, name: str) -> StepLimits:
        """Return the limits of a model's steps where it has the device to itself."""
        shape = self.scale.shapes[name]
        return own_limits(EngineConfig(), shape.arch, DTYPES[shape.dtype], self.device)

    # Models.

    def compile_kernels(self, names: Iterable[str]) -> None:
        """Have kernels on disk that nobody has compiled yet, those of all shapes side by side."""
        missing = [name for name in names if name not in self.compile_s]
        if self.scale.kind != "cuda" or not missing:
            return
        self.stop()  # whose worker has nearly all of the memory, by which limits of steps are set
        COMPILATIONS.watch()
        warmup = KernelWarmup(KernelCache.open(DataDir.open(self.data_dir).kernels_path))

        def compile_one(name: str) -> float:
            shape, began_s = self.scale.shapes[name], time.perf_counter()
            limits = self.limits(name)
            warmup.compile(KernelNeeds.on(self.device, shape.arch, shape.dtype, shape.quant, limits))
            return time.perf_counter() - began_s

        with step(f"kernels of {', '.join(missing)}"), ThreadPoolExecutor(len(missing)) as pool:
            self.compile_s |= dict(zip(missing, pool.map(compile_one, missing), strict=True))

    def make_ready(self, names: Iterable[str]) -> None:
        """Have models that can be asked, each with a snapshot; what cannot be made is noted."""
        missing = [name for name in names if name not in self.made and name not in self.failures]
        if not missing:
            return
        self.compile_kernels(missing)
        self.stop()  # whose worker has nearly all of the memory, which the rest takes
        if math.isnan(self.bytes_per_s):
            self.bytes_per_s = to_device_bytes_per_s(self.scale.copied_bytes, self.device)
        with ThreadPoolExecutor(1) as pool:  # one is deployed while the next is written
            deployed = {name: pool.submit(self._deploy, name, self._write(name)) for name in missing}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # workers take all that is free
        for name in missing:
            try:
                self.made[name] = {**deployed[name].result(), **self._make_snapshot(name)}
            except Exception as error:  # the other models may do better
                tell(f"model {name}: {error}")
                self.failures[name] = f"{type(error).__name__}: {error}"

    def need(self, *names: str) -> None:
        """Raise RuntimeError if a model cannot be asked."""
        self.make_ready(names)
        for name in names:
            if name in self.failures:
                raise RuntimeError(f"the model {name} could not be made ready: {self.failures[name]}")

    def _write(self, name: str) -> float | OSError:
        """Write a model and return the seconds, or why there is no room for it."""
        shape, began_s = self.scale.shapes[name], time.perf_counter()
        seed = list(self.scale.shapes).index(name)
        try:
            with step(f"model {name}"):
                write_random(self.place / name, shape.config, shape.dtype, seed, self.device)
        except OSError as error:
            return error
        return time.perf_counter() - began_s

    def _deploy(self, name: str, written: float | OSError) -> dict[str, object]:
        if isinstance(written, OSError):
            raise written
        began_s = time.perf_counter()
        deploy(self.data_dir, self.place / name, name)
        return {"write_s": written, "deploy_s": time.perf_counter() - began_s}

    def _make_snapshot(self, name: str) -> dict[str, object]:
        """Have a service make a snapshot; raises RuntimeError if there are no graphs in it that should be."""
        began_s = time.perf_counter()
        with step(f"snapshot of {name}"):
            *_, view = self.service().client.make_snapshot(name)
        assert isinstance(view, SnapshotView), view
        num_graphs = graphs_in(self.data_dir, name)
        if self.has_graphs and not num_graphs:
            raise RuntimeError("its snapshot holds no graphs; the log of the service says why, as `fallback`")
        return {
            "snapshot_s": time.perf_counter() - began_s,
            "snapshot_bytes": view.num_bytes,
            "making_s": view.seconds,
            "num_graphs": num_graphs,
        }

    # Services.

    def service(self, kind: ServiceKind = USUAL) -> Service:
        """Return a service on one device with all of its memory: that which runs, if it is such a one."""
        if self._running is None or self._running.kind != kind:
            self.start_service(kind)
        assert self._running is not None, "it was started just now"
        return self._running.service

    def start_service(self, kind: ServiceKind = USUAL) -> None:
        """Start a new service, in the place of that which runs."""
        self.stop()
        scale = self.scale
        host_bytes = scale.small_host_bytes if kind.is_small else scale.host_bytes
        flags = ["--device", scale.kind, "--workers", "1", "--host-memory", str(host_bytes), *scale.flags]
        if not kind.has_snapshots:
            flags += _NO_SNAPSHOTS
            self._services.enter_context(_aside(DataDir(self.data_dir).snapshots_path))
        gc.freeze()  # whoever looks for garbage while streams are read need not look through all of torch
        began_s = time.time()
        service = self._services.enter_context(serving(self.data_dir, flags, environment=self._environment))
        self.starts.append(Start(time.time() - began_s, breakdown(self.log, began_s)))
        self._running, self._is_rested, self._worker_since_s = _Running(service, kind), False, began_s

    def stop(self) -> None:
        """Stop the service, if one runs."""
        self._running = None
        self._services.close()

    def replace_worker(self, *, does_rest: bool = True) -> dict[str, float]:
        """Kill the worker of the service that runs, and wait until the next one is ready or has come to rest.

        Returns the parts of its start, as in `breakdown`, from when the other one was killed.
        """
        assert self._running is not None, "no service runs"
        service, began_s = self._running.service, time.time()
        (worker,) = service.client.ps().workers
        os.kill(worker.pid, signal.SIGKILL)
        while service.client.ps().workers[0].pid in (0, worker.pid):
            time.sleep(_LOOK_S)
        service.wait_ready()
        self._is_rested, self._worker_since_s = False, began_s
        if does_rest:
            self.rest()
        return breakdown(self.log, began_s)

    def rest(self) -> None:
        """Wait until all host memory of the service that runs is pinned, and its worker has all kernels.

        Does nothing if that was waited for.
        """
        assert self._running is not None, "no service runs"
        if not self._is_rested:
            time.sleep(self.scale.small_rest_s if self._running.kind.is_small else self.scale.rest_s)
            self._wait_for_rehearsals()
            self._is_rested = True

    def _wait_for_rehearsals(self) -> None:
        """Wait until the worker has loaded the kernels of all models ahead; it does so with nothing to do."""
        num_awaited = _NUM_REHEARSALS * len(self.made) if self.has_graphs else 0
        deadline_s = time.monotonic() + _REHEARSAL_PATIENCE_S
        while (num_over := num_rehearsals(self.log, self._worker_since_s)) < num_awaited:
            if time.monotonic() > deadline_s:  # results have how many were left to whoever is restored
                tell(f"kernels were loaded ahead {num_over} of {num_awaited} times")
                return
            time.sleep(_REHEARSAL_LOOK_S)

    def prompts(self, model: str, num_tokens: int = PROMPT_TOKENS) -> Prompts:
        return Prompts(self.scale.shapes[model].arch.vocab_size, num_tokens)

    def watch(self, service: Service) -> SnapshotWatch:
        """Look from now on whether models start with their snapshots."""
        return SnapshotWatch(service, has_graphs=self.has_graphs)

    def ask(self, service: Service, model: str) -> Asked:
        """Ask for a few tokens."""
        with uncollected(), asyncio.Runner() as runner:
            return runner.run(one(service, model, self.prompts(model).take(1)[0], NEW_TOKENS))

    def bring_to_host(self, service: Service, *models: str) -> int:
        """Load models until all bytes of all of them come from host memory, and return how often one was.

        To ask a model that is on the device brings nothing to host memory, where others may have taken its
        place: so it is dropped before. A CPU keeps nothing there, so each is loaded once.

        Raises:
            RuntimeError: they do not stay there together.
        """
        for num_rounds in range(1, _MAX_LOADS + 1):
            rungs = dict[str, list[str]]()
            for model in models:
                service.client.unload(model, free=True)
                rungs[model] = [str(use.rung) for use in self.ask(service, model).explained.rungs]
            if self.scale.kind == "cpu" or all(found == [Rung.HOST] for found in rungs.values()):
                return num_rounds * len(models)
        raise RuntimeError(f"these models do not stay in host memory together, and come from: {rungs}")
