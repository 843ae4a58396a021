"""The part of `bench.cluster` in which a node sends a model while its worker serves: how much slower is that?

The node has half of the cores to itself. Head, client and the receiver of the model have the others; the
receiver has the lowest priority there, since it would run on another machine. Do not run it under `nice`: the
node's sends could not be nicer than its worker.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import msgspec

from bench.cluster.members import NODE, SMALL, Members, Place, members
from bench.cluster.netlab import entered, inside, narrow, shaped_links
from bench.cluster.parts import MBIT, NUM_STREAMS, Figure
from bench.cluster.sink import SinkSetup
from bench.report import tell
from bench.service.client import completion
from bench.service.process import ROOT
from bench.service.streams import Prompts, good, in_turn
from hearth.core.types import Digest, NodeId, where_on_nodes
from hearth.store.transfer.lease_client import LeaseClient

NUM_TOKENS, PROMPT_TOKENS = 200, 16
_PULSE_S, _PULSE = 0.01, struct.Struct("d")
_AIM = "at most 1.1"


@dataclass(frozen=True, slots=True)
class _Window:
    gaps_s: Sequence[float]  #: between tokens
    delays_s: Sequence[float]  #: of small messages from the node to the head
    sent_bytes_per_s: float = 0.0

    def gap_s(self, share: float) -> float:
        return _at(self.gaps_s, share)


@dataclass(frozen=True, slots=True)
class _Load:
    how: str
    num_streams: int
    is_planned: bool = False


_LOADS = (_Load("ordinary sends", NUM_STREAMS), _Load("planned sends", 1, is_planned=True))


def source(num_rounds: int) -> Iterator[Figure]:
    for is_encrypted in (False, True):
        yield from _measure(num_rounds, is_encrypted=is_encrypted)


def _measure(num_rounds: int, *, is_encrypted: bool) -> Iterator[Figure]:
    head, node = (f"{name}-{os.getpid()}" for name in ("head", "source"))
    cores = sorted(os.sched_getaffinity(0))
    own, others = cores[: max(1, len(cores) // 2)], cores[len(cores) // 2 :]
    with shaped_links({head: None, node: None}) as addresses, entered(head), _on_cores(others):
        for name, device in ((f"{head}-hub", "p1"), (f"{head}-hub", "p2"), (node, "cable"), (head, "cable")):
            _receive_on(name, device, own if name == node else others)
        taskset = ("taskset", "-c", ",".join(map(str, own)))
        with members(
            {"small": SMALL, "large": SMALL},
            num_workers=0,
            host=addresses[head],
            place=Place(addresses[node], (*taskset, *inside(node))),
            settings=[f"cluster.encrypt_weights={str(is_encrypted).lower()}"],
        ) as both:
            both.start_node()
            both.wait_for_node()
            lab = _Lab(both, addresses[head], (*taskset, *inside(node)))
            lab.window(None)  # the first one loads the model
            for link, mbit in (("unshaped link", None), (f"{MBIT} Mbit/s", MBIT)):
                if mbit is not None:
                    narrow(node, mbit)
                how = f"{link}, {'encrypted' if is_encrypted else 'plain'}"
                yield from lab.compare(how, num_rounds, _LOADS[: 1 if mbit is None else None])


class _Lab:
    """A node that serves a model, and has another one to send. One thread uses it."""

    def __init__(self, both: Members, host: str, prefix: tuple[str, ...]) -> None:
        self._both, self._host, self._prefix = both, host, prefix
        self._prompts = Prompts(int(str(SMALL["vocab_size"])), PROMPT_TOKENS)
        (socket_path,) = (both.node_dir / "run").glob("sockets-*/keeper.sock")
        (agent_socket,) = (both.service.data_dir / "run").glob("sockets-*/agent.sock")
        digest = next(one.digest for one in both.service.client.models() if one.name == "large")
        with closing(LeaseClient(socket_path, is_pinned=False)) as client:  # it stays on the node's disk
            model = client.open(where_on_nodes(digest))
            grant = client.grant(model, range(len(model.manifest.chunks)))
            for chunk in grant:
                grant.release(chunk)
        (node,) = (one.node for one in both.service.client.nodes() if one.name == NODE)
        self._setup = SinkSetup(
            agent_socket=str(agent_socket),
            credentials=str(both.service.data_dir / "cluster"),
            node=NodeId(node),
            model=Digest(digest),
            chunk_bytes=tuple(chunk.num_bytes for chunk in model.manifest.chunks),
            num_streams=0,
            is_planned=False,
        )

    def compare(self, how: str, num_rounds: int, loads: Sequence[_Load]) -> Iterator[Figure]:
        quiet: list[_Window] = []
        sending: dict[_Load, list[_Window]] = {load: [] for load in loads}
        for number in range(num_rounds):
            quiet.append(self.window(None))
            for load, windows in sending.items():
                windows.append(self.window(load))
                tell(f"{how}, round {number}, {load.how}: {_told(quiet[-1])} -> {_told(windows[-1])}")
        for load, windows in sending.items():
            what = f"source, {how}, {load.how}"
            yield Figure(f"{what}: sent", "GB/s", None, [one.sent_bytes_per_s / 1e9 for one in windows])
            for name, share in (("p50", 0.5), ("p99", 0.99)):
                pairs = [
                    (one.gap_s(share), before.gap_s(share))
                    for one, before in zip(windows, quiet, strict=True)
                ]
                yield Figure(
                    f"{what}: token gap {name}",
                    "ms",
                    None,
                    [1e3 * gap for gap, _ in pairs],
                    [1e3 * gap for _, gap in pairs],
                )
                yield Figure(
                    f"{what}: token gap {name}, times that without",
                    "times",
                    _AIM,
                    [gap / base for gap, base in pairs],
                )
            yield Figure(
                f"{what}: p99 delay of a message to the head",
                "ms",
                None,
                [1e3 * _at(one.delays_s, 0.99) for one in windows],
                [1e3 * _at(one.delays_s, 0.99) for one in quiet],
            )

    def window(self, load: _Load | None) -> _Window:
        """Stream an answer, while the node sends if there is a load."""
        with _delays(self._host, self._prefix) as delays, self._sink(load) as sink:
            del delays[:]
            (answer,) = asyncio.run(
                in_turn(self._both.service.port, [completion("small", self._prompts.take(1)[0], NUM_TOKENS)])
            )
            seen = list(delays)
            sent = 0.0
            if sink is not None:
                said, _ = sink.communicate()
                sent = float(said)
        at_s = [event.at_s for event in good(answer.reply).events]
        return _Window([after - before for before, after in pairwise(at_s)], seen, sent)

    @contextmanager
    def _sink(self, load: _Load | None) -> Iterator[subprocess.Popen[bytes] | None]:
        if load is None:
            yield None
            return
        setup = msgspec.structs.replace(self._setup, num_streams=load.num_streams, is_planned=load.is_planned)
        command = ["chrt", "--idle", "0", sys.executable, "-m", "bench.cluster.sink"]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(msgspec.json.encode(setup) + b"\n")
            process.stdin.flush()
            if process.stdout.readline() != b"begun\n":
                raise RuntimeError("the node has sent nothing")
            yield process


@contextmanager
def _delays(host: str, prefix: Sequence[str]) -> Iterator[list[float]]:
    """Have a process of the node send its clock to this one again and again; yield the list of delays."""
    delays: list[float] = []

    def receive(connection: socket.socket) -> None:
        with connection:
            while message := connection.recv(_PULSE.size, socket.MSG_WAITALL):
                delays.append(time.monotonic() - _PULSE.unpack(message)[0])

    with socket.create_server((host, 0)) as listener:
        address = [host, str(listener.getsockname()[1])]
        command = [*prefix, sys.executable, "-m", "bench.cluster.source", *address]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as process:
            connection, _ = listener.accept()
            thread = threading.Thread(target=receive, args=(connection,))
            thread.start()
            try:
                yield delays
            finally:
                process.kill()
                thread.join()


def _send_pulses(host: str, port: int) -> None:
    with socket.create_connection((host, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            connection.sendall(_PULSE.pack(time.monotonic()))
            time.sleep(_PULSE_S)


@contextmanager
def _on_cores(cores: Sequence[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _receive_on(namespace: str, device: str, cores: Sequence[int]) -> None:
    """Handle packets that come to a device on these cores; else the sender's core would receive, too."""
    mask = sum(1 << core for core in cores)
    path = f"/sys/class/net/{device}/queues/rx-0/rps_cpus"
    subprocess.run([*inside(namespace), "sh", "-c", f"echo {mask:x} > {path}"], check=True)


def _at(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def _told(window: _Window) -> str:
    gaps = ", ".join(f"{1e3 * window.gap_s(share):.1f}" for share in (0.5, 0.99))
    delay = f"{1e3 * median(window.delays_s):.1f}, {1e3 * _at(window.delays_s, 0.99):.1f}"
    return f"gaps {gaps} ms, delay {delay} ms, {window.sent_bytes_per_s / 1e9:.3f} GB/s"


if __name__ == "__main__":
    _send_pulses(sys.argv[1], int(sys.argv[2]))
