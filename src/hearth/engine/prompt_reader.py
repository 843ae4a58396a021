"""Prompt readings: pooled hidden states, and logprobs of prompt tokens. Runs no layers.

The head runs over as many rows at a time as a step's logits hold, and only the requested values are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from hearth.core.sizes import padded_size, sampled_pieces
from hearth.core.types import MAX_LOGPROBS, Pooling, PromptLogprobs, PromptReading, RequestId
from hearth.engine.upload import Uploads
from hearth.models.decoder import Decoder
from hearth.policy.batch.plan import RowReading, StepPlan

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowRead:
    reading: RowReading  #: what was requested
    pooled: Floats | None  #: the hidden state of its last token, or the sum of all
    logprobs: Floats  #: [targets], as is the next
    ranks: npt.NDArray[np.int32]
    top_ids: npt.NDArray[np.int32]  #: [targets, top], as is the next
    top_logprobs: Floats

    @property
    def is_finite(self) -> bool:
        is_pooled_finite = self.pooled is None or bool(np.isfinite(self.pooled).all())
        return is_pooled_finite and bool(np.isfinite(self.logprobs).all())


@dataclass(frozen=True, slots=True)
class StepReads:
    """The readings of one step, as tensors over its rows. Copies to the host may be under way."""

    readings: list[tuple[int, RowReading]]  #: with the row's index in the plan, ascending
    pooled: torch.Tensor  #: float32 [rows that are pooled, hidden]
    logprobs: torch.Tensor  #: float32 [targets], rows concatenated
    ranks: torch.Tensor  #: int32 [targets]
    top_ids: torch.Tensor  #: int32 [targets, the most that a row requests]
    top_logprobs: torch.Tensor  #: float32, likewise

    def rows(self) -> Iterator[tuple[int, RowRead]]:
        """Yield the reading of each row with its index in the plan. All copies must have arrived."""
        pooled = iter(self.pooled.numpy())
        columns = [one.numpy() for one in (self.logprobs, self.ranks, self.top_ids, self.top_logprobs)]
        begin = 0
        for index, reading in self.readings:
            piece, num_top = slice(begin, begin + len(reading.targets)), reading.num_logprobs or 0
            logprobs, ranks, top_ids, top_logprobs = (column[piece] for column in columns)
            vector = None if reading.pooling is None else next(pooled)
            best = top_ids[:, :num_top], top_logprobs[:, :num_top]
            yield index, RowRead(reading, vector, logprobs, ranks, *best)
            begin = piece.stop


class PromptReader:
    def __init__(self, decoder: Decoder, uploads: Uploads) -> None:
        self._decoder, self._uploads = decoder, uploads

    def read(self, plan: StepPlan, hidden: torch.Tensor, sizes: Sequence[int]) -> StepReads:
        """Read what the rows of a plan request from `hidden`, as `Decoder.finish` returns it. Stays on the
        device.

        `sizes`: row counts that the head may run with; empty: any. Overwrites the decoder's logits.
        """
        readings: list[tuple[int, RowReading]] = []
        pooled: list[torch.Tensor] = []
        at: list[int] = []
        targets: list[int] = []
        ends = accumulate((row.num_tokens for row in plan.prompts), initial=plan.num_decode_rows)
        for number, (begin, row) in enumerate(zip(ends, plan.prompts, strict=False)):
            if (reading := row.reading) is None:
                continue
            readings.append((plan.num_decode_rows + number, reading))
            at += range(begin, begin + len(reading.targets))
            targets += reading.targets
            match reading.pooling:
                case Pooling.LAST:
                    pooled.append(hidden[begin + row.num_tokens - 1].float())
                case Pooling.MEAN:
                    pooled.append(hidden[begin : begin + row.num_tokens].sum(0, dtype=torch.float32))
                case None:
                    pass
        num_top = max((reading.num_logprobs or 0 for _, reading in readings), default=0)
        vectors = torch.stack(pooled) if pooled else hidden.new_empty((0, 0), dtype=torch.float32)
        return StepReads(readings, vectors, *self._logprobs(hidden, at, targets, num_top, sizes))

    def _logprobs(
        self,
        hidden: torch.Tensor,
        at: Sequence[int],
        targets: Sequence[int],
        num_top: int,
        sizes: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        num_most, vocab_size = self._decoder.logits.shape
        logprobs = hidden.new_empty(len(at), dtype=torch.float32)
        ranks = hidden.new_empty(len(at), dtype=torch.int32)
        top_ids = hidden.new_empty(len(at), num_top, dtype=torch.int32)
        top_logprobs = hidden.new_empty(len(at), num_top, dtype=torch.float32)
        if at:
            rows, wanted = self._uploads.ints(at, targets)
            for piece in _pieces(len(at), num_most, vocab_size):
                logits = self._logits(hidden, rows[piece], sizes)
                own = logits.gather(1, wanted[piece].unsqueeze(-1))
                log_sum = logits.logsumexp(-1, keepdim=True)
                logprobs[piece] = (own - log_sum).squeeze(-1)
                ranks[piece] = (logits > own).sum(-1, dtype=torch.int32) + 1
                if num_top:
                    # The maximum that a request may ask for, as in the sampler: ties are broken alike.
                    best = logits.topk(min(MAX_LOGPROBS, vocab_size))
                    top_ids[piece] = best.indices[:, :num_top].int()
                    top_logprobs[piece] = best.values[:, :num_top] - log_sum
        return logprobs, ranks, top_ids, top_logprobs

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return float32 logits of rows, padded to the sizes of steps so that no other kernels are needed."""
        num_rows = len(rows)
        chosen = hidden.index_select(0, rows)
        if sizes and (num_padded := padded_size(sizes, num_rows) - num_rows):
            chosen = torch.cat((chosen, hidden[:1].expand(num_padded, -1)))
        logits = self._decoder.head(chosen)[:num_rows]
        if logits.dtype == torch.float32:
            return logits
        return self._decoder.wide_logits[:num_rows].copy_(logits)


