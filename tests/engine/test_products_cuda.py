"""Chosen kernels of products on a CUDA device: every one that may be chosen, captured and not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hearth import LLM, SamplingParams
from hearth.config import EngineConfig, StoreConfig
from hearth.engine import product_tables
from hearth.engine.dry_run import KernelNeeds
from hearth.engine.product_choice import Way, cuda_times_us
from hearth.engine.product_tables import ProductTables
from hearth.kernels.kernel_cache import KernelCache
from hearth.sizes import StepLimits
from tests.engine.harness import ROOMY, ask, engine_for, greedy, prompts_for
from tests.engine.test_product_choice import run
from tests.store.stored import converted

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

DEVICE = torch.device("cuda", 0)


def any_is_faster(ways: Sequence[Way], num_rounds: int) -> list[float]:
    """Run all that is to be timed, and say that the last of it is the fastest."""
    assert min(cuda_times_us(ways, num_rounds)) > 0.0
    return [100.0 / (1 + number) for number in range(len(ways))]


def tables(path: Path) -> ProductTables:
    found = ProductTables.on(DEVICE, KernelCache.open(path))
    assert found is not None, "torch has loaded cuBLASLt"
    return found


@pytest.mark.parametrize("name", ["llama-gqa", "llama-mha-tied", "llama-bias", "falcon-40b"])
def test_captured_steps_compute_by_chosen_kernels_what_steps_that_are_launched_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_tables, "cuda_times_us", any_is_faster)
    engine = engine_for(name, device="cuda", dtype="bfloat16")
    eager = engine_for(name, replace(ROOMY, graphs="off"), device="cuda", dtype="bfloat16")
    arch = engine.runner.decoder.arch
    limits = StepLimits(*(ROOMY.max_batch_tokens or 0, ROOMY.max_seqs or 0), ROOMY.block_tokens)
    needs = KernelNeeds.on(DEVICE, arch, "bfloat16", "none", limits)
    prompts = prompts_for(arch.vocab_size, [5, 60, 100])
    ask(engine, prompts, greedy(4))
    engine.flush()

    _, chosen = run(tables(tmp_path).tune(needs, engine.runner))

    assert chosen is not None
    assert len(chosen) > 0
    for one in (engine, eager):
        one.use_products(chosen)
    assert ask(engine, prompts, greedy(12)) == ask(eager, prompts, greedy(12))


def test_an_llm_takes_the_table_that_is_kept_with_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_tables, "cuda_times_us", any_is_faster)
    model, store = converted("llama-gqa", "bfloat16"), StoreConfig(path=str(tmp_path), host_bytes=16 << 20)
    config = EngineConfig(max_batch_tokens=64, max_seqs=4, block_tokens=16, kv_bytes=8 << 20)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def answer() -> str:
        with LLM(model, device="cuda", engine=config, store=store, skip_tokenizer=True) as llm:
            llm.wait_loaded()
            assert len(llm.generate([1, 2, 3], params)[0].token_ids) == 4
            runner = llm.engine.runner
            needs = KernelNeeds.on(DEVICE, runner.decoder.arch, "bfloat16", "none", StepLimits(64, 4, 16))
            digest = runner.products_digest
            llm.engine.flush()
            run(tables(tmp_path / "kernels").tune(needs, runner))
            return digest

    assert answer() == ""
    assert len(answer()) == 32
