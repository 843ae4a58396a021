"""Times that the brain has learnt: how long requests run, and what reloading a model costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from hearth.core.types import LOCAL, ModelId, NodeId
from hearth.policy.fleet.events import LinkMeasured
from hearth.policy.fleet.records import Model
from hearth.policy.memory.reload_cost import ReloadCosts

PRIOR_RUN_S = 1.0
NEWEST_WEIGHT = 0.2


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one node to another, as measured."""

    bytes_per_s: float
    latency_s: float


@dataclass(slots=True)
class Estimates:
    reload: ReloadCosts
    mean_run_s: float | None = None
    run_s_by_model: dict[ModelId, float] = field(default_factory=dict)
    links: dict[NodeId, dict[NodeId, Link]] = field(default_factory=dict)  #: by target, then source

    def ran(self, model: ModelId, seconds: float) -> None:
        """Learn the run time of a request, from when its worker could run it."""
        self.mean_run_s = _averaged(self.mean_run_s, seconds)
        self.run_s_by_model[model] = _averaged(self.run_s_by_model.get(model), seconds)

    def forget(self, model: ModelId) -> None:
        self.run_s_by_model.pop(model, None)
        self.reload.forget(model)

    def load_s(self, num_bytes: int, model: Model, node: NodeId) -> float:
        """Return how long a node takes to load bytes of a model from where they are."""
        if node == LOCAL and len(model.residency) < 2:  # the common case
            return self.reload.load_s(num_bytes, model.residency.get(node))
        source = model.source_for(node)
        link = None if source is None else self.links.get(node, {}).get(source)
        peer_bytes_per_s = None if link is None else link.bytes_per_s
        return self.reload.load_s(num_bytes, model.bytes_by_rung(node), peer_bytes_per_s)

    def measured(self, event: LinkMeasured) -> None:
        link = Link(event.bytes_per_s, event.latency_s)
        self.links.setdefault(event.target, {})[event.source] = link

    def forget_node(self, node: NodeId) -> None:
        self.links.pop(node, None)
        for by_source in self.links.values():
            by_source.pop(node, None)

    def run_s(self, model: ModelId | None = None) -> float:
        known_s = self.mean_run_s if model is None else self.run_s_by_model.get(model, self.mean_run_s)
        return PRIOR_RUN_S if known_s is None else known_s


def _averaged(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + NEWEST_WEIGHT * (newest - mean)
