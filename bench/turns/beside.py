"""What bytes that come ahead of a turn cost the model in turn: gaps between its tokens, with and without.

python -m bench.turns.beside [--save] [--small]

Of two random models one answers 64 requests. The other is hosted and asked, over and over: it never gets a
turn, but all of its bytes come to the device ahead of it, and when they are there it is dropped. It comes by
another name and to other addresses each time, so that its pages have to be mapped anew, as they are where
models take turns. All of it goes through a worker's step loop in this process and a keeper in another, and
takes half a minute on a GPU.
`--small` is to see that everything runs: tiny models on a CPU, whose numbers mean nothing.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import itertools
import tempfile
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import msgspec
import torch

from bench.profile.scale import GPU, TINY_CPU, Scale
from bench.random_model import write_random
from bench.report import Row, arguments, emit, percentiles, step
from bench.reuse.parts import device_pages, host_pages
from bench.reuse.setting import Scale as ReuseScale
from bench.reuse.setting import Setting
from bench.reuse.worker import TimedFact, WorkerClient, working
from bench.shape import Shape
from hearth.config import EngineConfig
from hearth.engine.assemble import ModelSpec, workspace_bytes
from hearth.messages import DropModel, HostModel, ModelUse, Ping, Pong, Sampling, StartRequest, StepDone
from hearth.models.dtypes import DTYPES
from hearth.policy.turns.turn_policy import TurnRules
from hearth.store.loader import Loader
from hearth.store.manifest import read_manifest
from hearth.types import ModelId

AIM = 1.1  #: times the gap of a model that is alone
RUNNING, WAITING = ModelId("running"), tuple(ModelId(f"waiting-{number}") for number in range(48))
#: The model in turn has it for as long as this takes.
RULES = TurnRules(min_turn_s=1e6, max_turn_s=1e6)
LOOK_S = 0.003  #: between two looks at what has come
WARM_GAPS = 50  #: that count for nothing: graphs are captured
SPARE_PAGES = 16


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured: models, requests, and for how long."""

    scale: Scale
    running: Shape
    waiting: Shape
    num_requests: int
    num_prompt_tokens: int
    num_new_tokens: int
    seconds: float


#: Two of 3B: both have to be written and pinned, and all of it is to take half a minute.
LARGE = Part(replace(GPU, host_bytes=15 << 30), GPU.shapes[1], GPU.shapes[1], 64, 128, 4000, 8.0)
SMALL = Part(TINY_CPU, TINY_CPU.shapes[0], TINY_CPU.shapes[0], 4, 8, 900, 1.0)


