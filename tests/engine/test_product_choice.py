"""Kernels of products: which are asked for, which is chosen, and that an engine computes with them."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from hearth.engine import product_choice, product_tables
from hearth.engine.dry_run import KernelNeeds
from hearth.engine.engine import Engine
from hearth.engine.graphs import Work
from hearth.engine.product_choice import (
    NUM_FINAL_ROUNDS,
    NUM_FINALISTS,
    NUM_ROUNDS,
    PIECE_US,
    AskedProduct,
    ProductChoice,
    ProductChooser,
    ProductRecorder,
    StepGain,
    TimesUs,
    Way,
)
from hearth.engine.product_tables import ProductTables
from hearth.engine.step_shape import PaddedSizes, StepShape
from hearth.kernels import cublas_lt
from hearth.kernels.cublas_lt import ChosenProducts, size_of
from hearth.kernels.kernel_cache import KernelCache
from hearth.kernels.product_table import ProductSize, ProductTable
from hearth.sizes import StepLimits
from tests.engine.harness import ROOMY, ask, engine_for, greedy, prompts_for
from tests.kernels.fake_cublas_lt import algorithm, aligned, fake_lt, forget_algorithm, last_algorithm

Found = TypeVar("Found")

#: Rows that a CPU multiplies as a GPU does.
SIZES = PaddedSizes(decode=(2, 8), mixed=(96,), samples=(1, 2))


def times(**by_kernel: float) -> TimesUs:
    """Return a clock by which torch takes 100 us, and each kernel what is said."""

    def times_us(ways: Sequence[Way], num_rounds: int) -> list[float]:
        found = [100.0]
        for way in ways[1:]:
            way[0]()
            found.append(by_kernel.get(f"k{last_algorithm()}", 200.0))
        assert num_rounds <= NUM_FINAL_ROUNDS
        assert num_rounds <= NUM_ROUNDS or len(ways) <= 1 + NUM_FINALISTS
        return found

    return times_us


@dataclass(slots=True, eq=False, weakref_slot=True)
class RunAgain:
    """A graph of work that is run again, on a CPU, where nothing can be captured."""

    work: Work

    def replay(self) -> None:
        self.work()

    def instantiate(self) -> None: ...

    def raw_cuda_graph(self) -> int:
        raise AssertionError("no snapshot is made of it")


@dataclass(slots=True)
class FakeCapture:
    """Captures by running; its memory is gone with the last graph, as torch's is. Mutable: it counts."""

    num_captured: int = 0
    graphs: weakref.WeakSet[RunAgain] | None = None

    def capture(self, work: Work) -> RunAgain:
        self.num_captured += 1
        work()
        assert self.graphs is None or self.graphs, "all graphs in this memory are gone"
        self.graphs = weakref.WeakSet() if self.graphs is None else self.graphs
        graph = RunAgain(work)
        self.graphs.add(graph)
        return graph

    def forget(self) -> None:
        self.graphs = None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(cublas_lt, "_ALIGNMENT_BYTES", 16)  # a CPU's memory is not aligned as a device's
    return engine_for("llama-gqa", dtype="bfloat16")


STEP = StepShape.decode(5)


def chosen_for(engine: Engine, clock: TimesUs, *, adds: bool = False) -> ProductChoice:
    """Return what is chosen for one of the products of a step with five rows."""
    chooser = ProductChooser(engine.runner, fake_lt(), clock, None)
    recorder = ProductRecorder()
    engine.runner.padded_layers(STEP, 1)(recorder)
    choosing = chooser.choose(STEP, next(size for size in recorder.asked if size.adds is adds))
    try:
        while True:
            next(choosing)
    except StopIteration as end:
        choice = end.value
    assert isinstance(choice, ProductChoice)
    return choice


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
    engine: Engine, clock: TimesUs, expected: bytes | None, adds: bool
) -> None:
    assert chosen_for(engine, clock, adds=adds).algorithm == expected


