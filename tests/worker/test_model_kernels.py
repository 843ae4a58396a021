"""Kernels of models that a worker hosts: who waits for them, and who does not."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.host_pages import HostPages
from hearth.core.messages import ModelLoaded, PrepareModel
from hearth.core.sizes import StepLimits
from hearth.core.types import ModelId
from hearth.engine.dry_run import KernelNeeds
from hearth.memory.arena import ArenaPool
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.memory.vmm import MappedPool
from hearth.store.format.manifest import Manifest, read_manifest
from hearth.worker import model_kernels
from hearth.worker.model_kernels import ModelKernels
from hearth.worker.step_rehearsal import first_step_keys, other_keys
from tests.store.stored import PATIENCE_S, converted, tiers_at, until
from tests.worker.harness import BUDGET_BYTES, CONFIG, greedy, limits_of
from tests.worker.in_process import working_in_process

PROMPT = (3, 14, 15, 92)
LIMITS = limits_of(CONFIG)


class SlowKernels:
    """Stands in for a device that has the kernels of all models but one."""

    def __init__(self, missing_digest: str) -> None:
        self._missing_digest = missing_digest
        self.is_compiling, self.may_end = threading.Event(), threading.Event()
        self.prepared: list[PrepareModel] = []

    def compile(self, manifest: Manifest, limits: StepLimits) -> None:
        assert limits == LIMITS, "they are compiled for other steps"
        if manifest.digest == self._missing_digest:
            self.is_compiling.set()
            assert self.may_end.wait(PATIENCE_S)

    def prepare(self, order: PrepareModel) -> None:
        self.prepared.append(order)


def test_only_the_model_whose_kernels_are_compiled_waits_for_them(tmp_path: Path) -> None:
    ready, slow = converted("llama-gqa"), converted("qwen3")
    kernels = SlowKernels(read_manifest(slow).digest)
    new_pool = partial(ArenaPool, torch.device("cpu"), BUDGET_BYTES)
    with (
        tiers_at(tmp_path) as tiers,
        working_in_process(tiers, new_pool, kernels=kernels) as gateway,  # type: ignore[arg-type] # as said
    ):
        gateway.host("slow", slow)
        waiting = gateway.start("slow", PROMPT, greedy(3))
        assert kernels.is_compiling.wait(PATIENCE_S)
        gateway.host("ready", ready)
        assert len(gateway.ask("ready", PROMPT, greedy(5)).tokens) == 5
        assert gateway.answers[waiting].tokens == [], "it has stepped without its kernels"
        kernels.may_end.set()
        (answer,) = gateway.until_ended(waiting)
        assert len(answer.tokens) == 3


def test_bytes_cross_while_kernels_are_on_their_way(tmp_path: Path) -> None:
    slow = converted("qwen3")
    kernels = SlowKernels(read_manifest(slow).digest)
    new_pool = partial(ArenaPool, torch.device("cpu"), BUDGET_BYTES)
    with (
        tiers_at(tmp_path) as tiers,
        working_in_process(tiers, new_pool, kernels=kernels) as gateway,  # type: ignore[arg-type] # as said
    ):
        gateway.host("slow", slow)
        assert kernels.is_compiling.wait(PATIENCE_S)
        num_chunks, fetcher = len(read_manifest(slow).chunks), tiers.fetcher
        until(lambda: fetcher.counters.num_fills == num_chunks and not fetcher.book.num_leased)
        kernels.may_end.set()
        loaded = gateway.until(ModelLoaded)
    assert loaded.kernels_s > 0.0


def test_a_model_that_left_while_its_kernels_were_compiled_waits_for_them_when_it_is_back(
    tmp_path: Path,
) -> None:
    slow = converted("qwen3", chunk_bytes=64 << 10)
    kernels = SlowKernels(read_manifest(slow).digest)

    def pages(eviction_terms: EvictionTermsOf) -> Pool:
        return MappedPool(HostPages(600, 64 << 10), eviction_terms)

    with (
        tiers_at(tmp_path) as tiers,
        working_in_process(tiers, pages, kernels=kernels) as gateway,  # type: ignore[arg-type] # as said
    ):
        gateway.host("slow", slow)
        assert kernels.is_compiling.wait(PATIENCE_S)
        kernels.is_compiling.clear()
        gateway.retire("slow")
        gateway.host("slow", slow)
        waiting = gateway.start("slow", PROMPT, greedy(3))
        assert kernels.is_compiling.wait(PATIENCE_S), "it is taken to have them"
        gateway.ping()
        assert gateway.answers[waiting].tokens == [], "it has stepped without its kernels"
        kernels.may_end.set()
        (answer,) = gateway.until_ended(waiting)
        assert len(answer.tokens) == 3


def test_a_snapshot_is_looked_for_when_the_kernels_are_there_that_its_graphs_are_made_of(
    tmp_path: Path,
) -> None:
    slow = converted("qwen3")
    kernels, looks = SlowKernels(read_manifest(slow).digest), list[bool]()

    class Snapshots:
        lacks_graphs = False

        def look(self, *_: object, **__: object) -> None:
            looks.append(kernels.may_end.is_set())

    new_pool = partial(ArenaPool, torch.device("cpu"), BUDGET_BYTES)
    with (
        tiers_at(tmp_path) as tiers,
        working_in_process(
            tiers,
            new_pool,
            kernels=kernels,  # type: ignore[arg-type] # as said
            snapshots=Snapshots(),  # type: ignore[arg-type] # all that is asked here
        ) as gateway,
    ):
        gateway.host("slow", slow)
        assert kernels.is_compiling.wait(PATIENCE_S)
        kernels.may_end.set()
        gateway.until(ModelLoaded)
    assert looks == [True]


def test_a_worker_prepares_for_models_that_nobody_has_asked_for(tmp_path: Path) -> None:
    kernels = SlowKernels("")
    new_pool = partial(ArenaPool, torch.device("cpu"), BUDGET_BYTES)
    order = PrepareModel(ModelId("a"), "/somewhere", LIMITS)
    with (
        tiers_at(tmp_path) as tiers,
        working_in_process(tiers, new_pool, kernels=kernels) as gateway,  # type: ignore[arg-type] # as said
    ):
        gateway.inbox.put(order)
        gateway.ping()
    assert kernels.prepared == [order]


def test_a_worker_without_kernels_to_compile_has_nothing_to_prepare(tmp_path: Path) -> None:
    new_pool = partial(ArenaPool, torch.device("cpu"), BUDGET_BYTES)
    with tiers_at(tmp_path) as tiers, working_in_process(tiers, new_pool) as gateway:
        gateway.inbox.put(PrepareModel(ModelId("a"), "/nowhere", LIMITS))
        assert gateway.ping().fallbacks["kernels_compiled_while_serving"] == 0


def test_other_steps_are_rehearsed_behind_the_first_ones_of_all_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rehearsed, may_go = list[tuple[str, object]](), threading.Event()

    def note(needs: KernelNeeds, *arguments: object) -> None:
        *_, keys_of = arguments
        assert may_go.wait(PATIENCE_S)
        rehearsed.append((needs.arch.family, keys_of))
        if len(rehearsed) == 3:
            raise RuntimeError("no memory")

    monkeypatch.setattr(model_kernels, "rehearse", note)
    monkeypatch.setattr(model_kernels, "prepare_to_load", lambda: None)
    monkeypatch.setattr(model_kernels, "CudaPages", lambda *_: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(model_kernels, "KernelWarmup", lambda _: SimpleNamespace(load=bool, compile=bool))
    monkeypatch.setattr(
        ModelKernels,
        "_needs",
        lambda _, manifest, limits: KernelNeeds.of(
            manifest.arch, manifest.dtype, manifest.quant, limits, num_processors=2, capability=90
        ),
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    cache = SimpleNamespace(prune=lambda: 0)
    kernels = ModelKernels(
        cache,
        torch.device("cpu"),
        lambda where: read_manifest(Path(where)),
        lambda _: nullcontext,  # type: ignore[arg-type] # as said
    )
    for name in ("llama-gqa", "qwen3", "llama-gqa"):
        kernels.prepare(PrepareModel(ModelId(name), str(converted(name)), LIMITS))
    may_go.set()
    kernels._thread.submit(int).result(PATIENCE_S)
    kernels._thread.shutdown(wait=True)

    families = [read_manifest(converted(name)).arch.family for name in ("llama-gqa", "qwen3")]
    assert rehearsed == [(one, keys_of) for keys_of in (first_step_keys, other_keys) for one in families]
