"""Machines of a simulated service: which has which model, and when a model that one fetches is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hearth.core.types import LOCAL, ModelId, NodeId


@dataclass(frozen=True, slots=True)
class Fetched:
    source: NodeId
    began_s: float
    arrived_s: float


class SimulatedNetwork:
    """A node sends one model at a time and receives one at a time, at the speed of its link. What it has
    received it keeps. The first node has every model from the start.

    Mutable; written by its service.
    """

    def __init__(self, nodes: Sequence[NodeId], bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.bytes_fetched = 0
        self._sends_until_s = dict.fromkeys(nodes, 0.0)
        self._receives_until_s = dict.fromkeys(nodes, 0.0)
        self._arrived_s: dict[ModelId, dict[NodeId, float]] = {}  #: by the nodes that have it, or will

    def arrived_s(self, model: ModelId, node: NodeId) -> float | None:
        """Return since when a node has a model; None: it has to fetch it."""
        return self._holders(model).get(node)

    def fetch(self, model: ModelId, node: NodeId, num_bytes: int, now_s: float) -> Fetched:
        """Send a model to a node, from the node that can begin first."""
        holders = self._holders(model)

        def can_begin_s(source: NodeId) -> float:
            return max(self._sends_until_s[source], holders[source])

        source = min(holders, key=lambda one: (can_begin_s(one), one))
        began_s = max(now_s, can_begin_s(source), self._receives_until_s[node])
        arrived_s = began_s + num_bytes / self._bytes_per_s
        self._sends_until_s[source] = self._receives_until_s[node] = holders[node] = arrived_s
        self.bytes_fetched += num_bytes
        return Fetched(source, began_s, arrived_s)

    def _holders(self, model: ModelId) -> dict[NodeId, float]:
        return self._arrived_s.setdefault(model, {LOCAL: 0.0})
