"""The token of each row of a step: sampled last by its slot (decode), or sent by the host (prompts)."""

from __future__ import annotations

import torch

from hearth.kernels.jit import cdiv, launch, runs_triton, tl, triton


def gather_tokens(
    sent: torch.Tensor,
    slots: torch.Tensor,
    num_decode: torch.Tensor,
    last_tokens: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    """Set `out[row] = last_tokens[slots[row]]` for the first `num_decode` rows (int32 [1], on the device, so
    that one captured launch serves every mix of rows), `sent[row]` for all others.
    """
    impl = gather_tokens_triton if runs_triton(out) else gather_tokens_reference
    impl(sent, slots, num_decode, last_tokens, out=out)


def gather_tokens_reference(
    sent: torch.Tensor,
    slots: torch.Tensor,
    num_decode: torch.Tensor,
    last_tokens: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    count = int(num_decode)
    out[:count] = last_tokens[slots[:count]]
    out[count:] = sent[count:]


def gather_tokens_triton(
    sent: torch.Tensor,
    slots: torch.Tensor,
    num_decode: torch.Tensor,
    last_tokens: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    num_rows, block = out.shape[0], 256
    launch(
        _gather_tokens_kernel,
        (cdiv(num_rows, block),),
        out,
        sent,
        slots,
        num_decode,
        last_tokens,
        num_rows,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _gather_tokens_kernel(out, sent, slots, num_decode, last_tokens, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    is_decode = is_row & (row < tl.load(num_decode))
    slot = tl.load(slots + row, is_decode, other=0)
    last = tl.load(last_tokens + slot, is_decode, other=0).to(tl.int32)
    token = tl.load(sent + row, is_row & (is_decode == 0), other=0)
    tl.store(out + row, tl.where(is_decode, last, token), is_row)