def test_kernels_of_few_rows_are_taken_only_where_they_make_a_captured_step_faster(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_choice, "MAX_COLD_ROWS", 64)
    engine.runner.sizes = PaddedSizes(decode=(2, 5), mixed=(96,), samples=(1,))
    step_us, found = {2: 990.0, 5: 996.0}, list[ProductChoice | StepGain]()

    def times_us(ways: Sequence[Way], num_rounds: int) -> list[float]:
        if not isinstance(getattr(ways[0][0], "__self__", None), RunAgain):
            return times(k6=50.0)(ways, num_rounds)
        used = []
        for (replay,) in ways:
            forget_algorithm()
            replay()
            used.append(last_algorithm())
        assert used == [0, 6], "torch has computed the first one"
        return [1000.0, step_us[rows[-1]]]

    rows: list[int] = []
    chooser = ProductChooser(engine.runner, fake_lt(), times_us, FakeCapture(), found.append)
    tuning = chooser.choose_all()
    chosen = {}
    try:
        while True:
            rows.append(next(tuning).rows)
    except StopIteration as end:
        chosen = end.value

    gains = {one.shape.num_rows: one.is_faster for one in found if isinstance(one, StepGain)}
    assert gains == {5: False, 2: True}
    choices = [one for one in found if isinstance(one, ProductChoice)]
    assert {one.algorithm for one in choices} == {algorithm(6)}
    assert {size.rows for size in chosen} == {96, 2, 1}, "many rows are not looked at, nor is one of a CPU"


@pytest.mark.parametrize(
    ("differences_us", "of_both_us", "expected"),
    [
        ({"down": -40.0}, 0.0, {"down"}),
        ({"down": -40.0, "up": -20.0}, 0.0, {"down", "up"}),
        ({"down": -40.0, "up": -20.0}, 70.0, {"down"}),  # not together
        ({}, 0.0, set()),
    ],
)
def test_a_kernel_that_makes_a_captured_step_faster_alone_is_taken_without_the_others(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    differences_us: dict[str, float],
    of_both_us: float,
    expected: set[str],
) -> None:
    monkeypatch.setattr(product_choice, "MAX_COLD_ROWS", 64)
    engine.runner.sizes = PaddedSizes(decode=(5,), mixed=(96,), samples=(1,))
    arch = engine.runner.decoder.arch
    names = {arch.intermediate_size: "down"}
    outputs = {arch.dimensions.up_size: "up", arch.dimensions.qkv_size: "qkv", arch.vocab_size: "head"}

    def name_of(size: ProductSize) -> str:
        return names.get(size.inputs) or outputs.get(size.outputs) or "o"

    def times_us(ways: Sequence[Way], num_rounds: int) -> list[float]:
        graphs = [getattr(way[0], "__self__", None) for way in ways]
        if not isinstance(graphs[-1], RunAgain):
            return times(k6=50.0)(ways, num_rounds)
        (products,) = graphs[-1].work.args  # type: ignore[attr-defined] # a partial
        used = {name_of(size) for size in products._algorithms}
        differences = [differences_us.get(name, 30.0) for name in used]
        return [1000.0, 1000.0 + sum(differences) + (of_both_us if {"down", "up"} <= used else 0.0)]

    _, chosen = run(ProductChooser(engine.runner, fake_lt(), times_us, FakeCapture()).choose_all())

    assert {name_of(size) for size in chosen if size.rows == 5} == expected


