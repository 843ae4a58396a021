"""The inputs of one step: which tokens, where in their sequences, where their KV lies.

    rows:   | decode, one token each | span | span | ... | padding |    a span: a run of one sequence's prompt

They are device tensors and the few host values that shape launches. Knows no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hearth.kernels.adapter_rows import AdapterRows
from hearth.kernels.paged import PagedRows
from hearth.kernels.prompt_tiles import PrefillSpan, PromptTiles


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of one step, as the decoder reads them."""

    tokens: torch.Tensor  #: int32 or int64 [rows]
    rows: PagedRows
    #: The first of `rows`, of which all may decode; a captured step has more of them than mostly do.
    decode_rows: PagedRows
    num_decode: torch.Tensor | None  #: int32 [1], on the device: how many of them do; None: all of them
    spans: tuple[PrefillSpan, ...]  #: for the torch references
    tiles: PromptTiles | None  #: the same on the device, for the kernels; None: no prompts
    logit_rows: torch.Tensor | None  #: the rows whose logits are wanted; None: all of them
    adapters: AdapterRows | None = None  #: of the rows; None: no row has one, and the model runs bare
    logit_adapters: AdapterRows | None = None  #: the same of `logit_rows`, by their index there
