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
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from unittest.mock import patch

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
from hearth.core.config import EngineConfig
from hearth.core.messages import (
    CancelRequest,
    DropModel,
    HostModel,
    ModelUse,
    Ping,
    Pong,
    StartRequest,
    StepDone,
)
from hearth.core.types import ModelId, SamplingParams
from hearth.engine.assemble import ModelSpec, workspace_bytes
from hearth.models.dtypes import DTYPES
from hearth.policy.batch.prompt_allowance import PromptAllowance
from hearth.policy.turns.turn_policy import TurnRules
from hearth.store.format.manifest import read_manifest
from hearth.store.transfer.transfer import Loader

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
    num_prompts: int = 0  #: that come one by one beside one request that is left, in pieces
    long_prompt_tokens: int = 0  #: of each of them


#: Two of 3B: both have to be written and pinned, and all of it is to take half a minute.
LARGE = Part(replace(GPU, host_bytes=15 << 30), GPU.shapes[1], GPU.shapes[1], 64, 128, 4000, 8.0)
SMALL = Part(TINY_CPU, TINY_CPU.shapes[0], TINY_CPU.shapes[0], 4, 8, 900, 1.0)


@dataclass(frozen=True, slots=True)
class ToldStep:
    """A step as the timer of its engine tells it."""

    at_s: float  #: when it told
    num_prompt_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between the tokens of two steps, and the second of them."""

    seconds: float
    told: ToldStep | None  #: None: its timer was silent


@dataclass(slots=True)
class Times:
    """Times between two tokens, and what happened meanwhile. Mutable; filled by the `_Rig`."""

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    beside_told: list[float] = field(default_factory=list)  #: of the same steps by their timers
    crossings: list[float] = field(default_factory=list)  #: in which all bytes of the other model came
    prompts: list[Gap] = field(default_factory=list)  #: of steps with pieces of prompts, none without a timer


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
        with (
            timers_heard() as told,
            working(setting, Path(place), orders, budget_bytes, turns=RULES, is_mapped=True) as worker,
        ):
            worker.segment.wait_pinned()
            return _Rig(worker, part, told).measure()


@contextmanager
def timers_heard() -> Iterator[deque[ToldStep]]:
    """Have all that timers of engines in this process tell, in its order, by which prompts are cut."""
    told: deque[ToldStep] = deque()
    measured = PromptAllowance.measured

    def heard(
        allowance: PromptAllowance, num_decode_rows: int, num_prompt_tokens: int, seconds: float
    ) -> None:
        told.append(ToldStep(time.perf_counter(), num_prompt_tokens, seconds))
        measured(allowance, num_decode_rows, num_prompt_tokens, seconds)

    with patch.object(PromptAllowance, "measured", heard):
        yield told


class _Rig:
    """A worker whose one model answers. Mutable in its worker alone."""

    def __init__(self, worker: WorkerClient, part: Part, told: deque[ToldStep]) -> None:
        """`told` gets what timers tell, before the worker tells of the step."""
        self._worker, self._part, self._told = worker, part, told
        self._runs = iter(range(1, 1 << 30))
        self._answering: list[int] = []  #: runs of the requests whose gaps count
        self._last_s: float | None = None  #: when all requests had their last token
        self._num_tokens = 0  #: that each of them has had
        self._draw = Random(6)

    def measure(self) -> Times:
        worker, part = self._worker, self._part
        for model in (WAITING[-1], RUNNING):  # to host memory, and the first one out of the device's
            worker.host(model)
            self._ask(model, num_new_tokens=1)
            worker.until(StepDone)
            if model is not RUNNING:
                worker.send(DropModel(model))
        self._answering = [self._ask(RUNNING, part.num_new_tokens) for _ in range(part.num_requests)]
        times, waiting = Times(), itertools.cycle(WAITING)
        for _ in range(WARM_GAPS):
            self._gap()
        with step("alone and beside, in turn"):
            until_s = time.perf_counter() + part.seconds
            while time.perf_counter() < until_s and self._num_tokens < part.num_new_tokens // 2:
                began_s = time.perf_counter()
                beside = list(self._crossing(next(waiting)))
                times.crossings.append(time.perf_counter() - began_s)
                times.beside += [gap.seconds for gap in beside]
                times.beside_told += [gap.told.seconds for gap in beside if gap.told is not None]
                # In turn, for gaps grow with the context.
                times.alone += [self._gap().seconds for _ in beside]
        if part.num_prompts:
            with step("beside prompts"):
                worker.send(*(CancelRequest(run) for run in self._answering[1:]))
                del self._answering[1:]
                times.prompts = [gap for _ in range(part.num_prompts) for gap in self._beside_prompt()]
        return times

    def _beside_prompt(self) -> Iterator[Gap]:
        """Ask for a prompt that comes in pieces, and yield the gaps that had one of them."""
        run = self._ask(RUNNING, 1, self._part.long_prompt_tokens)
        is_over = False
        while not is_over:
            heard = self._worker.until(StepDone)
            is_over = heard.has_token_of(run)
            gap = self._since_last(heard)
            if gap is not None and gap.told is not None and gap.told.num_prompt_tokens:
                yield gap

    def _crossing(self, model: ModelId) -> Iterator[Gap]:
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
            elif (gap := self._since_last(heard)) is not None:
                yield gap
        worker.send(DropModel(model))

    def _gap(self) -> Gap:
        """Return the time to the next tokens of all requests."""
        while (gap := self._since_last(self._worker.until(StepDone))) is None:
            pass
        return gap

    def _since_last(self, heard: TimedFact) -> Gap | None:
        """Return the time since the last tokens of all requests; None: these are not of all, or the first."""
        told: ToldStep | None = None
        while self._told and self._told[0].at_s <= heard.at_s:
            told = self._told.popleft()
        if not isinstance(heard.fact, StepDone) or not set(self._answering) <= set(heard.fact.runs):
            return None
        last_s, self._last_s = self._last_s, heard.at_s
        self._num_tokens += 1
        return None if last_s is None else Gap(heard.at_s - last_s, told)

    def _ask(self, model: ModelId, num_new_tokens: int, num_prompt_tokens: int | None = None) -> int:
        """Ask a model, with a prompt that never came before if it is to be of another length than all."""
        prompt = tuple(1 + at % 100 for at in range(self._part.num_prompt_tokens))
        if num_prompt_tokens is not None:
            prompt = tuple(1 + self._draw.randrange(100) for _ in range(num_prompt_tokens))
        sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
        run = next(self._runs)
        self._worker.send(StartRequest(run, model, prompt, (), sampling, salt=b""))
        return run


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
