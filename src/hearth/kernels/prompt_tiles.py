"""Prompts of a step cut into tiles of query tokens, longest context first. Attends to nothing.

    rows of a step:   | decode rows | span | span | ... | padding |    a span: a run of one sequence's prompt

The list of tiles lies on the device at a fixed address, and a launch of attention takes all that it needs
from there. So one captured launch serves every mix of spans that fits into its capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from hearth.kernels.paged import Heads
from hearth.sizes import TILE_FIELDS


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """A run of consecutive tokens of one sequence among the rows of a step."""

    begin: int  #: first row
    num_tokens: int
    start: int  #: position of the first token

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.begin + self.num_tokens)


@dataclass(frozen=True, slots=True)
class PromptTiles:
    """The tiles of all spans of a step, as a launch of attention reads them."""

    #: int32 [capacity, TILE_FIELDS]: first row of the tile's span, tokens of the span, position of the span's
    #: first token in its sequence, first token of the tile within the span.
    items: torch.Tensor
    count: torch.Tensor  #: int32 [1]: how many of them there are in this step
    tile_tokens: int  #: query tokens of a whole tile

    @staticmethod
    def of(spans: Sequence[PrefillSpan], tile_tokens: int, device: torch.device | str) -> PromptTiles:
        """Tiles with memory of their own, just as many as there are."""
        items = torch.from_numpy(cut_tiles(spans, tile_tokens)).to(device).view(-1, TILE_FIELDS)
        return PromptTiles(items, torch.tensor([len(items)], dtype=torch.int32, device=device), tile_tokens)


def num_packed(heads: Heads) -> int:
    """Return how many query heads of a group share a tile, and so each load of k and v: one, or two."""
    return 2 if heads.num_q // heads.num_kv % 2 == 0 else 1


def cut_tiles(spans: Sequence[PrefillSpan], tile_tokens: int) -> npt.NDArray[np.int32]:
    """Return the fields of all tiles behind each other, those that attend to the longest context first."""
    tiles = []  # each behind the length of its context
    for span in spans:
        begin, num_tokens, start = span.begin, span.num_tokens, span.start
        last = (num_tokens - 1) // tile_tokens * tile_tokens
        tiles += [
            (start + first + tile_tokens, begin, num_tokens, start, first)
            for first in range(0, last, tile_tokens)
        ]
        tiles.append((start + num_tokens, begin, num_tokens, start, last))
    tiles.sort(reverse=True)
    width = 1 + TILE_FIELDS
    fields = np.fromiter(chain.from_iterable(tiles), np.int32, width * len(tiles))
    return fields.reshape(-1, width)[:, 1:].ravel()
