"""Tries restored graphs after a step: both must leave the same bits.

The step runs without the graphs, and its result goes to the host. Then the graphs run on the same inputs. A
step leaves this for the next one:

    tokens     Each slot's last sample is an input as well as an output. The graphs get the tokens from
               before the step, and the step's own are restored afterwards.
    KV         Written again to the same places. Where it is compared, the step's own is overwritten first,
               to detect a graph that writes nothing. The same holds for logits and choices, or for the
               hidden states that layers elsewhere take.
    hidden     Of layers elsewhere, which the step overwrites: the graphs get them again.

Everything else that a step writes (workspace, attention counters, scratch) is meaningless afterwards, or left
as it was found. So a step may run any number of times: if the graphs computed something else, it runs again
eagerly. No later step has used their result, provided that `end` is called before anything else is queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hearth.core.errors import DeviceError
from hearth.engine.graphs import Capturer, StepGraph, Work
from hearth.engine.layer_runner import LayerRunner
from hearth.engine.sampler import Sampler
from hearth.engine.step_shape import StepShape
from hearth.kernels.paged import PagedRows

#: Rows that are compared, spread over the step: all rows would need as much memory as the step's KV.
MAX_TRIED_ROWS = 16


@dataclass(frozen=True, slots=True)
class TriedPart:
    outputs: Sequence[torch.Tensor]  #: of equally many rows: logits and choices, or hidden states
    hidden: torch.Tensor | None = None  #: that layers elsewhere have left for the step; None: it has them all

    @staticmethod
    def of(layers: LayerRunner, sampler: Sampler, num_rows: int, num_tokens: int) -> TriedPart:
        decoder = layers.decoder
        hidden = decoder.hidden(num_tokens)
        outputs = [decoder.logits[:num_rows], sampler.chosen[:num_rows]] if decoder.is_last else [hidden]
        return TriedPart(outputs, None if decoder.is_first else hidden)


class GraphTrial:
    """One trial. Mutable; the runner calls `begin`, `step_done`, `replay` and `end`, in this order."""

    def __init__(
        self,
        graphs: Sequence[StepGraph],
        step: Work,
        sampler: Sampler,
        kv: torch.Tensor,
        *,
        is_rehearsed: bool = False,
    ) -> None:
        """`step` queues the step eagerly, on inputs that stay in place until `end`.

        `is_rehearsed`: graphs are captured but never run, and `end` is not called.
        """
        self._graphs, self._step, self._sampler, self._kv = graphs, step, sampler, kv
        # torch records an event when pinned memory is freed. On the stream of captures that would fall into
        # the capture of another thread and break it.
        self._num_wrong = (
            torch.empty((), dtype=torch.int64, device=kv.device)
            if is_rehearsed
            else torch.zeros((), dtype=torch.int64, pin_memory=kv.is_cuda)
        )
        self._event: torch.cuda.Event | None = None
        self._refusal: DeviceError | None = None

    def begin(self, rows: PagedRows, num_tokens: int, part: TriedPart) -> None:
        """Save what the step overwrites. `rows`, and hidden states that it takes, are in place."""
        at = _spread(num_tokens, self._kv.device)
        own = PagedRows(rows.positions[at], rows.slots[at], rows.block_table)
        targets = own.kv_targets(self._kv.shape[3])
        self._at = (targets.blocks, slice(None), slice(None), targets.offsets)
        self._part, self._rows = part, _spread(len(part.outputs[0]), self._kv.device)
        self._tokens_before = self._sampler.tokens.clone()
        self._hidden_before = None if part.hidden is None else part.hidden.clone()

    def step_done(self) -> None:
        self._expected = self._computed()

    def replay(self) -> None:
        """Queue the graphs and the comparison, after everything that the step queued."""
        self._tokens = self._sampler.tokens.clone()
        self._kv[self._at] = torch.full_like(self._expected[-1], torch.nan)
        for output in self._part.outputs:
            output.fill_(torch.nan if output.is_floating_point() else -1)
        self._restore_inputs()
        try:
            for graph in self._graphs:
                graph.replay()
        except DeviceError as error:
            self._refusal = error
            return
        pairs = zip(self._expected, self._computed(), strict=True)
        num_wrong = torch.stack([(_bits(old) != _bits(new)).sum() for old, new in pairs]).sum()
        self._num_wrong.copy_(num_wrong, non_blocking=True)
        self._sampler.tokens.copy_(self._tokens)
        if self._kv.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
            self._event.record()

    def end(self) -> str | None:
        """Wait for the trial; return None, or what is wrong with the graphs after the step ran again."""
        if self._event is not None:
            self._event.synchronize()
        num_wrong = int(self._num_wrong)
        if self._refusal is None and not num_wrong:
            return None
        self._restore_inputs()
        self._step()
        self._sampler.tokens.copy_(self._tokens)
        if self._refusal is not None:
            return str(self._refusal)
        return f"{num_wrong} numbers differ from those of the same step without graphs"

    def _restore_inputs(self) -> None:
        self._sampler.tokens.copy_(self._tokens_before)
        if self._part.hidden is not None and self._hidden_before is not None:
            self._part.hidden.copy_(self._hidden_before)

    def _computed(self) -> tuple[torch.Tensor, ...]:
        return *(output[self._rows] for output in self._part.outputs), self._kv[self._at]


@torch.inference_mode()
def rehearse_trial(layers: LayerRunner, sampler: Sampler, capturer: Capturer) -> None:
    """Capture what a trial does around graphs, so that torch loads its kernels. Runs nothing."""
    if not layers.sizes.decode:
        return
    size = next((size for size in layers.sizes.decode if size >= MAX_TRIED_ROWS), layers.sizes.decode[-1])
    shape, decoder = StepShape.decode(size), layers.decoder
    trial = GraphTrial((), lambda: None, sampler, layers.stage_kv, is_rehearsed=True)

    def work() -> None:
        trial.begin(layers.inputs.view(None, shape).rows, size, TriedPart.of(layers, sampler, size, size))
        trial.step_done()
        trial.replay()
        if decoder.is_last:
            decoder.wide_logits[:size].copy_(decoder.logits[:size])

    capturer.capture(work)


def _spread(count: int, device: torch.device) -> torch.Tensor:
    num_rows = min(count, MAX_TRIED_ROWS)
    return torch.arange(num_rows, device=device) * (count - 1) // max(num_rows - 1, 1)


def _bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view({2: torch.int16, 4: torch.int32}[numbers.itemsize])
