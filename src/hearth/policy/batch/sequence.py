"""A request on its way through the batcher: its tokens, its slot and its blocks. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from hearth.policy.batch.plan import EngineRequest
from hearth.policy.batch.prefix import KnownPrefix


@dataclass(slots=True, eq=False)
class LiveSequence:
    """Mutable; written only by the `Batcher` and the `Draft` of its plan."""

    request: EngineRequest
    arrival: int
    tokens: list[int]  #: prompt and committed output
    max_length: int  #: of prompt and output
    #: Of the full blocks of `tokens`, as far as needed so far.
    digests: list[bytes] = field(default_factory=list)
    prefix: KnownPrefix = field(default_factory=KnownPrefix)  #: of what it waits with
    #: Sampled on the device in a step that is not committed; they follow `tokens`.
    num_pending: int = 0
    #: Rows in steps that are not committed. Not admitted again before this is 0, so that every such row
    #: of a sequence with a slot belongs to its present stay in that slot.
    num_in_flight: int = 0
    is_ended: bool = False

    #: None while waiting; what follows is meaningful only while running.
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    num_prefill: int = 0  #: length of `tokens` on admission; what comes later is decoded
    num_planned: int = 0  #: tokens whose KV is computed by the steps planned so far
    num_published: int = 0  #: leading blocks that were offered to the prefix cache

    @property
    def num_unplanned(self) -> int:
        """Tokens that could be computed next; 0 if the last one that may be sampled is in flight."""
        if self.num_planned < self.num_prefill:
            return self.num_prefill - self.num_planned
        if self.request.guide is not None and self.num_pending:
            return 0  # what its guide allows is not known yet
        return 1 if len(self.tokens) + self.num_pending < self.max_length else 0
