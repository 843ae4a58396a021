"""Schedules that `bench.multicast` compares with the binomial pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.policy.multicast.schedules import Schedule, Send


def chain(num_nodes: int, num_parts: int) -> Schedule:
    """Every node forwards each part to the next node."""
    return _forward(range(num_nodes - 1), num_parts)


def tree(num_nodes: int, num_parts: int) -> Schedule:
    """As in FaaSNet, every node forwards each part to its two children in a binary tree."""
    return _forward([(node - 1) // 2 for node in range(1, num_nodes)], num_parts)


def one_by_one(num_nodes: int, num_parts: int) -> Schedule:
    """Node 0 sends the whole model to one node after another."""
    sends = (Send(part, 0, target) for target in range(1, num_nodes) for part in range(num_parts))
    return Schedule(num_parts, (tuple(range(num_nodes)),), tuple(sends))


def _forward(parents: Sequence[int], num_parts: int) -> Schedule:
    """Send each part along a tree; `parents` are those of nodes 1, 2 and so on."""
    sends = (Send(part, parent, node) for part in range(num_parts) for node, parent in enumerate(parents, 1))
    return Schedule(num_parts, (tuple(range(len(parents) + 1)),), tuple(sends))
