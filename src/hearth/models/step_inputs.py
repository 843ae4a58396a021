"""The inputs of one step: which tokens, where in their sequences, where their KV lies.

    rows:   | decode, one token each | span | span | ...        a span is a run of one sequence's prompt

They are device tensors and the few host values that shape launches. Knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hearth.kernels.paged import PagedRows
from hearth.kernels.prefill_attention import PrefillSpan


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one step, as the decoder reads them."""

    tokens: torch.Tensor  #: int64 [rows]
    rows: PagedRows
    decode_rows: PagedRows  #: the first of `rows`
    spans: tuple[PrefillSpan, ...]
    span_begins: torch.Tensor  #: int32 [spans + 1]
    logit_rows: torch.Tensor | None  #: int64: the rows whose logits are wanted; None: all of them
