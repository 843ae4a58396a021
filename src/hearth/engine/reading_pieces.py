"""Keeps what was read of prompts that are computed in pieces, until the last. Reads nothing by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hearth.core.types import PromptLogprobs, PromptReading, RequestId
from hearth.engine.prompt_reader import RowRead
from hearth.policy.batch.plan import StepPlan


class ReadingPieces:
    """Mutable; written by the engine, in the order of its steps."""

    def __init__(self) -> None:
        #: By request that is here and of which something is wanted, from its first row on.
        self._pieces: dict[RequestId, list[RowRead]] = {}
        #: By the same: the first step that may have a row of it. Those before are of who had its id before.
        self._first_steps: dict[RequestId, int] = {}

    def __len__(self) -> int:
        """How many requests something is still to be read of."""
        return len(self._pieces)

    def expect(self, request_id: RequestId, first_step: int) -> None:
        """Keep what is read of a request by steps from this one on."""
        self._pieces[request_id], self._first_steps[request_id] = [], first_step

    def forget(self, request_id: RequestId) -> None:
        """Keep nothing of a request any more, though steps that read it may be in flight."""
        if self._pieces.pop(request_id, None) is not None:
            del self._first_steps[request_id]

    def take(self, plan: StepPlan, reads: Mapping[int, RowRead]) -> dict[RequestId, PromptReading]:
        """Add what a step has read, by row, and return what is complete with it."""
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
    """Return what all rows of a prompt tell together."""
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
