"""Plans by which nodes that load the same model at once pass it on to each other. Sends no weights.

The schedules are `policy/multicast/`. A node is told its part of one when it asks who has the model: from
which node to fetch which chunks, in order. It may ask for chunks that the other node does not have yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from hearth.core.node_messages import HeldChunks, LinkSpeed, PlannedFetch
from hearth.core.types import Digest, NodeId, Rung
from hearth.policy.memory.reload_cost import PRIOR_BYTES_PER_S
from hearth.policy.multicast.parts import SEND_S, choose_num_parts, cut_parts
from hearth.policy.multicast.schedules import multicast
from hearth.store.format.manifest import Manifest

log = logging.getLogger(__name__)

Plan = tuple[PlannedFetch, ...]


class Multicasts:
    """Mutable; used on the event loop alone."""

    def __init__(self, manifest_of: Callable[[Digest], Manifest | None]) -> None:
        """`manifest_of` returns that of a deployed model; None: it is not deployed any more."""
        self._manifest_of = manifest_of
        #: Of nodes that are loading, each with the number of its replica.
        self._plans: dict[Digest, dict[NodeId, tuple[int, Plan]]] = {}
        self._num_sends = 0  #: of all plans: sends of earlier ones come first

    def plan_for(
        self,
        node: NodeId,
        model: Digest,
        loading: Mapping[NodeId, int],
        held_by: Mapping[NodeId, HeldChunks | None],
        links: Sequence[LinkSpeed],
    ) -> Plan:
        """Return from where a node is to fetch which chunks, in order. Empty if no other node starts to load.

        A node that got an empty plan chooses its own sources, and stays out of later plans.

        Args:
            node: It asks.
            model: The model that it loads.
            loading: The nodes that load the model, and the numbers of their replicas.
            held_by: Which chunks nodes have; None: all.
            links: Measured between nodes.
        """
        known = self._plans.pop(model, {})
        plans = {one: plan for one, plan in known.items() if loading.get(one) == plan[0]}
        if node in loading:
            if node not in plans:
                receivers = [one for one in loading if one not in plans]
                made = self._plan(model, receivers, held_by, links)
                plans |= {one: (loading[one], plan) for one, plan in made.items()}
            plans.setdefault(node, (loading[node], ()))
        if plans:
            self._plans[model] = plans
        return plans[node][1] if node in plans else ()

    def sources_of(self, node: NodeId, model: Digest) -> tuple[NodeId, ...]:
        """Return the nodes that are to send parts of a model to a node."""
        _, plan = self._plans.get(model, {}).get(node, (0, ()))
        return tuple(dict.fromkeys(fetch.node for fetch in plan))

    def _plan(
        self,
        model: Digest,
        receivers: Sequence[NodeId],
        held_by: Mapping[NodeId, HeldChunks | None],
        links: Sequence[LinkSpeed],
    ) -> dict[NodeId, Plan]:
        if len(receivers) < 2 or (manifest := self._manifest_of(model)) is None:
            return {}
        num_chunks = len(manifest.chunks)
        whole = [one for one, held in held_by.items() if held is None or _count(held) == num_chunks]
        receivers = [one for one in receivers if one not in whole]
        if not whole or len(receivers) < 2:
            return {}
        rates = [link.bytes_per_s for link in links] or [PRIOR_BYTES_PER_S[Rung.PEER]]
        latency_s = SEND_S + median([link.latency_s for link in links] or [0.0])
        layers = layer_chunks(manifest)
        num_parts = choose_num_parts(
            manifest.num_bytes, len(layers), len(receivers), median(rates), latency_s, len(whole)
        )
        parts = cut_parts(layers, num_parts)
        schedule = multicast(len(whole), len(receivers), len(parts))
        names = [*whole, *receivers]
        told = ",".join(whole), ",".join(receivers), len(parts)
        log.info("multicast model=%s from=%s to=%s parts=%d", model, *told)
        plans: dict[NodeId, list[PlannedFetch]] = {name: [] for name in receivers}
        for turn, send in enumerate(schedule.sends, self._num_sends):
            chunks, source = parts[send.part].chunks, names[send.source]
            plans[names[send.target]].append(PlannedFetch(chunks.start, chunks.stop, source, turn))
        self._num_sends += len(schedule.sends)
        return {name: tuple(plan) for name, plan in plans.items()}


def layer_chunks(manifest: Manifest) -> list[range]:
    """Return the chunks of each layer; the first has the embedding, too, the last the head."""
    edges = [0, *(layer.begin for layer in manifest.layers[1:]), manifest.num_bytes]
    size = manifest.chunk_bytes
    return [range(begin // size, -(-end // size)) for begin, end in pairwise(edges)]


def _count(held: HeldChunks) -> int:
    return (int.from_bytes(held.host, "little") | int.from_bytes(held.disk, "little")).bit_count()