def test_nothing_is_chosen_where_nothing_is_proposed_or_memory_is_not_aligned(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = times(k1=50.0)
    assert chosen_for(engine, fast).algorithm == algorithm(1)
    assert chosen_for(engine_for("llama-gqa"), fast).algorithm is None, "nothing is proposed for float32"
    monkeypatch.setattr(cublas_lt, "_ALIGNMENT_BYTES", 1 << 40)
    assert chosen_for(engine, fast).algorithm is None


@pytest.mark.parametrize("product_us", [20.0, 2_200.0, 11_000.0])
def test_a_piece_keeps_the_device_busy_for_a_moment_whatever_a_product_takes(
    engine: Engine, product_us: float
) -> None:
    busy_us = [0.0]

    def times_us(ways: Sequence[Way], num_rounds: int) -> list[float]:
        busy_us[-1] += product_us * num_rounds * sum(map(len, ways))
        return [product_us] * len(ways)

    chooser = ProductChooser(engine.runner, fake_lt(), times_us, None)
    recorder = ProductRecorder()
    engine.runner.padded_layers(STEP, 1)(recorder)
    for _ in chooser.choose(STEP, next(iter(recorder.asked))):
        busy_us.append(0.0)
    num_layers = engine.runner.decoder.arch.num_layers
    # The first piece tells how long a product takes.
    assert busy_us[0] == product_us * NUM_ROUNDS * num_layers
    assert max(busy_us[1:]) <= max(PIECE_US, 2 * product_us * num_layers)
    assert sum(busy_us) > product_us * num_layers * (NUM_ROUNDS + NUM_FINAL_ROUNDS)


def run(tuning: Generator[ProductSize, None, Found]) -> tuple[list[ProductSize], Found]:
    sizes = []
    while True:
        try:
            sizes.append(next(tuning))
        except StopIteration as end:
            return sizes, end.value


def test_a_kernel_is_chosen_for_every_product_of_all_steps_with_weights_of_several_layers(
    engine: Engine,
) -> None:
    engine.runner.sizes = SIZES
    seen: list[ProductChoice] = []
    num_weights: defaultdict[int, set[int]] = defaultdict(set)

    def times_us(ways: Sequence[Way], num_rounds: int) -> list[float]:
        num_weights[rows_of(ways[0])].add(len(ways[0]))
        return times(k6=80.0)(ways, num_rounds)

    chooser = ProductChooser(engine.runner, fake_lt(), times_us, None, seen.append)
    sizes, chosen = run(chooser.choose_all())

    assert len({choice.size for choice in seen}) == len(seen), "chosen for twice"
    assert set(sizes) == {choice.size for choice in seen}
    assert chosen == {choice.size: algorithm(6) for choice in seen}
    arch = engine.runner.decoder.arch
    layer = {
        (arch.dimensions.qkv_size, arch.hidden_size, False),
        (arch.hidden_size, arch.dimensions.q_size, True),
        (arch.dimensions.up_size, arch.hidden_size, False),
        (arch.hidden_size, arch.intermediate_size, True),
    }
    head = (arch.vocab_size, arch.hidden_size, False)
    for rows in (2, 8, 96):
        found = {(size.outputs, size.inputs, size.adds) for size in sizes if size.rows == rows}
        assert found == layer | ({head} if rows < 96 else set())
        assert max(num_weights[rows]) == arch.num_layers, (
            "they are small, and few rows would find them cached"
        )


def rows_of(way: Way) -> int:
    """Return the rows of a product that torch computes."""
    asked = way[0].args[0]  # type: ignore[attr-defined] # a partial
    assert isinstance(asked, AskedProduct)
    return asked.size.rows


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
    monkeypatch.setattr(product_tables, "MAX_COLD_ROWS", 0)
    engine.runner.sizes, needs = SIZES, needs_of(engine)
    assert tables(tmp_path).find(needs) is None
    sizes, chosen = run(tables(tmp_path).tune(needs, engine.runner))
    assert sizes
    assert chosen is not None
    assert len(chosen) == len(set(sizes))
    found = tables(tmp_path).find(needs)
    assert found is not None
    assert found.digest == chosen.digest
    again, same = run(tables(tmp_path).tune(needs, engine.runner))
    assert again == [], "they are measured again"
    assert same is not None
    assert same.digest == chosen.digest
    assert tables(tmp_path, "another device").find(needs) is None
    assert tables(tmp_path).find(needs_of(engine, max_seqs=4)) is None


def test_kernels_of_few_rows_that_no_captured_step_has_proved_are_not_kept_for_others(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product_tables, "cuda_times_us", times(k6=80.0))
    monkeypatch.setattr(product_tables, "MAX_COLD_ROWS", 64)
    engine.runner.sizes, needs = SIZES, needs_of(engine)
    assert engine.runner.graphs is None, "nothing is captured"
    sizes, chosen = run(tables(tmp_path).tune(needs, engine.runner))
    assert chosen is not None
    assert len(chosen) == len({size for size in sizes if size.rows > 64}) > 0


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
    sizes_asked, _ = run(ProductChooser(engine.runner, fake_lt(), times(), None).choose_all())
    chosen = dict.fromkeys(sizes_asked, algorithm(6))
    engine.runner.sizes = sizes

    products = ChosenProducts(fake_lt(), ProductTable("a device", "1", chosen))
    engine.use_products(products)

    assert engine.usage.kv_cached_blocks == 0
    engine.batcher.check()
    assert engine.runner.products_digest == products.digest
    x, weight, out = aligned(5, 64, seed=1), aligned(128, 64, seed=2), aligned(5, 128, seed=3)
    fake_lt().launcher(size_of(x, weight, adds=False), algorithm(1))(x, weight, out)
    assert last_algorithm() == 1
    after = ask(engine, prompts, greedy(4))
    assert last_algorithm() == 6
    assert [answer.tokens for answer in after] == [answer.tokens for answer in before]
