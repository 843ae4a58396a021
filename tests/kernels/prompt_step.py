"""A step of decode rows, spans of prompts and padding over paged KV, for tests of attention over prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hearth.core.sizes import TILE_FIELDS
from hearth.kernels.paged import Heads, PagedRows
from hearth.kernels.prefill_attention import prefill_attention_reference
from hearth.kernels.prompt_tiles import PrefillSpan, PromptTiles
from tests.kernels.cases import Paged, random

NUM_DECODE, NUM_PADDING = 2, 3
UNTOUCHED = 7.0


@dataclass(frozen=True, slots=True)
class PromptStep:
    """The inputs of attention. KV is written up to each span's end, and full of NaN behind it."""

    heads: Heads
    spans: Sequence[PrefillSpan]
    rows: PagedRows
    qkv: torch.Tensor
    kv: torch.Tensor

    @staticmethod
    def build(
        chunks: Sequence[tuple[int, int]],
        heads: Heads,
        device: str,
        dtype: torch.dtype,
        block_tokens: int = 16,
    ) -> PromptStep:
        """Make a step of chunks, each a number of tokens behind those that are in KV already."""
        lengths = [start + count for start, count in chunks]
        cache = Paged.build(lengths, heads, device, dtype, block_tokens=block_tokens)
        cache.fill(lengths)
        spans, begin = [], NUM_DECODE
        for start, count in chunks:
            spans.append(PrefillSpan(begin, count, start))
            begin += count
        num_rows = begin + NUM_PADDING
        dummy_slot = len(lengths)
        slots = torch.full((num_rows,), dummy_slot, dtype=torch.int32, device=device)
        positions = torch.zeros_like(slots)
        for span, slot in zip(spans, cache.slots, strict=True):
            slots[span.rows] = slot
            positions[span.rows] = torch.arange(span.start, span.start + span.num_tokens, device=device).int()
        width = (heads.num_q + 2 * heads.num_kv) * heads.dim
        qkv = random(num_rows, width, device=device, dtype=dtype)
        return PromptStep(heads, spans, PagedRows(positions, slots, cache.block_table), qkv, cache.kv)

    def expected(self, window: int | None = None) -> torch.Tensor:
        """Return what attention gives in float32; rows of no span are `UNTOUCHED`."""
        out = self._out(torch.float32)
        prefill_attention_reference(
            self.qkv.float(), self.heads, self.rows, self.spans, self.kv.float(), window=window, out=out
        )
        return out

    def moved_far(self) -> PromptStep:
        """Return the same with KV that lies behind the first 2**31 elements of its memory."""
        num_blocks, unit = len(self.kv), self.kv[0].numel()
        num_layers = (1 << 22) // unit
        far = torch.empty(512 + num_blocks, num_layers, *self.kv.shape[1:], **_like(self.kv))[:, 0]
        far[512:] = self.kv
        rows = PagedRows(self.rows.positions, self.rows.slots, self.rows.block_table + 512)
        return replace(self, rows=rows, kv=far)

    def tiles(self, tile_tokens: int, capacity: int | None = None) -> PromptTiles:
        """Cut the spans; what is left of `capacity` is full of numbers that lead outside of all memory."""
        tiles = PromptTiles.of(self.spans, tile_tokens, self.qkv.device)
        if capacity is None:
            return tiles
        items = torch.full((capacity, TILE_FIELDS), 1 << 30, dtype=torch.int32, device=self.qkv.device)
        items[: len(tiles.items)] = tiles.items
        return replace(tiles, items=items)

    def attended(
        self,
        attend: Callable[..., None],
        tiles: PromptTiles,
        *,
        window: int | None = None,
        **options: object,
    ) -> torch.Tensor:
        """Return what a kernel writes to memory that is `UNTOUCHED` before."""
        out = self._out(self.qkv.dtype)
        attend(self.qkv, self.heads, self.rows, tiles, self.kv, window=window, out=out, **options)
        return out

    def _out(self, dtype: torch.dtype) -> torch.Tensor:
        width = self.heads.num_q * self.heads.dim
        return torch.full((len(self.qkv), width), UNTOUCHED, device=self.qkv.device, dtype=dtype)


def assert_rest_is_left_alone(out: torch.Tensor) -> None:
    for rest in (out[:NUM_DECODE], out[-NUM_PADDING:]):
        assert (rest == UNTOUCHED).all(), "rows of no span were written"


def _like(x: torch.Tensor) -> dict[str, Any]:
    return {"dtype": x.dtype, "device": x.device}
