from __future__ import annotations

import pytest
import torch

from hearth.kernels.decode_attention import (
    SplitScratch,
    choose_splits,
    decode_attention_reference,
    decode_attention_triton,
)
from hearth.kernels.paged import Heads, PagedRows
from hearth.kernels.prefill_attention import (
    prefill_attention_reference,
    prefill_attention_triton,
    prompt_tile_tokens,
)
from hearth.kernels.prompt_tiles import PrefillSpan, PromptTiles
from hearth.kernels.rotary import rotate_and_store_triton
from tests.kernels.cases import DEVICES, Paged, assert_close, crossed, random

HEADS = [
    Heads(2, 2, 64),
    Heads(6, 2, 80),
    Heads(5, 1, 96),
    Heads(4, 4, 128),
    Heads(9, 3, 20),
    Heads(20, 1, 64),
]
LENGTHS = [1, 15, 16, 17, 100, 205]
#: A window, and into how many parts the past is split.
SPLITS = [(None, 1), (None, 3), (None, 8), (40, 1), (130, 2)]


def scratch_for(rows: int, heads: Heads, device: str, max_splits: int = 8) -> SplitScratch:
    return SplitScratch(
        rows * heads.num_kv * max_splits,
        torch.full((rows * heads.num_q * max_splits * heads.dim,), float("nan"), device=device),
        torch.full((rows * heads.num_q * max_splits * 2,), float("nan"), device=device),
        torch.zeros(rows * heads.num_kv, dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize(
    ("window", "num_splits", "device", "dtype"), crossed(SPLITS, halves_on_cpu=[(None, 3), (130, 2)])
)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_kernel_equals_reference_in_recycled_memory(
    device: str, dtype: torch.dtype, heads: Heads, window: int | None, num_splits: int
) -> None:
    cache = Paged.build(LENGTHS, heads, device, dtype)
    cache.fill(LENGTHS)
    positions = torch.tensor(LENGTHS, dtype=torch.int32, device=device) - 1
    width = (heads.num_q + 2 * heads.num_kv) * heads.dim
    qkv = random(len(LENGTHS), width, device=device, dtype=dtype)
    expected = torch.empty(len(LENGTHS), heads.num_q * heads.dim, device=device)
    decode_attention_reference(
        qkv.float(),
        heads,
        cache.rows(positions),
        cache.kv.float(),
        window=window,
        out=expected,
    )
    out = torch.full_like(expected, float("nan"), dtype=dtype)
    scratch = scratch_for(len(LENGTHS), heads, device)

    decode_attention_triton(
        qkv, heads, cache.rows(positions), cache.kv,
        window=window, scratch=scratch, out=out, num_splits=num_splits,
    )  # fmt: skip

    assert_close(out, expected)
    assert not scratch.counters.any(), "counters must be zero between launches"


def test_splits_fill_the_device_and_no_more() -> None:
    assert choose_splits(1, 32, 528) == 16
    assert choose_splits(4, 32, 528) == 4
    assert choose_splits(64, 32, 528) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [Heads(32, 32, 128), Heads(32, 8, 128)], ids=str)
def test_blocks_past_the_32_bit_offset_are_written_and_read(heads: Heads) -> None:
    """Element offsets of a 7B's cache pass 2**31 at block 512: 32 layers of 131,072 elements each."""
    kv = torch.empty(2100, 32, 2, 16, heads.num_kv, heads.dim, dtype=torch.bfloat16, device="cuda")
    kv.view(torch.uint8).fill_(0xFF)
    layer = kv[:, 31]
    block_table = torch.tensor([[690, 513, 2099]], dtype=torch.int32, device="cuda")
    positions = torch.arange(41, dtype=torch.int32, device="cuda")
    rows = PagedRows(positions, torch.zeros_like(positions), block_table)
    qkv = random(41, (heads.num_q + 2 * heads.num_kv) * heads.dim, device="cuda", dtype=torch.bfloat16)
    expected = torch.empty(41, heads.num_q * heads.dim, device="cuda")

    rotate_and_store_triton(qkv, heads, rows, layer, cos_sin=None, norms=None)
    prefill_attention_reference(
        qkv.float(), heads, rows, [PrefillSpan(0, 41, 0)], layer.float(), window=None, out=expected
    )
    chunk, last = (torch.full_like(expected, float("nan"), dtype=torch.bfloat16) for _ in range(2))
    tiles = PromptTiles.of([PrefillSpan(0, 41, 0)], prompt_tile_tokens(heads, qkv.dtype, len(qkv)), "cuda")
    prefill_attention_triton(qkv, heads, rows, tiles, layer, window=None, out=chunk)
    decode_attention_triton(
        qkv, heads, rows, layer,
        window=None, scratch=scratch_for(41, heads, "cuda"), out=last,
    )  # fmt: skip

    assert int((~layer.isnan()).sum()) == 41 * 2 * heads.num_kv * heads.dim
    assert_close(chunk, expected)
    assert_close(last, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_same_bits_whichever_split_finishes_last(device: str) -> None:
    heads = Heads(8, 4, 64)
    # The interpreter takes its time, and one split after the other: a second launch shows that the first has
    # left everything as it was, and a third would show nothing more.
    lengths, num_launches = ([700, 650, 1, 64], 3) if device == "cuda" else ([150, 130, 1, 64], 2)
    cache = Paged.build(lengths, heads, device, torch.float16)
    cache.fill(lengths)
    positions = torch.tensor(lengths, dtype=torch.int32, device=device) - 1
    qkv = random(4, 16 * 64, device=device, dtype=torch.float16)
    scratch = scratch_for(4, heads, device)
    outs = []
    for _ in range(num_launches):
        out = torch.empty(4, 8 * 64, device=device, dtype=torch.float16)
        decode_attention_triton(
            qkv, heads, cache.rows(positions), cache.kv,
            window=None, scratch=scratch, out=out, num_splits=8,
        )  # fmt: skip
        outs.append(out)

    assert all(torch.equal(outs[0], out) for out in outs[1:])
