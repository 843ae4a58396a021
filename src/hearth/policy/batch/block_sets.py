"""Sets of KV blocks: free ones, and cached ones in the order of their last use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, count

_END, _ABSENT = -1, -2  #: no blocks: where a chain of blocks ends, and a link of who is in none


class FreeBlocks:
    """Hands out the lowest block. Mutable; written only by the `BlockBook` that owns it."""

    def __init__(self) -> None:
        self._is_free = bytearray()
        self._num_free = 0
        self._lowest = 0  #: none below it is free

    def __len__(self) -> int:
        return self._num_free

    def __contains__(self, block: int) -> bool:
        return block < len(self._is_free) and bool(self._is_free[block])

    def __iter__(self) -> Iterator[int]:
        return compress(count(self._lowest), self._is_free[self._lowest :])

    def reserve(self, num_blocks: int) -> None:
        self._is_free.extend(bytes(max(0, num_blocks - len(self._is_free))))

    def add(self, blocks: Sequence[int]) -> None:
        is_free = self._is_free
        if isinstance(blocks, range):  # which may be a whole KV
            is_free[blocks.start : blocks.stop] = b"\1" * len(blocks)
        else:
            for block in blocks:
                is_free[block] = 1
        self._num_free += len(blocks)
        self._lowest = min(self._lowest, min(blocks, default=self._lowest))

    def remove(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self:
                self._is_free[block] = 0
                self._num_free -= 1

    def clear(self) -> None:
        self._is_free = bytearray(len(self._is_free))
        self._num_free = self._lowest = 0

    def pop_lowest(self, num_blocks: int) -> list[int]:
        is_free, at, blocks = self._is_free, self._lowest, list[int]()
        num_left = min(num_blocks, self._num_free)
        self._num_free -= num_left
        while num_left:
            first = is_free.find(1, at)
            behind = is_free.find(0, first, first + num_left)
            at = behind if behind >= 0 else min(first + num_left, len(is_free))
            is_free[first:at] = bytes(at - first)
            blocks += range(first, at)
            num_left -= at - first
        self._lowest = at
        return blocks

    def check(self) -> None:
        free = list(compress(count(), self._is_free))
        assert free == list(self), f"free and never handed out: {set(free).difference(self)}"
        assert len(free) == self._num_free, f"{free=} {self._num_free=}"


class CachedBlocks:
    """Blocks in the order of their last use: a ring linked through two lists. Mutable."""

    def __init__(self) -> None:
        self._newer, self._older = [_END], [_END]
        self._num_cached = 0

    def __len__(self) -> int:
        return self._num_cached

    def __contains__(self, block: int) -> bool:
        return block < len(self._newer) - 1 and self._newer[block] != _ABSENT

    def __iter__(self) -> Iterator[int]:
        block = self._newer[_END]
        while block != _END:
            yield block
            block = self._newer[block]

    def among(self, blocks: Iterable[int]) -> list[int]:
        return [block for block in blocks if block in self]

    def reserve(self, num_blocks: int) -> None:
        for links in (self._newer, self._older):
            end = links.pop()
            links.extend([_ABSENT] * (num_blocks - len(links)))
            links.append(end)

    def add(self, blocks: Iterable[int]) -> None:
        newer, older, num_cached = self._newer, self._older, self._num_cached
        last = older[_END]
        for block in blocks:
            newer[last] = block
            older[block] = last
            last = block
            num_cached += 1
        newer[last], older[_END] = _END, last
        self._num_cached = num_cached

    def remove(self, blocks: Iterable[int]) -> None:
        newer, older = self._newer, self._older
        for block in blocks:
            before, behind = older[block], newer[block]
            newer[before], older[behind] = behind, before
            newer[block] = _ABSENT
            self._num_cached -= 1

    def pop_oldest(self, num_blocks: int) -> list[int]:
        newer, blocks = self._newer, list[int]()
        block = newer[_END]
        for _ in range(min(num_blocks, self._num_cached)):
            blocks.append(block)
            behind = newer[block]
            newer[block] = _ABSENT
            block = behind
        newer[_END], self._older[block] = block, _END
        self._num_cached -= len(blocks)
        return blocks

    def clear(self) -> None:
        for links in (self._newer, self._older):
            links[:] = [_ABSENT] * (len(links) - 1) + [_END]
        self._num_cached = 0
