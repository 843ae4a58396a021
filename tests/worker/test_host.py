"""The step loop and its models on a thread of the test, over tiers whose reads the test holds back."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue, SimpleQueue
from typing import TypeVar

import pytest
import torch

from hearth.engine.engine import Engine, StepOutcome
from hearth.memory.pool import Need, Space
from hearth.memory.whole import WholePool
from hearth.messages import (
    DropModel,
    Fact,
    LoadProgressed,
    ModelFailed,
    ModelLoaded,
    Ping,
    Pong,
    Shutdown,
    StartRequest,
    StepDone,
)
from hearth.store.borrower import Borrower
from hearth.store.lender import Lender
from hearth.store.loader import Loader
from hearth.store.manifest import WEIGHTS, read_manifest
from hearth.types import ModelId
from hearth.worker.host import Workshop
from hearth.worker.worker import DeviceLost, Inbox, Worker
from tests.store.stored import PATIENCE_S, Gated, converted, flip, gated_tiers
from tests.worker.harness import BUDGET_BYTES, CONFIG, folder, greedy, host_order

F = TypeVar("F", bound=Fact)
PROMPT = (3, 14, 15, 92, 65, 35)


class WatchedPool:
    """A pool that remembers, without holding it, all memory that it gave."""

    def __init__(self) -> None:
        self._pool = WholePool(torch.device("cpu"), BUDGET_BYTES)
        self._given: list[weakref.ref[torch.UntypedStorage]] = []
        self.budget_bytes = BUDGET_BYTES

    @property
    def used_bytes(self) -> int:
        return self._pool.used_bytes

    @property
    def num_alive(self) -> int:
        return sum(ref() is not None for ref in self._given)

    def take(self, model: ModelId, need: Need) -> Space:
        space = self._pool.take(model, need)
        self._given += [
            weakref.ref(one.untyped_storage()) for one in (space.weights, space.workspace, space.kv)
        ]
        return space

    def give_back(self, model: ModelId) -> None:
        self._pool.give_back(model)


@dataclass(slots=True)
class Bench:
    """Mutable: facts are taken from it, and the worker's end is noted."""

    inbox: Inbox
    facts: Queue[Fact]
    pool: WatchedPool
    gate: Gated
    lost: Future[DeviceLost] = field(default_factory=Future)

    def until(self, kind: type[F]) -> F:
        while not isinstance(fact := self.facts.get(timeout=PATIENCE_S), kind):
            pass
        return fact

    def ping(self) -> Pong:
        self.inbox.put(Ping(0))
        return self.until(Pong)

    def host(self, name: str, where: Path) -> None:
        self.inbox.put(host_order(name, where))

    def start(self, run: int, name: str, num_tokens: int) -> None:
        self.inbox.put(StartRequest(run, ModelId(name), PROMPT, (), greedy(num_tokens)))

    def tokens_of(self, run: int) -> list[int]:
        """Until it has ended."""
        tokens: list[int] = []
        while True:
            fact = self.until(StepDone)
            tokens += [token for one, token in zip(fact.runs, fact.tokens, strict=True) if one == run]
            if run in fact.finished:
                return tokens


