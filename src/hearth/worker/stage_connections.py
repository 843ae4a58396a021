"""Connections between the members of pipelines: who dials says which pipeline it is for.

The target may not have started loading. Its connection is kept here until it does, and claimed then.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from hearth.core.errors import HearthError, ServiceError, StageLost
from hearth.core.types import NodeId, WorkerId, node_of

#: Time for the first message of a connection.
HELLO_S = 10.0
#: Connections that nobody has claimed yet, of which the oldest is closed for another one.
MAX_UNCLAIMED = 64
_MAX_HELLO_BYTES = 4096
_LENGTH_BYTES = 4

log = logging.getLogger(__name__)


class StageHello(msgspec.Struct, frozen=True):
    """The first message of a member on its connection to another one."""

    pipeline: str
    has_steps: bool  #: False: it has results
    is_on_device: bool = False  #: the memory that comes with it


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory for hidden states that two members map."""

    descriptor: int
    is_on_device: bool


@dataclass(frozen=True, slots=True)
class Arrival:
    connection: socket.socket
    shared: SharedMemory | None  #: None: hidden states are sent

    @property
    def is_over(self) -> bool:
        """True if the other end has hung up."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.connection.close()
        if self.shared is not None:
            os.close(self.shared.descriptor)


#: The pipeline, whether it has steps, and the node that it comes from.
_Key = tuple[str, bool, NodeId]


def _key(hello: StageHello, source: NodeId) -> _Key:
    return hello.pipeline, hello.has_steps, source


class StageConnections:
    """Connects the members of pipelines on this worker with others. Any thread calls it."""

    def __init__(self, own: WorkerId, connect: Callable[[WorkerId], socket.socket]) -> None:
        """`connect` reaches another worker. Raises ServiceError or OSError if it cannot."""
        self.own, self._connect = own, connect
        self.num_dropped = 0  #: frames that were dropped by members that are closed
        self._arrivals: dict[_Key, Arrival] = {}  #: unclaimed
        self._changed = threading.Condition()

    def accept(self, connection: socket.socket, source: NodeId | None) -> None:
        """Take a connection of another member, and read its hello. `source` None: it is of this machine."""
        descriptors: list[int] = []
        try:
            connection.settimeout(HELLO_S)
            begin = b""
            if source is None:
                begin, descriptors, _, _ = socket.recv_fds(
                    connection, _LENGTH_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
            size = int.from_bytes(begin + _receive(connection, _LENGTH_BYTES - len(begin)), "big")
            if size > _MAX_HELLO_BYTES:
                raise ServiceError(f"a hello of {size} bytes came, limit: {_MAX_HELLO_BYTES}")
            hello = msgspec.json.decode(_receive(connection, size), type=StageHello)
            connection.settimeout(None)
        except (OSError, HearthError, msgspec.MsgspecError) as error:
            log.warning("member_refused reason=%s", error)
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)
            return
        shared = SharedMemory(descriptors[0], hello.is_on_device) if descriptors else None
        with self._changed:
            over = [key for key, one in self._arrivals.items() if one.is_over]
            key = _key(hello, node_of(self.own) if source is None else source)
            self._drop({*over, key}.intersection(self._arrivals))
            self._drop(list(self._arrivals)[: -MAX_UNCLAIMED + 1])
            self._arrivals[key] = Arrival(connection, shared)
            self._changed.notify_all()

    def connect(self, worker: WorkerId, hello: StageHello, shared: int | None = None) -> socket.socket:
        """Connect to another member, and give it a copy of `shared`. Raises StageLost."""
        content = msgspec.json.encode(hello)
        frame = len(content).to_bytes(_LENGTH_BYTES, "big") + content
        try:
            connection = self._connect(worker)
            try:
                if shared is None:
                    connection.sendall(frame)
                else:
                    socket.send_fds(connection, [frame], [shared])
            except OSError:
                connection.close()
                raise
        except (OSError, HearthError) as error:
            raise StageLost(
                f"worker `{worker}` of pipeline {hello.pipeline} is not reached: {error}"
            ) from error
        return connection

    def claim(
        self,
        hello: StageHello,
        sender: WorkerId,
        is_given_up: Callable[[], bool],
        look_s: float | None = None,
    ) -> Arrival | None:
        """Wait for the connection of another worker; None: it was given up.

        `forget` tells of that, and it is asked again every `look_s`.
        """
        key = _key(hello, node_of(sender))
        with self._changed:
            while (arrival := self._arrivals.pop(key, None)) is None and not is_given_up():
                self._changed.wait(look_s)
        return arrival

    def forget(self, pipeline: str) -> None:
        """Close the unclaimed connections of a pipeline that was dissolved."""
        with self._changed:
            self._drop([key for key in self._arrivals if key[0] == pipeline])
            self._changed.notify_all()

    def _drop(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            self._arrivals.pop(key).close()


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    content = b""
    while len(content) < num_bytes:
        part = connection.recv(num_bytes - len(content))
        if not part:
            raise ConnectionError("the connection was closed before the hello")
        content += part
    return content
