"""Kernels of products: which are asked for, which is chosen, and that an engine computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hearth.engine import product_tables
from hearth.engine.dry_run import KernelNeeds
from hearth.engine.engine import Engine
from hearth.engine.product_choice import (
    NUM_FINAL_ROUNDS,
    NUM_FINALISTS,
    NUM_ROUNDS,
    AskedProduct,
    TimesUs,
    Way,
    choose,
    choose_all,
)
from hearth.engine.product_tables import ProductTables, Tuning
from hearth.engine.step_shape import PaddedSizes
from hearth.kernels import cublas_lt
from hearth.kernels.cublas_lt import ChosenProducts, size_of
from hearth.kernels.kernel_cache import KernelCache
from hearth.kernels.product_table import ProductSize, ProductTable
from hearth.sizes import StepLimits
from tests.engine.harness import ROOMY, ask, engine_for, greedy, prompts_for
from tests.kernels.fake_cublas_lt import algorithm, aligned, fake_lt, last_algorithm

#: Rows that a CPU multiplies as a GPU does.
SIZES = PaddedSizes(decode=(2, 8), mixed=(96,), samples=(1, 2))


def times(**by_kernel: float) -> TimesUs:
    """Return a clock by which torch takes 100 us, and each kernel what is said."""

    def times_us(ways: Sequence[Way], num_rounds: int) -> list[float]:
        found = [100.0]
        for way in ways[1:]:
            way[0]()
            found.append(by_kernel.get(f"k{last_algorithm()}", 200.0))
        is_final = num_rounds == NUM_FINAL_ROUNDS
        assert is_final or num_rounds == NUM_ROUNDS
        assert not is_final or len(ways) <= 1 + NUM_FINALISTS
        return found

    return times_us


def asked(n: int = 128, *, adds: bool = False) -> AskedProduct:
    x, weights = aligned(5, 64, seed=1), [aligned(n, 64, seed=seed) for seed in (2, 3)]
    return AskedProduct(size_of(x, weights[0], adds=adds), x, aligned(5, n, seed=4), weights)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        (times(k1=90.0, k5=95.0, k6=80.0), algorithm(6)),
        (times(k1=70.0, k5=95.0, k6=80.0), algorithm(1)),
        (times(k1=90.0, k6=80.0, k7=60.0), algorithm(7)),  # proposed for twice as many rows
        (times(k1=99.5, k5=120.0, k6=130.0), None),  # not clearly faster
        (times(k1=90.0, k5=50.0, k6=80.0), None),  # the fastest computes something else
    ],
)
def test_the_fastest_kernel_is_taken_if_it_is_clearly_faster_and_right(
    clock: TimesUs, expected: bytes | None, adds: bool
) -> None:
    assert choose(asked(adds=adds), fake_lt(), clock) == expected


def test_nothing_is_chosen_where_nothing_is_proposed_or_memory_is_not_aligned() -> None:
    assert choose(asked(n=13), fake_lt(), times()) is None
    one = asked()
    moved = torch.cat([one.x.view(-1)] * 2)[1:321].view(5, 64)
    assert choose(AskedProduct(one.size, moved, one.out, one.weights), fake_lt(), times()) is None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(cublas_lt, "_ALIGNMENT_BYTES", 16)  # a CPU's memory is not aligned as a device's
    return engine_for("llama-gqa", dtype="bfloat16")


def run(tuning: Tuning) -> tuple[list[ProductSize], ChosenProducts | None]:
    sizes = []
    while True:
        try:
            sizes.append(next(tuning))
        except StopIteration as end:
            return sizes, end.value


def test_every_product_of_all_steps_is_asked_for_once_with_weights_of_several_layers(engine: Engine) -> None:
    engine.runner.sizes = SIZES
    seen: dict[ProductSize, int] = {}

    def note(one: AskedProduct) -> bytes | None:
        assert one.size not in seen
        assert one.x.shape == (one.size.rows, one.size.inputs)
        assert one.out.shape == (one.size.rows, one.size.outputs)
        seen[one.size] = len({weight.data_ptr() for weight in one.weights})
        return algorithm(6) if one.size.adds else None

    tuning = choose_all(engine.runner, note)
    yielded = []
    try:
        while True:
            yielded.append(next(tuning))
    except StopIteration as end:
        chosen = end.value

    assert yielded == list(seen)
    assert chosen == {size: algorithm(6) for size in seen if size.adds}
    arch = engine.runner.decoder.arch
    layer = {
        (arch.dimensions.qkv_size, arch.hidden_size, False),
        (arch.hidden_size, arch.dimensions.q_size, True),
        (arch.dimensions.up_size, arch.hidden_size, False),
        (arch.hidden_size, arch.intermediate_size, True),
    }
    head = (arch.vocab_size, arch.hidden_size, False)
    for rows in (2, 8, 96):
        found = {(size.outputs, size.inputs, size.adds) for size in seen if size.rows == rows}
        assert found == layer | ({head} if rows < 96 else set())
    qkv = next(size for size in seen if size.rows == 96 and size.outputs == arch.dimensions.qkv_size)
    assert seen[qkv] == min(4, arch.num_layers)


def tables(tmp_path: Path, device: str = "a device") -> ProductTables:
    (tmp_path / "lists").mkdir(exist_ok=True)
    return ProductTables(KernelCache(tmp_path), device, fake_lt())


def needs_of(engine: Engine, max_seqs: int = ROOMY.max_seqs or 8) -> KernelNeeds:
    limits = StepLimits(256, max_seqs, 4)
    return KernelNeeds.of(engine.runner.decoder.arch, "bfloat16", "none", limits, 132, 90)


def test_kernels_are_measured_once_and_found_by_all_others(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_tables, "cuda_times_us", times(k1=90.0, k5=110.0, k6=80.0))
    engine.runner.sizes, needs = SIZES, needs_of(engine)
    assert tables(tmp_path).find(needs) is None
    sizes, chosen = run(tables(tmp_path).tune(needs, engine.runner))
    assert sizes
    assert chosen is not None
    assert len(chosen) == len(sizes)
    found = tables(tmp_path).find(needs)
    assert found is not None
    assert found.digest == chosen.digest
    again, same = run(tables(tmp_path).tune(needs, engine.runner))
    assert again == [], "they are measured again"
    assert same is not None
    assert same.digest == chosen.digest
    assert tables(tmp_path, "another device").find(needs) is None
    assert tables(tmp_path).find(needs_of(engine, max_seqs=4)) is None


def test_a_table_that_cannot_be_kept_is_not_used(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(product_tables, "cuda_times_us", times(k1=90.0, k5=110.0, k6=80.0))
    engine.runner.sizes = SIZES
    kept = tables(tmp_path)
    (tmp_path / "lists").rmdir()
    sizes, chosen = run(kept.tune(needs_of(engine), engine.runner))
    assert sizes
    assert chosen is None
    assert "product_table_not_kept" in caplog.text


def test_an_engine_that_is_given_kernels_computes_with_them_and_forgets_what_it_computed_without(
    engine: Engine,
) -> None:
    prompts, sizes = prompts_for(64, [80]), engine.runner.sizes
    before = ask(engine, prompts, greedy(4))
    engine.flush()
    assert engine.usage.kv_cached_blocks > 0
    assert engine.runner.products_digest == ""
    engine.runner.sizes = PaddedSizes(decode=(1,), mixed=(80,), samples=(1,))
    chosen = dict.fromkeys(choose_all(engine.runner, lambda _: None), algorithm(6))
    engine.runner.sizes = sizes

    products = ChosenProducts(fake_lt(), ProductTable("a device", "1", chosen))
    engine.use_products(products)

    assert engine.usage.kv_cached_blocks == 0
    engine.batcher.check()
    assert engine.runner.products_digest == products.digest
    one = asked()
    fake_lt().launcher(one.size, algorithm(1))(one.x, one.weights[0], one.out)
    assert last_algorithm() == 1
    after = ask(engine, prompts, greedy(4))
    assert last_algorithm() == 6
    assert [answer.tokens for answer in after] == [answer.tokens for answer in before]
