"""The sizes of steps that a simulated engine has graphs of, as `engine/graphs.py` has them. Runs nothing.

A size is captured by the first step that needs it, but not by one behind a load: that runs kernel by kernel,
because somebody waits for its token. It may do so after every load of a model that is asked seldom.
"""

from __future__ import annotations

from hearth.core.sizes import StepLimits, decode_sizes, mixed_sizes, padded_size
from hearth.policy.batch.plan import StepPlan


class SteppedGraphs:
    """Mutable; written by its engine. Graphs go by rows, and by whether there are prompts among them."""

    def __init__(self, limits: StepLimits) -> None:
        self._decode, self._mixed = decode_sizes(limits), mixed_sizes(limits)
        self._captured: set[tuple[bool, int]] = set()

    def has(self, plan: StepPlan) -> bool:
        """True if a step of this plan is replayed."""
        return self._key(plan) in self._captured

    def has_decode(self, num_rows: int) -> bool:
        """True if a step of so many rows that decode is replayed."""
        return (False, padded_size(self._decode, num_rows)) in self._captured

    def capture(self, plan: StepPlan) -> None:
        self._captured.add(self._key(plan))

    def _key(self, plan: StepPlan) -> tuple[bool, int]:
        if plan.num_prompt_tokens:
            return True, padded_size(self._mixed, plan.num_tokens)
        return False, padded_size(self._decode, plan.num_rows)
