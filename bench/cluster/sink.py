"""Takes chunks of a model from one node until its standard input closes, and drops them.

python -m bench.cluster.sink     reads a `SinkSetup` as a line; says when bytes come; at the end, how many
                                 came per second
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import msgspec

from hearth.core.errors import LoadCancelled
from hearth.core.types import Digest, NodeId
from hearth.store.transfer.peer_stream import PIECE_BYTES, AgentClient, PeerStream

STALL_S = 10.0


class SinkSetup(msgspec.Struct):
    agent_socket: str  #: that answers for the receiving node
    credentials: str  #: of that node
    node: NodeId  #: to take from
    model: Digest
    chunk_bytes: tuple[int, ...]
    num_streams: int
    is_planned: bool  #: one chunk at a time, in turns


class _Sink:
    def __init__(self, setup: SinkSetup) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._num_bytes, self._num_asked, self._is_over = 0, 0, False
        self.began = threading.Event()

    def take(self) -> None:
        setup, buffer = self._setup, memoryview(bytearray(max(self._setup.chunk_bytes)))
        ticket = AgentClient(Path(setup.agent_socket)).ticket(setup.node)
        stream = PeerStream.open(setup.node, ticket, Path(setup.credentials), STALL_S)
        while not self._is_over:
            with self._lock:
                asked, self._num_asked = self._num_asked, self._num_asked + 1
            index, turn = asked % len(setup.chunk_bytes), asked if setup.is_planned else None
            room = buffer[: setup.chunk_bytes[index]]
            try:
                stream.read_chunk(setup.model, index, room, self._count, turn=turn)
            except LoadCancelled:
                break
        stream.close()

    def _count(self) -> bool:
        with self._lock:
            self._num_bytes += PIECE_BYTES  # the last piece of a chunk may be smaller: this is about speed
        self.began.set()
        return not self._is_over

    def end(self) -> int:
        self._is_over = True
        with self._lock:
            return self._num_bytes


def main() -> None:
    sink = _Sink(msgspec.json.decode(sys.stdin.readline(), type=SinkSetup))
    threads = [threading.Thread(target=sink.take, daemon=True) for _ in range(sink._setup.num_streams)]
    for thread in threads:
        thread.start()
    sink.began.wait()
    began_s = time.perf_counter()
    print("begun", flush=True)
    sys.stdin.read()
    num_bytes = sink.end() - PIECE_BYTES
    print(num_bytes / (time.perf_counter() - began_s), flush=True)


if __name__ == "__main__":
    main()
