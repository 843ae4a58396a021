"""Graphs of steps: captured, or restored from a snapshot and tried before they serve."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hearth.core.errors import DeviceError
from hearth.engine.engine import Engine
from hearth.engine.graph_trial import rehearse_trial
from hearth.engine.graphs import CapturedGraph, StepGraph, StepGraphs, Work
from hearth.engine.pending_step import PendingStep
from hearth.engine.step_shape import GraphKey, PaddedSizes, StepPart, StepShape
from hearth.models.decoder import Decoder
from hearth.policy.batch.blocks import BlockMove
from hearth.policy.batch.plan import StepPlan
from tests.engine.harness import ROOMY, ask, engine_for, greedy, prompts_for
from tests.engine.test_adapters import add
from tests.models.adapters import random_adapter
from tests.models.zoo import build

DECODE, MIXED, TAIL = (GraphKey(part, 8) for part in (StepPart.DECODE, StepPart.MIXED, StepPart.TAIL))


@dataclass
class Graph:
    """A graph that does something when it is replayed."""

    effect: Callable[[], None] = lambda: None
    num_replays: int = 0
    is_ready: bool = False

    def instantiate(self) -> None:
        self.is_ready = True

    def replay(self) -> None:
        self.num_replays += 1
        self.effect()

    def raw_cuda_graph(self) -> int:
        return id(self)


@dataclass
class Captures:
    """Makes graphs that do the work that they were captured from."""

    made: list[Graph] = field(default_factory=list)

    def capture(self, work: Work) -> CapturedGraph:
        self.made.append(Graph(work))
        return self.made[-1]

    def forget(self) -> None:
        pass


@dataclass
class Source:
    """A snapshot whose graphs are restored when a test says so."""

    restored: dict[str, Graph] = field(default_factory=dict)
    coming: set[str] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    num_failed: int = 0
    is_marked: bool = False
    is_stopped: bool = False
    later: set[str] = field(default_factory=set)  #: coming once adapters are wanted
    wanted: list[str] = field(default_factory=list)
    let_go_of: list[object] = field(default_factory=list)  #: besides its own

    def find(self, key: str) -> StepGraph | None:
        return self.restored.get(key)

    def is_coming(self, key: str) -> bool:
        return key in self.coming

    def want(self, key: str) -> None:
        self.wanted.append(key)

    def want_adapters(self) -> None:
        self.coming |= self.later
        self.later = set()

    def begin_trial(self) -> None:
        self.is_marked = True

    def end_trial(self) -> None:
        self.is_marked = False

    def stop(self) -> None:
        self.is_stopped = True

    def let_go(self, others: list[object]) -> None:
        self.restored.clear()
        self.let_go_of += others
        others.clear()

    def discard(self, reason: str) -> None:
        self.reasons.append(reason)


class TestBooks:
    @pytest.fixture
    def captures(self) -> Captures:
        return Captures()

    @pytest.fixture
    def graphs(self, captures: Captures) -> StepGraphs:
        return StepGraphs(captures)

    def ran(self, graphs: StepGraphs, key: GraphKey) -> int:
        """Run a part of a step, and return how often its work was called."""
        calls: list[None] = []
        graphs.run(key, lambda: calls.append(None))
        return len(calls)

    def test_without_a_snapshot_a_graph_is_captured_when_first_needed(
        self, graphs: StepGraphs, captures: Captures
    ) -> None:
        assert graphs.needs_capture(DECODE)
        for _ in range(3):
            graphs.run(DECODE, lambda: None)

        assert [graph.num_replays for graph in captures.made] == [3]
        assert DECODE in graphs
        assert list(graphs.captured) == [DECODE]
        assert graphs.begin_trial([DECODE]) is None

    def test_a_graph_that_is_captured_ahead_is_ready_and_serves_from_the_first_step_on(
        self, graphs: StepGraphs, captures: Captures
    ) -> None:
        for _ in range(2):
            graphs.capture_ahead(DECODE, lambda: None)
        (graph,) = captures.made
        assert graph.is_ready
        assert graph.num_replays == 0
        assert DECODE in graphs
        assert self.ran(graphs, DECODE) == 0

        assert captures.made == [graph]
        assert graph.num_replays == 1

    def test_a_graph_that_a_step_has_captured_meanwhile_stays(
        self, graphs: StepGraphs, captures: Captures, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Graph, "instantiate", lambda _graph: graphs.run(DECODE, lambda: None))
        graphs.capture_ahead(DECODE, lambda: None)
        graphs.run(DECODE, lambda: None)

        assert [graph.num_replays for graph in captures.made] == [0, 2]

    def test_nothing_is_captured_ahead_that_a_snapshot_has(
        self, graphs: StepGraphs, captures: Captures
    ) -> None:
        graphs.restore_from(Source(coming={DECODE.name}))
        graphs.capture_ahead(DECODE, lambda: None)

        assert not captures.made

    def test_steps_run_eagerly_while_their_graph_is_coming_or_untried(
        self, graphs: StepGraphs, captures: Captures
    ) -> None:
        source, graph = Source(coming={DECODE.name}), Graph()
        graphs.restore_from(source)
        assert self.ran(graphs, DECODE) == 1
        assert source.wanted == [DECODE.name], "it should come before others"
        assert graphs.begin_trial([DECODE]) is None
        source.restored[DECODE.name], source.coming = graph, set()
        assert self.ran(graphs, DECODE) == 1

        assert DECODE not in graphs
        assert not graphs.needs_capture(DECODE)
        assert not captures.made
        assert graph.num_replays == 0

    def test_an_accepted_graph_serves_and_nothing_is_captured(
        self, graphs: StepGraphs, captures: Captures, caplog: pytest.LogCaptureFixture
    ) -> None:
        graph = Graph()
        graphs.restore_from(Source({DECODE.name: graph}))
        assert graphs.begin_trial([DECODE]) == [graph]
        assert graphs.begin_trial([DECODE]) is None, "it is on trial"
        with caplog.at_level(logging.DEBUG):
            graphs.end_trial(None)
        assert caplog.messages == [f"graphs_accepted graphs={DECODE.name}"]

        assert self.ran(graphs, DECODE) == 0
        assert graph.num_replays == 1
        assert not captures.made
        assert (len(graphs), graphs.num_restored) == (1, 1)
        assert graphs.begin_trial([DECODE]) is None

    def test_a_step_is_tried_with_the_graphs_of_all_its_parts_in_order(
        self, graphs: StepGraphs, captures: Captures
    ) -> None:
        source, tail = Source(), Graph()
        graphs.restore_from(source)
        assert self.ran(graphs, MIXED) == 1  # captured, for the snapshot has no such size
        source.coming = {TAIL.name}
        assert graphs.begin_trial([MIXED, TAIL]) is None
        source.restored[TAIL.name] = tail

        assert graphs.begin_trial([MIXED, TAIL]) == [captures.made[0], tail]
        graphs.end_trial(None)
        assert graphs.num_restored == 1

    def test_a_rejected_snapshot_is_dropped_with_all_its_graphs(
        self, graphs: StepGraphs, captures: Captures
    ) -> None:
        source = Source({key.name: Graph() for key in (DECODE, MIXED, TAIL)})
        graphs.restore_from(source)
        graphs.begin_trial([DECODE])
        graphs.end_trial(None)
        graphs.begin_trial([MIXED, TAIL])
        graphs.end_trial("3 numbers differ")

        assert source.reasons == ["3 numbers differ"]
        assert all(graphs.needs_capture(key) for key in (DECODE, MIXED, TAIL))
        assert self.ran(graphs, DECODE) == 1
        assert len(captures.made) == 1

    def test_forgetting_drops_what_was_restored_as_well(self, graphs: StepGraphs) -> None:
        source = Source({DECODE.name: Graph()})
        graphs.restore_from(source)
        graphs.begin_trial([DECODE])
        graphs.forget()
        graphs.end_trial(None)

        assert graphs.needs_capture(DECODE)
        assert source.is_stopped, "graphs are restored that nobody wants"

    @pytest.mark.parametrize(
        "end",
        [
            lambda graphs: graphs.end_trial(None),
            lambda graphs: graphs.end_trial("3 numbers differ"),
            StepGraphs.forget,
            StepGraphs.drop_restored,
        ],
    )
    def test_a_trial_is_marked_until_it_is_over(
        self, graphs: StepGraphs, end: Callable[[StepGraphs], None]
    ) -> None:
        source = Source({key.name: Graph() for key in (DECODE, MIXED)})
        graphs.restore_from(source)
        assert graphs.begin_trial([TAIL]) is None
        assert not source.is_marked
        graphs.begin_trial([DECODE])
        assert source.is_marked
        end(graphs)

        assert not source.is_marked


def test_an_engine_that_is_given_an_adapter_wants_the_graphs_of_steps_with_adapters() -> None:
    engine = engine_for("llama-gqa")
    source = Source(later={"decode-adapters-1"})
    engine.runner.layers.graphs = StepGraphs(Captures())
    engine.runner.layers.graphs.restore_from(source)
    assert engine.runner.layers.graphs.needs_capture(key := GraphKey(StepPart.DECODE, 1, has_adapters=True))
    add(engine, random_adapter("llama-gqa", "all"))

    assert not engine.runner.layers.graphs.needs_capture(key), "it is coming"
    assert source.coming == {"decode-adapters-1"}


class Rig:
    """An engine whose graphs do what steps do, or what a test has them do instead."""

    def __init__(self, spoil: Callable[[Rig], None] | None = None) -> None:
        self.engine = engine_for("llama-gqa", replace(ROOMY, max_batch_tokens=16))
        self.runner, self._spoil = self.engine.runner, spoil
        self.num_served = 0
        self.is_trial = False
        self.source = Source()
        self.runner.layers.graphs = StepGraphs(self)
        self.runner.layers.graphs.restore_from(self.source)
        self._watch()

    def _watch(self) -> None:
        """Note what is run, and have a snapshot know a graph of everything that is asked for."""
        run, settle = self.runner.layers.run, self.runner.settle

        def watched_run(shape: StepShape, plan: StepPlan | None) -> None:
            self.step = shape, plan
            run(shape, plan)
            self.is_trial = True

        def watched_settle() -> None:
            self.is_trial = False
            settle()

        self.runner.layers.run = watched_run  # type: ignore[method-assign] # the only way to look on
        self.runner.settle = watched_settle  # type: ignore[method-assign] # likewise
        self.source.find = lambda key: self.graph(key) if not self.source.reasons else None  # type: ignore

    def graph(self, name: str) -> Graph:
        part = StepPart(name.split("-")[0])

        def effect() -> None:
            shape, plan = self.step
            self.num_served += not self.is_trial
            if self._spoil is None:
                self.runner.layers.run_part(part, shape, plan)
            else:
                self._spoil(self)

        return self.source.restored.setdefault(name, Graph(effect))

    def capture(self, work: Work) -> CapturedGraph:
        """A graph captured here, which is right for any step of its size."""
        part = work.args[0]  # type: ignore[attr-defined] # the runner's partial
        return Graph(lambda: self.runner.layers.run_part(part, *self.step))

    def forget(self) -> None:
        pass


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return tokens_of(engine_for("llama-gqa", replace(ROOMY, max_batch_tokens=16)))


def tokens_of(engine: Engine) -> list[list[int]]:
    """Prompts in chunks and decodes beside each other, and once more on the prefixes that they have left."""
    prompts = prompts_for(build("llama-gqa").model.config.vocab_size, [1, 3, 5, 17, 30])
    return [answer.tokens for _ in range(2) for answer in ask(engine, prompts, greedy())]


def test_restored_graphs_are_tried_once_and_serve_from_then_on(expected: list[list[int]]) -> None:
    rig = Rig()

    assert tokens_of(rig.engine) == expected
    graphs = rig.runner.layers.graphs
    assert graphs is not None
    assert graphs.num_restored == len(rig.source.restored) > 3
    assert rig.num_served > 10
    assert not rig.source.reasons
    assert not graphs.captured


def nothing(rig: Rig) -> None:
    pass


def wrong_logits(rig: Rig) -> None:
    rig.runner.layers.run_eagerly(*rig.step)  # type: ignore[arg-type] # never padding
    rig.runner.layers.decoder.logits.add_(1e-3)


def no_kv(rig: Rig) -> None:
    """All is right but for what is written to KV."""
    before = rig.runner.layers.kv.clone()
    rig.runner.layers.run_eagerly(*rig.step)  # type: ignore[arg-type] # never padding
    rig.runner.layers.kv.copy_(before)


def garbage(rig: Rig) -> None:
    for tensor in (rig.runner.layers.decoder.logits, rig.runner.sampler.tokens, rig.runner.sampler.chosen):
        tensor.fill_(7)
    shape, plan = rig.step
    rows = rig.runner.layers.inputs.view(plan, shape).rows.kv_targets(rig.runner.layers.kv.shape[3])
    rig.runner.layers.kv[rows.blocks, :, :, rows.offsets] = 5.0
    rig.runner._tables.counters.fill_(3)


def refused(rig: Rig) -> None:
    garbage(rig)
    raise DeviceError("CUDA's driver refused cuGraphLaunch: CUDA_ERROR_INVALID_VALUE (1)")


@pytest.mark.parametrize("spoil", [nothing, wrong_logits, no_kv, garbage, refused])
def test_a_graph_that_does_something_else_is_found_out_and_harms_nobody(
    spoil: Callable[[Rig], None], expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(spoil)

    assert tokens_of(rig.engine) == expected
    assert len(rig.source.reasons) == 1
    assert rig.num_served == 0
    assert rig.runner.layers.graphs is not None
    assert rig.runner.layers.graphs.num_restored == 0
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.message.split()[0] for record in warnings] == ["snapshot_discarded"]


def test_a_trial_is_over_before_blocks_move_or_the_model_rests(expected: list[list[int]]) -> None:
    """Memory may be taken away after that, and nothing of the trial may touch it any more."""
    rig = Rig(garbage)
    engine = rig.engine
    (prompt,) = prompts_for(build("llama-gqa").model.config.vocab_size, [5])
    engine.add(engine.request("r", prompt, greedy()))  # type: ignore[arg-type]
    engine.step()
    assert rig.runner._trial is not None
    written = rig.runner.layers.kv.clone()
    engine.flush()

    assert rig.runner._trial is None
    assert len(rig.source.reasons) == 1
    assert not torch.equal(written, rig.runner.layers.kv), "the step did not run again"
    assert not rig.runner._tables.counters.any(), "the next step counts from where the graph ended"


def test_a_trial_is_over_when_the_last_request_ends() -> None:
    """Nobody would wait for it, and a worker that is killed then would be taken to have died of it."""
    rig = Rig()
    prompts = prompts_for(build("llama-gqa").model.config.vocab_size, [5])
    ask(rig.engine, prompts, replace(greedy(), max_tokens=1))

    assert rig.runner._trial is None
    assert not rig.source.is_marked
    assert rig.runner.layers.graphs is not None
    assert rig.runner.layers.graphs.num_restored > 0


def test_an_engine_that_is_closed_in_a_trial_has_no_more_graphs_restored() -> None:
    rig = Rig()
    (prompt,) = prompts_for(build("llama-gqa").model.config.vocab_size, [5])
    rig.engine.add(rig.engine.request("r", prompt, greedy()))  # type: ignore[arg-type]
    rig.engine.step()
    assert rig.source.is_marked
    rig.engine.close()

    assert rig.source.is_stopped
    assert not rig.source.is_marked
    assert not rig.source.restored, "nobody runs them any more"


def test_a_rehearsal_of_a_trial_queues_all_that_a_trial_does_but_graphs_and_leaves_tokens() -> None:
    runner, captures = Rig().runner, Captures()
    runner.layers.sizes = PaddedSizes(decode=(1, 8), mixed=(16,), samples=(1, 8))
    tokens = runner.sampler.tokens.clone()
    rehearse_trial(runner.layers, runner.sampler, captures)
    (captured,) = captures.made
    assert not (runner.sampler.chosen == -1).any(), "captured, and not run"

    with torch.inference_mode():
        captured.replay()
    assert (runner.sampler.chosen == -1).all(), "as a graph that computes nothing leaves them"
    assert torch.equal(runner.sampler.tokens, tokens)
    runner.layers.sizes = PaddedSizes()
    rehearse_trial(runner.layers, runner.sampler, captures)
    assert len(captures.made) == 1, "where nothing is captured nothing is tried"


def test_a_trial_that_a_device_was_lost_in_stays_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    (prompt,) = prompts_for(build("llama-gqa").model.config.vocab_size, [5])
    rig.engine.add(rig.engine.request("r", prompt, greedy()))  # type: ignore[arg-type]
    rig.engine.step()

    def lost() -> None:
        raise DeviceError("an illegal memory access was encountered")

    monkeypatch.setattr(rig.runner, "synchronize", lost)
    with pytest.raises(DeviceError):
        rig.engine.close()
    assert rig.source.is_marked


def test_a_substitute_serves_untried_and_goes_with_those_of_the_snapshot() -> None:
    runner, captures = engine_for("llama-gqa").runner, Captures()
    runner.layers.sizes = PaddedSizes(decode=(1, 8), mixed=(16,), samples=(1, 8))
    own = Captures()
    runner.layers.graphs = StepGraphs(own)
    runner.layers.decoder._on_layer = lambda: pytest.fail("no layer of a step has passed")
    runner.layers.capture_substitutes(StepShape.decode(1), lambda: captures)
    assert not captures.made, "a step captures its own where there is no snapshot"

    source = Source(coming={"decode-1"}, restored={"mixed-16": Graph()})
    runner.layers.graphs.restore_from(source)
    for shape in (StepShape.decode(1), StepShape(True, 16, 8), StepShape.decode(1)):
        runner.layers.capture_substitutes(shape, lambda: captures)
    assert not own.made, "torch fills no memory again whose graphs are gone"
    assert [graph.is_ready for graph in captures.made] == [True, True], "once each, of what the snapshot has"
    assert not runner.layers.graphs.captured, "no snapshot is made of them"
    runner.run_padding(StepShape.decode(1))
    assert captures.made[0].num_replays == 1
    assert runner.layers.graphs.begin_trial([GraphKey(StepPart.MIXED, 16)]) is None
    runner.layers.graphs.drop_restored()
    assert len(runner.layers.graphs) == 0
    assert source.let_go_of == captures.made, "not by whoever drops them, which takes the driver long"


def test_a_substitute_is_captured_between_launches_and_made_ready_behind_one() -> None:
    runner, captures, calls = engine_for("llama-gqa").runner, Captures(), list[str]()
    runner.layers.sizes = PaddedSizes(decode=(1, 8), mixed=(16,), samples=(1, 8))
    runner.layers.graphs = StepGraphs(captures)
    runner.layers.graphs.restore_from(Source(coming={"decode-1"}))
    capture, num_layers = captures.capture, len(runner.layers.decoder.layers)

    class Noted:
        def capture(self, work: Work) -> CapturedGraph:
            with torch.inference_mode():
                work()
            calls.append("captured")
            return capture(work)

        def forget(self) -> None: ...

    runner.layers.capture_substitutes(
        StepShape.decode(1),
        Noted,
        give_way=lambda: calls.append("layer"),
        get_behind=lambda: calls.append("behind"),
    )
    assert calls == ["behind", *["layer"] * num_layers, "captured", "behind"]
    calls.clear()
    runner.layers.rehearse("decode-1", Noted(), lambda: calls.append("layer"))
    assert calls == [*["layer"] * min(2, num_layers), "captured"]


def test_a_runner_that_is_closed_waits_for_its_own_steps_and_not_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the device has nothing queued behind the step of another model."""
    engine = engine_for("llama-gqa")
    (prompt,) = prompts_for(build("llama-gqa").model.config.vocab_size, [5])
    runner, waits, launch = engine.runner, list[str](), PendingStep.__init__

    def launched(pending: PendingStep, *arguments: Any) -> None:
        launch(pending, *arguments)
        pending.end = SimpleNamespace(synchronize=lambda: waits.append("own"))  # type: ignore[assignment]

    monkeypatch.setattr(runner, "synchronize", lambda: waits.append("all"))
    runner.close()
    assert waits.pop() == "all", "tables were filled, and no step follows"
    with monkeypatch.context() as patch:
        patch.setattr(PendingStep, "__init__", launched)
        engine.add(engine.request("r", prompt, greedy()))  # type: ignore[arg-type]
        engine.step()
    waits.clear()
    runner.close()
    assert waits == ["own"]
    for queue in (
        runner.fill_tables,
        lambda: runner.copy_blocks([BlockMove(1, 2)]),
        lambda: runner.run_padding(StepShape.decode(1)),
    ):
        end = runner._end
        queue()
        runner.close()
        assert waits.pop() == "all"
        runner._end = end


