"""The step loop and its models on a thread of the test, over tiers whose reads the test holds back."""

from __future__ import annotations

import math
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import msgspec
import pytest
import torch

from bench.host_pages import HostPages
from hearth.control.observe.pool_views import FALLBACKS
from hearth.core.errors import DeviceError
from hearth.core.messages import (
    DeviceResidency,
    HostingFailed,
    LoadProgress,
    ModelLoaded,
    StartRequest,
    StepDone,
)
from hearth.core.types import Hold, ModelId, RequestId, Rung
from hearth.engine.assemble import assemble
from hearth.engine.engine import Engine, StepOutcome, StepOutputs
from hearth.engine.graph_capture import GraphCapture
from hearth.engine.runner import Runner
from hearth.engine.step_shape import PaddedSizes, StepShape
from hearth.kernels import packed_products, prefill_hopper
from hearth.memory.arena import ArenaPool
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.memory.vmm import MappedPool
from hearth.models.decoder import Decoder
from hearth.policy.memory.reload_cost import DeviceReloadCosts
from hearth.store.format.manifest import WEIGHTS, read_manifest
from hearth.worker.background import FirstTokens
from hearth.worker.hosted_model import HostedModel
from hearth.worker.hosted_models import HostedModels
from hearth.worker.hosting_state import ServedModel
from hearth.worker.model_load import (
    EngineReady,
    FirstRequests,
    FirstStepsUncaptured,
    HostingNews,
    ModelLoad,
)
from hearth.worker.model_marks import WorkerMarks
from hearth.worker.model_snapshots import SnapshotLook
from hearth.worker.reclaimer import Reclaimer
from hearth.worker.steps import MAX_VAIN_ROUNDS, ModelSteps
from hearth.worker.weights_transfer import WeightsLoaded
from tests.store.stored import PATIENCE_S, Gated, converted, flip, gated_tiers
from tests.worker.harness import BUDGET_BYTES, greedy
from tests.worker.in_process import LoopGateway, working_in_process

PROMPT = (3, 14, 15, 92, 65, 35)


def new_pool(eviction_terms: EvictionTermsOf) -> Pool:
    return ArenaPool(torch.device("cpu"), BUDGET_BYTES, eviction_terms)


@dataclass(frozen=True, slots=True)
class Bench:
    gateway: LoopGateway
    gate: Gated

    @property
    def is_empty(self) -> bool:
        pong = self.gateway.ping()
        return pong.free_bytes == pong.budget_bytes

    def start(self, name: str, num_tokens: int) -> int:
        return self.gateway.start(name, PROMPT, greedy(num_tokens))

    def num_tokens(self, run: int) -> int:
        return len(self.gateway.until_ended(run)[0].tokens)


@contextmanager
def bench_of(root: Path, max_facts: int = 0) -> Iterator[Bench]:
    with (
        gated_tiers(root) as gated,
        working_in_process(gated.tiers, new_pool, max_facts=max_facts) as gateway,
    ):
        try:
            yield Bench(gateway, gated.gate)
        finally:
            gated.gate.open()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with bench_of(tmp_path) as bench:
        yield bench


@pytest.fixture(scope="module")
def model() -> Path:
    return converted("llama-gqa")


def test_a_model_that_was_dropped_has_left_all_its_memory(bench: Bench, model: Path) -> None:
    bench.gate.open()
    bench.gateway.host("a", model)
    bench.start("a", 30)
    bench.gateway.until(StepDone)
    assert not bench.is_empty

    bench.gateway.drop("a")

    assert bench.is_empty


def test_a_model_that_was_dropped_while_it_was_loaded_has_as_well(bench: Bench, model: Path) -> None:
    bench.gateway.host("a", model)
    bench.start("a", 30)
    bench.gate.next()  # its memory is taken, and its first chunk asked for
    assert not bench.is_empty

    bench.gateway.drop("a")

    assert bench.is_empty


