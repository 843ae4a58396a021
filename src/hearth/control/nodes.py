"""The nodes that serve models: that of this machine, and those of the cluster. Decides no placement."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from hearth.core import node_messages as messages
from hearth.core.errors import NoWorkers
from hearth.core.messages import WorkerEnded
from hearth.core.node_messages import WorkerStatus
from hearth.core.types import LOCAL, Digest, NodeId, WorkerId, node_of
from hearth.node.link import FrameLink
from hearth.node.local_node import LocalNode
from hearth.node.tickets import TicketIssuer

if TYPE_CHECKING:  # it loads packages that only a cluster needs
    from hearth.node.channel import Channel


class RemoteNode:
    """One life of another machine in the cluster. Mutable; used on the event loop alone."""

    def __init__(self, node_id: NodeId, hello: messages.NodeHello, channel: Channel) -> None:
        self.node_id, self.hello, self.channel = node_id, hello, channel
        self.tickets = TicketIssuer()
        self.links: dict[WorkerId, FrameLink] = {}
        self.held: dict[Digest, messages.HeldChunks] = {}  #: of models that it has chunks of
        self.pulse = messages.NodePulse((), 0)

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def labels(self) -> dict[str, str]:
        return self.hello.labels

    def workers(self) -> list[WorkerStatus]:
        """Return those that the node has reported. One that is ready counts when it is linked here."""
        return [
            replace(one, state="starting", hello=None)
            if one.state == "ready" and one.worker not in self.links
            else one
            for one in self.pulse.workers
        ]

    @property
    def may_serve(self) -> bool:
        """True if a worker is up or may come up. A node that has just joined reports no workers yet."""
        workers = self.workers()
        return any(one.state != "failing" for one in workers) or (not workers and self.trouble() is None)

    def trouble(self) -> str | None:
        return None if self.pulse.trouble is None else f"on node {self.node_id}: {self.pulse.trouble}"

    def expect_end(self, reason: str) -> None:
        """Note why all workers end, for the sake of the node: no model is to blame."""
        for link in self.links.values():
            link.ended = link.ended or WorkerEnded(reason, is_with_node=True)


#: How long requests that lack room wait for machines that are away: most return within seconds.
NO_NODE_S = 30.0


class Nodes:
    """Mutable; used on the event loop alone."""

    def __init__(self, local: LocalNode, *, can_grow: bool = False) -> None:
        """`can_grow`: a request that waits may bring a machine."""
        self.local, self._can_grow = local, can_grow
        self.others: dict[NodeId, RemoteNode] = {}
        self._last_up_s = time.monotonic()  #: when another machine last had a worker that may come up

    def workers(self) -> list[WorkerStatus]:
        return [worker for node in self._all() for worker in node.workers()]

    def trouble(self) -> str | None:
        """Say why workers are not up; None: they are, or start for the first time."""
        told = [trouble for node in self._all() if (trouble := node.trouble()) is not None]
        return "; ".join(told) or None

    def outage(self) -> NoWorkers | None:
        """Return the error of requests while no worker comes up; None: one is up, or may come up."""
        now_s, is_local = time.monotonic(), bool(self.local.supervisor.seats)
        if any(node.may_serve for node in self.others.values()):
            self._last_up_s = now_s
            return None
        if is_local or self._can_grow or now_s - self._last_up_s < NO_NODE_S:
            return self.local.supervisor.outage()
        trouble = self.trouble() or "no machine has joined; `hearth cluster token` prints the command for one"
        error = NoWorkers(f"no worker is up: {trouble}")
        error.retry_s = NO_NODE_S
        return error

    def failing(self) -> list[NodeId]:
        """Return the nodes on which workers fail to start, and none is starting for the first time."""
        by_node = {LOCAL: self.local.workers()} | {one.node_id: one.workers() for one in self.others.values()}
        return [
            node
            for node, workers in by_node.items()
            if any(one.state == "failing" for one in workers)
            and all(one.state != "starting" for one in workers)
        ]

    def device_share(self, worker: WorkerId) -> float:
        """Return a worker's share of its device."""
        name = node_of(worker)
        if name == LOCAL:
            return 1.0 / self.local.devices.num_sharing
        node = self.others.get(name)  # None: it was lost, and what its worker has said is not handled yet
        return 1.0 if node is None else 1.0 / node.hello.num_sharing

    def labels_of(self, node: NodeId) -> Mapping[str, str]:
        return (self.others.get(node) or self.local).labels

    def _all(self) -> list[LocalNode | RemoteNode]:
        return [self.local, *self.others.values()]
