"""How much KV a model should have: when to ask for more, and what to give back.

KV follows the load up at once and down slowly: once in an epoch of WINDOW_STEPS steps, blocks are given back
that were free and not wanted in every step of it, less a reserve.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Some seconds: longer than the gaps of a steady load.
WINDOW_STEPS = 256
#: Blocks for this many steps of running sequences are kept ready, so that they are mapped in time.
AHEAD_STEPS = 16


@dataclass(frozen=True, slots=True)
class KvUse:
    num_blocks: int
    num_live: int
    num_cached: int
    num_wanted: int  #: by the next step
    num_running: int  #: sequences

    @property
    def num_free(self) -> int:
        return self.num_blocks - self.num_live - self.num_cached


@dataclass(frozen=True, slots=True)
class Growth:
    now_blocks: int  #: that the next step lacks
    ahead_blocks: int  #: that should be ready besides

    def within(self, most_blocks: int) -> Growth:
        now_blocks = min(self.now_blocks, most_blocks)
        return Growth(now_blocks, min(self.ahead_blocks, most_blocks - now_blocks))


class Elastic:
    """How the KV of one engine follows its load.

    Mutable; the step loop calls `growth` before each step and `surplus_blocks` after.
    """

    def __init__(self, block_tokens: int) -> None:
        assert block_tokens >= 1, f"{block_tokens=}"
        self._block_tokens = block_tokens
        #: Steps of this epoch so far, and in them: the fewest blocks that were to spare, the largest reserve.
        self._num_steps = 0
        self._spare_blocks: int | None = None
        self._reserve_blocks = 0

    def growth(self, use: KvUse) -> Growth:
        spare = self._note(use)
        reserve = self.reserve_blocks(use.num_running)
        return Growth(now_blocks=max(0, -spare), ahead_blocks=max(0, reserve - max(0, spare)))

    def surplus_blocks(self, use: KvUse) -> int:
        """Return how many blocks to give back; 0 except at the end of an epoch."""
        spare = self._note(use)
        self._num_steps += 1
        if self._num_steps < WINDOW_STEPS:
            return 0
        least = spare if self._spare_blocks is None else self._spare_blocks
        surplus = max(0, least - self._reserve_blocks)
        self._num_steps, self._spare_blocks, self._reserve_blocks = 0, None, 0
        return surplus

    @property
    def num_steps_left(self) -> int:
        return WINDOW_STEPS - 1 - self._num_steps

    def skip(self, num_steps: int, use: KvUse) -> None:
        """Skip steps that only took free blocks; `use` is after them."""
        assert num_steps <= self.num_steps_left, f"{num_steps=} {self.num_steps_left=}"
        self._note(use)
        self._num_steps += num_steps

    def _note(self, use: KvUse) -> int:
        spare = use.num_free - use.num_wanted
        self._spare_blocks = spare if self._spare_blocks is None else min(self._spare_blocks, spare)
        self._reserve_blocks = max(self._reserve_blocks, self.reserve_blocks(use.num_running))
        return spare

    def reserve_blocks(self, num_running: int) -> int:
        return -(-num_running * AHEAD_STEPS // self._block_tokens)
