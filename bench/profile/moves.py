"""How fast models come and go: rates of the rungs, mapping of pages, switches through a worker's step loop.

    one answers, another is asked: the turn of the first ends, missing bytes of the other cross, it answers

The budget holds only the largest model, and each is promised all of it, so each switch ends a turn and takes
bytes from the models before. Nothing crosses ahead of a turn.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median

import msgspec
import torch

from bench.load.raw_readers import Caches
from bench.profile.scale import Scale
from bench.random_model import write_random
from bench.report import step, tell
from bench.reuse.parts import device_pages, host_pages
from bench.reuse.replay import synchronize
from bench.reuse.setting import Scale as ReuseScale
from bench.reuse.setting import Setting
from bench.reuse.worker import WorkerClient, working
from bench.shape import Shape
from hearth.core.config import StoreConfig
from hearth.core.messages import (
    CancelRequest,
    DropModel,
    HostModel,
    ModelLoaded,
    RetireModel,
    StartRequest,
    StepDone,
)
from hearth.core.types import ModelId, Rung, SamplingParams
from hearth.engine.assemble import ModelSpec, tables_bytes, workspace_bytes
from hearth.memory.cuda_pages import PAGE_BYTES
from hearth.models.dtypes import DTYPES
from hearth.policy.turns.turn_policy import TurnRules
from hearth.snapshot.cost_profile import MeasuredMapping, MeasuredSwitch
from hearth.store.format.manifest import WEIGHTS, read_manifest
from hearth.store.format.verify import verify
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.destination import whole
from hearth.store.transfer.transfer import Loader

#: Pages beyond what the largest model takes: sinks of others, and what rounding may cost.
SPARE_PAGES = 8
NUM_SPOKEN_TOKENS = 48
#: Loads tell how time grows with bytes if one brings so many times as many as the other.
_APART = 1.5
HOW_SWITCHED = "a model that answers gives way to another by turns, through a worker's step loop"
#: As short turns as switches allow, and nothing comes ahead of them.
RULES = TurnRules(min_turn_s=0.05, front_bytes=0)


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """What a worker takes for switches and steps."""

    host_bytes_per_s: float  #: of loads from pinned host memory, mapping included
    switch: MeasuredSwitch
    assemble_s: float
    decode_s: Mapping[str, float]  #: by shape: the time of a step with one row
    details: list[dict[str, object]]  #: of each switch


@dataclass(frozen=True, slots=True)
class _Switch:
    """One switch to a model, and its parts."""

    model: ModelId
    missing_bytes: int
    load_s: float  #: from the beginning of its turn until all of them were there
    begin_s: float  #: from then to the first token, whose prompt was computed behind the bytes


def measure_mapping(device: torch.device) -> MeasuredMapping | None:
    """Time mapping and unmapping of pages one by one, as loads do it."""
    if device.type != "cuda":
        return None
    num_pages = 64
    pages = device_pages(num_pages * PAGE_BYTES, PAGE_BYTES)
    address = pages.reserve(None)
    times = []
    for page in range(num_pages):
        began_s = time.perf_counter()
        pages.map(address + page * PAGE_BYTES, page)
        pages.unmap(address + page * PAGE_BYTES)
        times.append(time.perf_counter() - began_s)
    pages.free(address)
    pages.close()
    return MeasuredMapping(PAGE_BYTES, median(times))


def measure_disk(scale: Scale, device: torch.device) -> float:
    """Return bytes per second of a load from disk, caches dropped, through little host memory."""
    shape = scale.shapes[0]
    with tempfile.TemporaryDirectory(prefix="hearth-profile-") as place:
        directory = write_random(Path(place) / "model", shape.config, shape.dtype, 0, device)
        store = Path(place) / "store"
        bad = verify(directory, store=store)
        assert not bad, f"a model that was just made is damaged: {bad[0]}"
        config = StoreConfig(path=str(store), host_bytes=scale.disk_ring_bytes)
        caches = Caches.of(directory / WEIGHTS, is_machine_ours=device.type == "cuda")
        with closing(Tiers(config, is_pinned=device.type == "cuda")) as tiers:
            if device.type == "cuda":
                tiers.segment.wait_pinned()
            model = tiers.open(directory)
            base = torch.empty(model.manifest.num_bytes, dtype=torch.uint8, device=device)
            rates = []
            for _ in range(2):
                caches.drop()
                synchronize(device)
                began_s = time.perf_counter()
                load = Loader(device).load(
                    model.name,
                    model.manifest,
                    whole(model.manifest, base),
                    lambda chunks: tiers.fetch(model, chunks),
                )
                rungs = load.wait().rungs
                synchronize(device)
                if Rung.DISK in rungs:  # what stayed in host memory from the time before does not count
                    rates.append(rungs[Rung.DISK].num_bytes / (time.perf_counter() - began_s))
            return max(rates)


def worker_setting(scale: Scale, device: torch.device) -> Setting:
    return Setting(
        ReuseScale(host_bytes=scale.host_bytes, chunk_bytes=scale.page_bytes),
        device,
        Loader(device),
        device_pages if device.type == "cuda" else host_pages,
    )


def measure_worker(scale: Scale, device: torch.device) -> WorkerTimes:
    """Time switches between all shapes, and steps, through a worker."""
    with tempfile.TemporaryDirectory(prefix="hearth-profile-", dir=scale.memory_place) as place:
        with step("worker: writing models"):
            orders = hosting_orders(scale, device, Path(place))
        setting = worker_setting(scale, device)
        budget_bytes = budget_of(scale, device)
        orders = {
            model: msgspec.structs.replace(order, own_bytes=budget_bytes) for model, order in orders.items()
        }
        with working(setting, Path(place), orders, budget_bytes, turns=RULES) as worker:
            worker.segment.wait_pinned()
            return _WorkerRig(worker, scale).measure()


def measure_return(scale: Scale, device: torch.device, line: LoadLine) -> float:
    """Return how much longer than a load by `line` it takes until an evicted model is there again.

    As without turns: one model is retired, another hosted, and the budget holds one of them.
    """
    times = []
    with tempfile.TemporaryDirectory(prefix="hearth-profile-", dir=scale.memory_place) as place:
        orders = hosting_orders(scale, device, Path(place))
        setting = worker_setting(scale, device)
        with working(setting, Path(place), orders, budget_of(scale, device), is_mapped=True) as worker:
            worker.segment.wait_pinned()
            models, last = list(orders), None
            for round_number in range(scale.num_switches + 2):
                for model in models:
                    if last is not None:
                        worker.send(RetireModel(last))
                    worker.rest()
                    began_s = time.perf_counter()
                    worker.host(model)
                    heard = worker.until(ModelLoaded)
                    assert isinstance(heard.fact, ModelLoaded)
                    num_bytes = sum(use.num_bytes for use in heard.fact.rungs)
                    last = model
                    if round_number > 1:  # the first two bring models to host memory, and engines
                        load_s = line.first_s + num_bytes / line.bytes_per_s if num_bytes else 0.0
                        times.append(heard.at_s - began_s - load_s)
                        tell(f"  {model}: {num_bytes} bytes, {1e3 * times[-1]:.2f} ms beside its load")
    return max(0.0, scale.typical(times))


class _WorkerRig:
    """A worker, and the models that take turns on it. Mutable in its worker alone."""

    def __init__(self, worker: WorkerClient, scale: Scale) -> None:
        self._worker, self._scale = worker, scale
        self._draw, self._runs = Random(1), itertools.count(1_000_000)
        self._models = list(worker.orders)

    def measure(self) -> WorkerTimes:
        worker, scale = self._worker, self._scale
        decode_s, new = {}, []
        with step("worker: models to host memory, then steps"):
            for model in self._models:
                self._ask_new(model)
                decode_s[str(model)] = self._decode_s(model)
                worker.send(DropModel(model))
                new.append(self._ask_new(model))  # host memory has it, and kernels are compiled
                worker.send(DropModel(model))
        with step("worker: switches"):
            switches = list(self._switches())
        for one in switches:
            tell(f"  {one}")
        switches = [one for one in switches if one.missing_bytes]
        line = fit_loads([(one.missing_bytes, one.load_s) for one in switches], scale)
        begin_s = scale.typical(max(0.0, one.begin_s) for one in switches)
        return WorkerTimes(
            host_bytes_per_s=line.bytes_per_s,
            switch=MeasuredSwitch(HOW_SWITCHED, line.first_s, begin_s),
            assemble_s=scale.typical(loaded.open_s + loaded.assemble_s for loaded in new),
            decode_s=decode_s,
            details=[_shown(one) for one in switches],
        )

    def _switches(self) -> Iterator[_Switch]:
        """Yield switches from each model to the next, round and round, each beside a request of the last."""
        for model in self._models:
            self._worker.host(model)
        last: int | None = None
        for round_number in range(self._scale.num_switches + 1):
            for model in self._models:
                run, switch = self._switch(model)
                if last is not None:
                    self._worker.send(CancelRequest(last))
                last = run
                if round_number:  # the first one brings them into the order that all others find
                    yield switch

    def _switch(self, model: ModelId) -> tuple[int, _Switch]:
        """Ask a model for more than it is to say while another answers; return the request and the switch."""
        run = next(self._runs)
        self._worker.send(self._request(run, model, self._scale.turn_tokens))
        loaded, loaded_s, first_s = wait_for_load(self._worker, run)
        missing_bytes = sum(use.num_bytes for use in loaded.rungs)
        return run, _Switch(model, missing_bytes, loaded.assemble_s + loaded.total_s, first_s - loaded_s)

    def _ask_new(self, model: ModelId) -> ModelLoaded:
        """Host a model and ask it at once; return how it came."""
        self._worker.host(model)
        run = next(self._runs)
        self._worker.send(self._request(run, model, num_new_tokens=1))
        loaded, _, _ = wait_for_load(self._worker, run)
        self._worker.rest()
        return loaded

    def _decode_s(self, model: ModelId) -> float:
        """Return the time from one token to the next of the only request."""
        gaps: list[float] = []
        for _ in range(2):  # the first one captures a graph
            run = next(self._runs)
            self._worker.send(self._request(run, model, NUM_SPOKEN_TOKENS))
            at_s: list[float] = []
            while len(at_s) < NUM_SPOKEN_TOKENS:
                heard = self._worker.until(StepDone)
                if heard.has_token_of(run):
                    at_s.append(heard.at_s)
            gaps = [late_s - early_s for early_s, late_s in pairwise(at_s)]
        return self._scale.typical(gaps)

    def _request(self, run: int, model: ModelId, num_new_tokens: int) -> StartRequest:
        return new_request(self._draw, self._scale, run, model, self._scale.switch_prompt, num_new_tokens)


def new_request(
    draw: Random, scale: Scale, run: int, model: ModelId, num_tokens: int, num_new_tokens: int
) -> StartRequest:
    """Return a request whose prompt never comes twice, so that no prefix is found."""
    vocab_size = min(shape.arch.vocab_size for shape in scale.shapes)
    prompt = tuple(draw.randrange(vocab_size) for _ in range(num_tokens))
    sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
    return StartRequest(run, model, prompt, (), sampling, salt=b"")


def wait_for_load(worker: WorkerClient, run: int) -> tuple[ModelLoaded, float, float]:
    """Wait for a load and the token of a run behind it; return how it came, and when each was told."""
    loaded: ModelLoaded | None = None
    loaded_s = first_s = 0.0
    while loaded is None or not first_s:  # either may come first
        heard = worker.until(ModelLoaded, StepDone)
        if isinstance(heard.fact, ModelLoaded):
            loaded, loaded_s = heard.fact, heard.at_s
        elif heard.has_token_of(run) and not first_s:
            first_s = heard.at_s
    return loaded, loaded_s, first_s


@dataclass(frozen=True, slots=True)
class LoadLine:
    """How long a load takes: a time that it takes whatever it brings, and its bytes."""

    first_s: float
    bytes_per_s: float


def fit_loads(loads: Sequence[tuple[int, float]], scale: Scale) -> LoadLine:
    """Return the line nearest to the (bytes, seconds) of loads: outliers do not count.

    Of loads that all brought the same nothing can be told apart: all of their time is that of their bytes.
    """
    slopes = [
        (late_s - early_s) / (more - less)
        for (less, early_s), (more, late_s) in itertools.combinations(sorted(loads), 2)
        if more > _APART * less and late_s > early_s
    ]
    if not slopes:
        return LoadLine(0.0, 1 / scale.typical(seconds / num_bytes for num_bytes, seconds in loads))
    slope = median(slopes)
    first_s = scale.typical(seconds - slope * num_bytes for num_bytes, seconds in loads)
    return LoadLine(max(0.0, first_s), 1 / slope)


def hosting_orders(scale: Scale, device: torch.device, place: Path) -> dict[ModelId, HostModel]:
    """Return the orders to host a model of each shape; a single one gets another to switch with."""
    shapes = [(ModelId(shape.name), shape) for shape in scale.shapes]
    if len(shapes) == 1:
        shapes.append((ModelId(f"other-{shapes[0][0]}"), shapes[0][1]))
    return {
        model: hosting_order(scale, device, place / model, shape, seed)
        for seed, (model, shape) in enumerate(shapes)
    }


def hosting_order(scale: Scale, device: torch.device, directory: Path, shape: Shape, seed: int) -> HostModel:
    """Return the order to host a random model that is written to a directory of its name."""
    write_random(directory, shape.config, shape.dtype, seed, device)
    kv_bytes = _kv_bytes(scale, shape)
    return HostModel(
        model=ModelId(directory.name),
        hosting=0,
        where=str(directory),
        digest=read_manifest(directory).digest,
        weight=1.0,
        max_context=_context(scale),
        limits=scale.limits,
        kv_floor_bytes=kv_bytes,
        max_kv_bytes=kv_bytes,
        eos_ids=(),
    )


def budget_of(scale: Scale, device: torch.device) -> int:
    """Return what the largest model takes, so that no two of them fit."""

    def pages(num_bytes: int) -> int:
        return -(-num_bytes // scale.page_bytes)

    most = 0
    num_alike = (
        2 if len(scale.shapes) == 1 else 1
    )  # as in `hosting_orders`; a smaller one leaves room for its tables
    for shape in scale.shapes:
        spec = ModelSpec(shape.arch, DTYPES[shape.dtype], _context(scale), scale.limits, frozenset())
        sizes = (shape.weights_bytes, workspace_bytes(spec, device), _kv_bytes(scale, shape))
        most = max(most, sum(map(pages, sizes)) + num_alike * pages(tables_bytes(spec)))
    return (most + SPARE_PAGES) * scale.page_bytes


def _context(scale: Scale) -> int:
    return scale.switch_prompt + max(scale.turn_tokens, 2 * NUM_SPOKEN_TOKENS)


def _kv_bytes(scale: Scale, shape: Shape) -> int:
    """Return the KV of one context, the sink and a block that is begun."""
    return (_context(scale) + 3 * scale.limits.block_tokens) * shape.kv_bytes_per_token


def _shown(switch: _Switch) -> dict[str, object]:
    return {name: getattr(switch, name) for name in switch.__slots__}
