"""Executes step plans on a device: a plan goes in, sampled tokens come out later. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hearth.core.types import AdapterId, SamplingTable
from hearth.engine.adapter_table import AdapterTable
from hearth.engine.engine_tables import EngineTables
from hearth.engine.graph_trial import GraphTrial, TriedPart
from hearth.engine.layer_runner import LayerRunner
from hearth.engine.pending_step import PendingCopy, PendingStep, StepInFlight, host_like
from hearth.engine.prompt_reader import PromptReader, StepReads
from hearth.engine.sampler import Sampler, SampleRows, Samples
from hearth.engine.step_shape import StepShape
from hearth.engine.upload import Uploads
from hearth.models.adapter import AdapterLayout
from hearth.models.weights import Weights
from hearth.policy.batch.blocks import BlockMove
from hearth.policy.batch.flights import StageTimes
from hearth.policy.batch.plan import StepPlan

#: Blocks are moved in pieces of at most this many bytes, or one by one: the copy needs temporary memory.
_COPY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class _PreparedStep:
    plan: StepPlan
    rows: SampleRows


class Runner:
    """Runs the steps of a model: inputs, layers, prompt readings, sampling. Mutable; one thread calls it."""

    @property
    def num_flights(self) -> int | None:
        """Steps that the stages of a pipeline may compute at the same time; None: all stages are here."""
        return None

    @property
    def stage_times(self) -> StageTimes | None:
        """Times of a pipeline's steps; None: not measured, or all stages are here."""
        return None

    def __init__(self, layers: LayerRunner, sampler: Sampler, uploads: Uploads, tables: EngineTables) -> None:
        self.layers, self.sampler = layers, sampler
        self._tables, self._uploads = tables, uploads
        self._prepared: _PreparedStep | None = None
        self._trial: GraphTrial | None = None  #: of restored graphs; the device may still be computing it
        #: Recorded behind everything queued so far; None: unknown, as something else followed the last step.
        self._end: torch.cuda.Event | None = None
        #: Of the last two steps. Host memory of inputs is written again two steps later.
        self._step_ends: tuple[torch.cuda.Event | None, torch.cuda.Event | None] = (None, None)
        self._reader = PromptReader(layers.decoder, uploads)
        self.adapters = AdapterTable(layers.decoder.arch.dimensions, layers.kv.dtype, uploads)
        #: Where sampled tokens arrive. Two, since a step is launched before the previous one is waited for.
        self._hosts = [host_like(sampler.chosen) for _ in range(2)]

    @property
    def last_end(self) -> torch.cuda.Event | None:
        """Recorded behind the last step; None: there was none, or it ended when it was launched."""
        return self._step_ends[1]

    def is_warm(self, plan: StepPlan) -> bool:
        """True if the time of this step is typical: no wait for weights, no capture, no trial."""
        layers = self.layers
        if layers.gate is not None or self._trial is not None or (plan.has_readings and plan.num_decode_rows):
            return False
        return layers.has_graphs(layers.sizes.shape_of(plan))

    def measured(self, plan: StepPlan, seconds: float) -> None:
        """Note how long a typical step took on this device."""

    # Steps.

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> None:
        """Queue the inputs of the next step, except for hidden states and sampled tokens."""
        self._prepared = _PreparedStep(plan, self._fill(plan))

    def forget_prepared(self) -> None:
        """Queue other inputs for the next step, or the same ones again."""
        if self._prepared is not None:
            self._prepared = None
            last = self._step_ends[1]  # whose host memory these inputs will use
            self._step_ends = (last, last)

    @torch.inference_mode()
    def launch(self, plan: StepPlan, hidden: torch.Tensor | None = None) -> StepInFlight:
        """Queue a step of layers that include the last. `hidden`: as in `launch_stage`."""
        rows = self._inputs(plan)
        self.sampler.admit(plan.admissions)
        trial, reads = self._run_layers(plan, hidden)
        decoder = self.layers.decoder
        samples = self.sampler.sample(decoder.logits[: plan.num_rows], rows, decoder.wide_logits)
        self._hosts.reverse()
        pending = PendingStep(samples, len(rows), self._hosts[0][: plan.num_rows], reads)
        self._finish(trial, pending.end)
        return pending

    @torch.inference_mode()
    def launch_stage(self, plan: StepPlan, hidden: torch.Tensor | None, out: torch.Tensor) -> PendingCopy:
        """Queue a step of layers that others follow, and the copy of its hidden states to `out`.

        `hidden`: the output of the layers before, [plan.num_tokens, hidden size]; None: there are none.
        """
        self._inputs(plan)
        trial, _ = self._run_layers(plan, hidden)
        pending = PendingCopy(self.layers.decoder.hidden(plan.num_tokens), out)
        self._finish(trial, pending.end)
        return pending

    def _begin(self) -> None:
        if (before_last := self._step_ends[0]) is not None:
            before_last.synchronize()  # where steps follow each other through stages, it may still run
        self._end = None
        self.settle()
        self._uploads.next_step()

    def _inputs(self, plan: StepPlan) -> SampleRows:
        """Queue the inputs of a step, unless it was prepared."""
        prepared, self._prepared = self._prepared, None
        return prepared.rows if prepared is not None and prepared.plan is plan else self._fill(plan)

    def _fill(self, plan: StepPlan) -> SampleRows:
        self._begin()
        layers = self.layers
        shape = layers.sizes.shape_of(plan)
        rows = layers.inputs.fill(plan, shape)
        if shape.has_adapters:
            layers.inputs.adapters.fill(plan, shape, self.adapters)
        return rows

    def _run_layers(
        self, plan: StepPlan, hidden: torch.Tensor | None
    ) -> tuple[GraphTrial | None, StepReads | None]:
        layers = self.layers
        shape = layers.sizes.shape_of(plan)
        # An open gate stays for a step without graphs, which then runs eagerly: the first step after a load
        # is quicker to run than to capture, and requests wait for its tokens.
        if layers.has_graphs(shape):
            layers.drop_open_gate()
        if hidden is not None:
            layers.decoder.hidden(plan.num_tokens).copy_(hidden, non_blocking=True)
        trial = self._begin_trial(shape, plan)
        layers.run(shape, plan)
        reads = self._read(shape, plan) if plan.has_readings and shape.has_tail else None
        if trial is not None:
            trial.step_done()
        return trial, reads

    def _finish(self, trial: GraphTrial | None, end: torch.cuda.Event | None) -> None:
        if trial is not None:
            trial.replay()
            self._trial = trial
        else:
            self._end = end
        self._step_ends = (self._step_ends[1], end)
        self.layers.drop_open_gate()

    def _begin_trial(self, shape: StepShape, plan: StepPlan) -> GraphTrial | None:
        layers = self.layers
        # A step with readings has another tail.
        if layers.graphs is None or layers.gate is not None or plan.has_readings:
            return None
        graphs = layers.graphs.begin_trial(shape.keys)
        if graphs is None:
            return None
        trial = GraphTrial(graphs, partial(self._run_again, shape, plan), self.sampler, layers.stage_kv)
        part = TriedPart.of(layers, self.sampler, plan.num_rows, plan.num_tokens)
        trial.begin(layers.inputs.view(plan, shape).rows, plan.num_tokens, part)
        return trial

    @torch.inference_mode()
    def settle(self) -> None:
        """Wait for a trial behind the last step, and undo what its graphs wrote."""
        if self._trial is None:
            return
        self._end = None
        graphs = self.layers.graphs
        assert graphs is not None, "a trial without graphs"
        trial, self._trial = self._trial, None
        reason = trial.end()
        if reason is not None:
            self.synchronize()  # with the step that ran again
        graphs.end_trial(reason)

    def _run_again(self, shape: StepShape, plan: StepPlan) -> None:
        self._tables.counters.zero_()  # every step finds them so, and leaves them so
        self.layers.run_eagerly(shape, plan)

    def _read(self, shape: StepShape, plan: StepPlan) -> StepReads:
        layers = self.layers
        step = layers.inputs.view(plan, shape)
        hidden = layers.decoder.finish(step, layers.gate)
        reads = self._reader.read(plan, hidden, layers.sizes.samples)
        assert step.logit_rows is not None, f"readings in a step without prompts: {plan.step_id=}"
        logits = layers.decoder.head(hidden.index_select(0, step.logit_rows))
        self.sampler.take_best(logits, layers.inputs.sample_slots(shape))
        return reads

    def synchronize(self) -> None:
        if self.layers.kv.is_cuda:
            torch.cuda.current_stream(self.layers.kv.device).synchronize()

    def close(self) -> None:
        """Wait for everything queued here. No other call may follow."""
        graphs = self.layers.graphs
        if graphs is not None:
            graphs.stop_restoring()
        if self._end is None:
            self.synchronize()
        else:  # not for steps of other models on the same stream
            self._end.synchronize()
        self._trial = None  # it refers to the runner, and so to all of its memory
        if graphs is not None:  # not before: a graph on trial may have broken the device
            graphs.drop_restored()

    # What steps use: weights, tables, adapters and KV.

    def rebind(self, weights: Weights, workspace: torch.Tensor | None = None) -> None:
        """Use weights, and a workspace, that have moved. Graphs are captured again when next needed."""
        self.settle()
        self.layers.rebind(weights, workspace)

    def drop_restored(self) -> None:
        self.settle()
        if self.layers.graphs is not None:
            self.layers.graphs.drop_restored()

    @torch.inference_mode()
    def fill_tables(self) -> None:
        """Fill all tables: before the first step, and whenever their memory was used by another model."""
        self._end = None
        self.forget_prepared()
        self._tables.fill()
        self.layers.inputs.adapters.forget()

    @torch.inference_mode()
    def place_table(self, table: SamplingTable, memory: torch.Tensor | None) -> None:
        """Move a sampling table to `memory` (uint8), behind all launched steps; None: torch allocates it."""
        self._end = None
        self.sampler.tables.place(table, memory)

    @torch.inference_mode()
    def add_adapter(self, adapter: AdapterId, layout: AdapterLayout, layers: Sequence[torch.Tensor]) -> None:
        self._end = None
        self.forget_prepared()
        self.adapters.bind(adapter, layout, layers)
        self.layers.inputs.adapters.forget()
        if self.layers.graphs is not None:
            self.layers.graphs.want_adapters()

    def remove_adapter(self, adapter: AdapterId) -> None:
        self.forget_prepared()
        self.adapters.unbind(adapter)
        self.layers.inputs.adapters.forget()

    def add_blocks(self, extent: range) -> None:
        """Note that later steps may use these blocks."""

    def remove_blocks(self, extent: range) -> None:
        """Note that no later step uses these blocks."""

    @torch.inference_mode()
    def copy_blocks(self, moves: Sequence[BlockMove]) -> None:
        """Queue copies of whole blocks behind all launched steps. No source is a target."""
        if not moves:
            return
        self._end = None
        self.settle()
        kv = self.layers.kv
        sources, targets = self._uploads.ints([m.source for m in moves], [m.target for m in moves])
        num_at_once = max(1, _COPY_BYTES // kv[0].nbytes)
        for first in range(0, len(moves), num_at_once):
            piece = slice(first, first + num_at_once)
            kv.index_copy_(0, targets[piece], kv.index_select(0, sources[piece]))

    @torch.inference_mode()
    def read_blocks(self, blocks: Sequence[int]) -> list[PendingCopy]:
        """Queue copies of this stage's KV in blocks to host memory, behind all launched steps."""
        self._end = None
        self.settle()
        kv, copies = self.layers.stage_kv, list[PendingCopy]()
        num_at_once = max(1, _COPY_BYTES // kv[0].nbytes)
        for first in range(0, len(blocks), num_at_once):
            (numbers,) = self._uploads.ints(blocks[first : first + num_at_once])
            piece = kv.index_select(0, numbers)
            host = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.is_cuda)
            copies.append(PendingCopy(piece, host))
        return copies

    @torch.inference_mode()
    def write_blocks(self, blocks: Sequence[int], layers: range, content: torch.Tensor) -> None:
        """Queue writes of some layers of blocks, of which no launched step knows. `content` (uint8): rows."""
        self._end = None
        self.settle()
        kv = self.layers.stage_kv[:, layers.start : layers.stop]
        num_at_once = max(1, _COPY_BYTES // kv[0].nbytes)
        for first in range(0, len(blocks), num_at_once):
            piece = slice(first, first + num_at_once)
            (numbers,) = self._uploads.ints(blocks[piece])
            rows = content[piece].view(kv.dtype).view(-1, *kv.shape[1:])
            kv.index_copy_(0, numbers, rows.to(kv.device, non_blocking=True))

    @torch.inference_mode()
    def move_blocks(self, moves: Sequence[BlockMove]) -> None:
        """Copy blocks, and change block tables accordingly, which no plan does for these moves."""
        if moves:
            self.copy_blocks(moves)
            self.layers.inputs.follow(moves, len(self.layers.kv))

    # Before requests: steps of padding, and what surrounds a step.

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture every size that has no graph and gets none. Does nothing while weights are arriving."""
        layers = self.layers
        layers.drop_open_gate()
        if layers.graphs is None or layers.gate is not None:
            return
        shapes = layers.sizes.all_shapes()
        if layers.inputs.adapters.is_used:
            shapes += layers.sizes.all_shapes(has_adapters=True)
        for shape in shapes:
            if any(layers.graphs.needs_capture(key) for key in shape.keys):
                self.synchronize()  # two steps later the host copy of the inputs is written again
                self.run_padding(shape)
        self.synchronize()  # likewise, for the next two steps

    @torch.inference_mode()
    def run_padding(self, shape: StepShape) -> None:
        """Queue a step that is all padding. It writes no KV but the sink."""
        self._end = None
        self.forget_prepared()
        self.settle()
        self.layers.drop_open_gate()
        self.layers.inputs.fill_padding(shape)
        if shape.has_adapters:
            self.layers.inputs.adapters.fill_padding(shape)
        self.layers.run(shape, None)

    @torch.inference_mode()
    def rehearse_inputs(self, plan: StepPlan) -> None:
        """Do what surrounds the layers of a step: fill tables, send inputs, fetch a token."""
        self.fill_tables()
        self.sampler.admit(plan.admissions)
        rows = self.layers.inputs.fill(plan, self.layers.sizes.shape_of(plan))
        samples = Samples(self.sampler.chosen[: plan.num_rows], None, None, None, ())
        PendingStep(samples, len(rows), self._hosts[0][: plan.num_rows]).wait()
