"""The inputs of one step: tokens, their positions, their KV blocks; as device tensors and launch parameters.

rows:   | decode, one token each | span | span | ... | padding |    a span: part of one sequence's prompt
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hearth.kernels.adapter_rows import AdapterRows
from hearth.kernels.paged import PagedRows
from hearth.kernels.prompt_tiles import PrefillSpan, PromptTiles


@dataclass(frozen=True, slots=True)
class StepInputs:
    tokens: torch.Tensor  #: int32 or int64 [rows]
    rows: PagedRows
    #: The first of `rows`, which may decode; a captured step has more of them than usually do.
    decode_rows: PagedRows
    num_decode: torch.Tensor | None  #: int32 [1], on the device: how many of them decode; None: all
    spans: tuple[PrefillSpan, ...]  #: for the torch references
    tiles: PromptTiles | None  #: the same on the device, for the kernels; None: no prompts
    logit_rows: torch.Tensor | None  #: the rows that need logits; None: all
    adapters: AdapterRows | None = None  #: of the rows; None: no row has one
    logit_adapters: AdapterRows | None = None  #: the same of `logit_rows`, by their index there