def test_a_model_whose_load_failed_has_as_well(bench: Bench, model: Path, tmp_path: Path) -> None:
    rotten = tmp_path / "rotten"
    shutil.copytree(model, rotten)
    flip(rotten / WEIGHTS, read_manifest(rotten).num_bytes - 5000)
    bench.gate.open()
    bench.gateway.host("a", rotten)
    bench.start("a", 30)

    failed = bench.gateway.until(HostingFailed)

    assert failed.label in ("chunk_corrupt", "chunk_missing")
    assert bench.is_empty


def test_a_retired_model_keeps_its_weights_and_comes_back_without_a_load(bench: Bench, model: Path) -> None:
    bench.gate.open()
    first = bench.gateway.load("a", model)
    before = bench.gateway.ask("a", PROMPT, greedy(10)).tokens
    bench.gateway.retire("a")
    pong = bench.gateway.ping()
    (use,) = pong.models
    assert (use.is_hosted, use.hold, use.kv_bytes) == (False, Hold.RETAINED, 0)
    assert use.weights_bytes == use.total_bytes > 0

    second = bench.gateway.load("a", model)

    assert sum(rung.num_bytes for rung in first.rungs) > 0
    assert first.reused_bytes == 0
    assert second.rungs == ()
    assert second.reused_bytes > 0
    assert bench.gateway.ask("a", PROMPT, greedy(10)).tokens == before


