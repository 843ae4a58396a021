"""Runs the layers of a model over inputs that are in place, eagerly or by CUDA graphs. Samples nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hearth.engine.graphs import CapturedGraph, Capturer, StepGraphs
from hearth.engine.inputs import InputBuffers
from hearth.engine.step_shape import PaddedSizes, StepPart, StepShape
from hearth.models.decoder import Decoder
from hearth.models.weights import WeightGate, Weights
from hearth.models.workspace import Workspace
from hearth.policy.batch.plan import StepPlan

#: Two layers hold every library kernel: the last layer of a step with prompts ends with its attention.
_REHEARSED_LAYERS = 2


class LayerRunner:
    """The decoder, KV, inputs and graphs of one model. Mutable; the thread that steps calls it."""

    def __init__(
        self,
        decoder: Decoder,
        kv: torch.Tensor,
        kv_layers: range,
        inputs: InputBuffers,
        sizes: PaddedSizes,
        graphs: StepGraphs | None,
        take_logits: Callable[[torch.Tensor, torch.Tensor], None],
        bind_workspace: Callable[[torch.Tensor], Workspace],
    ) -> None:
        """Take `kv` as in `Decoder.body`, of `kv_layers`, which include the decoder's layers.

        Only blocks named by a plan, and the sink, are touched.

        `sizes`: what steps are padded to. `graphs` None: all steps run eagerly. `take_logits(logits, slots)`
        ends a step and is captured with it. `bind_workspace` makes a workspace of memory (uint8).
        """
        self.decoder, self.kv, self.inputs = decoder, kv, inputs
        begin = decoder.layers.start - kv_layers.start
        self.stage_kv = kv[:, begin : begin + len(decoder.layers)]
        self.sizes, self.graphs = sizes, graphs
        self.gate: WeightGate | None = None  #: None: all weights have arrived
        self._take_logits, self._bind_workspace = take_logits, bind_workspace

    # Weights.

    def follow(self, gate: WeightGate | None) -> None:
        """Run steps layer by layer behind weights that are arriving, until `gate` is open; None: at once."""
        self.gate = gate

    def drop_open_gate(self) -> None:
        if self.gate is not None and self.gate.is_open():
            self.gate = None

    def rebind(self, weights: Weights, workspace: torch.Tensor | None = None) -> None:
        self.decoder.rebind(weights, None if workspace is None else self._bind_workspace(workspace))
        if self.graphs is not None:
            self.graphs.forget()

    # Steps.

    def has_graphs(self, shape: StepShape) -> bool:
        """True if a step of this shape needs no capture: its graphs exist, or steps run eagerly."""
        return self.graphs is None or all(key in self.graphs for key in shape.keys)

    def run(self, shape: StepShape, plan: StepPlan | None) -> None:
        """Queue the step whose inputs are in place; None: it is all padding. Logits stay in the decoder.

        The tail of a step with readings is left to the caller: what is read differs from step to step.
        """
        for key in shape.keys:
            if key.part is StepPart.TAIL and plan is not None and plan.has_readings:
                continue
            work = partial(self.run_part, key.part, shape, plan)
            # A graph reads all weights, so it cannot follow a gate.
            if self.graphs is None or self.gate is not None:
                work()
            else:
                self.graphs.run(key, work)

    def run_eagerly(self, shape: StepShape, plan: StepPlan) -> None:
        for key in shape.keys:
            self.run_part(key.part, shape, plan)

    def run_part(self, part: StepPart, shape: StepShape, plan: StepPlan | None) -> None:
        self._queue(part, shape, plan, self.decoder, self.stage_kv, self.gate)

    def _queue(
        self,
        part: StepPart,
        shape: StepShape,
        plan: StepPlan | None,
        decoder: Decoder,
        kv: torch.Tensor,
        gate: WeightGate | None,
    ) -> None:
        step = self.inputs.view(plan, shape)
        if part is not StepPart.TAIL:
            hidden = decoder.hidden(shape.num_rows)
            if decoder.is_first:
                self.inputs.gather_tokens(shape)
                if gate is not None:
                    gate.embed()
                hidden = decoder.embed(step)
            decoder.body(hidden, step, kv, gate)
        if not shape.has_tail:
            decoder.pass_on(step)
        elif part is not StepPart.MIXED:
            self._take_logits(decoder.tail(step, gate), self.inputs.sample_slots(shape))

    # Captures. These run nothing on the device; any one thread may call them while steps run.

    @torch.inference_mode()
    def capture_ahead(self, shape: StepShape) -> None:
        if self.graphs is None:
            return
        for key in shape.keys:
            work = partial(self._queue, key.part, shape, None, self.decoder, self.stage_kv, None)
            self.graphs.capture_ahead(key, work)

    @torch.inference_mode()
    def capture_substitutes(
        self,
        shape: StepShape,
        new_capturer: Callable[[], Capturer],
        give_way: Callable[[], None] | None = None,
        get_behind: Callable[[], None] = lambda: None,
    ) -> None:
        """Capture the parts of a step that a snapshot has, to be used instead of its graphs.

        All memory must be mapped. `give_way` is called between layers, `get_behind` before work that keeps
        the driver busy.
        """
        if self.graphs is None:
            return
        # A decoder of its own: its layers must not count as progress of a step.
        decoder = self.decoder.first_layers(len(self.decoder.layers), on_layer=give_way)
        for key in shape.keys:
            work = partial(self._queue, key.part, shape, None, decoder, self.stage_kv, None)
            self.graphs.capture_substitute(key, work, new_capturer(), get_behind)

    @torch.inference_mode()
    def rehearse(
        self, name: str, capturer: Capturer, give_way: Callable[[], None] | None = None
    ) -> CapturedGraph | None:
        """Capture the first layers of the part that snapshots call `name`; None: there is no such part."""
        shapes = [*self.sizes.all_shapes(), *self.sizes.all_shapes(has_adapters=True)]
        found = [(key, shape) for shape in shapes for key in shape.keys if key.name == name]
        if not found:
            return None
        (key, shape), decoder = found[0], self.decoder.first_layers(_REHEARSED_LAYERS, on_layer=give_way)
        kv = self.stage_kv[:, : len(decoder.layers)]
        return capturer.capture(partial(self._queue, key.part, shape, None, decoder, kv, None))
