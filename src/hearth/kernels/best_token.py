"""The highest logit of each row and its token: by chunk in one launch, merged in a second.

All memory is at fixed addresses, so that both are part of a captured step.
"""

from __future__ import annotations

import torch

from hearth.core.sizes import LOGIT_CHUNK
from hearth.kernels.jit import launch, next_power_of_2, runs_triton, tl, triton
from hearth.kernels.overlap import wait_for_inputs

_BLOCK = 2048


def best_tokens(
    logits: torch.Tensor,
    slots: torch.Tensor,
    *,
    chosen: torch.Tensor,
    last_tokens: torch.Tensor,
    parts: torch.Tensor,
) -> None:
    """Set `chosen[row]` (int32 [rows, 2]) to the token of the highest logit and its bits in float32.

    Of equals it is the first; NaN is higher than all. The token is also written to the row's slot of
    `last_tokens` (int64). `parts` is scratch of `sampler_buffers`. There may be more slots than rows.
    """
    impl = best_tokens_triton if runs_triton(logits) else best_tokens_reference
    impl(logits, slots, chosen=chosen, last_tokens=last_tokens, parts=parts)


def best_tokens_reference(
    logits: torch.Tensor,
    slots: torch.Tensor,
    *,
    chosen: torch.Tensor,
    last_tokens: torch.Tensor,
    parts: torch.Tensor,
) -> None:
    tokens = highest(logits)
    best = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    chosen[:, 0], chosen[:, 1] = tokens, best.float().view(torch.int32)
    last_tokens.index_copy_(0, slots[: len(logits)].long(), tokens)


def highest(rows: torch.Tensor) -> torch.Tensor:
    """Return the column of each row's highest number, as `best_tokens`. NumPy is faster than torch here."""
    if rows.device.type == "cpu":
        return torch.from_numpy(rows.float().numpy().argmax(-1))
    return rows.max(-1).indices


def best_tokens_triton(
    logits: torch.Tensor,
    slots: torch.Tensor,
    *,
    chosen: torch.Tensor,
    last_tokens: torch.Tensor,
    parts: torch.Tensor,
) -> None:
    (num_rows, vocab_size), num_chunks = logits.shape, parts.shape[1]
    assert logits.stride(1) == 1, f"{logits.stride()=}"
    assert chosen.is_contiguous(), f"{chosen.stride()=}"
    assert parts.is_contiguous(), f"{parts.stride()=}"
    assert num_rows <= len(parts), f"{num_rows=} {parts.shape=}"
    assert num_chunks * LOGIT_CHUNK >= vocab_size, f"{vocab_size=} {parts.shape=}"
    if not num_rows:
        return
    launch(
        _best_of_chunk_kernel,
        (num_rows, num_chunks),
        parts,
        logits,
        logits.stride(0),
        vocab_size,
        CHUNK=LOGIT_CHUNK,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    launch(
        _best_token_kernel,
        (num_rows,),
        chosen,
        last_tokens,
        parts,
        slots,
        num_chunks,
        CHUNKS=next_power_of_2(num_chunks),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["stride", "vocab_size"])
def _best_of_chunk_kernel(
    parts,
    logits,
    stride,
    vocab_size,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    begin = chunk * CHUNK
    end = tl.minimum(begin + CHUNK, vocab_size)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_token = begin + tl.zeros((BLOCK,), tl.int32)
    for at in range(begin, end, BLOCK):
        token = at + lane
        logit = tl.load(logits + row * stride + token, token < end, other=-float("inf")).to(tl.float32)
        # NaN is kept.
        is_better = ((logit > best) | (logit != logit)) & (best == best)
        best = tl.where(is_better, logit, best)
        best_token = tl.where(is_better, token, best_token)
    logit, token = _highest(best, best_token, end - 1)
    out = parts + (row * tl.num_programs(1) + chunk) * 2
    tl.store(out, token)
    tl.store(out + 1, logit.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["num_chunks"])
def _best_token_kernel(
    chosen, last_tokens, parts, slots, num_chunks, CHUNKS: tl.constexpr, OVERLAPS: tl.constexpr
):
    wait_for_inputs(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    part, is_chunk = parts + (row * num_chunks + chunk) * 2, chunk < num_chunks
    tokens = tl.load(part, is_chunk, other=0x7FFFFFFF)
    bits = tl.load(part + 1, is_chunk, other=0)
    logits = tl.where(is_chunk, bits.to(tl.float32, bitcast=True), -float("inf"))
    logit, token = _highest(logits, tokens, 0x7FFFFFFF)
    tl.store(chosen + 2 * row, token)
    tl.store(chosen + 2 * row + 1, logit.to(tl.int32, bitcast=True))
    tl.store(last_tokens + tl.load(slots + row), token.to(tl.int64))


@triton.jit
def _highest(logits, tokens, most):
    is_nan = logits != logits
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    highest = tl.max(tl.where(is_nan, -float("inf"), logits), 0)
    is_best = tl.where(has_nan, is_nan, logits == highest)
    token = tl.min(tl.where(is_best, tokens, most), 0)
    return tl.where(has_nan, float("nan"), highest), token