def test_models_whose_prompts_take_the_slower_kernel_are_counted(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.gate.open()
    bench.gateway.load("a", model)
    assert bench.gateway.ping().fallbacks["prompt_attention"] == 0, "the fastest for a CPU"
    assert bench.gateway.ping().fallbacks["staging"] == 0, "nothing is pinned for a CPU"

    monkeypatch.setattr(prefill_hopper, "capability", lambda: 90)

    assert bench.gateway.ping().fallbacks["prompt_attention"] == 1, "of a head size that is not served"

    bench.gateway.drop("a")
    assert bench.gateway.ping().fallbacks["prompt_attention"] == 1, "a counter never counts back"


def test_models_whose_products_of_eight_bits_lack_scratch_are_told_of_and_counted(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.gate.open()
    bench.gateway.load("a", model)
    assert bench.gateway.ping().fallbacks["eight_bit_products"] == 0

    monkeypatch.setattr(Decoder, "sharing_obstacle", lambda _: "3 numbers of scratch")
    for name in ("b", "c"):
        bench.gateway.load(name, model)

    assert bench.gateway.ping().fallbacks["eight_bit_products"] == 3
    assert sum("fallback eight_bit_products=" in line for line in caplog.messages) == 1


def test_a_worker_without_the_c_code_for_packed_weights_is_counted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.gateway.ping().fallbacks["packed_products"] == 0

    monkeypatch.setattr(packed_products, "is_missing", lambda: True)

    assert bench.gateway.ping().fallbacks["packed_products"] == 1
    assert "packed_products" in FALLBACKS, "by which `hearth doctor` names it"


def test_weights_that_are_on_their_way_have_memory_but_are_not_there_yet(bench: Bench, model: Path) -> None:
    bench.gateway.host("a", model)
    bench.gate.next()
    (use,) = bench.gateway.ping().models
    assert use.coming_bytes == use.weights_bytes == use.total_bytes > 0

    bench.gate.open()
    bench.gateway.until(ModelLoaded)
    bench.start("a", 30)
    bench.gateway.until(StepDone)

    (use,) = bench.gateway.ping().models
    assert (use.coming_bytes, use.weights_bytes) == (0, use.total_bytes)
    assert 0 < use.kv_used_blocks * use.block_bytes <= use.kv_bytes


def test_a_model_that_is_retired_while_it_is_loaded_can_be_hosted_again(bench: Bench, model: Path) -> None:
    bench.gateway.host("a", model)
    bench.gate.next()
    bench.gateway.retire("a")
    assert bench.is_empty  # what had arrived was not whole

    bench.gate.open()
    bench.gateway.load("a", model)

    assert len(bench.gateway.ask("a", PROMPT, greedy(10)).tokens) == 10


def test_a_model_that_is_retired_while_it_is_looked_for_can_be_hosted_again(
    bench: Bench, model: Path
) -> None:
    bench.gate.open()
    bench.gateway.host("a", model)
    bench.gateway.retire("a")
    assert bench.is_empty

    bench.gateway.load("a", model)

    assert len(bench.gateway.ask("a", PROMPT, greedy(10)).tokens) == 10


def test_a_load_that_was_called_off_holds_up_no_later_step(tmp_path: Path) -> None:
    model = converted("llama-gqa", chunk_bytes=64 << 10)

    def pages(eviction_terms: EvictionTermsOf) -> Pool:
        return MappedPool(HostPages(600, 64 << 10), eviction_terms)

    with gated_tiers(tmp_path) as gated, working_in_process(gated.tiers, pages) as gateway:
        gateway.host("a", model)
        gated.gate.next()
        while not gateway.ping().models[0].block_bytes:
            pass  # until it has its engine, which follows the load
        gateway.retire("a")
        gated.gate.open()
        gateway.load("b", model)
        before = gateway.ask("b", PROMPT, greedy(5)).tokens

        gateway.host("a", model)

        assert gateway.ask("a", PROMPT, greedy(5)).tokens == before


def test_a_load_that_was_called_off_while_its_engine_was_put_together_touches_no_memory(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That may be somebody else's by now, or unmapped."""
    is_assembling, may_go, is_over, filled = Event(), Event(), Event(), list[Runner]()
    run = ModelLoad._run

    def late(*arguments: object) -> Engine:
        is_assembling.set()
        may_go.wait(PATIENCE_S)
        return assemble(*arguments)  # type: ignore[arg-type] # as it was called

    def noted(load: ModelLoad, engine: Engine | None) -> None:
        run(load, engine)
        is_over.set()

    monkeypatch.setattr(ModelLoad, "_run", noted)
    monkeypatch.setattr("hearth.worker.model_load.assemble", late)
    monkeypatch.setattr(Runner, "fill_tables", filled.append)
    bench.gate.open()
    bench.gateway.host("a", model)
    assert is_assembling.wait(PATIENCE_S)
    bench.gateway.retire("a")
    bench.gateway.ping()  # it is retired
    may_go.set()
    assert is_over.wait(PATIENCE_S)
    assert not filled


def test_bytes_cross_while_the_engine_is_put_together(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them may come first: no step is made before there is an engine to make it."""
    is_filled = Event()
    weights_loaded = HostedModel.weights_loaded

    def noted(hosted: HostedModel, news: WeightsLoaded) -> ModelLoaded | None:
        told = weights_loaded(hosted, news)
        is_filled.set()
        return told

    def late(*arguments: object) -> Engine:
        assert is_filled.wait(PATIENCE_S), "its bytes wait for it"
        return assemble(*arguments)  # type: ignore[arg-type] # as it was called

    monkeypatch.setattr(HostedModel, "weights_loaded", noted)
    monkeypatch.setattr("hearth.worker.model_load.assemble", late)
    bench.gate.open()
    bench.gateway.host("a", model)
    run = bench.start("a", 10)

    assert bench.num_tokens(run) == 10
    (loaded,) = bench.gateway.loads
    assert loaded.place_s + loaded.total_s <= loaded.assemble_s, "the engine came last"


@pytest.mark.parametrize("breaks", ["engine", "bytes", "tables"])
def test_a_start_of_which_a_part_breaks_beside_the_others_leaves_nothing_behind(
    bench: Bench, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str
) -> None:
    is_failed, is_over, closed = Event(), Event(), list[Runner]()
    run, drop, close = ModelLoad._run, HostedModels.drop, Runner.close

    def noted(load: ModelLoad, engine: Engine | None) -> None:
        try:
            run(load, engine)
        finally:
            is_over.set()

    def dropped(models: HostedModels, name: ModelId) -> None:
        drop(models, name)
        is_failed.set()

    def assembled(*arguments: object) -> Engine:
        bench.gate.next()  # bytes are asked for
        if breaks == "engine":
            raise DeviceError("no memory for it")
        if breaks == "bytes":
            bench.gate.open()
            assert is_failed.wait(PATIENCE_S)
        return assemble(*arguments)  # type: ignore[arg-type] # as it was called

    def filled(runner: Runner) -> None:
        raise DeviceError("no tables")

    def closes(runner: Runner) -> None:
        closed.append(runner)
        close(runner)

    where = tmp_path / "copied"
    shutil.copytree(model, where)
    if breaks == "bytes":
        flip(where / WEIGHTS, 5000)
    if breaks == "tables":
        monkeypatch.setattr(Runner, "fill_tables", filled)
    monkeypatch.setattr(ModelLoad, "_run", noted)
    monkeypatch.setattr(HostedModels, "drop", dropped)
    monkeypatch.setattr(Runner, "close", closes)
    monkeypatch.setattr("hearth.worker.model_load.assemble", assembled)
    bench.gateway.host("a", where)
    bench.start("a", 10)

    bench.gateway.until(HostingFailed)

    assert is_over.wait(PATIENCE_S)
    assert bench.is_empty
    assert len(closed) == (breaks != "engine"), "an engine that nobody has was left open, or closed twice"
    monkeypatch.undo()
    bench.gate.open()
    bench.gateway.load("b", model)
    assert bench.num_tokens(bench.start("b", 5)) == 5
    assert not any(isinstance(fact, HostingFailed) for fact in bench.gateway.facts.queue)


def test_a_model_is_there_when_both_its_bytes_and_its_engine_are(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_filled, may_open = Event(), Event()
    weights_loaded = HostedModel.weights_loaded

    def late(engine: Engine, is_whole: bool, look: SnapshotLook | None) -> EngineReady:
        may_open.wait(PATIENCE_S)
        return EngineReady(engine, is_whole, look)

    def noted(hosted: HostedModel, news: WeightsLoaded) -> ModelLoaded | None:
        told = weights_loaded(hosted, news)
        is_filled.set()
        return told

    monkeypatch.setattr("hearth.worker.model_load.EngineReady", late)
    monkeypatch.setattr(HostedModel, "weights_loaded", noted)
    bench.gate.open()
    bench.gateway.host("a", model)
    assert is_filled.wait(PATIENCE_S)

    (use,) = bench.gateway.ping().models
    assert use.hold is Hold.BUSY  # nothing of it is taken or moved
    assert not bench.gateway.loads
    may_open.set()
    bench.gateway.until(ModelLoaded)
    assert len(bench.gateway.ask("a", PROMPT, greedy(10)).tokens) == 10


def test_a_request_that_waited_for_its_engine_is_counted_once(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(DeviceReloadCosts, "asked", lambda costs, model, now_s: asked.append(model))
    bench.gateway.host("a", model)
    run = bench.start("a", 5)
    bench.gate.open()

    assert bench.num_tokens(run) == 5
    assert asked == ["a"]


def test_another_version_under_the_same_name_shares_nothing_with_the_one_before(
    bench: Bench, model: Path
) -> None:
    bench.gate.open()
    bench.gateway.load("a", model)
    bench.gateway.retire("a")

    other = bench.gateway.load("a", converted("opt-pre"))

    assert other.reused_bytes == 0
    (use,) = bench.gateway.ping().models
    assert use.weights_bytes == use.total_bytes


def test_what_is_on_the_device_is_told_when_it_changes(bench: Bench, model: Path) -> None:
    bench.gate.open()
    bench.gateway.host("a", model)
    there = bench.gateway.until(DeviceResidency).bytes_by_model
    bench.gateway.ask("a", PROMPT, greedy(10))
    bench.gateway.drop("a")

    assert list(there) == ["a"]
    assert all(num_bytes > 0 for num_bytes in there.values())
    assert bench.gateway.until(DeviceResidency).bytes_by_model == {}


def test_a_model_that_breaks_in_a_step_leaves_and_others_go_on(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.gate.open()
    bench.gateway.host("good", model)
    bench.gateway.host("bad", converted("opt-pre"))
    step = Engine.step
    broken = read_manifest(converted("opt-pre")).arch

    def breaks(engine: Engine) -> StepOutcome:
        if engine.runner.layers.decoder.arch == broken:
            raise ValueError("something is off")
        return step(engine)

    monkeypatch.setattr(Engine, "step", breaks)
    bench.start("bad", 30)
    failed = bench.gateway.until(HostingFailed)
    run = bench.start("good", 5)

    assert (failed.model, failed.label) == ("bad", "engine_failed")
    assert "something is off" in failed.reason
    assert bench.num_tokens(run) == 5
    assert [use.model for use in bench.gateway.ping().models] == ["good"]


def test_tokens_are_told_before_the_books_of_their_step_are_finished(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after_step, is_heard = Reclaimer.after_step, threading.Event()
    found = list[tuple[bool, bool]]()

    def late(reclaimer: Reclaimer, name: ModelId, served: ServedModel, outcome: StepOutcome) -> None:
        if outcome.outputs.finished:
            found.append((is_heard.wait(PATIENCE_S), served.engine.batcher.is_settled))
        after_step(reclaimer, name, served, outcome)

    monkeypatch.setattr(Reclaimer, "after_step", late)
    bench.gate.open()
    bench.gateway.host("a", model)
    assert bench.num_tokens(bench.start("a", 5)) == 5
    is_heard.set()
    assert bench.num_tokens(bench.start("a", 3)) == 3
    bench.gateway.ping()
    assert found == [(True, True)] * 2


def test_a_model_whose_books_break_leaves_when_its_tokens_are_told(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(reclaimer: Reclaimer, name: ModelId, served: ServedModel, outcome: StepOutcome) -> None:
        if outcome.outputs.finished:
            raise ValueError("the books are off")

    monkeypatch.setattr(Reclaimer, "after_step", breaks)
    bench.gate.open()
    bench.gateway.host("a", model)
    assert bench.num_tokens(bench.start("a", 5)) == 5
    failed = bench.gateway.until(HostingFailed)
    assert "the books are off" in failed.reason


def test_an_error_of_the_device_ends_the_worker(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(engine: Engine) -> StepOutcome:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Engine, "step", breaks)
    bench.gate.open()
    bench.gateway.load("a", model)
    bench.start("a", 30)

    assert "the device failed while running `a`" in str(bench.gateway.device_lost.result(PATIENCE_S))


def test_a_model_answers_while_another_waits_for_its_bytes(bench: Bench, model: Path) -> None:
    bench.gateway.host("a", model)
    for _ in set(read_manifest(model).chunk_ids):
        bench.gate.next().allow()
    bench.gateway.until(ModelLoaded)
    bench.gateway.host("b", converted("opt-pre"))
    waiting = bench.start("b", 5)
    bench.gate.next()  # held back

    assert bench.num_tokens(bench.start("a", 20)) == 20

    bench.gate.open()
    assert bench.num_tokens(waiting) == 5


def test_nobody_takes_the_facts_so_no_step_is_made(model: Path, tmp_path: Path) -> None:
    with bench_of(tmp_path, max_facts=3) as bench:
        bench.gate.open()
        bench.gateway.load("a", model)
        run = bench.start("a", 50)

        while not bench.gateway.answers[run].is_ended:
            bench.gateway.hear()
            assert bench.gateway.facts.qsize() <= 3

    assert len(bench.gateway.answers[run].tokens) == 50


def test_nobody_is_taken_to_wait_for_a_first_token_who_has_one_or_has_gone(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs that are restored give way to those who wait."""
    noted, awaited = set[FirstTokens](), FirstTokens.awaited

    def note(first_tokens: FirstTokens, run: int) -> None:
        noted.add(first_tokens)
        awaited(first_tokens, run)

    monkeypatch.setattr(FirstTokens, "awaited", note)
    bench.gateway.host("a", model)
    gone = bench.start("a", 5)
    bench.gateway.host("b", converted("opt-pre"))
    bench.start("b", 5)
    bench.gateway.ping()
    (first_tokens,) = noted
    assert len(first_tokens._runs) == 2
    assert not first_tokens._are_all_served.is_set()

    bench.gateway.cancel(gone)
    bench.gateway.drop("b")
    run = bench.start("a", 50)
    bench.gate.open()
    while not bench.gateway.answers[run].tokens:
        bench.gateway.hear()

    assert first_tokens._are_all_served.is_set()
    first_tokens.give_way(math.inf)()
    awaited(first_tokens, 7)
    first_tokens.give_way(0.0)()  # returns all the same
    assert bench.num_tokens(run) == 50


@pytest.mark.parametrize("is_beside", [True, False])
def test_first_steps_of_all_that_wait_for_a_model_are_captured_beside_its_load(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch, is_beside: bool
) -> None:
    """Also of those who come while it loads, not of those who go; whether others step says which steps."""
    noted, is_noted, may_look = list[tuple[FirstRequests, bool]](), threading.Event(), threading.Event()

    def note(load: ModelLoad, runner: object, captured: object) -> None:
        assert may_look.wait(PATIENCE_S)
        noted.append((load.first, load._is_beside))
        is_noted.set()

    if is_beside:
        bench.gateway.host("a", model)
        for _ in read_manifest(model).chunks:
            bench.gate.next().allow()
        long = bench.start("a", 100)
        bench.gateway.until(StepDone)
    monkeypatch.setattr(ModelLoad, "_next_shape", note)
    bench.gateway.host("b", converted("opt-pre"))
    short = [bench.start("b", num_tokens) for num_tokens in (2, 1)]
    bench.gate.next()  # its first chunk is asked for, and waited for
    short.append(bench.start("b", 3))
    for gone in [bench.start("b", 4) for _ in range(8)]:
        bench.gateway.cancel(gone)
    bench.gateway.cancel(short[1])
    bench.gateway.ping()
    may_look.set()
    bench.gate.open()
    assert is_noted.wait(PATIENCE_S)
    bench.gateway.until_ended(short[0], short[2], *([long] if is_beside else []))

    assert noted == [(FirstRequests(2, 2 * len(PROMPT), 2), is_beside)]


def test_starts_whose_first_steps_cannot_be_captured_are_counted(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(load: ModelLoad, runner: object, captured: object) -> None:
        raise ValueError("nothing is mapped there")

    monkeypatch.setattr(ModelLoad, "_next_shape", refuse)
    assert bench.gateway.ping().fallbacks["first_steps_not_captured"] == 0
    bench.gate.open()
    bench.gateway.host("a", model)
    assert bench.num_tokens(bench.start("a", 5)) == 5
    deadline_s = time.monotonic() + PATIENCE_S
    while not (count := bench.gateway.ping().fallbacks["first_steps_not_captured"]):
        assert time.monotonic() < deadline_s

    assert count == 1
    assert "first_steps_not_captured" in FALLBACKS, "by which `hearth doctor` names it"


def test_only_requests_whose_steps_can_be_foreseen_are_captured_for() -> None:
    plain = StartRequest(1, ModelId("m"), (1, 2, 3), (4,), greedy(2), salt=b"")
    first = FirstRequests().with_one(plain)
    assert first == FirstRequests(1, 4, 0), "it has one of two tokens, and ends with the next"
    assert first.with_one(msgspec.structs.replace(plain, pooling="mean")) == first
    endless = replace(plain.sampling, max_tokens=None)
    more = msgspec.structs.replace(plain, output=(), sampling=endless)
    assert first.with_one(more) == FirstRequests(2, 7, 1)
    assert first.with_one(more).without_one(plain) == FirstRequests(1, 3, 1)
    assert first.without_one(plain) == FirstRequests()


@pytest.mark.parametrize("is_beside", [True, False])
@pytest.mark.parametrize("ends", ["followed", "loaded", "cancelled", "broken", None])
def test_no_first_step_is_captured_that_would_come_too_late(
    ends: str | None, is_beside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Capturing one takes the interpreter by pieces, from the step that runs without it then."""
    load, captured = ModelLoad.__new__(ModelLoad), list[StepShape]()
    load.first, load._is_cancelled, load.weights = FirstRequests(1, 5, 1), False, None
    load._is_beside, load.is_almost_loaded = is_beside, False
    load._resources = SimpleNamespace(marks=WorkerMarks())  # type: ignore[assignment] # all that is asked of it
    load._mapping = SimpleNamespace(wait=lambda: None)  # type: ignore[assignment] # likewise
    posted = list[HostingNews]()
    load._post = posted.append
    sizes = PaddedSizes(decode=(1, 8), mixed=(16,), samples=(1, 8))

    def capture_substitutes(shape: StepShape, new_capturer: object, *paces: object) -> None:
        launches = load._resources.marks.launches
        assert (new_capturer, *paces) == (GraphCapture, launches.give_way, launches.get_behind)
        captured.append(shape)
        load.first = FirstRequests(2, 9, 2)  # for another has come
        load.is_almost_loaded = ends == "followed"
        load.weights = SimpleNamespace() if ends == "loaded" else None  # type: ignore[assignment] # there
        load._is_cancelled = ends == "cancelled"
        if ends == "broken":
            raise ValueError("nothing is mapped there")

    load._capture_first(SimpleNamespace(sizes=sizes, capture_substitutes=capture_substitutes))  # type: ignore[arg-type] # likewise
    first = [StepShape(True, 16, 1), StepShape(True, 16, 8)] if is_beside else [StepShape.decode(1)]
    # Beside others no step follows the bytes.
    goes_on = ends is None or (ends == "followed" and is_beside)
    assert captured == ([*first, StepShape.decode(8)] if goes_on else first[:1])
    assert caplog.messages == (["first_steps_not_captured"] if ends == "broken" else [])
    assert posted == ([FirstStepsUncaptured()] if ends == "broken" else [])


def test_models_short_of_kv_are_stuck_when_each_has_tried_again_since_the_last_adapter_came() -> None:
    """Its requests may compute, and end, or its memory be taken: nobody else's need to end for that."""
    steps, first, second = ModelSteps.__new__(ModelSteps), ModelId("a"), ModelId("b")
    steps._num_vain = Counter()
    hosted = SimpleNamespace(later_stage=None)
    steps._models = SimpleNamespace(hosted={first: hosted, second: hosted})  # type: ignore[assignment] # likewise
    steps.ready = lambda: {first: served, second: served}  # type: ignore[method-assign, dict-item] # as below
    adapters = SimpleNamespace(is_any_coming=True)
    steps._reclaimer = SimpleNamespace(  # type: ignore[assignment] # all that is asked of it
        adapters=adapters, before_step=lambda *_: None, after_step=lambda *_: None
    )
    vain = StepOutcome(StepOutputs(), (), (RequestId(1),), has_run=False)
    served = SimpleNamespace(
        engine=SimpleNamespace(step=lambda: vain, settle=lambda: None, is_computing=False)
    )

    def is_stuck_after(model: ModelId, num_steps: int) -> bool:
        for _ in range(num_steps):
            outcome = steps.step(model, served, is_prepared=True)  # type: ignore[arg-type] # as above
            steps.settle(model, served, outcome)  # type: ignore[arg-type] # likewise
        return steps.is_stuck

    assert not is_stuck_after(first, 100)
    assert not is_stuck_after(second, 100)
    adapters.is_any_coming = False
    assert not is_stuck_after(first, 100), "the other may compute"
    assert not is_stuck_after(second, MAX_VAIN_ROUNDS)
    assert is_stuck_after(second, 1)

    vain = StepOutcome(StepOutputs(), (), ())  # one that has computed
    assert not is_stuck_after(second, 1)


def test_progress_is_told_by_bytes_and_layers(
    bench: Bench, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hearth.worker.weights_transfer.PROGRESS_INTERVAL_S", 0.0)
    manifest = read_manifest(model)
    bench.gateway.host("a", model)

    told: list[LoadProgress] = []
    for _ in manifest.chunks:  # those that come together are told together
        bench.gate.next().allow()
        told.append(bench.gateway.until(LoadProgress))

    assert {use.rung for use in bench.gateway.until(ModelLoaded).rungs} == {Rung.DISK}
    ends = [manifest.chunk_range(index).end for index in range(len(manifest.chunks))]
    assert [one.num_bytes for one in told] == ends
    assert [one.num_layers for one in told] == [
        sum(layer.end <= end for layer in manifest.layers) for end in ends
    ]
