"""Top-k and top-p as one cutoff per row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hearth.core.sizes import sampled_pieces

#: How many logits to rank at first on a CPU, where reading the result is cheap. A nucleus seldom has more.
_FIRST_WIDTHS = (1024, 8192)


def rank_cutoff(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, top_ks: Sequence[int]
) -> torch.Tensor:
    """Return the lowest logit that top-k and then top-p keep in each row: [n, 1].

    Ties with it are kept too, so the result does not depend on how a sort orders equals. `top_k` and `top_p`
    are [n, 1], the vocabulary size and infinity if off; `top_ks` is `top_k` on the host.
    """
    return torch.cat(
        [
            _rank(logits[piece], top_k[piece], top_p[piece], top_ks[piece])
            for piece in sampled_pieces(*logits.shape)
        ]
    )


def _rank(
    logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, top_ks: Sequence[int]
) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    log_sum = logits.logsumexp(-1, keepdim=True) if max(top_ks) == vocab_size else None
    widths = _widths(top_ks, vocab_size, logits.device)
    for width in widths:
        ranked = logits.topk(width).values if width < vocab_size else logits.sort(descending=True).values
        in_top_k = torch.arange(width, device=logits.device) < top_k
        log_kept = torch.where(in_top_k, ranked, -math.inf).logsumexp(-1, keepdim=True)
        log_mass = log_kept if log_sum is None else torch.where(top_k < vocab_size, log_kept, log_sum)
        mass = (ranked - log_mass).exp_()
        kept = in_top_k & (mass.cumsum(-1) - mass < top_p)
        if width == widths[-1] or not kept[:, -1].any():
            break
    return ranked.gather(1, kept.sum(-1, keepdim=True).clamp_(min=1) - 1)


def _widths(top_ks: Sequence[int], vocab_size: int, device: torch.device) -> tuple[int, ...]:
    """Return how many logits to rank at each attempt, until the last is not kept. The CPU tries few at first;
    elsewhere reading the result would block on the device, so all are ranked at once.
    """
    widest = max((top_k for top_k in top_ks if top_k < vocab_size), default=0)
    if max(top_ks) < vocab_size:
        return (widest,)
    first = _FIRST_WIDTHS if device.type == "cpu" else ()
    return (*(width for width in first if widest < width < vocab_size), vocab_size)
