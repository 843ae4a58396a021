"""How much KV a model should have: when to ask for more, and what can go back. Asks nobody and takes nothing.

KV follows the load upwards at once and downwards slowly. Before each step `growth` says what the step lacks,
and how much should lie ready so that the steps after it need not wait. What goes back is decided once in an
epoch of WINDOW_STEPS steps: blocks that were free, and wanted by nobody, in every step of it, less the
reserve. So a load that comes back within an epoch finds its blocks still there, and a step that asks for more
is followed by a whole epoch in which nothing goes back.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Some seconds: longer than the gaps of a steady load, shorter than anybody would wait to have memory back.
WINDOW_STEPS = 256
#: Blocks that running sequences will fill in so many steps lie ready, so that they are mapped meanwhile.
AHEAD_STEPS = 16


@dataclass(frozen=True, slots=True)
class KvUse:
    """The KV of a model between two steps."""

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
    """Blocks of KV that a model should get before its next step."""

    now_blocks: int  #: that the next step lacks
    ahead_blocks: int  #: that should lie ready beside what the model has then

    def within(self, most_blocks: int) -> Growth:
        """Return the growth cut to at most so many blocks in all, what the next step lacks first."""
        now_blocks = min(self.now_blocks, most_blocks)
        return Growth(now_blocks, min(self.ahead_blocks, most_blocks - now_blocks))


class Elastic:
    """How the KV of one engine follows its load.

    Mutable; whoever steps the engine calls `growth` before each step and `surplus_blocks` after.
    """

    def __init__(self, block_tokens: int) -> None:
        assert block_tokens >= 1, f"{block_tokens=}"
        self._block_tokens = block_tokens
        #: Steps of this epoch so far, and in them: the fewest blocks that were to spare, the largest reserve.
        self._num_steps = 0
        self._spare_blocks: int | None = None
        self._reserve_blocks = 0

    def growth(self, use: KvUse) -> Growth:
        """Return the blocks that should come before the next step."""
        spare = self._note(use)
        reserve = self.reserve_blocks(use.num_running)
        return Growth(now_blocks=max(0, -spare), ahead_blocks=max(0, reserve - max(0, spare)))

    def surplus_blocks(self, use: KvUse) -> int:
        """Return how many blocks could go back; 0 but at the end of an epoch."""
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
        """How many steps are over before blocks may go back: those of this epoch but the last."""
        return WINDOW_STEPS - 1 - self._num_steps

    def skip(self, num_steps: int, use: KvUse) -> None:
        """Have so many of the steps left be over that only took free blocks; `use` is after them."""
        assert num_steps <= self.num_steps_left, f"{num_steps=} {self.num_steps_left=}"
        self._note(use)
        self._num_steps += num_steps

    def _note(self, use: KvUse) -> int:
        """Return how many blocks would be left free after the next step; negative if it lacks some."""
        spare = use.num_free - use.num_wanted
        self._spare_blocks = spare if self._spare_blocks is None else min(self._spare_blocks, spare)
        self._reserve_blocks = max(self._reserve_blocks, self.reserve_blocks(use.num_running))
        return spare

    def reserve_blocks(self, num_running: int) -> int:
        """Return the blocks that so many sequences will fill next: one each every `block_tokens` steps."""
        return -(-num_running * AHEAD_STEPS // self._block_tokens)
