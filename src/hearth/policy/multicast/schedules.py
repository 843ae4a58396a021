"""Schedules by which nodes pass a model on to each other, part by part. Pure: sends nothing.

A schedule is an ordered list of sends. Each node does its own sends and receives in this order, one up and
one down at a time, and starts a send as soon as it has the part and both ends are free; there are no
barriers. A send comes after the one that brought its part, so nodes never wait for each other in a circle.
Nodes are numbered; the sources come first.

The binomial pipeline (lambda-Scale, section 4.2; Ganesan and Seshadri, 2005) brings b parts from one node to
N - 1 others in b + ceil(log2 N) - 1 rounds, which is optimal. Nodes are the vertices of a hypercube. In each
round they exchange parts along the next dimension: the source sends the next part, every other node the
newest part that its neighbour lacks. Four nodes and three parts take four rounds:

    round 1   0 -> 1: part 0
    round 2   0 -> 2: part 1   1 -> 3: part 0
    round 3   0 -> 1: part 2   2 -> 3: part 1   3 -> 2: part 0
    round 4   0 -> 2: part 2   1 -> 3: part 2   3 -> 1: part 1

If N is not a power of two, some vertices are pairs of nodes. For its neighbours a pair is one node: one of
the two sends, one receives, and meanwhile they exchange parts with each other. A pair needs one more round
than a single node, so the bound holds for every N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product


@dataclass(frozen=True, slots=True)
class Send:
    part: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Schedule:
    num_parts: int
    groups: tuple[tuple[int, ...], ...]  #: disjoint; the first node of each has the model from the beginning
    sends: tuple[Send, ...]  #: in order; a part reaches a node before the node sends it


def multicast(num_sources: int, num_receivers: int, num_parts: int) -> Schedule:
    """Send the model from several nodes to others: a binomial pipeline per source (Algorithm 1).

    Each source has its own group of receivers and starts with a different part, so nodes of different groups
    soon hold the whole model together: the first of them after ceil(b / k) + ceil(log2 L) - 1 rounds, with b
    parts and k groups of at most L nodes. Sources beyond the number of receivers send nothing.
    """
    num_groups, num_nodes = min(num_sources, num_receivers), num_sources + num_receivers
    groups = tuple(
        (source, *range(num_sources + source, num_nodes, max(num_groups, 1))) for source in range(num_sources)
    )
    orders = rotated_orders(num_groups, num_parts)
    sends = (send for group, order in zip(groups, orders, strict=False) for send in _spread(group, order))
    return Schedule(num_parts, groups, tuple(sends))


def rotated_orders(num_orders: int, num_parts: int) -> list[list[int]]:
    """Return orders of parts that cover all parts with their first ceil(`num_parts` / `num_orders`)."""
    starts = [index * num_parts // num_orders for index in range(num_orders)]
    return [[*range(start, num_parts), *range(start)] for start in starts]


@dataclass(frozen=True, slots=True)
class _Roles:
    """Nodes of a vertex that send to and receive from its neighbour in a round, and what a pair exchanges."""

    sender: int | None
    receiver: int | None
    inside: list[Send]  #: from one node of the pair to the other


def _spread(group: Sequence[int], order: Sequence[int]) -> list[Send]:
    """Return the sends from the first node of a group to the others, round by round."""
    num_dimensions = len(group).bit_length() - 1
    num_others = (1 << num_dimensions) - 1
    vertices = [group[:1], *(group[1 + vertex :: num_others] for vertex in range(num_others))]
    held: dict[int, set[int]] = {node: set() for node in group}  # parts, by their position in `order`
    sends: list[Send] = []
    num_rounds = 0
    while any(len(positions) < len(order) for positions in held.values()):
        held[group[0]].add(min(num_rounds, len(order) - 1))  # the source has the rest, but sends it later
        for send in _next_round(vertices, held, 1 << num_rounds % num_dimensions):
            held[send.target].add(send.part)
            sends.append(Send(order[send.part], send.source, send.target))
        num_rounds += 1
    return sends


def _next_round(vertices: Sequence[Sequence[int]], held: Mapping[int, set[int]], bit: int) -> list[Send]:
    """Return the sends of a round, in which vertices whose numbers differ in `bit` are neighbours."""
    by_vertex = [set[int]().union(*(held[node] for node in vertex)) for vertex in vertices]
    newest = [max(own - by_vertex[at ^ bit], default=None) for at, own in enumerate(by_vertex)]
    roles = [_share_roles(vertex, held, newest[at], newest[at ^ bit]) for at, vertex in enumerate(vertices)]
    sends = [send for one in roles for send in one.inside]
    for at, part in enumerate(newest):
        source, target = roles[at].sender, roles[at ^ bit].receiver
        if part is not None and source is not None and target is not None:
            sends.append(Send(part, source, target))
    return sends


def _share_roles(
    vertex: Sequence[int], held: Mapping[int, set[int]], sent: int | None, received: int | None
) -> _Roles:
    """Choose the roles of one or two nodes so that neither falls behind the other."""
    senders = [None] if sent is None else [node for node in vertex if sent in held[node]]
    receivers = [None] if received is None else vertex

    def num_held(roles: _Roles) -> tuple[int, int]:
        targets = [roles.receiver, *(send.target for send in roles.inside)]
        counts = [len(held[node]) + targets.count(node) for node in vertex]
        return min(counts), sum(counts)

    choices = product(senders, receivers)
    return max((_Roles(*pair, _exchange(vertex, held, *pair)) for pair in choices), key=num_held)


def _exchange(
    vertex: Sequence[int], held: Mapping[int, set[int]], sender: int | None, receiver: int | None
) -> list[Send]:
    """Return the sends inside a pair that leave one up for `sender` and one down for `receiver`."""
    return [
        Send(max(held[source] - held[target]), source, target)
        for source, target in permutations(vertex, 2)
        if source != sender and target != receiver and held[source] - held[target]
    ]
