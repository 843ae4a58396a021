"""Logit bias and the allowed-token mask: one row to add per request. Knows no other rule of sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hearth.core.sizes import bias_buffers, sampled_pieces
from hearth.core.types import SamplingParams
from hearth.engine.upload import Uploads
from hearth.models.buffers import zeroed
from hearth.policy.batch.plan import Admission


def is_biased(sampling: SamplingParams) -> bool:
    return bool(sampling.logit_bias) or sampling.allowed_token_ids is not None


class LogitBias:
    """The bias of requests that have one, a row each. Mutable; used by its `OptionalTable`."""

    def __init__(
        self, num_rows: int, vocab_size: int, uploads: Uploads, memory: torch.Tensor | None = None
    ) -> None:
        """`memory` (uint8) has room for the table; None: torch allocates it."""
        self.num_rows = num_rows
        self._uploads = uploads
        #: The number added to each logit; minus infinity forbids a token.
        self._bias = zeroed(bias_buffers(num_rows, vocab_size), uploads.device, memory)["bias"]

    def copy(self, other: LogitBias) -> None:
        """Take over all that another table with no more rows holds."""
        self._bias[: other.num_rows].copy_(other._bias)

    def admit(self, admissions: Sequence[Admission], rows: Sequence[int]) -> None:
        """Write the rows of these requests anew, whoever had them before."""
        vocab_size = self._bias.shape[1]
        free, masked, entries = [], [], []
        values: list[float] = []
        for admission, row in zip(admissions, rows, strict=True):
            sampling = admission.sampling
            bias = sampling.bias_by_token
            if sampling.allowed_token_ids is None:
                free.append(row)
            else:
                masked.append(row)
                bias = {token: bias.get(token, 0.0) for token in sampling.allowed_token_ids}
            assert all(0 <= token < vocab_size for token in bias), f"{vocab_size=} {bias=}"
            entries += [row * vocab_size + token for token in bias]
            values += bias.values()
        free_rows, masked_rows, where = self._uploads.ints(free, masked, entries)
        self._bias.index_fill_(0, free_rows, 0.0).index_fill_(0, masked_rows, -math.inf)
        self._bias.view(-1).index_copy_(0, where, self._uploads.floats(values))

    def apply(self, logits: torch.Tensor, rows: torch.Tensor, table_rows: torch.Tensor) -> None:
        """Add the bias of `table_rows` to `logits[rows]` in place."""
        for piece in sampled_pieces(len(rows), logits.shape[1]):
            logits.index_add_(0, rows[piece], self._bias[table_rows[piece]])
