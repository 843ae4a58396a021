"""Repetition, presence and frequency penalties. Knows no other rule of sampling.

The counts live on the device, because the host learns a sampled token only after the next step is planned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hearth.core.sizes import penalty_buffers, sampled_pieces
from hearth.core.types import SamplingParams
from hearth.engine.upload import Uploads
from hearth.models.buffers import zeroed
from hearth.policy.batch.plan import Admission


def is_penalised(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


class Penalties:
    """Token counts of penalised requests, a row each. Mutable; used by its `OptionalTable`."""

    def __init__(
        self, num_rows: int, vocab_size: int, uploads: Uploads, memory: torch.Tensor | None = None
    ) -> None:
        """`memory` (uint8) has room for the table; None: torch allocates it."""
        self.num_rows = num_rows
        self._vocab_size = vocab_size
        self._uploads = uploads
        tensors = zeroed(penalty_buffers(num_rows, vocab_size), uploads.device, memory)
        #: Whether the prompt of a request holds a token.
        self._in_prompt = tensors["in_prompt"]
        #: How often a request has sampled a token.
        self._num_sampled = tensors["num_sampled"]
        #: Repetition, presence and frequency penalty of each request.
        self._weights = tensors["weights"]

    def copy(self, other: Penalties) -> None:
        """Take over all that another table with no more rows holds."""
        self._in_prompt[: other.num_rows].copy_(other._in_prompt)
        self._num_sampled[: other.num_rows].copy_(other._num_sampled)
        self._weights[: other.num_rows].copy_(other._weights)

    def admit(self, admissions: Sequence[Admission], rows: Sequence[int]) -> None:
        """Count anew from the tokens of the admissions, a row for each, whoever had the rows before."""
        prompts, outputs, weights = [], [], []
        for admission, row in zip(admissions, rows, strict=True):
            start, sampling = row * self._vocab_size, admission.sampling
            prompts += [start + token for token in set(admission.tokens[: admission.num_prompt_tokens])]
            outputs += [start + token for token in admission.tokens[admission.num_prompt_tokens :]]
            weights += [sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty]
        where, in_prompt, sampled = self._uploads.ints(rows, prompts, outputs)
        self._in_prompt.index_fill_(0, where, False).view(-1).index_fill_(0, in_prompt, True)
        self._count(self._num_sampled.index_fill_(0, where, 0), sampled)
        self._weights.index_copy_(0, where, self._uploads.floats(weights).view(-1, 3))

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, table_rows: torch.Tensor) -> None:
        """Penalise `logits[rows]` in place by the counts of `table_rows`."""
        for piece in sampled_pieces(len(rows), self._vocab_size):
            self._apply(logits, rows[piece], table_rows[piece])

    def _apply(self, logits: torch.Tensor, rows: torch.Tensor, table_rows: torch.Tensor) -> None:
        """Penalise rows of which all temporaries may be there at a time."""
        repetition, presence, frequency = self._weights[table_rows].unsqueeze(-1).unbind(1)
        num_sampled = self._num_sampled[table_rows]
        is_sampled = num_sampled > 0
        scores = logits[rows]
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(is_sampled | self._in_prompt[table_rows], repeated, scores)
        scores -= frequency * num_sampled + presence * is_sampled
        logits.index_copy_(0, rows, scores)

    def record(self, table_rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count one more sampled token for each row."""
        self._count(self._num_sampled, table_rows * self._vocab_size + tokens)

    @staticmethod
    def _count(table: torch.Tensor, entries: torch.Tensor) -> None:
        table.view(-1).scatter_add_(0, entries, torch.ones_like(entries, dtype=torch.int32))