@dataclass(slots=True)
class Times:
    """Times between two tokens, and what happened meanwhile. Mutable; filled by the `_Rig`."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    crossings: list[float] = field(default_factory=list)  #: in which all bytes of the other model came


def main() -> None:
    parser = arguments(__doc__)
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument("--small", action="store_true", help="tiny models on a CPU")
    options = parser.parse_args()
    if options.small and options.save:
        parser.error("numbers of a small run mean nothing: leave out --save")
    part = SMALL if options.small else LARGE
    times = measured(part, torch.device("cpu" if options.small else "cuda:0"))
    alone, beside, crossings = map(percentiles, (times.alone, times.beside, times.crossings))
    ratio = beside["p50"] / alone["p50"]
    rows = [
        Row("inter-token p50, alone", "ms", 1e3 * alone["p50"]),
        Row("inter-token p50, beside bytes that come ahead", "ms", 1e3 * beside["p50"]),
        Row("beside over alone", "times", ratio, aim=f"at most {AIM:g}"),
        Row("bytes that come ahead", "GB/s", part.waiting.weights_bytes / crossings["p50"] / 1e9),
    ]
    result = {"is_small": options.small, "alone_s": alone, "beside_s": beside, "crossings_s": crossings}
    emit("turns_beside", {"rows": [asdict(row) for row in rows], **result}, save=options.save)


def measured(part: Part, device: torch.device) -> Times:
    """Have one model answer while the other comes, over and over."""
    scale = part.scale
    with tempfile.TemporaryDirectory(prefix="hearth-beside-", dir=scale.memory_place) as place:
        with step("writing models"):
            orders = _orders(part, device, Path(place))
        setting = Setting(
            ReuseScale(
                EngineConfig(**asdict(scale.limits)),
                host_bytes=scale.host_bytes,
                chunk_bytes=scale.page_bytes,
            ),
            device,
            Loader(device),
            device_pages if device.type == "cuda" else host_pages,
        )
        budget_bytes = orders[WAITING[0]].own_bytes
        with working(setting, Path(place), orders, budget_bytes, turns=RULES, is_mapped=True) as worker:
            worker.segment.wait_pinned()
            return _Rig(worker, part).measure()


class _Rig:
    """A worker whose one model answers. Mutable in its worker alone."""

    def __init__(self, worker: WorkerClient, part: Part) -> None:
        self._worker, self._part = worker, part
        self._runs = iter(range(1, 1 << 30))
        self._last_s: float | None = None  #: when all requests had their last token
        self._num_tokens = 0  #: that each of them has had

    def measure(self) -> Times:
        worker, part = self._worker, self._part
        for model in (WAITING[-1], RUNNING):  # to host memory, and the first one out of the device's
            worker.host(model)
            self._ask(model, num_new_tokens=1)
            worker.until(StepDone)
            if model is not RUNNING:
                worker.send(DropModel(model))
        for _ in range(part.num_requests):
            self._ask(RUNNING, part.num_new_tokens)
        times, waiting = Times(), itertools.cycle(WAITING)
        for _ in range(WARM_GAPS):
            self._gap()
        with step("alone and beside, in turn"):
            until_s = time.perf_counter() + part.seconds
            while time.perf_counter() < until_s and self._num_tokens < part.num_new_tokens // 2:
                began_s = time.perf_counter()
                beside = list(self._crossing(next(waiting)))
                times.crossings.append(time.perf_counter() - began_s)
                times.beside += beside
                times.alone += [self._gap() for _ in beside]  # in turn, for gaps grow with the context
        return times

    def _crossing(self, model: ModelId) -> Iterator[float]:
        """Have all bytes of a model come, and yield the gaps between tokens meanwhile."""
        worker = self._worker
        worker.host(model)
        self._ask(model, num_new_tokens=1)
        worker.send(Ping(0))
        while True:
            heard = worker.until(StepDone, Pong)
            if isinstance(heard.fact, Pong):
                if any(_is_there(use) for use in heard.fact.models if use.model == model):
                    break
                time.sleep(LOOK_S)
                worker.send(Ping(0))
            elif (gap_s := self._since_last(heard)) is not None:
                yield gap_s
        worker.send(DropModel(model))

    def _gap(self) -> float:
        """Return the time to the next tokens of all requests."""
        while (gap_s := self._since_last(self._worker.until(StepDone))) is None:
            pass
        return gap_s

    def _since_last(self, heard: TimedFact) -> float | None:
        """Return the time since the last tokens of all requests; None: these are not of all, or the first."""
        if not isinstance(heard.fact, StepDone) or len(heard.fact.runs) < self._part.num_requests:
            return None
        last_s, self._last_s = self._last_s, heard.at_s
        self._num_tokens += 1
        return None if last_s is None else heard.at_s - last_s

    def _ask(self, model: ModelId, num_new_tokens: int) -> None:
        prompt = tuple(1 + at % 100 for at in range(self._part.num_prompt_tokens))
        sampling = Sampling(seed=0, temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
        self._worker.send(StartRequest(next(self._runs), model, prompt, (), sampling, salt=b""))


def _is_there(use: ModelUse) -> bool:
    return use.weights_bytes >= use.total_bytes > 0 and not use.coming_bytes


def _orders(part: Part, device: torch.device, place: Path) -> dict[ModelId, HostModel]:
    """Return the orders for both; the one that waits is promised all memory, so it never fits beside."""
    scale = part.scale
    context = part.num_prompt_tokens + part.num_new_tokens + 1
    block_tokens = scale.limits.block_tokens
    orders, budget_bytes = {}, SPARE_PAGES * scale.page_bytes
    for seed, (model, shape) in enumerate(((RUNNING, part.running), (WAITING[0], part.waiting))):
        directory = write_random(place / model, shape.config, shape.dtype, seed, device)
        num_sequences = part.num_requests if model is RUNNING else 1
        kv_bytes = num_sequences * (context + 2 * block_tokens) * shape.kv_bytes_per_token
        spec = ModelSpec(shape.arch, DTYPES[shape.dtype], context, scale.limits, frozenset())
        sizes = (shape.weights_bytes, workspace_bytes(spec, device), kv_bytes)
        budget_bytes += sum(-(-size // scale.page_bytes) * scale.page_bytes for size in sizes)
        orders[model] = HostModel(
            model=model,
            hosting=0,
            where=str(directory),
            digest=read_manifest(directory).digest,
            weight=1.0,
            max_context=context,
            limits=scale.limits,
            kv_floor_bytes=kv_bytes,
            max_kv_bytes=kv_bytes,
            eos_ids=(),
        )
    waiting = msgspec.structs.replace(orders[WAITING[0]], own_bytes=budget_bytes)
    return {
        RUNNING: msgspec.structs.replace(orders[RUNNING], own_bytes=1, slot=0),
        **{
            model: msgspec.structs.replace(waiting, model=model, slot=slot)
            for slot, model in enumerate(WAITING, start=1)
        },
    }


if __name__ == "__main__":
    main()
