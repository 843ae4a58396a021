"""Times and rates that the brain has learnt: of arrivals, runs, prompts and loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hearth.core.types import LOCAL, ModelId, NodeId
from hearth.policy.fleet.events import ComputedPrompt, LinkMeasured
from hearth.policy.fleet.prefixes import PREFIX_TOKENS
from hearth.policy.fleet.records import Model, ReplicaStage
from hearth.policy.memory.reload_cost import ReloadCosts

PRIOR_RUN_S = 1.0
PRIOR_TOKEN_S = 1e-4
#: From a worker to another one of its node, until that was measured.
PRIOR_NODE_BYTES_PER_S = 1e9
NEWEST_WEIGHT = 0.2
#: Of a slower prompt, in the time of the fastest.
FADING_WEIGHT = 0.01
#: Arrivals so long ago count 1 / e as much as those now, in the two rates that are learnt. The lower one is
#: expected to last: a burst raises only the one over the short time, and what has ended lowers it first.
SHORT_S, LONG_S = 10.0, 120.0


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one node to another, as measured."""

    bytes_per_s: float
    latency_s: float


@dataclass(slots=True)
class Arrivals:
    """Decayed numbers of requests for a model."""

    last_s: float
    num_short: float = 0.0
    num_long: float = 0.0

    def add(self, now_s: float) -> None:
        elapsed_s = now_s - self.last_s
        self.num_short = self.num_short * math.exp(-elapsed_s / SHORT_S) + 1.0
        self.num_long = self.num_long * math.exp(-elapsed_s / LONG_S) + 1.0
        self.last_s = now_s

    def long_per_s(self, now_s: float) -> float:
        return self.num_long / LONG_S * math.exp((self.last_s - now_s) / LONG_S)

    def lasting_per_s(self, now_s: float) -> float:
        short_per_s = self.num_short / SHORT_S * math.exp((self.last_s - now_s) / SHORT_S)
        return min(short_per_s, self.long_per_s(now_s))


@dataclass(slots=True)
class Estimates:
    reload: ReloadCosts
    mean_run_s: float | None = None
    run_s_by_model: dict[ModelId, float] = field(default_factory=dict)
    links: dict[NodeId, dict[NodeId, Link]] = field(default_factory=dict)  #: by target, then source
    token_s_by_model: dict[ModelId, float] = field(default_factory=dict)  #: of prompts
    #: The same of the fastest of the last prompts, which shared few steps with others.
    least_token_s: dict[ModelId, float] = field(default_factory=dict)
    arrivals: dict[ModelId, Arrivals] = field(default_factory=dict)
    #: How many layers take as long as the head.
    head_layers: dict[ModelId, float] = field(default_factory=dict)

    def arrived(self, model: ModelId, now_s: float) -> None:
        self.reload.asked(model, now_s)
        if (arrivals := self.arrivals.get(model)) is None:
            arrivals = self.arrivals[model] = Arrivals(now_s)
        arrivals.add(now_s)

    def expect_arrivals(self, model: ModelId, now_s: float, ahead_s: float) -> float:
        """Return how many requests are expected in the next `ahead_s` seconds."""
        arrivals = self.arrivals.get(model)
        return 0.0 if arrivals is None else ahead_s * arrivals.lasting_per_s(now_s)

    def expect_running(self, model: ModelId, now_s: float) -> float:
        """Return how many requests run at a time in the long run, by Little's law."""
        arrivals = self.arrivals.get(model)
        return 0.0 if arrivals is None else arrivals.long_per_s(now_s) * self.run_s(model)

    def ran(self, model: ModelId, seconds: float) -> None:
        """Learn the run time of a request, from when its worker could run it."""
        self.mean_run_s = _averaged(self.mean_run_s, seconds)
        self.run_s_by_model[model] = _averaged(self.run_s_by_model.get(model), seconds)

    def computed(self, model: ModelId, prompt: ComputedPrompt) -> None:
        """Learn the time per token of a prompt. Short prompts are ignored: most of their time is fixed."""
        if prompt.num_tokens >= PREFIX_TOKENS:
            token_s = prompt.seconds / prompt.num_tokens
            self.token_s_by_model[model] = _averaged(self.token_s_by_model.get(model), token_s)
            least_s = self.least_token_s.get(model, token_s)
            self.least_token_s[model] = min(token_s, least_s + FADING_WEIGHT * (token_s - least_s))

    def prompt_s(self, model: ModelId, num_tokens: int) -> float:
        return num_tokens * self.token_s_by_model.get(model, PRIOR_TOKEN_S)

    def least_prompt_s(self, model: ModelId, num_tokens: int) -> float:
        """Return how long a prompt keeps a device busy, however many prompts share its steps; 0: unknown."""
        return num_tokens * self.least_token_s.get(model, 0.0)

    def forget(self, model: ModelId) -> None:
        self.run_s_by_model.pop(model, None)
        self.token_s_by_model.pop(model, None)
        self.least_token_s.pop(model, None)
        self.arrivals.pop(model, None)
        self.head_layers.pop(model, None)
        self.reload.forget(model)

    def load_s(self, num_bytes: int, model: Model, node: NodeId) -> float:
        """Return how long a node takes to load bytes of a model from where they are."""
        residency = model.residency
        if node == LOCAL and len(residency) < 2:  # the common case
            return self.reload.load_s(num_bytes, residency.get(node))
        source = model.source_for(node)
        link = None if source is None else self.links.get(node, {}).get(source)
        peer_bytes_per_s = None if link is None else link.bytes_per_s
        return self.reload.load_s(num_bytes, model.bytes_by_rung(node), peer_bytes_per_s)

    def kv_s(self, source: NodeId, target: NodeId, num_bytes: int) -> float:
        """Return how long KV takes to a worker of another node, or of the same; infinite: unknown."""
        ways = self.links.get(target, {}).get(source), self.links.get(source, {}).get(target)
        if (link := next((one for one in ways if one is not None), None)) is not None:
            return link.latency_s + num_bytes / link.bytes_per_s
        return num_bytes / PRIOR_NODE_BYTES_PER_S if source == target else math.inf

    def measured(self, event: LinkMeasured) -> None:
        link = Link(event.bytes_per_s, event.latency_s)
        self.links.setdefault(event.target, {})[event.source] = link

    def staged(self, model: ModelId, stages: Sequence[ReplicaStage], stage_s: Sequence[float]) -> None:
        """Learn what the head costs from the times of stages."""
        layers = [stage.end - stage.begin for stage in stages]
        layer_s = sum(stage_s[:-1]) / sum(layers[:-1])
        self.head_layers[model] = max(0.0, stage_s[-1] / layer_s - layers[-1])

    def forget_node(self, node: NodeId) -> None:
        self.links.pop(node, None)
        for by_source in self.links.values():
            by_source.pop(node, None)

    def run_s(self, model: ModelId | None = None) -> float:
        known_s = self.mean_run_s if model is None else self.run_s_by_model.get(model, self.mean_run_s)
        return PRIOR_RUN_S if known_s is None else known_s


def _averaged(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + NEWEST_WEIGHT * (newest - mean)
