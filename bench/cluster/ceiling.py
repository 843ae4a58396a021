"""What one socket between two processes carries, without a store: sent from a memory file, received, hashed.

The receiver hashes piece by piece, as `PeerStream` does; sender and receiver use as many threads as streams.
"""

from __future__ import annotations

import os
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from hearth.store.format.manifest import CHUNK_BYTES
from hearth.store.transfer.data_connection import tls_context
from hearth.store.transfer.peer_stream import PIECE_BYTES

CHUNKS_PER_STREAM = 16
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Ceiling:
    bytes_per_s: float
    sender_cpu_s_per_gb: float
    receiver_cpu_s_per_gb: float


def probe(num_streams: int, credentials: Path | None, name: str) -> Ceiling:
    """`credentials`: those of the node `name`, to encrypt; None: not encrypted."""
    given = [str(num_streams), "" if credentials is None else str(credentials)]
    command = [sys.executable, "-m", "bench.cluster.ceiling", *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        port = int(sender.stdout.readline())
        connections: list[socket.socket] = []
        for _ in range(num_streams):
            connection: socket.socket = socket.create_connection(("127.0.0.1", port))
            if credentials is not None:
                context = tls_context(credentials, ssl.PROTOCOL_TLS_CLIENT)
                connection = context.wrap_socket(connection, server_hostname=name)
            connections.append(connection)
        began_s, own_s = time.perf_counter(), _cpu_s()
        with ThreadPoolExecutor(num_streams) as pool:
            list(pool.map(_receive, connections))
        seconds, own_s = time.perf_counter() - began_s, _cpu_s() - own_s
        for connection in connections:
            connection.close()
        cpu_s = float(sender.stdout.readline())
    num_bytes = num_streams * CHUNKS_PER_STREAM * CHUNK_BYTES
    return Ceiling(num_bytes / seconds, cpu_s / num_bytes * 1e9, own_s / num_bytes * 1e9)


def _receive(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    flags = 0 if isinstance(connection, ssl.SSLSocket) else socket.MSG_WAITALL
    for _ in range(CHUNKS_PER_STREAM):
        connection.sendall(b"\n")
        hasher = blake3()
        for begin in range(0, CHUNK_BYTES, PIECE_BYTES):
            piece, done = buffer[begin : begin + PIECE_BYTES], 0
            while done < len(piece):
                done += connection.recv_into(piece[done:], 0, flags)
            hasher.update(piece)
        hasher.digest()


def _send(connection: socket.socket, fd: int, memory: memoryview) -> None:
    with connection:
        while connection.recv(1):
            if isinstance(connection, ssl.SSLSocket):
                for begin in range(0, CHUNK_BYTES, _PIECE_BYTES):
                    connection.sendall(memory[begin : begin + _PIECE_BYTES])
            else:
                offset = 0
                while offset < CHUNK_BYTES:
                    offset += os.sendfile(connection.fileno(), fd, offset, CHUNK_BYTES - offset)


def main() -> None:
    num_streams, credentials = int(sys.argv[1]), sys.argv[2]
    data = os.urandom(CHUNK_BYTES)
    fd = os.memfd_create("ceiling")
    os.write(fd, data)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threads = []
        for _ in range(num_streams):
            connection, _ = listener.accept()
            if credentials:
                context = tls_context(Path(credentials), ssl.PROTOCOL_TLS_SERVER)
                connection = context.wrap_socket(connection, server_side=True)
            threads.append(_started(lambda c=connection: _send(c, fd, memoryview(data))))  # type: ignore[misc]
    before_s = _cpu_s()
    for thread in threads:
        thread.join()
    print(_cpu_s() - before_s, flush=True)


def _started(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
