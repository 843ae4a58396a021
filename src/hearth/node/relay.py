"""Relays the frames of a worker between its own connection and one to the head. Decodes no message.

The worker's node has two links: to the worker, which it supervises, and to the head. Each direction holds its
source back while its sink is slow.
"""

from __future__ import annotations

from hearth.core.messages import WorkerHello
from hearth.core.node_messages import WorkerOpened
from hearth.core.types import NodeId
from hearth.node.channel import Channel
from hearth.node.link import FrameLink


class WorkerRelay:
    """The relay of one worker. Mutable; used on the event loop alone."""

    def __init__(self, worker: FrameLink, hello: WorkerHello, node: NodeId) -> None:
        self._worker, self._hello, self._node = worker, hello, node
        self._early: list[bytes] = []  #: frames of the worker before the connection to the head is open
        self._to_head: _Flow | None = None
        self._to_worker: _Flow | None = None

    def open(self, channel: Channel) -> None:
        """Use a new connection to the head. Raises ConnectionResetError."""
        channel.send(WorkerOpened(self._node, self._hello))
        self._to_head, self._to_worker = _Flow(self._worker, channel), _Flow(channel, self._worker)
        channel.become_link(self._hello.worker, self)
        early, self._early = self._early, []
        for body in early:
            self._to_head.relay(body)

    def worker_sent(self, body: bytes) -> None:
        if self._to_head is None:
            self._early.append(body)  # bounded: nothing is consumed until it is sent
        else:
            self._to_head.relay(body)

    def worker_left(self) -> None:
        """Tell the head how the worker ended, and close."""
        if self._to_head is not None:
            self._to_head.sink.send(self._worker.ending())
            self._to_head.sink.close()

    # What the link to the head tells.

    def received(self, link: FrameLink, body: bytes) -> None:
        assert self._to_worker is not None, "set before the channel is a link"
        self._to_worker.relay(body)

    def left(self, link: FrameLink) -> None:
        """End the worker, which is of no use without its head."""
        self._worker.abort()


class _Flow:
    def __init__(self, source: FrameLink, sink: FrameLink) -> None:
        self.source, self.sink = source, sink
        self._unsent_bytes = 0  #: that the source is held back for
        sink.on_drained = self._settle

    def relay(self, body: bytes) -> None:
        self._unsent_bytes += len(body)
        self.sink.forward(body)
        if not self.sink.is_slow:
            self._settle()

    def _settle(self) -> None:
        num_bytes, self._unsent_bytes = self._unsent_bytes, 0
        self.source.consumed(num_bytes)
