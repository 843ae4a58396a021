"""The pages of a simulated model's KV, as in a mapped pool. Moves no byte."""

from __future__ import annotations

from hearth.policy.batch.batch_kv import BatchKv
from hearth.policy.memory.kv_range import KvRange


class SteppedKv:
    """Mutable; written only by the model's worker. Adds blocks to the batcher and takes them back."""

    def __init__(self, range_: KvRange, batch: BatchKv) -> None:
        self.range, self._batch = range_, batch
        #: The pages of the sink come first and are given back last.
        self._num_pages = self._num_blocks = 0

    @property
    def is_placed(self) -> bool:
        """True if the model has its sink, from its load until it is retired."""
        return self._num_pages > 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages, the sink included."""
        return self._num_pages * self.range.page_bytes

    def max_growth(self, free_bytes: int) -> int:
        """Return how many blocks more fit into `free_bytes`."""
        return self.range.num_blocks(self._num_pages + free_bytes // self.range.page_bytes) - self._num_blocks

    def place_sink(self) -> None:
        """Take the pages of the sink, unless the model has them."""
        if not self.is_placed:
            self._num_pages, self._num_blocks = self.range.sink_pages, 1

    def extents(self) -> list[range]:
        """Return the blocks that can be taken back next: those of the last page."""
        num_left = self.range.one_less(self._num_pages)
        return [] if num_left is None else [range(self.range.num_blocks(num_left), self._num_blocks)]

    def grow(self, num_blocks: int, free_bytes: int) -> int:
        """Take free pages until there are `num_blocks` more, or none is free; return how many blocks."""
        num_before, max_bytes = self._num_blocks, self.num_bytes + free_bytes
        while self._num_blocks < num_before + num_blocks:
            end = self.range.num_blocks(self._num_pages)
            if end == self._num_blocks:
                num_pages = self.range.one_more(self._num_pages)
                if num_pages is None or num_pages * self.range.page_bytes > max_bytes:
                    break
                self._num_pages, end = num_pages, self.range.num_blocks(num_pages)
            self._batch.add(range(self._num_blocks, end))
            self._num_blocks = end
        return self._num_blocks - num_before

    def clear(self, extent: range, *, may_preempt: bool, keeps_floor: bool) -> bool:
        """Give the last extent back; False: not possible, nothing changed."""
        moves = self._batch.clear(extent, may_move=True, may_preempt=may_preempt, keeps_floor=keeps_floor)
        if moves is None:
            return False
        self._num_blocks = extent.start
        self._num_pages = self.range.num_pages(extent.start)
        return True

    def clear_all(self) -> None:
        """Give back all KV of an idle model, the sink included."""
        self._batch.remove_all()
        self._num_pages = self._num_blocks = 0
