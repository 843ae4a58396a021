"""The adapters that a worker is thought to have on its device: those that requests brought there last. Pure.

Workers tell nobody when one gives way, for that happens all the time and costs its next request milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hearth.core.types import AdapterId

#: So many are remembered for a worker: more than most devices have room for.
MAX_KNOWN = 1024


@dataclass(slots=True)
class KnownAdapters:
    """Mutable; written by `Fleet.start`."""

    #: The one that was used longest ago first.
    used: dict[AdapterId, None] = field(default_factory=dict)

    def __contains__(self, adapter: AdapterId) -> bool:
        return adapter in self.used

    def use(self, adapter: AdapterId) -> None:
        """Note that a request with an adapter goes to the worker."""
        self.used.pop(adapter, None)
        self.used[adapter] = None
        if len(self.used) > MAX_KNOWN:
            del self.used[next(iter(self.used))]
