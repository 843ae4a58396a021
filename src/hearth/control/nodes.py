"""The nodes that serve models: that of this machine, and those of the cluster. Decides no placement."""

from __future__ import annotations

from hearth.core.errors import NoWorkers
from hearth.core.types import NodeId, WorkerId, node_of
from hearth.node.local_node import LocalNode
from hearth.node.node import Node
from hearth.node.supervisor import seat_index
from hearth.node.worker_seat import WorkerStatus


class Nodes:
    """Mutable; used on the event loop alone."""

    def __init__(self, local: LocalNode) -> None:
        self.local = local
        self.others: dict[NodeId, Node] = {}

    def workers(self) -> list[WorkerStatus]:
        return [worker for node in self._all() for worker in node.workers()]

    def trouble(self) -> str | None:
        """Say why workers are not up; None: they are, or start for the first time."""
        told = [trouble for node in self._all() if (trouble := node.trouble()) is not None]
        return "; ".join(told) or None

    def outage(self) -> NoWorkers | None:
        """Return the error of requests while no worker comes up; None: one is up, or may come up."""
        if any(one.state != "failing" for node in self.others.values() for one in node.workers()):
            return None
        return self.local.supervisor.outage()

    def device_share(self, worker: WorkerId) -> float:
        """Return a worker's share of its device."""
        node = self.others.get(node_of(worker))
        return (self.local if node is None else node).device_share(seat_index(worker))

    def _all(self) -> list[Node]:
        return [self.local, *self.others.values()]
