"""Other machines of the service under test: `hearth join` on loopback, by links that can be cut or slow.

node -> passage -> the cluster's port of the head        control, tokens
other stores -> passage -> the port of the node          weights
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from socketserver import BaseRequestHandler, ThreadingTCPServer

from bench.service.process import ROOT, STOP_S

NAMES = ("one", "two")
HOST = "127.0.0.1"
#: Below those that Linux gives out by itself, so that nobody has it while a process starts again.
PORTS = range(12_000, 32_000)
#: Passed on at a time.
PIECE_BYTES = 1 << 14


class ClusterNode:
    """`hearth join` in a process of its own. Mutable; used by one thread at a time."""

    def __init__(self, data_dir: Path, *flags: str) -> None:
        self.data_dir, self._output = data_dir, data_dir.parent / f"{data_dir.name}.out"
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hearth", "join", *flags, "--data-dir", str(data_dir)],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def stop(self) -> int:
        """End it as an operator would."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_S)


class Passage(ThreadingTCPServer):
    """Passes connections on to another port, as a link does that can be cut, silent or slow."""

    daemon_threads = True

    def __init__(self, target: int) -> None:
        super().__init__((HOST, 0), _Connection)
        self.target, self.port = target, int(self.server_address[1])
        self.is_cut = False
        self.open: set[socket.socket] = set()
        self._flows = threading.Event()
        self._flows.set()
        self._byte_s = 0.0  #: for each byte
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @contextmanager
    def cut(self) -> Iterator[None]:
        """End all connections, and take no others while the context lasts."""
        self.is_cut = True
        for connection in list(self.open):
            _end(connection)
        try:
            yield
        finally:
            self.is_cut = False

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Pass on nothing while the context lasts, and end no connection: as a link does that is down."""
        self._flows.clear()
        try:
            yield
        finally:
            self._flows.set()

    @contextmanager
    def slow(self, bytes_per_s: float) -> Iterator[None]:
        """Limit each direction of each connection while the context lasts."""
        self._byte_s = 1.0 / bytes_per_s
        try:
            yield
        finally:
            self._byte_s = 0.0

    def pass_on(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(PIECE_BYTES):
                time.sleep(len(data) * self._byte_s)
                self._flows.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            _end(source)
            _end(target)

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Connection(BaseRequestHandler):
    server: Passage
    request: socket.socket

    def handle(self) -> None:
        with suppress(OSError), socket.create_connection((HOST, self.server.target)) as onward:
            ends = {self.request, onward}
            self.server.open |= ends
            if not self.server.is_cut:  # looked at when `cut` can see it
                pass_on = self.server.pass_on
                back = threading.Thread(target=pass_on, args=(onward, self.request), daemon=True)
                back.start()
                pass_on(self.request, onward)
                back.join()
            self.server.open -= ends


class Nodes:
    """The cluster around a service. Mutable; used on the event loop alone."""

    def __init__(self, place: Path, head_data_dir: Path, flags: Sequence[str]) -> None:
        """Make the service the head of a cluster. `flags`: of `hearth join`, for each node."""
        self._place, self._flags = place, flags
        head_port = free_port()
        self.head_flags = ("--workers", "1", "--set", f"cluster.listen={HOST}:{head_port}")
        self.to_head = Passage(head_port)
        self._ports = {name: free_port() for name in NAMES}
        self.to_stores = {name: Passage(port) for name, port in self._ports.items()}
        init = ["cluster", "init", "--address", f"{HOST}:{self.to_head.port}"]
        made = subprocess.run(
            [sys.executable, "-m", "hearth", *init, "--data-dir", str(head_data_dir)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        self._invitation = made.stdout.split()[2:]  #: after `hearth join`
        self.nodes: dict[str, ClusterNode] = {}

    def start(self, name: str) -> None:
        """Start a node. One that has joined before needs no token."""
        words = () if name in self.nodes else (*self._invitation, "--name", name)
        addresses = {"listen": self._ports[name], "address": self.to_stores[name].port}
        settings = [
            part for key, port in addresses.items() for part in ("--set", f"cluster.{key}={HOST}:{port}")
        ]
        self.nodes[name] = ClusterNode(self._place / f"node-{name}", *words, *self._flags, *settings)

    def pids(self) -> list[int]:
        """Return the agents that are there now."""
        return [node.process.pid for node in self.nodes.values() if node.process.poll() is None]

    def stop(self) -> list[str]:
        """End all nodes as an operator would; return what went wrong."""
        codes = {name: node.stop() for name, node in self.nodes.items()}
        for passage in (self.to_head, *self.to_stores.values()):
            passage.close()
        return [f"node {name} ended with {code}, must be 0" for name, code in codes.items() if code]


def free_port() -> int:
    """Return a port that nobody listens on now: every life of a process has the same one."""
    while True:
        port = SystemRandom().choice(PORTS)
        with socket.socket() as held, suppress(OSError):  # it is taken
            held.bind((HOST, port))
            return port


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)