def test_a_substitute_is_not_kept_if_all_are_dropped_while_it_is_captured() -> None:
    """Else a step would run it later, on memory that is not the model's any more."""
    graphs = StepGraphs(Captures())

    class Interrupted(Captures):
        def capture(self, work: Work) -> CapturedGraph:
            graphs.forget()
            return super().capture(work)

    graphs.restore_from(Source(coming={DECODE.name}))
    graphs.capture_substitute(DECODE, lambda: None, Interrupted())
    assert DECODE not in graphs


def test_a_substitute_since_a_trial_began_is_not_replaced_by_the_one_on_trial() -> None:
    graphs, captures, restored = StepGraphs(Captures()), Captures(), Graph()
    graphs.restore_from(Source({DECODE.name: restored}))
    graphs.begin_trial([DECODE])
    graphs.capture_substitute(DECODE, lambda: None, captures)
    graphs.end_trial(None)
    graphs.run(DECODE, lambda: None)
    assert captures.made[0].num_replays == 1
    assert restored.num_replays == 0


def test_a_trial_that_is_rehearsed_takes_no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, captures, zeros = engine_for("llama-gqa").runner, Captures(), torch.zeros
    runner.layers.sizes = PaddedSizes(decode=(1, 8), mixed=(16,), samples=(1, 8))
    kv: Any = SimpleNamespace(is_cuda=True, device=torch.device("cpu"))
    runner.layers.kv = kv

    def unpinned(*shape: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        assert not pin_memory
        return zeros(*shape, **how)

    monkeypatch.setattr(torch, "zeros", unpinned)
    rehearse_trial(runner.layers, runner.sampler, captures)
    assert len(captures.made) == 1


def test_what_is_captured_ahead_is_what_a_step_runs() -> None:
    runner, captures = engine_for("llama-gqa").runner, Captures()
    runner.layers.sizes, runner.layers.graphs = (
        PaddedSizes(decode=(1, 8), mixed=(16,), samples=(1, 8)),
        StepGraphs(captures),
    )
    for shape in runner.layers.sizes.all_shapes():
        runner.layers.capture_ahead(shape)
    assert {key.name for key in runner.layers.graphs.captured} == {
        "decode-1",
        "decode-8",
        "mixed-16",
        "tail-1",
        "tail-8",
    }
    shape = runner.layers.sizes.all_shapes()[0]
    runner.run_padding(shape)
    replayed = runner.layers.decoder.logits[: shape.num_logits].clone()

    runner.layers.graphs = None
    runner.run_padding(shape)
    # Rows of padding read memory that nobody has written: it may hold anything, but the same each time.
    torch.testing.assert_close(
        runner.layers.decoder.logits[: shape.num_logits], replayed, rtol=0, atol=0, equal_nan=True
    )
    assert [graph.num_replays for graph in captures.made] == [1, 0, 0, 0, 0]


def test_rehearsing_captures_two_layers_of_a_part_and_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, captures, rows = engine_for("llama-gqa").runner, Captures(), list[int]()
    runner.layers.sizes = PaddedSizes(decode=(1, 8), mixed=(16,), samples=(1, 8))
    project = Decoder.project

    def noted(decoder: Decoder, layer: int, normed: torch.Tensor, adapters: object = None) -> torch.Tensor:
        rows.append(len(normed))
        return project(decoder, layer, normed, adapters)

    monkeypatch.setattr(Decoder, "project", noted)
    names = ["decode-8", "mixed-16", "tail-8"]
    assert [runner.layers.rehearse(name, captures) for name in names] == captures.made
    assert runner.layers.rehearse("decode-16", captures) is None
    assert rows == []
    with torch.inference_mode():
        for graph in captures.made:
            graph.replay()
    assert rows == [8, 8, 16, 16], "layers of decode and of mixed steps; a tail begins behind the last"
