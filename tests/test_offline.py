"""An LLM over a converted model: it computes behind its load, fails with it, and lets go of everything."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as StillWaiting
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hearth import LLM, SamplingParams, offline
from hearth.core.config import EngineConfig, StoreConfig
from hearth.core.errors import BadTokenizer, ChunkCorrupt, EngineFailed, LoadCancelled, ModelError
from hearth.store.format.manifest import WEIGHTS, Manifest
from hearth.store.tiers.tiers import Tiers
from tests.completions import completions
from tests.models.zoo import build
from tests.store.stored import (
    PATIENCE_S,
    GatedTiers,
    converted,
    flip,
    gated_tiers,
    stored_at,
    tiers_at,
)

NAME = "llama-gqa"
PROMPT = [1, 2, 3, 4, 5]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
CONFIG = EngineConfig(max_batch_tokens=64, max_seqs=4, block_tokens=4, kv_bytes=1 << 20)


@pytest.fixture
def model() -> Path:
    """Small chunks: every layer has some of its own."""
    return converted(NAME, chunk_bytes=16 << 10)


@pytest.fixture
def manifest(model: Path) -> Manifest:
    return stored_at(model).manifest


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[GatedTiers]:
    with gated_tiers(tmp_path / "root") as gated:
        yield gated


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def open_llm(path: Path, store: Tiers | StoreConfig, *, dtype: str = "auto") -> LLM:
    return LLM(path, engine=CONFIG, store=store, dtype=dtype, skip_tokenizer_init=True)


def answer(llm: LLM) -> list[int]:
    return completions(llm, PROMPT, PARAMS)[0].token_ids


@cache
def undisturbed() -> list[int]:
    with LLM(build(NAME).directory, engine=CONFIG, skip_tokenizer_init=True) as llm:
        return answer(llm)


def let_through(gated: GatedTiers, num_chunks: int) -> None:
    for _ in range(num_chunks):
        gated.gate.next().allow()


def has_run(llm: LLM, layer: int) -> bool:
    """It has written keys of its own: at first they are all zero."""
    return bool(llm.engine.runner.layers.kv[:, layer].any())


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.001)


def assert_waits(future: Future[list[int]]) -> None:
    with pytest.raises(StillWaiting):
        future.result(timeout=0.05)


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("hearth-read")]


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 1), (16, 2)])
def test_torch_gets_no_more_threads_than_there_are_usable_cores(
    num_cores: int, num_threads: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(2)
    monkeypatch.setattr(offline, "num_usable_cores", lambda: num_cores)
    try:
        with tiers_at(tmp_path) as tiers, open_llm(model, tiers) as llm:
            answer(llm)
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(2)


class FakeCaptures:
    """Notes that it was begun and stopped. Mutable."""

    begun: list[FakeCaptures]

    def __init__(self, runner: Any, goes_on: Callable[[], bool]) -> None:
        runner.graphs = None  # CUDA graphs cannot be had here
        self.goes_on, self.is_stopped = goes_on, False
        self.begun.append(self)

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[FakeCaptures]:
    """Have engines be captured as on a CUDA device, until sizes are captured ahead."""
    FakeCaptures.begun = []
    assemble = offline.assemble

    def captured(*arguments: Any, **options: Any) -> Any:
        engine = assemble(*arguments, **options)
        engine.runner.layers.graphs = object()  # type: ignore[assignment]
        return engine

    monkeypatch.setattr(offline, "assemble", captured)
    monkeypatch.setattr(offline, "CaptureAhead", FakeCaptures)
    return FakeCaptures.begun


class TestBehindTheLoad:
    def test_sizes_are_captured_for_as_long_as_weights_come(
        self, model: Path, manifest: Manifest, gated: GatedTiers, captures: list[FakeCaptures]
    ) -> None:
        with open_llm(model, gated.tiers) as llm:
            (capturing,) = captures
            assert capturing.goes_on()
            let_through(gated, len(manifest.chunks))
            llm.wait_loaded()
            until(lambda: not capturing.goes_on())
            assert not capturing.is_stopped
        assert capturing.is_stopped

    def test_layers_run_as_they_come_and_the_first_token_after_the_last_chunk(
        self, model: Path, manifest: Manifest, gated: GatedTiers, pool: ThreadPoolExecutor
    ) -> None:
        first_layer = manifest.chunks_of(manifest.layers[0]).stop
        with open_llm(model, gated.tiers) as llm:
            llm.engine.runner.layers.kv.zero_()
            tokens = pool.submit(answer, llm)
            let_through(gated, first_layer)
            until(lambda: has_run(llm, 0))
            assert not has_run(llm, 1)
            let_through(gated, len(manifest.chunks) - first_layer - 1)
            until(lambda: has_run(llm, 2))
            assert_waits(tokens)
            let_through(gated, 1)
            assert tokens.result(PATIENCE_S) == undisturbed()
            record = llm.wait_loaded()
        assert record is not None
        assert record.num_bytes == manifest.num_bytes
        assert record.first_layer_s < record.total_s

    def test_requests_that_come_before_and_after_the_load_are_answered_alike(
        self, model: Path, gated: GatedTiers, pool: ThreadPoolExecutor
    ) -> None:
        with open_llm(model, gated.tiers) as llm:
            early = [pool.submit(answer, llm) for _ in range(2)]
            gated.gate.open()
            llm.wait_loaded()
            assert [tokens.result(PATIENCE_S) for tokens in early] == [undisturbed()] * 2
            assert answer(llm) == undisturbed()

    def test_two_of_one_model_read_its_chunks_once(
        self, model: Path, manifest: Manifest, tmp_path: Path
    ) -> None:
        with tiers_at(tmp_path / "root") as tiers:
            with open_llm(model, tiers) as first, open_llm(model, tiers) as second:
                assert answer(first) == answer(second) == undisturbed()
            assert tiers.fetcher.counters.num_fills == len(manifest.chunks)


class TestFailing:
    def test_a_request_behind_a_corrupt_chunk_ends_with_its_name(
        self, model: Path, manifest: Manifest, tmp_path: Path, pool: ThreadPoolExecutor
    ) -> None:
        last = len(manifest.chunks) - 1
        broken = Path(shutil.copytree(model, tmp_path / "broken"))
        flip(broken / WEIGHTS, manifest.chunk_range(last).begin)
        with gated_tiers(tmp_path / "root") as gated:
            llm = open_llm(broken, gated.tiers)
            llm.engine.runner.layers.kv.zero_()
            tokens = pool.submit(answer, llm)
            let_through(gated, last)
            until(lambda: has_run(llm, 1))
            let_through(gated, 1)
            with pytest.raises(EngineFailed, match=rf"chunk {last} of `broken` \(`.*stored was"):
                tokens.result(PATIENCE_S)
            with pytest.raises(ChunkCorrupt, match=f"chunk {last} of `broken`"):
                llm.wait_loaded()
            with pytest.raises(EngineFailed, match=f"chunk {last} of `broken`"):
                answer(llm)
            pool.submit(llm.close).result(PATIENCE_S)

    def test_closing_while_a_request_waits_for_weights_ends_both(
        self, model: Path, gated: GatedTiers, pool: ThreadPoolExecutor
    ) -> None:
        llm = open_llm(model, gated.tiers)
        tokens = pool.submit(answer, llm)
        let_through(gated, 1)
        pool.submit(llm.close).result(PATIENCE_S)
        error = tokens.exception(PATIENCE_S)
        assert isinstance(error, EngineFailed)
        assert isinstance(error.__cause__, LoadCancelled | EngineFailed | None)  # None: it came after the end
        gated.gate.open()
        gated.tiers.fetcher.close()
        assert gated.tiers.fetcher.book.num_leased == 0

    def test_a_narrow_model_that_cannot_be_loaded_fails_when_it_is_opened(self, tmp_path: Path) -> None:
        broken = Path(shutil.copytree(converted(NAME, dtype="bfloat16"), tmp_path / "broken"))
        flip(broken / WEIGHTS, 0)
        with pytest.raises(ChunkCorrupt, match="chunk 0 of `broken`"):
            open_llm(broken, StoreConfig(path=str(tmp_path / "root")))
        assert reader_threads() == []


class TestLettingGo:
    def test_tiers_of_its_own_are_closed_when_all_is_loaded(self, model: Path, tmp_path: Path) -> None:
        with open_llm(model, StoreConfig(path=str(tmp_path / "root"))) as llm:
            llm.wait_loaded()
            assert reader_threads() == []
            assert answer(llm) == undisturbed()

    def test_tiers_that_were_given_stay_open(self, model: Path, tmp_path: Path) -> None:
        with tiers_at(tmp_path / "root") as tiers:
            for _ in range(2):
                with open_llm(model, tiers) as llm:
                    assert answer(llm) == undisturbed()
            assert tiers.fetcher.book.num_leased == 0

    def test_a_model_without_its_tokenizer_leaves_no_reader(self, model: Path, tmp_path: Path) -> None:
        with pytest.raises(BadTokenizer):
            LLM(model, engine=CONFIG, store=StoreConfig(path=str(tmp_path / "root")))
        assert reader_threads() == []

    def test_a_checkpoint_that_is_not_converted_has_no_record(self) -> None:
        with LLM(build(NAME).directory, engine=CONFIG, skip_tokenizer_init=True) as llm:
            assert llm.wait_loaded() is None


class TestDtype:
    def test_another_dtype_than_the_stored_one_is_refused(self, model: Path, tmp_path: Path) -> None:
        with pytest.raises(
            ModelError, match=r"converted to float32, given: dtype `bfloat16`; .*--dtype bfloat16"
        ):
            open_llm(model, StoreConfig(path=str(tmp_path / "root")), dtype="bfloat16")
        assert reader_threads() == []

    def test_a_narrow_model_may_be_asked_for_in_float32(self, tmp_path: Path) -> None:
        store = StoreConfig(path=str(tmp_path / "root"))
        with open_llm(converted(NAME, dtype="bfloat16"), store, dtype="float32") as llm:
            assert len(answer(llm)) == PARAMS.max_tokens
