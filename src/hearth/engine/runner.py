"""Executes step plans on a device: a plan goes in, sampled tokens come out later. Decides nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hearth.engine.graphs import DecodeGraphs
from hearth.engine.inputs import InputBuffers
from hearth.engine.sampler import Sampler, SampleRow, Samples
from hearth.engine.upload import Uploads
from hearth.models.decoder import Decoder
from hearth.models.step_inputs import StepInputs
from hearth.models.weights import WeightGate, Weights
from hearth.policy.batch.blocks import BlockMove
from hearth.policy.batch.plan import StepPlan
from hearth.types import RequestId, SamplingTable, TokenLogprob, TokenLogprobs

#: Blocks that move are copied in pieces of at most this, or one by one: the copy takes memory of its own.
_COPY_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that a step has sampled: one entry per sampling row of the plan, in order."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]  #: as many as the row asked for; None: it asked for none
    broken_rows: list[int]  #: indices of rows of the plan, also of those that do not sample: see `commit`


class PendingStep:
    """A step that the device may still be computing."""

    def __init__(self, samples: Samples, best_logits: torch.Tensor) -> None:
        """Queue the copies to the host. `best_logits`: the highest behind each row of the plan."""
        parts = (samples.logprobs, samples.top_ids, samples.top_logprobs)
        self._tokens, self._best_logits = _to_host(samples.tokens), _to_host(best_logits)
        self._logprobs, self._top_ids, self._top_logprobs = (
            None if part is None else _to_host(part) for part in parts
        )
        self._num_logprobs = samples.num_logprobs
        self._event: torch.cuda.Event | None = None
        if samples.tokens.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch leaves it untyped
            self._event.record()

    def wait(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        broken_rows = [row for row, best in enumerate(self._best_logits.tolist()) if not math.isfinite(best)]
        return StepResult(self._tokens.tolist(), self._asked_logprobs(), broken_rows)

    def _asked_logprobs(self) -> list[TokenLogprobs | None]:
        """Return to each row what it asked for, whatever was computed because others asked for more."""
        if self._logprobs is None:
            return [None] * len(self._num_logprobs)
        tops = (self._top_ids, self._top_logprobs)
        top_ids, top_logprobs = ([[]] * len(self._logprobs) if top is None else top.tolist() for top in tops)
        rows = zip(self._num_logprobs, self._logprobs.tolist(), top_ids, top_logprobs, strict=True)
        return [
            None if num is None else TokenLogprobs(own, tuple(map(TokenLogprob, ids[:num], best[:num])))
            for num, own, ids, best in rows
        ]


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Runner:
    """Runs step plans on one device. Mutable through its buffers; one thread calls it, in step order."""

    def __init__(
        self,
        decoder: Decoder,
        kv: torch.Tensor,
        inputs: InputBuffers,
        sampler: Sampler,
        uploads: Uploads,
        max_graph_size: int,
    ) -> None:
        """Take `kv` as in `Decoder.run`; with a `max_graph_size` of 0 every step runs eagerly.

        Only blocks that a plan names, and the sink, are ever touched: there may be no memory behind others.
        """
        self.decoder = decoder
        self._gate: WeightGate | None = None
        self.kv = kv
        self._inputs = inputs
        self._sampler = sampler
        self._uploads = uploads
        self.graphs = DecodeGraphs(max_graph_size) if max_graph_size else None

    @property
    def sink(self) -> int:
        return self._inputs.sink

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Capture a graph of every size, between steps."""
        if self.graphs is not None:
            self._inputs.park(self.graphs.sizes[-1])
            self.graphs.capture_all(self.decode)

    def follow(self, gate: WeightGate | None) -> None:
        """Run steps layer by layer behind weights that are still arriving, until the gate is open.

        None: no weights are arriving any more.
        """
        self._gate = gate

    def has_table(self, table: SamplingTable) -> bool:
        return self._sampler.has_table(table)

    @torch.inference_mode()
    def place_table(self, table: SamplingTable, memory: torch.Tensor | None) -> None:
        """Have a sampling table lie in `memory`, behind all launched steps; None: where torch finds some."""
        self._sampler.place_table(table, memory)

    def drop_table(self, table: SamplingTable) -> None:
        """Let go of a sampling table, because no plan from now on has a row that needs it."""
        self._sampler.drop_table(table)

    def free_row(self, table: SamplingTable, request_id: RequestId) -> None:
        """Let others have the row of a request in a sampling table, because no plan has a row of it."""
        self._sampler.free_row(table, request_id)

    def synchronize(self) -> None:
        """Wait for all steps that were launched."""
        if self.kv.is_cuda:
            torch.cuda.current_stream(self.kv.device).synchronize()

    def rebind(self, weights: Weights) -> None:
        """Follow weights that were moved; graphs are captured anew when next needed."""
        self.decoder.rebind(weights)
        if self.graphs is not None:
            self.graphs.forget()

    @torch.inference_mode()
    def copy_blocks(self, moves: Sequence[BlockMove]) -> None:
        """Queue copies of whole blocks behind all launched steps. No source is a target."""
        if not moves:
            return
        # To be sent as one, and kept on the host until the device has read it, as a step's numbers are.
        sources, targets = self._uploads.ints([m.source for m in moves], [m.target for m in moves])
        num_at_once = max(1, _COPY_BYTES // self.kv[0].nbytes)
        for first in range(0, len(moves), num_at_once):
            piece = slice(first, first + num_at_once)
            self.kv.index_copy_(0, targets[piece], self.kv.index_select(0, sources[piece]))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Queue a step on the device and return without waiting for it."""
        self._uploads.next_step()
        self._sampler.admit(plan.admissions)
        logits = self._forward(plan)
        rows = [SampleRow(row.slot, row.start + row.num_tokens, row.mask) for row in plan.rows if row.samples]
        samples = self._sampler.sample(logits[: len(rows)], rows)
        best_logits = samples.best_logits
        if not plan.rows[-1].samples:
            best_logits = torch.cat((best_logits, logits[len(rows) : len(plan.rows)].amax(-1)))
        assert len(best_logits) == len(plan.rows), f"not only the last row samples nothing: {plan.rows}"
        return PendingStep(samples, best_logits)

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        num_decode = plan.num_decode_rows
        if self._gate is not None and self._gate.is_open():
            self._gate = None
        # A graph reads all weights, so it has to wait for the last of them.
        if self.graphs is not None and self._gate is None and num_decode == len(plan.rows):
            size = self.graphs.size_for(num_decode)
            if size is not None:
                self._inputs.fill(plan, num_padded_rows=size - num_decode)
                return self.graphs.replay(size, self.decode)
        self._inputs.fill(plan)
        self._inputs.gather_tokens(num_decode, plan.num_tokens)
        return self._forward_eagerly(self._inputs.view(plan))

    def _forward_eagerly(self, step: StepInputs) -> torch.Tensor:
        gate = self._gate
        if gate is not None:
            gate.embed()
        hidden = self.decoder.run(self.decoder.embed(step), step, self.kv, gate)
        if gate is not None:
            gate.head()
        return self.decoder.logits(hidden)

    def decode(self, num_rows: int) -> torch.Tensor:
        """A step of decode rows only, as it is captured."""
        self._inputs.gather_tokens(num_rows, num_rows)
        step = self._inputs.decode_view(num_rows)
        return self.decoder.logits(self.decoder.run(self.decoder.embed(step), step, self.kv))
