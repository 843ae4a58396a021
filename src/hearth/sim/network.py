"""Machines of a simulated service: which has which model, and when a model that one fetches is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hearth.core.types import LOCAL, ModelId, NodeId

#: Of a model that several nodes fetch at once.
NUM_PARTS = 16


@dataclass(frozen=True, slots=True)
class Fetched:
    source: NodeId
    began_s: float
    arrived_s: float


@dataclass(slots=True)
class _Multicast:
    source: NodeId
    asked_s: float
    began_s: float
    arrived_s: float
    num_receivers: int = 1


class SimulatedNetwork:
    """A node sends one model at a time and receives one at a time, at the speed of its link. What it has
    received it keeps. The first node has every model from the start. Nodes that begin to fetch a model at the
    same time pass it on to each other, in `NUM_PARTS` parts, by the binomial pipeline.

    Mutable; written by its service.
    """

    def __init__(self, nodes: Sequence[NodeId], bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.bytes_fetched = 0
        self._sends_until_s = dict.fromkeys(nodes, 0.0)
        self._receives_until_s = dict.fromkeys(nodes, 0.0)
        self._latest: dict[ModelId, _Multicast] = {}
        self._arrived_s: dict[ModelId, dict[NodeId, float]] = {}  #: by the nodes that have it, or will

    def arrived_s(self, model: ModelId, node: NodeId) -> float | None:
        """Return since when a node has a model; None: it has to fetch it."""
        return self._holders(model).get(node)

    def fetch(self, model: ModelId, node: NodeId, num_bytes: int, now_s: float) -> Fetched:
        """Send a model to a node, from the node that can begin first."""
        holders, latest = self._holders(model), self._latest.get(model)
        self.bytes_fetched += num_bytes
        if latest is not None and self._can_join(latest, node, now_s):
            latest.num_receivers += 1
            num_rounds = NUM_PARTS + latest.num_receivers.bit_length() - 1
            arrived_s = latest.began_s + num_rounds / NUM_PARTS * num_bytes / self._bytes_per_s
            self._sends_until_s[latest.source] = self._receives_until_s[node] = holders[node] = arrived_s
            latest.arrived_s = arrived_s
            return Fetched(latest.source, latest.began_s, arrived_s)

        def can_begin_s(source: NodeId) -> float:
            return max(self._sends_until_s[source], holders[source])

        source = min(holders, key=lambda one: (can_begin_s(one), one))
        began_s = max(now_s, can_begin_s(source), self._receives_until_s[node])
        arrived_s = began_s + num_bytes / self._bytes_per_s
        self._sends_until_s[source] = self._receives_until_s[node] = holders[node] = arrived_s
        self._latest[model] = _Multicast(source, now_s, began_s, arrived_s)
        return Fetched(source, began_s, arrived_s)

    def _can_join(self, latest: _Multicast, node: NodeId, now_s: float) -> bool:
        """True if the node can receive as soon as the others, and the source sends nothing else after it."""
        is_last = self._sends_until_s[latest.source] == latest.arrived_s
        return latest.asked_s == now_s and is_last and self._receives_until_s[node] <= latest.began_s

    def _holders(self, model: ModelId) -> dict[NodeId, float]:
        return self._arrived_s.setdefault(model, {LOCAL: 0.0})