@contextmanager
def bench_of(root: Path, max_facts: int = 0) -> Iterator[Bench]:
    """With `max_facts`, the worker waits when so many lie there untaken."""
    with (
        folder() as place,
        gated_tiers(root) as gated,
        closing(Lender(gated.tiers, place / "s")),
        closing(Borrower(place / "s")) as borrower,
    ):
        device, pool = torch.device("cpu"), WatchedPool()
        bench = Bench(SimpleQueue(), Queue(max_facts), pool, gated.gate)
        worker = Worker(
            Workshop(device, CONFIG, pool, borrower, Loader(device)), bench.inbox, bench.facts.put
        )

        def run() -> None:
            try:
                worker.run()
            except DeviceLost as error:
                bench.lost.set_result(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield bench
        finally:
            gated.gate.open()
            bench.inbox.put(Shutdown())
            thread.join(PATIENCE_S)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    gc.collect()
    gc.disable()  # memory has to be free at once, not when somebody tidies up
    try:
        with bench_of(tmp_path) as bench:
            yield bench
    finally:
        gc.enable()


@pytest.fixture(scope="module")
def model() -> Path:
    return converted("llama-gqa")


def test_a_model_that_was_dropped_has_left_all_its_memory(bench: Bench, model: Path) -> None:
    bench.gate.open()
    bench.host("a", model)
    bench.start(1, "a", 30)
    bench.until(StepDone)
    assert bench.pool.num_alive == 3

    bench.inbox.put(DropModel(ModelId("a")))

    assert bench.ping().used_bytes == 0
    assert bench.pool.num_alive == 0


def test_a_model_that_was_dropped_while_it_was_loaded_has_as_well(bench: Bench, model: Path) -> None:
    bench.host("a", model)
    bench.start(1, "a", 30)
    bench.gate.next()  # its memory is taken, and its first chunk asked for
    assert bench.ping().used_bytes > 0

    bench.inbox.put(DropModel(ModelId("a")))

    assert bench.ping().used_bytes == 0
    assert bench.pool.num_alive == 0


def test_a_model_whose_load_failed_has_as_well(bench: Bench, model: Path, tmp_path: Path) -> None:
    rotten = tmp_path / "rotten"
    shutil.copytree(model, rotten)
    flip(rotten / WEIGHTS, read_manifest(rotten).num_bytes - 5000)
    bench.gate.open()
    bench.host("a", rotten)
    bench.start(1, "a", 30)

    failed = bench.until(ModelFailed)

    assert failed.label in ("chunk_corrupt", "chunk_missing")
    assert bench.ping().used_bytes == 0
    assert bench.pool.num_alive == 0


def test_a_model_that_breaks_in_a_step_leaves_and_others_go_on(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.gate.open()
    bench.host("good", model)
    bench.host("bad", converted("opt-pre"))
    step = Engine.step
    broken = read_manifest(converted("opt-pre")).arch

    def breaks(engine: Engine) -> StepOutcome:
        if engine.runner.decoder.arch == broken:
            raise ValueError("something is off")
        return step(engine)

    monkeypatch.setattr(Engine, "step", breaks)
    bench.start(1, "bad", 30)
    failed = bench.until(ModelFailed)
    bench.start(2, "good", 5)

    assert (failed.model, failed.label) == ("bad", "engine_failed")
    assert "something is off" in failed.reason
    assert len(bench.tokens_of(2)) == 5
    assert bench.pool.num_alive == 3


def test_an_error_of_the_device_ends_the_worker(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(engine: Engine) -> StepOutcome:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Engine, "step", breaks)
    bench.gate.open()
    bench.host("a", model)
    bench.until(ModelLoaded)
    bench.start(1, "a", 30)

    assert "the device is lost, under `a`" in str(bench.lost.result(PATIENCE_S))


def test_a_model_answers_while_another_waits_for_its_bytes(bench: Bench, model: Path) -> None:
    bench.host("a", model)
    for _ in {chunk.digest for chunk in read_manifest(model).chunks}:
        bench.gate.next().allow()
    bench.until(ModelLoaded)
    bench.host("b", converted("opt-pre"))
    bench.start(1, "b", 5)
    bench.gate.next()  # held back

    bench.start(2, "a", 20)
    assert len(bench.tokens_of(2)) == 20

    bench.gate.open()
    assert len(bench.tokens_of(1)) == 5


def test_nobody_takes_the_facts_so_no_step_is_made(model: Path, tmp_path: Path) -> None:
    with bench_of(tmp_path, max_facts=3) as bench:
        bench.gate.open()
        bench.host("a", model)
        bench.until(ModelLoaded)
        bench.start(1, "a", 50)

        taken = []
        while True:
            taken.append(bench.facts.get(timeout=PATIENCE_S))
            assert bench.facts.qsize() <= 3
            if isinstance(taken[-1], StepDone) and taken[-1].finished:
                break

    assert sum(len(fact.tokens) for fact in taken if isinstance(fact, StepDone)) == 50


def test_progress_is_told_by_bytes_and_layers(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.worker.arrival.PROGRESS_INTERVAL_S", 0.0)
    manifest = read_manifest(model)
    bench.gate.open()
    bench.host("a", model)

    told: list[LoadProgressed] = []
    while isinstance(fact := bench.facts.get(timeout=PATIENCE_S), LoadProgressed):
        told.append(fact)

    assert isinstance(fact, ModelLoaded)
    ends = [manifest.chunk_range(index).end for index in range(len(manifest.chunks))]
    assert [one.num_bytes for one in told] == ends
    assert [one.num_layers for one in told] == [
        sum(layer.end <= end for layer in manifest.layers) for end in ends
    ]
