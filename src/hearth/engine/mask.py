"""Masks of guided rows: a bit per token, applied on the device. Knows no grammar and no other rule."""

from __future__ import annotations

import math

import torch


def apply_masks(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Forbid in `logits[rows]`, in place, the tokens whose bit is 0. `masks`: int32 [rows, words].

    What is allowed becomes finite, so that whatever a model computes the choice is an allowed token.
    """
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_forbidden = (masks.view(torch.uint8).unsqueeze(-1) & bits == 0).view(len(masks), -1)
    scores = logits[rows].nan_to_num_().masked_fill_(is_forbidden[:, : logits.shape[1]], -math.inf)
    logits.index_copy_(0, rows, scores)
