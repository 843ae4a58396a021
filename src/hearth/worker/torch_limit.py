"""How much of a CUDA device torch may take besides the pool: by what was measured, or by a guess.

    limit    every engine's model has a memory profile:  the sum of these, and `SPARE_BYTES`
             else:                                       the guess

A profile has all that torch had taken while its model was measured, also for models beside it. So their sum
is never too little; it may be too much, and costs nothing then: what nobody needs is not taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from hearth.core.types import ModelId
from hearth.snapshot.memory_profile import MemoryProfile

#: For what requests may need and no measurement has seen, such as the logits of a large batch to be sorted.
SPARE_BYTES = 2 << 30

log = logging.getLogger(__name__)


class TorchLimit:
    """Mutable; the step thread alone calls it."""

    def __init__(self, guess_bytes: int, set_limit: Callable[[int], None]) -> None:
        """`set_limit` has torch keep to so many bytes; it is called at once."""
        self._guess_bytes, self._set_limit = guess_bytes, set_limit
        self.num_bytes, self.is_measured = guess_bytes, False
        set_limit(guess_bytes)

    def follow(self, profiles: Mapping[ModelId, MemoryProfile | None]) -> None:
        """Keep to a limit for these models, whose engines are there, by their profiles."""
        measured = [profile.torch_bytes for profile in profiles.values() if profile is not None]
        is_measured = bool(measured) and len(measured) == len(profiles)
        num_bytes = sum(measured) + SPARE_BYTES if is_measured else self._guess_bytes
        if (num_bytes, is_measured) != (self.num_bytes, self.is_measured):
            self.num_bytes, self.is_measured = num_bytes, is_measured
            self._set_limit(num_bytes)
            log.info("torch_limited num_bytes=%d is_measured=%s", num_bytes, is_measured)
