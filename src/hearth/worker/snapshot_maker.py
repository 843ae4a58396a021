"""Makes snapshots on a worker while no model has requests, one step at a time.

Steps of padding are run for its profiles: on a CUDA device of every size, which captures missing graphs, on a
CPU of some quick sizes. Measured steps of requests replace those of their kind. Another thread writes the
file.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch

from hearth.core.errors import HearthError, SnapshotError
from hearth.core.messages import Fact, MakeSnapshot, SnapshotMade, SnapshotProgress
from hearth.core.types import ModelId, Rung
from hearth.engine.engine import Engine
from hearth.engine.step_shape import StepShape
from hearth.engine.step_times import StepSamples, StepTimer, TimedStep
from hearth.snapshot import cost_profile, memory_profile
from hearth.snapshot.memory_profile import MemoryProfile
from hearth.system.standing_threads import StandingThreads
from hearth.worker.failure import ModelBroke, failure_of
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosting_state import ServedModel
from hearth.worker.measured_costs import measured_costs
from hearth.worker.model_snapshots import ModelSnapshots

#: How long no request has come before a step of a snapshot runs.
QUIET_S = 1.0
#: Steps per size: the first may capture it, or load a kernel.
NUM_RUNS = 4
#: On a CPU, sizes above one that takes so long are skipped: requests wait for its end.
LONGEST_S = 0.25

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    made: SnapshotMade
    memory: MemoryProfile | None  #: None: not measured, so no snapshot was made


@dataclass(slots=True)
class _Making:
    order: MakeSnapshot
    shapes: list[StepShape] = field(default_factory=list)  #: of steps still to run
    num_steps: int = 0
    last_shape: StepShape | None = None  #: of the previous step
    samples: StepSamples = field(default_factory=StepSamples)  #: of padding
    began_s: float | None = None  #: when the first step was run
    is_written: bool = False  #: its file is being written
    free_bytes: int = 0  #: of the device besides torch, before the first step


class SnapshotMaker:
    """The ordered snapshots. Mutable; the step thread calls it, and other threads call `post`."""

    def __init__(
        self,
        snapshots: ModelSnapshots | None,
        device: torch.device,
        hosted: Mapping[ModelId, HostedModel],
        rates: Callable[[], dict[Rung, float]],
        threads: StandingThreads,
        post: Callable[[SnapshotWritten], None],
    ) -> None:
        """`snapshots` None: orders are refused. `rates` returns measured bytes per second."""
        self._snapshots, self._device, self._hosted, self._rates = snapshots, device, hosted, rates
        self._threads, self._post = threads, post
        self._makings: dict[ModelId, _Making] = {}  #: in the order of their arrival
        self._busy_s = time.perf_counter()  #: when a request was last seen

    def order(self, order: MakeSnapshot) -> SnapshotMade | None:
        """Take an order, unless its stay has ended; return the answer if it is refused."""
        if self._snapshots is None:
            return SnapshotMade(order.model, order.hosting, failure="its worker keeps none, its log says why")
        hosted, known = self._hosted.get(order.model), self._makings.get(order.model)
        is_current = hosted is not None and hosted.order.hosting == order.hosting
        if is_current and (known is None or known.order.hosting != order.hosting):
            self._makings[order.model] = _Making(order)
        return None

    def saw_request(self) -> None:
        self._busy_s = time.perf_counter()

    def timeout_s(self) -> float | None:
        """Return the seconds until `advance` should be called, if no request comes; None: not before news."""
        return None if self._next() is None else max(0.0, self._busy_s + QUIET_S - time.perf_counter())

    def advance(self) -> list[Fact] | None:
        """Do one piece of work for the first snapshot that can advance; None: there is none now.

        Raises ModelBroke if a step of the model failed.
        """
        if (making := self._next()) is None or self.timeout_s() != 0.0:
            return None
        model = making.order.model
        served = self._hosted[model].served
        assert served is not None, f"`{model}` is loaded"
        try:
            return self._advance(self._hosted[model], served, making)
        except Exception as error:  # as in a step of a request
            raise ModelBroke(model, error) from error

    def _next(self) -> _Making | None:
        for model, making in list(self._makings.items()):
            hosted = self._hosted.get(model)
            if hosted is None or hosted.order.hosting != making.order.hosting:
                del self._makings[model]  # the gateway knows
            elif hosted.is_loaded and not making.is_written:
                return making
        return None

    def written(self, news: SnapshotWritten) -> None:
        model, hosting = news.made.model, news.made.hosting
        if (making := self._makings.get(model)) is not None and making.order.hosting == hosting:
            del self._makings[model]
        hosted = self._hosted.get(model)
        if hosted is not None and hosted.order.hosting == hosting and news.made.failure is None:
            hosted.memory = news.memory

    def _advance(self, hosted: HostedModel, served: ServedModel, making: _Making) -> list[Fact]:
        engine = served.engine
        if making.began_s is None:
            hosted.settle_steps()  # the last one of its requests
            engine.runner.drop_restored()  # restored graphs cannot be saved
            making.began_s = time.perf_counter()
            making.shapes = [shape for shape in _shapes(engine) for _ in range(NUM_RUNS)]
            if making.order.has_adapters:  # once each, to be captured: their times are in no profile
                making.shapes += engine.runner.layers.sizes.all_shapes(has_adapters=True)
            making.num_steps = len(making.shapes)
            making.free_bytes = self._beside_torch_bytes()
        elif making.shapes:
            self._run(engine, making)
        else:
            making.is_written = True
            try:
                self._write(hosted, served, making)
            except Exception as error:  # not a step: the model serves on, unless the device is lost
                if (failure := failure_of(error)).is_fatal:
                    raise
                log.error(
                    "snapshot_broke model=%s reason=%s\n%s", hosted.model, failure.reason, failure.trace
                )
                del self._makings[hosted.model]
                return [SnapshotMade(hosted.model, making.order.hosting, failure=failure.reason)]
        model, hosting = making.order.model, making.order.hosting
        num_done = making.num_steps - len(making.shapes)
        return [SnapshotProgress(model, hosting, num_done, making.num_steps)]

    def _run(self, engine: Engine, making: _Making) -> None:
        shape, is_cpu = making.shapes.pop(0), self._device.type == "cpu"
        seconds = _run_padding(engine, shape)
        is_long = is_cpu and seconds > LONGEST_S
        if (shape == making.last_shape or is_long) and not shape.has_adapters:
            # In a profile a row attends at least to itself, and prompts have more tokens than rows.
            num_rows = min(shape.num_logits, shape.num_rows - 1) if shape.has_prompts else shape.num_rows
            if num_rows:
                making.samples.keep(TimedStep(shape.num_rows, num_rows, shape.num_rows, seconds))
        if is_long:  # larger sizes take longer
            making.shapes = [one for one in making.shapes if one.has_prompts != shape.has_prompts]
        making.last_shape = shape

    def _write(self, hosted: HostedModel, served: ServedModel, making: _Making) -> None:
        look, loaded, order, began_s = hosted.look, hosted.first_load, making.order, making.began_s
        snapshots, post = self._snapshots, self._post
        assert snapshots is not None, "an order was taken without snapshots"
        assert look is not None, f"no snapshot of `{hosted.model}` was looked for"
        assert loaded is not None, f"`{hosted.model}` was never loaded"
        assert began_s is not None, f"no step of `{hosted.model}` was run"
        if look.fingerprint is None:
            raise SnapshotError(look.reason or "its dependencies are unknown")
        sections = dict[str, bytes]()
        if hosted.member is None:  # the costs of a stage are those of no model
            cost = measured_costs(
                served, order.model, loaded, self._rates(), making.samples, snapshots.device_name
            )
            sections[cost_profile.SECTION] = msgspec.json.encode(cost)
        parts = snapshots.parts_of(served.engine)
        torch_bytes, library_bytes = self._torch_bytes(), making.free_bytes - self._beside_torch_bytes()
        pool = served.engine.runner.layers.kv.untyped_storage() if self._device.type == "cpu" else None
        fingerprint = look.fingerprint

        def write() -> None:
            made, memory = SnapshotMade(order.model, order.hosting), None
            try:
                memory = MemoryProfile(torch_bytes, max(0, library_bytes), _resident_besides(pool))
                kept = {} if parts is None else parts.save()
                path = snapshots.save(
                    fingerprint, {**sections, **kept, memory_profile.SECTION: memory.pack()}
                )
                num_bytes, lacks = path.stat().st_size, parts is not None and parts.lacks_adapters(kept)
            except Exception as error:  # the thread's top: the order is answered
                if not isinstance(error, (HearthError, OSError)):
                    log.exception("snapshot_broke model=%s", order.model)
                made = msgspec.structs.replace(made, failure=str(error) or repr(error))
            else:
                made = msgspec.structs.replace(
                    made,
                    num_bytes=num_bytes,
                    unbooked_bytes=memory.unbooked_bytes,
                    seconds=time.perf_counter() - began_s,
                    lacks_adapters=lacks,
                )
            post(SnapshotWritten(made, memory))

        self._threads.start(write)

    def _torch_bytes(self) -> int:
        return int(torch.cuda.max_memory_reserved(self._device)) if self._device.type == "cuda" else 0

    def _beside_torch_bytes(self) -> int:
        """Return the device's free memory plus torch's: torch does not change that sum."""
        if self._device.type != "cuda":
            return 0
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return int(free_bytes + torch.cuda.memory_reserved(self._device))


def _shapes(engine: Engine) -> list[StepShape]:
    """Return the shapes to run: largest first if they are captured, else smallest first."""
    sizes = engine.runner.layers.sizes
    if sizes.decode:
        return sizes.all_shapes()
    limits = engine.batcher.limits
    has_tail = sizes.has_tail
    rows = [1 << power for power in range(limits.max_seqs.bit_length())]
    tokens = [1 << power for power in range(1, limits.max_batch_tokens.bit_length())]
    return [
        *(StepShape.decode(size, has_tail=has_tail) for size in rows if size <= limits.max_seqs),
        *(StepShape(True, size, 1, has_tail=has_tail) for size in tokens if size <= limits.max_batch_tokens),
    ]


def _run_padding(engine: Engine, shape: StepShape) -> float:
    runner = engine.runner
    runner.synchronize()  # two steps later the host copy of the inputs is written again
    timer = StepTimer(runner.layers.kv.device)
    runner.run_padding(shape)
    end: torch.cuda.Event | None = None
    if runner.layers.kv.is_cuda:
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch leaves it untyped
        end.record()
    timer.stop(end)
    runner.synchronize()
    return timer.seconds()


def _resident_besides(pool: torch.UntypedStorage | None) -> int:
    """Return this process's own memory without `pool`; None: the pool lies elsewhere."""
    pool_bytes = 0 if pool is None else resident_bytes(pool.data_ptr(), pool.nbytes())
    return max(0, process_bytes(os.getpid()) - pool_bytes)


_PIECE = 1 << 20
_IS_PRESENT = np.uint64(1 << 63)


def process_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def resident_bytes(address: int, num_bytes: int) -> int:
    """Return how many bytes of an address range are in RAM, in whole pages."""
    first, end = address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE)
    num_pages = 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as entries:
        for page in range(first, end, _PIECE):
            entries.seek(page * 8)
            found = np.frombuffer(entries.read(min(_PIECE, end - page) * 8), np.uint64)
            num_pages += int(np.count_nonzero(found & _IS_PRESENT))
    return num_pages * mmap.PAGESIZE
