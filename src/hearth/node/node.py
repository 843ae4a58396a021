"""A node as the head sees it: its own machine (`local_node.py`) or another (`control/cluster.py`)."""

from __future__ import annotations

from typing import Protocol

from hearth.core.types import NodeId
from hearth.node.worker_seat import WorkerStatus


class Node(Protocol):
    @property
    def node_id(self) -> NodeId: ...

    def workers(self) -> list[WorkerStatus]: ...

    def device_share(self, seat: int) -> float:
        """Return the share of its device that a worker has, by the index of its seat."""

    def trouble(self) -> str | None:
        """Say why workers are not up; None: they are, or start for the first time."""
