"""How blocks of KV lie on the pages of a mapped pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvRange:
    """How blocks of KV lie on pages, and which of them a page more makes usable.

    blocks  | 0, the sink | 1       | 2       | 3       | 4     ...    a block may straddle pages
    pages   | 0                 | 1                 | 2         ...
              with the sink: 1    extent: 2, 3        extent: ...      an extent: what its last page completes
    """

    block_bytes: int
    page_bytes: int
    max_blocks: int  #: the sink included

    @property
    def sink_pages(self) -> int:
        return self.num_pages(1)

    def num_blocks(self, num_pages: int) -> int:
        return min(self.max_blocks, num_pages * self.page_bytes // self.block_bytes)

    def num_pages(self, num_blocks: int) -> int:
        return -(-num_blocks * self.block_bytes // self.page_bytes)

    def one_more(self, num_pages: int) -> int | None:
        """Return how many pages one more extent takes in all; None: there is none."""
        num_blocks = self.num_blocks(num_pages)
        return None if num_blocks == self.max_blocks else self.num_pages(num_blocks + 1)

    def one_less(self, num_pages: int) -> int | None:
        """Return how many pages stay without the last extent; None: it has the sink."""
        if num_pages <= self.sink_pages:
            return None
        return self.num_pages(self.num_blocks(num_pages - 1))
