"""Prompts of a step cut into tiles of query tokens, longest context first.

    rows of a step:   | decode rows | span | span | ... | padding |    a span: part of one sequence's prompt

The list of tiles is on the device at a fixed address, and attention reads all that it needs from there. So
one captured launch serves every mix of spans that fits its capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hearth.core.sizes import TILE_FIELDS
from hearth.kernels.paged import Heads


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    begin: int  #: first row
    num_tokens: int
    start: int  #: position of the first token

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + self.num_tokens)


@dataclass(frozen=True, slots=True)
class PromptTiles:
    #: int32 [capacity, TILE_FIELDS]: first row of the tile's span, tokens of the span, position of the span's
    #: first token in its sequence, first token of the tile within the span.
    items: torch.Tensor
    count: torch.Tensor  #: int32 [1]: the number of tiles in this step
    tile_tokens: int  #: query tokens of a whole tile

    @staticmethod
    def of(spans: Sequence[PrefillSpan], tile_tokens: int, device: torch.device | str) -> PromptTiles:
        begins, lengths, starts = (
            np.array([getattr(span, name) for span in spans], np.int64)
            for name in ("begin", "num_tokens", "start")
        )
        tiles = tiles_of(begins, lengths, starts, tile_tokens)
        items = torch.from_numpy(tiles).to(device).view(-1, TILE_FIELDS)
        return PromptTiles(items, torch.tensor([len(items)], dtype=torch.int32, device=device), tile_tokens)


def num_packed(heads: Heads) -> int:
    """Return how many query heads of a group, 1 or 2, share a tile, and so each load of k and v."""
    return 2 if heads.num_q // heads.num_kv % 2 == 0 else 1


def tiles_of(
    begins: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    tile_tokens: int,
) -> npt.NDArray[np.int32]:
    """Return the concatenated fields of all tiles, those with the longest context first."""
    counts = -(-lengths // tile_tokens)
    ends = counts.cumsum()
    num_tiles = int(ends[-1]) if len(ends) else 0
    firsts = (np.arange(num_tiles) - (ends - counts).repeat(counts)) * tile_tokens
    contexts = np.minimum(firsts + (starts + tile_tokens).repeat(counts), (starts + lengths).repeat(counts))
    order = contexts.argsort(kind="stable")[::-1]
    span = np.arange(len(counts)).repeat(counts)[order]
    tiles = np.empty((num_tiles, TILE_FIELDS), np.int32)
    tiles[:, 0], tiles[:, 1], tiles[:, 2] = begins[span], lengths[span], starts[span]
    tiles[:, 3] = firsts[order]
    return tiles.ravel()
