from __future__ import annotations

import pytest
import torch

from hearth.kernels.prefill_attention import (
    Span,
    fresh_attention,
    prefill_attention_reference,
    prefill_attention_triton,
)
from hearth.kernels.rotary import Heads
from tests.kernels.cases import DTYPES, Paged, assert_close, random

HEADS = [Heads(2, 2, 64), Heads(6, 2, 80), Heads(5, 1, 96), Heads(2, 2, 128), Heads(9, 3, 20)]


@pytest.mark.parametrize(("device", "dtype"), DTYPES)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 33, 7])
def test_kernel_equals_reference_for_chunks_and_prefixes(
    device: str, dtype: torch.dtype, heads: Heads, window: int | None
) -> None:
    starts, counts = [0, 16, 5, 0, 37], [1, 70, 33, 65, 3]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    cache = Paged.build(lengths, heads, device, dtype)
    cache.fill(lengths)
    num_decode_rows = 2
    begins = [num_decode_rows]
    for count in counts:
        begins.append(begins[-1] + count)
    spans = [Span(*span) for span in zip(begins, counts, starts, strict=False)]
    slots = torch.zeros(begins[-1], dtype=torch.int32, device=device)
    positions = torch.zeros_like(slots)
    for span, slot in zip(spans, cache.slots, strict=True):
        slots[span.begin : span.begin + span.num_tokens] = slot
        positions[span.begin : span.begin + span.num_tokens] = torch.arange(
            span.start, span.start + span.num_tokens
        )
    width = (heads.num_q + 2 * heads.num_kv) * heads.dim
    qkv = random(begins[-1], width, device=device, dtype=dtype)
    expected = torch.full((begins[-1], heads.num_q * heads.dim), 7.0, device=device)
    prefill_attention_reference(
        qkv.float(), heads, spans, slots, cache.block_table, cache.kv.float(), window=window, out=expected
    )
    out = torch.full_like(expected, 7.0, dtype=dtype)

    prefill_attention_triton(
        qkv, heads, spans, torch.tensor(begins, dtype=torch.int32, device=device), positions, slots,
        cache.block_table, cache.kv, window=window, out=out,
    )  # fmt: skip

    assert (out[:num_decode_rows] == 7.0).all(), "rows outside of all spans are left alone"
    assert_close(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "heads", [Heads(8, 8, 128), Heads(9, 3, 64), Heads(6, 2, 80), Heads(8, 1, 96)], ids=str
)
def test_fresh_prompts_through_the_library_equal_the_reference(dtype: torch.dtype, heads: Heads) -> None:
    spans = [Span(3, 600, 0), Span(603, 513, 0)]
    qkv = random(1116, (heads.num_q + 2 * heads.num_kv) * heads.dim, device="cuda", dtype=dtype)
    lengths = [600, 513]
    cache = Paged.build(lengths, heads, "cuda", torch.float32)
    slots = torch.cat([cache.slots[:1].expand(603), cache.slots[1:].expand(513)])
    for span, slot in zip(spans, cache.slots.tolist(), strict=True):
        at = torch.arange(span.num_tokens, device="cuda")
        kv = qkv[span.begin : span.begin + span.num_tokens, heads.num_q * heads.dim :].float()
        blocks = cache.block_table[slot, at // 16].long()
        cache.kv[blocks, :, at % 16] = kv.view(-1, 2, heads.num_kv, heads.dim)
    expected = torch.zeros(1116, heads.num_q * heads.dim, device="cuda")
    prefill_attention_reference(
        qkv.float(), heads, spans, slots, cache.block_table, cache.kv, window=None, out=expected
    )
    out = torch.zeros_like(expected, dtype=dtype)

    fresh_attention(qkv, heads, spans, out=out)

    assert_close(out, expected)
