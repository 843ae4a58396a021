from __future__ import annotations

import pytest
import torch

from hearth.kernels.paged import Heads, PagedRows
from hearth.kernels.prefill_attention import (
    prefill_attention,
    prefill_attention_reference,
    prefill_attention_triton,
    prompt_tile_tokens,
)
from hearth.kernels.prompt_tiles import PrefillSpan, PromptTiles
from hearth.kernels.rotary import rotate_and_store_reference
from tests.kernels.cases import Paged, assert_close, crossed, random

HEADS = [Heads(2, 2, 64), Heads(6, 2, 80), Heads(5, 1, 96), Heads(2, 2, 128), Heads(9, 3, 20)]
WINDOWS = [None, 33, 7]


@pytest.mark.parametrize(
    ("window", "device", "dtype"), crossed([(window,) for window in WINDOWS], halves_on_cpu=[(33,)])
)
@pytest.mark.parametrize("heads", HEADS, ids=str)
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
    spans = [PrefillSpan(*span) for span in zip(begins, counts, starts, strict=False)]
    slots = torch.zeros(begins[-1], dtype=torch.int32, device=device)
    positions = torch.zeros_like(slots)
    for span, slot in zip(spans, cache.slots, strict=True):
        slots[span.begin : span.begin + span.num_tokens] = slot
        positions[span.begin : span.begin + span.num_tokens] = torch.arange(
            span.start, span.start + span.num_tokens
        )
    rows = PagedRows(positions, slots, cache.block_table)
    width = (heads.num_q + 2 * heads.num_kv) * heads.dim
    qkv = random(begins[-1], width, device=device, dtype=dtype)
    expected = torch.full((begins[-1], heads.num_q * heads.dim), 7.0, device=device)
    prefill_attention_reference(
        qkv.float(), heads, rows, spans, cache.kv.float(), window=window, out=expected
    )
    out = torch.full_like(expected, 7.0, dtype=dtype)

    tiles = PromptTiles.of(spans, prompt_tile_tokens(heads, dtype), device)
    prefill_attention_triton(qkv, heads, rows, tiles, cache.kv, window=window, out=out)

    assert (out[:num_decode_rows] == 7.0).all(), "rows outside of all spans are left alone"
    assert_close(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "heads", [Heads(8, 8, 128), Heads(9, 3, 64), Heads(6, 2, 80), Heads(8, 1, 96)], ids=str
)
@pytest.mark.parametrize("counts", [[1100], [1030, 1024]])
def test_long_fresh_prompts_equal_the_reference(dtype: torch.dtype, heads: Heads, counts: list[int]) -> None:
    begins = [sum(counts[:at]) for at in range(len(counts) + 1)]
    spans = [PrefillSpan(begin, count, 0) for begin, count in zip(begins, counts, strict=False)]
    qkv = random(begins[-1], (heads.num_q + 2 * heads.num_kv) * heads.dim, device="cuda", dtype=dtype)
    cache = Paged.build(counts, heads, "cuda", dtype)
    slots = torch.repeat_interleave(cache.slots, torch.tensor(counts, device="cuda"))
    positions = torch.cat([torch.arange(count, dtype=torch.int32, device="cuda") for count in counts])
    rows = PagedRows(positions, slots, cache.block_table)
    rotate_and_store_reference(qkv, heads, rows, cache.kv, cos_sin=None, norms=None)
    expected = torch.zeros(begins[-1], heads.num_q * heads.dim, device="cuda")
    prefill_attention_reference(qkv.float(), heads, rows, spans, cache.kv.float(), window=None, out=expected)
    tiles = PromptTiles.of(spans, prompt_tile_tokens(heads, dtype), "cuda")
    out = torch.full_like(expected, float("nan"), dtype=dtype)

    prefill_attention(qkv, heads, rows, spans, tiles, cache.kv, window=None, out=out)

    assert_close(out, expected)
