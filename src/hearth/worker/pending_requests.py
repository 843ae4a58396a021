"""The requests of one model that its engine does not have yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from hearth.core.messages import StartRequest
from hearth.policy.batch.plan import EngineRequest


@dataclass(slots=True, eq=False)
class PendingRequests:
    """A request waits in one of these at a time, in this order. Mutable; written by `Runs` alone."""

    queued: list[StartRequest] = field(default_factory=list)  #: until the model has an engine with memory
    #: By run: until the KV has come that they had on other workers.
    arriving: dict[int, StartRequest] = field(default_factory=dict)
    unchecked: set[int] = field(default_factory=set)  #: runs whose grammar is being compiled
    #: By run: checked requests whose adapter is not on the device yet.
    held: dict[int, EngineRequest] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.queued or self.arriving or self.unchecked or self.held)

    def take_queued(self) -> list[StartRequest]:
        taken, self.queued = self.queued, []
        return taken

    def discard(self, run: int) -> None:
        self.queued = [request for request in self.queued if request.run != run]
        self.arriving.pop(run, None)
        self.unchecked.discard(run)
        self.held.pop(run, None)
