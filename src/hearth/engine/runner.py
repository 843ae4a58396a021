"""Executes step plans on a device: a plan goes in, sampled tokens come out later. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch

from hearth.core.types import AdapterId, RequestId, SamplingTable
from hearth.engine.adapter_table import AdapterTable
from hearth.engine.engine_tables import EngineTables
from hearth.engine.graph_trial import MAX_TRIED_ROWS, GraphTrial
from hearth.engine.graphs import CapturedGraph, Capturer, StepGraphs
from hearth.engine.inputs import InputBuffers
from hearth.engine.pending_step import PendingStep, host_like
from hearth.engine.prompt_reader import PromptReader, StepReads
from hearth.engine.sampler import Sampler, Samples
from hearth.engine.step_shape import PaddedSizes, StepPart, StepShape
from hearth.engine.upload import Uploads
from hearth.models.adapter import AdapterLayout
from hearth.models.decoder import Decoder
from hearth.models.weights import WeightGate, Weights
from hearth.models.workspace import Workspace
from hearth.policy.batch.blocks import BlockMove
from hearth.policy.batch.plan import StepPlan

_Method = TypeVar("_Method", bound=Callable[..., Any])
#: Blocks that move are copied in pieces of at most this, or one by one: the copy takes memory of its own.
_COPY_BYTES = 16 << 20
#: All kernels of libraries are in two layers: the last one of a step with prompts ends with its attention.
_REHEARSED_LAYERS = 2


def _queues(method: _Method) -> _Method:
    """Have a method of the runner that queues something forget where all that was queued ended before."""

    @wraps(method)
    def queue(runner: Runner, *args: object, **kwargs: object) -> object:
        runner._end = None
        return method(runner, *args, **kwargs)

    return cast(_Method, queue)


class Runner:
    """Runs step plans on one device. Mutable through its buffers; one thread calls it, in step order.

    A step is its body, its tail and sampling. Each part of the first two is one function over inputs at fixed
    addresses, be it run as it stands or replayed from a graph that was captured of it. Where prompts are
    read, all rows are finished in place of the tail, never by a graph: what is read differs by the step.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: torch.Tensor,
        inputs: InputBuffers,
        sampler: Sampler,
        uploads: Uploads,
        sizes: PaddedSizes,
        graphs: StepGraphs | None,
        tables: EngineTables,
        bind_workspace: Callable[[torch.Tensor], Workspace],
    ) -> None:
        """Take `kv` as in `Decoder.body`, and the sizes that steps are padded to; without graphs run eagerly.

        Only blocks that a plan names, and the sink, are ever touched: there may be no memory behind others.
        `tables` are those that decoder, inputs and sampler have. `bind_workspace` returns the buffers of the
        decoder in memory (uint8) that it may be moved to.
        """
        self.decoder = decoder
        self._tables, self._bind_workspace = tables, bind_workspace
        self._gate: WeightGate | None = None
        self.kv = kv
        self._inputs = inputs
        self._sampler = sampler
        self._uploads = uploads
        self.sizes = sizes
        self.graphs = graphs
        self._trial: GraphTrial | None = None  #: of restored graphs, that the device may still be computing
        #: Behind all that was queued here; None: not known, for the last was no step, or none that was whole.
        self._end: torch.cuda.Event | None = None
        self._reader = PromptReader(decoder, uploads)
        self._adapters = AdapterTable(decoder.arch.dimensions, kv.dtype, uploads)
        #: Where what steps have chosen arrives. Two, for a step is launched before the last is waited for.
        self._hosts = [host_like(sampler.chosen) for _ in range(2)]

    @property
    def sink(self) -> int:
        return self._inputs.sink

    def num_padded_tokens(self, plan: StepPlan) -> int:
        """Return with how many rows a step of this plan is padded."""
        return self.sizes.shape_of(plan).num_rows - plan.num_tokens

    def is_warm(self, plan: StepPlan) -> bool:
        """True if a step of this plan has neither to wait for weights nor to be captured first.

        Nor has it more to do than others of its size, beside requests that decode, nor does a trial run in
        front of it. Where nobody decodes, also how long prompts take that are read is worth knowing: there
        may be no others.
        """
        if self._gate is not None or self._trial is not None or (plan.has_readings and plan.num_decode_rows):
            return False
        return self._has_graphs(self.sizes.shape_of(plan))

    def _has_graphs(self, shape: StepShape) -> bool:
        """True if a step of this shape has nothing to be captured, because it was or nothing is."""
        return self.graphs is None or all(key in self.graphs for key in shape.keys)

    # Steps.

    @torch.inference_mode()
    @_queues
    def launch(self, plan: StepPlan) -> PendingStep:
        """Queue a step on the device and return without waiting for it."""
        self.settle()
        self._uploads.next_step()
        self._sampler.admit(plan.admissions)
        shape = self.sizes.shape_of(plan)
        # Else it stays for this step, and with it no graph is captured: the first step behind a load is run
        # sooner than captured, and somebody waits for its token, however early the last bytes came.
        if self._has_graphs(shape):
            self._drop_open_gate()
        rows = self._inputs.fill(plan, shape)
        if shape.has_adapters:
            self._inputs.adapters.fill(plan, shape, self._adapters)
        trial = self._begin_trial(shape, plan)
        self._run(shape, plan)
        reads = self._read(shape, plan) if plan.has_readings else None
        if trial is not None:
            trial.step_done()
        logits = self.decoder.logits[: plan.num_rows]
        samples = self._sampler.sample(logits, rows, self.decoder.wide_logits)
        self._hosts.reverse()
        pending = PendingStep(samples, len(rows), self._hosts[0][: plan.num_rows], reads)
        if trial is not None:
            trial.replay()
            self._trial = trial
        else:
            self._end = pending.end
        self._drop_open_gate()
        return pending

    def _begin_trial(self, shape: StepShape, plan: StepPlan) -> GraphTrial | None:
        """Begin a trial if a graph of this step was never tried."""
        # Where prompts are read the tail is another.
        if self.graphs is None or self._gate is not None or plan.has_readings:
            return None
        graphs = self.graphs.begin_trial(shape.keys)
        if graphs is None:
            return None
        trial = GraphTrial(graphs, partial(self._run_again, shape, plan), self._sampler, self.kv)
        rows, logits = self._inputs.view(plan, shape).rows, self.decoder.logits[: plan.num_rows]
        trial.begin(rows, plan.num_tokens, logits)
        return trial

    @torch.inference_mode()
    def settle(self) -> None:
        """Wait for graphs that are tried behind the last step, so that nothing stays of what they did."""
        if self._trial is None:
            return
        self._end = None
        assert self.graphs is not None, "a trial without graphs"
        trial, self._trial = self._trial, None
        if (reason := trial.end()) is None:
            self.graphs.accept()
        else:
            self.synchronize()  # with the step that ran again: nobody else waits for it
            self.graphs.reject(reason)

    def _drop_open_gate(self) -> None:
        """Wait at a gate no longer once all weights are there."""
        if self._gate is not None and self._gate.is_open():
            self._gate = None

    def _run(self, shape: StepShape, plan: StepPlan | None) -> None:
        """Queue the step whose inputs are in place, which leaves its logits with the decoder.

        But where prompts are read, these are left to `_read`.
        """
        for key in shape.keys:
            if key.part is StepPart.TAIL and plan is not None and plan.has_readings:
                continue  # see `_read`
            work = partial(self._run_part, key.part, shape, plan)
            # A graph reads all of its weights, so it has to wait for the last of them.
            if self.graphs is None or self._gate is not None:
                work()
            else:
                self.graphs.run(key, work)

    def _read(self, shape: StepShape, plan: StepPlan) -> StepReads:
        """Queue all behind the body of a step whose prompts are read, and leave what the tail would leave."""
        step = self._inputs.view(plan, shape)
        hidden = self.decoder.finish(step, self._gate)
        reads = self._reader.read(plan, hidden, self.sizes.samples)
        assert step.logit_rows is not None, f"prompts are read in a step without any: {plan.step_id=}"
        logits = self.decoder.head(hidden.index_select(0, step.logit_rows))
        self._sampler.take_best(logits, self._inputs.sample_slots(shape))
        return reads

    def _run_again(self, shape: StepShape, plan: StepPlan) -> None:
        """Run a step once more, behind graphs that did something else."""
        self._tables.counters.zero_()  # as every step finds them, and leaves them
        self._run_eagerly(shape, plan)

    def _run_eagerly(self, shape: StepShape, plan: StepPlan) -> None:
        for key in shape.keys:
            self._run_part(key.part, shape, plan)

    def _run_part(self, part: StepPart, shape: StepShape, plan: StepPlan | None) -> None:
        self._queue(part, shape, plan, self.decoder, self.kv, self._gate)

    def _queue(
        self,
        part: StepPart,
        shape: StepShape,
        plan: StepPlan | None,
        decoder: Decoder,
        kv: torch.Tensor,
        gate: WeightGate | None,
    ) -> None:
        step = self._inputs.view(plan, shape)
        if part is not StepPart.TAIL:
            self._inputs.gather_tokens(shape)
            if gate is not None:
                gate.embed()
            decoder.body(decoder.embed(step), step, kv, gate)
        if part is not StepPart.MIXED:
            self._sampler.take_best(decoder.tail(step, gate), self._inputs.sample_slots(shape))

    def synchronize(self) -> None:
        """Wait for all steps that were launched."""
        if self.kv.is_cuda:
            torch.cuda.current_stream(self.kv.device).synchronize()

    def close(self) -> None:
        """Wait for all that was launched here. No other call may follow."""
        if self.graphs is not None:
            self.graphs.stop_restoring()
        if self._end is None:
            self.synchronize()
        else:  # not for steps of other models, which would have nothing queued behind them then
            self._end.synchronize()
        self._trial = None  # which keeps the runner, and so all of its memory
        if self.graphs is not None:  # not before: the device might be lost by what is on trial
            self.graphs.drop_restored()

    # What steps use: weights, tables, adapters and KV.

    def follow(self, gate: WeightGate | None) -> None:
        """Run steps layer by layer behind weights that are still arriving, until the gate is open.

        None: no weights are arriving any more.
        """
        self._gate = gate

    def rebind(self, weights: Weights, workspace: torch.Tensor | None = None) -> None:
        """Follow weights that were moved, and a workspace; graphs are captured anew when next needed."""
        self.settle()
        self.decoder.rebind(weights, None if workspace is None else self._bind_workspace(workspace))
        if self.graphs is not None:
            self.graphs.forget()

    def drop_restored(self) -> None:
        """Capture here what was restored from a snapshot, when it is next needed: so that one can be made."""
        self.settle()
        if self.graphs is not None:
            self.graphs.drop_restored()

    @torch.inference_mode()
    @_queues
    def fill_tables(self) -> None:
        """Fill all tables, before the first step and whenever their memory was somebody else's meanwhile."""
        self._tables.fill()
        self._inputs.adapters.forget()

    def has_table(self, table: SamplingTable) -> bool:
        return self._sampler.has_table(table)

    @torch.inference_mode()
    @_queues
    def place_table(self, table: SamplingTable, memory: torch.Tensor | None) -> None:
        """Have a sampling table lie in `memory`, behind all launched steps; None: where torch finds some."""
        self._sampler.place_table(table, memory)

    def drop_table(self, table: SamplingTable) -> None:
        """Let go of a sampling table, because no plan from now on has a row that needs it."""
        self._sampler.drop_table(table)

    def free_row(self, table: SamplingTable, request_id: RequestId) -> None:
        """Let others have the row of a request in a sampling table, because no plan has a row of it."""
        self._sampler.free_row(table, request_id)

    @torch.inference_mode()
    @_queues
    def add_adapter(self, adapter: AdapterId, layout: AdapterLayout, layers: Sequence[torch.Tensor]) -> None:
        """Have steps from now on find an adapter in its place (`AdapterTable.bind`)."""
        self._adapters.bind(adapter, layout, layers)
        self._inputs.adapters.forget()
        if self.graphs is not None:
            self.graphs.want_adapters()

    def remove_adapter(self, adapter: AdapterId) -> None:
        """Forget an adapter, because no plan from now on has a row of it."""
        self._adapters.unbind(adapter)
        self._inputs.adapters.forget()

    @torch.inference_mode()
    @_queues
    def copy_blocks(self, moves: Sequence[BlockMove]) -> None:
        """Queue copies of whole blocks behind all launched steps. No source is a target."""
        if not moves:
            return
        self.settle()
        # To be sent as one, and kept on the host until the device has read it, as a step's numbers are.
        sources, targets = self._uploads.ints([m.source for m in moves], [m.target for m in moves])
        num_at_once = max(1, _COPY_BYTES // self.kv[0].nbytes)
        for first in range(0, len(moves), num_at_once):
            piece = slice(first, first + num_at_once)
            self.kv.index_copy_(0, targets[piece], self.kv.index_select(0, sources[piece]))

    # Ahead of requests: steps of padding, and what is around them.

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture a graph of every size that has none and gets none, between steps.

        None while weights are arriving.
        """
        self._drop_open_gate()
        if self.graphs is None or self._gate is not None:
            return
        shapes = self.sizes.all_shapes()
        if self._inputs.adapters.is_used:
            shapes += self.sizes.all_shapes(has_adapters=True)
        for shape in shapes:
            if any(self.graphs.needs_capture(key) for key in shape.keys):
                self.synchronize()  # for what is sent is written where that of the step before the last lies
                self.run_padding(shape)
        self.synchronize()  # likewise: nobody waits for the last of them before the next two are launched

    @torch.inference_mode()
    @_queues
    def run_padding(self, shape: StepShape) -> None:
        """Queue a step that is all padding, which touches nobody's KV."""
        self.settle()
        self._drop_open_gate()
        self._inputs.park(shape)
        if shape.has_adapters:
            self.park_adapters(shape)
        self._run(shape, None)

    @_queues
    def park_adapters(self, shape: StepShape) -> None:
        """Have no row of steps of this shape have an adapter, until one is launched that has."""
        self._inputs.adapters.park(shape)

    @torch.inference_mode()
    @_queues
    def draw_padding(self, shape: StepShape) -> None:
        """Queue the draws of a step that is all padding, in which no token is drawn.

        Before them the best tokens, once more, as behind rules that change logits.
        """
        logits, rows = self.decoder.wide_logits[: shape.num_logits], self._inputs.park(shape)
        self._sampler.take_best(logits, rows.device_slots)
        self._sampler.draw(logits, rows)

    @torch.inference_mode()
    @_queues
    def rehearse_inputs(self, plan: StepPlan) -> None:
        """Do all that a step of a plan does around its parts: fill tables, send inputs, fetch a token.

        No part of the step is run, and nothing but tables is touched.
        """
        self._tables.fill()
        self._sampler.admit(plan.admissions)
        rows = self._inputs.fill(plan, self.sizes.shape_of(plan))
        samples = Samples(self._sampler.chosen[: plan.num_rows], None, None, None, ())
        PendingStep(samples, len(rows), self._hosts[0][: plan.num_rows]).wait()

    # Captures beside all steps, by any thread: nothing is run.

    @torch.inference_mode()
    def capture_ahead(self, shape: StepShape) -> None:
        """Have graphs of all parts of a step ready, where they are captured. Runs nothing.

        Any one thread may call it, beside all steps: weights need not be there yet.
        """
        if self.graphs is None:
            return
        for key in shape.keys:
            self.graphs.capture_ahead(
                key, partial(self._queue, key.part, shape, None, self.decoder, self.kv, None)
            )

    @torch.inference_mode()
    def stand_in(
        self,
        shape: StepShape,
        new_capturer: Callable[[], Capturer],
        give_way: Callable[[], None] | None = None,
        get_behind: Callable[[], None] = lambda: None,
    ) -> None:
        """Have graphs captured of all parts of a step that a snapshot has, to serve in place of its own.

        Any one thread may call it, beside all steps, once there is memory at all addresses: runs nothing.
        `give_way` is called between layers, `get_behind` before what keeps the driver busy.
        """
        if self.graphs is None:
            return
        # One that tells the marks of steps of no layer: these are none of a step.
        decoder = self.decoder.first_layers(len(self.decoder.layers), on_layer=give_way)
        for key in shape.keys:
            work = partial(self._queue, key.part, shape, None, decoder, self.kv, None)
            self.graphs.stand_in(key, work, new_capturer(), get_behind)

    @torch.inference_mode()
    def rehearse(
        self, name: str, capturer: Capturer, give_way: Callable[[], None] | None = None
    ) -> CapturedGraph | None:
        """Capture the first layers of the part of a step that has this name in snapshots; None: none has.

        Nothing is run, and any thread may call it: libraries load the kernels that they have for the size,
        and the launches of a step without a graph are quicker from then on. `give_way` is called between
        layers.
        """
        shapes = [*self.sizes.all_shapes(), *self.sizes.all_shapes(has_adapters=True)]
        found = [(key, shape) for shape in shapes for key in shape.keys if key.name == name]
        if not found:
            return None
        (key, shape), decoder = found[0], self.decoder.first_layers(_REHEARSED_LAYERS, on_layer=give_way)
        kv = self.kv[:, : len(decoder.layers)]
        return capturer.capture(partial(self._queue, key.part, shape, None, decoder, kv, None))

    @torch.inference_mode()
    def rehearse_trial(self, capturer: Capturer) -> None:
        """Capture what a trial of restored graphs does around them. Runs nothing; any thread may call it.

        torch loads a kernel when it is first launched, and a trial has a dozen that no step has: else the
        first trial of a process waits for them, with the requests of its step. So would the first draw for
        the one that widens logits.
        """
        if not self.sizes.decode:
            return
        size = next((size for size in self.sizes.decode if size >= MAX_TRIED_ROWS), self.sizes.decode[-1])
        shape = StepShape.decode(size)
        trial = GraphTrial((), lambda: None, self._sampler, self.kv, is_rehearsed=True)

        def work() -> None:
            trial.begin(self._inputs.view(None, shape).rows, size, self.decoder.logits[:size])
            trial.step_done()
            trial.replay()
            self.decoder.wide_logits[:size].copy_(self.decoder.logits[:size])

        capturer.capture(work)
