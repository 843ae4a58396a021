"""Steps padded to few sizes, as CUDA devices run them, on a CPU: nothing of the padding shows.

Where nothing can be captured, `FirstWork` stands in for graphs: for every step of a shape it runs again the
work of the first one. Whatever that work took from the plan instead of from device memory would be wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from hearth.core.config import EngineConfig
from hearth.core.sizes import StepLimits
from hearth.core.types import Pooling, RequestId
from hearth.engine import inputs
from hearth.engine.engine import Engine
from hearth.engine.graphs import Work
from hearth.engine.step_shape import GraphKey, PaddedSizes, StepPart
from hearth.kernels.step_read import read_step
from hearth.policy.batch.plan import DecodeRows, Row, StepPlan, TableWrites
from tests.engine.harness import ROOMY, ask, assert_greedy, engine_for, greedy, prompts_for, run
from tests.models.zoo import build

CHUNKED = replace(ROOMY, max_batch_tokens=16)


@dataclass(slots=True)
class FirstWork:
    """What was run first for each key; run again for all that follow."""

    work_by_key: dict[GraphKey, Work] = field(default_factory=dict)
    num_replayed: int = 0

    def __contains__(self, key: GraphKey) -> bool:
        return key in self.work_by_key

    def needs_capture(self, key: GraphKey) -> bool:
        return key not in self.work_by_key

    def begin_trial(self, keys: Sequence[GraphKey]) -> None:
        """Nothing comes of a snapshot."""

    def run(self, key: GraphKey, work: Work) -> None:
        self.num_replayed += key in self.work_by_key
        self.work_by_key.setdefault(key, work)()

    def forget(self) -> None:
        self.work_by_key.clear()


def padded(name: str, config: EngineConfig, graphs: FirstWork | None = None) -> Engine:
    """An engine that pads its steps. Its memory is full of NaN."""
    engine = engine_for(name, config)
    limits = engine.batcher.limits
    sizes = StepLimits(limits.max_batch_tokens, limits.max_seqs, config.block_tokens)
    engine.runner.layers.sizes = PaddedSizes.of(sizes)
    engine.runner.layers.graphs = graphs  # type: ignore[assignment] # CUDA graphs cannot be had here
    engine.runner.layers.kv.fill_(torch.nan)
    engine.runner.layers.decoder._workspace.residual.untyped_storage().fill_(0xFF)
    return engine


def prompts(name: str, lengths: list[int]) -> list[list[int]]:
    return prompts_for(build(name).model.config.vocab_size, lengths)


@pytest.mark.parametrize("config", [ROOMY, CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "opt-350m", "neox-parallel", "falcon-7b"])
def test_padding_changes_no_token(name: str, config: EngineConfig) -> None:
    engine, asked = padded(name, config), prompts(name, [1, 3, 5, 17, 30])
    for _ in ("first", "again, on the prefixes that the first has left"):
        for prompt, answer in zip(asked, ask(engine, asked, greedy(6)), strict=True):
            assert_greedy(name, prompt, answer.tokens)
            assert len(answer.tokens) == 6


@pytest.fixture
def _triton_everywhere(monkeypatch: pytest.MonkeyPatch, quick_interpreter: None) -> None:
    """Run the kernels of CUDA devices, which read on the device what rows there are, by the interpreter."""
    for name, module in list(sys.modules.items()):
        if name.startswith("hearth.") and hasattr(module, "runs_triton"):
            monkeypatch.setattr(module, "runs_triton", lambda _x: True)


@pytest.mark.slow
@pytest.mark.usefixtures("_triton_everywhere")
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_the_work_of_the_first_step_of_a_shape_does_for_all_others() -> None:
    """With prompts alone, among decode rows and in chunks."""
    graphs, name = FirstWork(), "mistral-window"
    config = replace(ROOMY, max_batch_tokens=8, max_seqs=2)
    engine, asked = padded(name, config, graphs), prompts(name, [3, 11, 2])

    for prompt, answer in zip(asked, ask(engine, asked, greedy(3)), strict=True):
        assert_greedy(name, prompt, answer.tokens)
        assert len(answer.tokens) == 3
    assert {key.part for key in graphs.work_by_key} == set(StepPart)
    assert graphs.num_replayed >= 5


def test_a_step_whose_prompts_are_read_replays_only_its_body() -> None:
    graphs, name = FirstWork(), "llama-gqa"
    engine, (first, second) = padded(name, ROOMY, graphs), prompts(name, [3, 3])
    vectors = [
        run(engine, [engine.request(RequestId("e"), prompt, greedy(0), pooling=Pooling.MEAN)])[0].reading
        for prompt in (first, second, first)
    ]
    assert {key.part for key in graphs.work_by_key} == {StepPart.MIXED}
    assert graphs.num_replayed == 2
    assert vectors[0] == vectors[2] != vectors[1]


@dataclass(slots=True)
class Gate:
    """Weights of which nothing is known until they are there."""

    is_shut: bool = True
    passed: list[str] = field(default_factory=list)

    def is_open(self) -> bool:
        return not self.is_shut

    def embed(self) -> None:
        self.passed.append("embed")

    def layer(self, index: int) -> None:
        self.passed.append(f"layer {index}")

    def head(self) -> None:
        self.passed.append("head")


def test_no_graph_is_captured_or_replayed_while_weights_arrive() -> None:
    graphs, gate = FirstWork(), Gate()
    engine = padded("llama-gqa", ROOMY, graphs)
    engine.runner.layers.follow(gate)

    (asked,) = prompts("llama-gqa", [5])
    answers = ask(engine, [asked], greedy(2))
    assert (len(graphs.work_by_key), gate.passed[:2], gate.passed[-1]) == (0, ["embed", "layer 0"], "head")
    gate.is_shut = False

    for _ in ("behind the gate, once", "by graphs"):
        assert ask(engine, [asked], greedy(2)) == answers
    assert {key.part for key in graphs.work_by_key} == set(StepPart)


def test_nothing_is_captured_on_the_way_to_the_first_token_behind_a_load() -> None:
    """Not even where all weights have come before the step; but what is captured already is replayed."""
    graphs, asked = FirstWork(), prompts("llama-gqa", [5])
    engine = padded("llama-gqa", ROOMY, graphs)
    engine.runner.layers.follow(gate := Gate(is_shut=False))
    (answer,) = ask(engine, asked, greedy(1))
    assert (len(graphs.work_by_key), gate.passed[-1]) == (0, "head")

    assert ask(engine, asked, greedy(1)) == [answer]
    assert {key.part for key in graphs.work_by_key} == {StepPart.MIXED, StepPart.TAIL}
    engine.runner.layers.follow(later := Gate(is_shut=False))
    num_before = graphs.num_replayed
    assert ask(engine, asked, greedy(1)) == [answer]
    assert (graphs.num_replayed - num_before, later.passed) == (2, [])


def test_a_step_is_warm_once_its_weights_and_its_graphs_are_there() -> None:
    """Steps that are not tell nothing about how long others take."""
    graphs, gate = FirstWork(), Gate()
    engine = padded("llama-gqa", ROOMY, graphs)
    row = Row(RequestId("a"), 0, 0, 5, (5, 6, 7, 8, 9), samples=True)
    prompt, alike = (
        StepPlan(0, (), TableWrites(), DecodeRows(), (one,)) for one in (row, row._replace(start=8))
    )

    assert not engine.runner.is_warm(prompt)
    engine.runner.run_padding(engine.runner.layers.sizes.shape_of(prompt))
    assert engine.runner.is_warm(alike)
    engine.runner.layers.follow(gate)
    assert not engine.runner.is_warm(alike)


def test_every_size_is_captured_at_start_and_only_once() -> None:
    graphs = FirstWork()
    engine = padded("llama-gqa", ROOMY, graphs)
    engine.runner.layers.follow(Gate(is_shut=False))

    engine.runner.capture_all()

    keys = set(graphs.work_by_key)
    expected = {StepPart.DECODE: (1, 2, 4, 8), StepPart.MIXED: (64, 128, 192, 256), StepPart.TAIL: (1, 8)}
    assert keys == {GraphKey(part, size) for part, sizes in expected.items() for size in sizes}
    num_replayed = graphs.num_replayed
    engine.runner.capture_all()
    assert graphs.num_replayed == num_replayed, "a graph that is there is left alone"
    others = [
        block for block in range(len(engine.runner.layers.kv)) if block != engine.runner.layers.inputs.sink
    ]
    assert bool(engine.runner.layers.kv[others].isnan().all())


def test_what_is_sent_stays_on_the_host_until_a_slow_device_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a capture two steps are launched at once; a device may read as late as it is waited for."""
    engine = padded("llama-gqa", replace(ROOMY, max_batch_tokens=8, max_seqs=2), FirstWork())
    unread: list[tuple[torch.Tensor, torch.Tensor]] = []  # memory of the host, and what was to be read there

    def sent(
        out: torch.Tensor,
        host: torch.Tensor,
        count: int,
        *,
        table: torch.Tensor,
        writes: torch.Tensor | None,
    ) -> None:
        unread.append((host[:count], host[:count].clone()))
        read_step(out, host, count, table=table, writes=writes)

    monkeypatch.setattr(inputs, "read_step", sent)
    monkeypatch.setattr(engine.runner, "synchronize", unread.clear)
    engine.runner.capture_all()
    for position in (0, 1):
        row = Row(RequestId("a"), 0, position, 1, (5,), samples=True)
        engine.runner.launch(StepPlan(0, (), TableWrites(), DecodeRows(), (row,)))

    assert unread
    assert all(host.equal(written) for host, written in unread)