def _pieces(num_rows: int, num_most: int, vocab_size: int) -> Iterator[slice]:
    for piece in sampled_pieces(num_rows, vocab_size):
        for begin in range(piece.start, min(piece.stop, num_rows), num_most):
            yield slice(begin, min(begin + num_most, piece.stop, num_rows))


class ReadingPieces:
    """Readings of prompts computed in chunks. Mutable; written by the engine, in step order."""

    def __init__(self) -> None:
        #: By live request with a reading, from its first row on.
        self._pieces: dict[RequestId, list[RowRead]] = {}
        #: By the same: the first step with a row of it. Earlier rows belong to a request that had the id
        #: before.
        self._first_steps: dict[RequestId, int] = {}

    def __len__(self) -> int:
        return len(self._pieces)

    def expect(self, request_id: RequestId, first_step: int) -> None:
        self._pieces[request_id], self._first_steps[request_id] = [], first_step

    def forget(self, request_id: RequestId) -> None:
        if self._pieces.pop(request_id, None) is not None:
            del self._first_steps[request_id]

    def take(self, plan: StepPlan, reads: Mapping[int, RowRead]) -> dict[RequestId, PromptReading]:
        complete: dict[RequestId, PromptReading] = {}
        for index, read in reads.items():
            row = plan.prompts[index - plan.num_decode_rows]
            pieces = self._pieces.get(row.request_id)
            if pieces is None or plan.step_id < self._first_steps[row.request_id]:
                continue  # it has ended
            if row.start == 0:
                pieces.clear()  # it was preempted, and is read from the beginning again
            pieces.append(read)
            if row.samples:
                complete[row.request_id] = _joined(pieces)
                self.forget(row.request_id)
        return complete


def _joined(pieces: Sequence[RowRead]) -> PromptReading:
    has_logprobs = pieces[-1].reading.num_logprobs is not None
    return PromptReading(_embedding(pieces), _logprobs(pieces) if has_logprobs else None)


def _embedding(pieces: Sequence[RowRead]) -> bytes | None:
    pooled = [piece.pooled for piece in pieces if piece.pooled is not None]
    if not pooled:
        return None
    vector = np.sum(pooled, axis=0, dtype=np.float64)  # the mean has the same direction
    length = float(np.linalg.norm(vector)) or 1.0
    return (vector / length).astype("<f4").tobytes()


def _logprobs(pieces: Sequence[RowRead]) -> PromptLogprobs:
    return PromptLogprobs(
        pieces[-1].top_ids.shape[1],
        np.concatenate([piece.logprobs for piece in pieces]).astype("<f4").tobytes(),
        np.concatenate([piece.ranks for piece in pieces]).astype("<i4").tobytes(),
        np.concatenate([piece.top_ids for piece in pieces]).astype("<i4").tobytes(),
        np.concatenate([piece.top_logprobs for piece in pieces]).astype("<f4").tobytes(),
    )
