"""The parts of `bench.cluster`: each starts keepers, has models loaded, and returns figures of all rounds."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from bench.cluster.ceiling import Ceiling, probe
from bench.cluster.netlab import inside, listen_inside, shaped_links
from bench.cluster.nodes import Cluster, Node
from bench.report import step, tell
from hearth.core.errors import StoreError
from hearth.core.messages import KeeperSetup
from hearth.core.node_messages import HeldChunks
from hearth.core.types import Digest, Rung, server_name
from hearth.models.families import arch_from_config
from hearth.models.layout import layout_of
from hearth.store.format.manifest import CHUNK_BYTES, MANIFEST, WEIGHTS, Manifest, chunk_of
from hearth.store.keeper_client import KeeperClient
from hearth.store.transfer.lease_client import LeaseClient

#: 0.6 GB in bfloat16.
SHAPE: Mapping[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
#: More make a ceiling on few cores lower.
NUM_STREAMS = 4
MBIT = 200
SHAPED_CHUNKS = 24


@dataclass(slots=True)
class Figure:
    measure: str
    unit: str
    aim: str | None = None
    values: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Keeper:
    node: Node
    process: subprocess.Popen[bytes]

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def socket(self) -> Path:
        return self.node.folder / "keeper.sock"


@dataclass(frozen=True, slots=True)
class Load:
    num_bytes: int
    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.seconds / 1e9


def loopback(num_rounds: int) -> Iterator[Figure]:
    for is_encrypted in (False, True):
        how = "encrypted" if is_encrypted else "plain"
        speed = Figure(
            f"loopback, {how}: host memory of a node to that of another", "GB/s", "0.9 of the bound"
        )
        cpu_aim = None if is_encrypted else "at most 0.15"
        cpu = Figure(f"loopback, {how}: sender", "CPU s/GB", cpu_aim)
        receiving = Figure(f"loopback, {how}: receiver", "CPU s/GB")
        kept = Figure(f"loopback, {how}: the same, kept on the receiver's disk", "GB/s")
        two = Figure(f"loopback, {how}: two senders", "GB/s")
        with bench_cluster(is_encrypted) as bench:
            senders = [bench.keeper(name) for name in ("a", "b")]
            receiver = bench.keeper("c", num_chunks=bench.num_chunks, disk_bytes=0)
            keeping = bench.keeper("d", num_chunks=bench.num_chunks)
            for keeper in (receiver, keeping):  # the first load opens connections and makes the pages
                bench.load(keeper, senders)
            for number in range(num_rounds):
                ceiling = bench.ceiling()
                speed.bounds.append(ceiling.bytes_per_s / 1e9)
                cpu.bounds.append(ceiling.sender_cpu_s_per_gb)
                one = bench.load(receiver, senders[:1])
                speed.values.append(one.gb_per_s)
                cpu.values.append(one.sender_cpu_s / one.num_bytes * 1e9)
                receiving.values.append(one.receiver_cpu_s / one.num_bytes * 1e9)
                receiving.bounds.append(ceiling.receiver_cpu_s_per_gb)
                kept.values.append(bench.load(keeping, senders[:1]).gb_per_s)
                two.values.append(bench.load(receiver, senders).gb_per_s)
                tell(f"{how}, round {number}: {one.gb_per_s:.3f} GB/s of {ceiling.bytes_per_s / 1e9:.3f}")
        yield from (speed, cpu, receiving, kept, two)


def shaped(num_rounds: int) -> Iterator[Figure]:
    """Senders behind links of `MBIT`, a receiver behind one of five times as much."""
    bound = MBIT / 8e3
    for is_encrypted in (False, True):
        how = f"{MBIT} Mbit/s, {'encrypted' if is_encrypted else 'plain'}"
        one = Figure(f"{how}: one sender", "GB/s", "0.92 of the bound")
        two = Figure(f"{how}: two senders, times one", "times", "1.8")
        links = {"a": MBIT, "b": MBIT, "c": 5 * MBIT}
        with shaped_links(links) as addresses, bench_cluster(is_encrypted) as bench:
            senders = [bench.keeper(name, address=addresses[name]) for name in ("a", "b")]
            receiver = bench.keeper("c", num_chunks=SHAPED_CHUNKS, disk_bytes=0, address=addresses["c"])
            bench.load(receiver, senders, SHAPED_CHUNKS)
            for number in range(num_rounds):
                one.values.append(bench.load(receiver, senders[:1], SHAPED_CHUNKS).gb_per_s)
                one.bounds.append(bound)
                both = bench.load(receiver, senders, SHAPED_CHUNKS).gb_per_s
                two.values.append(both / one.values[-1])
                tell(f"{how}, round {number}: {one.values[-1]:.4f} GB/s of {bound:g}, two {both:.4f}")
        yield from (one, two)


class Bench:
    """Keepers of several nodes, and models that no receiver has seen. One thread uses it."""

    def __init__(self, cluster: Cluster, stack: ExitStack) -> None:
        self.cluster, self._stack = cluster, stack
        with step("writing random models"):
            self._models = [write_random(cluster.folder / f"model-{number}", SHAPE) for number in range(2)]
        self.num_chunks = len(self._models[0][1].chunks)
        self._num_loads = Counter[Keeper]()

    def keeper(
        self,
        name: str,
        *,
        num_chunks: int | None = None,
        disk_bytes: int | None = None,
        address: str | None = None,
    ) -> Keeper:
        """Start a keeper. `num_chunks` that it loads at a time, so that nothing of the load before stays.

        None: its host memory has room for all models.
        `address`: in its own network namespace; None: it has none.
        """
        num_cells = self.num_chunks * len(self._models) if num_chunks is None else num_chunks
        return start_keeper(
            self.cluster,
            name,
            self._stack,
            host_bytes=num_cells * CHUNK_BYTES,
            disk_bytes=disk_bytes,
            address=address,
        )

    def ceiling(self) -> Ceiling:
        node = self.cluster.nodes[next(iter(self.cluster.nodes))]
        credentials = node.folder if self.cluster.is_encrypted else None
        return probe(NUM_STREAMS, credentials, server_name(node.name))

    def load(self, receiver: Keeper, senders: Sequence[Keeper], num_chunks: int | None = None) -> Load:
        """Have a model loaded from the host memory of senders; not the one that the receiver had before."""
        directory, manifest = self._models[self._num_loads[receiver] % len(self._models)]
        self._num_loads[receiver] += 1
        where = f"hearth://{manifest.digest}"
        for sender in senders:
            warm_up(sender, directory)
        names = {sender.node.name for sender in senders}
        self.cluster.said = {name: lambda _: () for name in self.cluster.nodes if name not in names}
        with closing(LeaseClient(receiver.socket, is_pinned=False)) as client:
            model = client.open(where)
            before_s, receiver_s = sum(sender.cpu_s for sender in senders), receiver.cpu_s
            began_s, rungs = time.perf_counter(), set[Rung | None]()
            chunks = manifest.chunks[:num_chunks]
            grant = client.grant(model, range(len(chunks)))
            for chunk in grant:
                rungs.add(None if chunk.delivery is None else chunk.delivery.rung)
                grant.release(chunk)
            seconds = time.perf_counter() - began_s
            cpu_s = sum(sender.cpu_s for sender in senders) - before_s
            receiver_s = receiver.cpu_s - receiver_s
        if rungs != {Rung.PEER}:
            raise RuntimeError(f"all chunks should have come from nodes, some came from {rungs}")
        asyncio.run(KeeperClient(receiver.socket).forget(where))
        return Load(sum(chunk.num_bytes for chunk in chunks), seconds, cpu_s, receiver_s)


@contextmanager
def bench_cluster(is_encrypted: bool) -> Iterator[Bench]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-bench-"))
        cluster = stack.enter_context(closing(Cluster(Path(folder), is_encrypted)))
        yield Bench(cluster, stack)


def start_keeper(
    cluster: Cluster,
    name: str,
    stack: ExitStack,
    *,
    host_bytes: int,
    disk_bytes: int | None = None,
    address: str | None = None,
) -> Keeper:
    """Start the keeper of a new node; it ends with the stack. `address`: as for `Bench.keeper`."""
    node = cluster.add(name, None if address is None else listen_inside(name, address))
    prefix = () if address is None else inside(name)
    setup = KeeperSetup(
        socket=str(node.folder / "keeper.sock"),
        kind="cuda",  # it keeps chunks in host memory; no device is touched
        path=str(node.folder / "store"),
        disk_bytes=disk_bytes,
        host_bytes=host_bytes,
        log_level="error",
        agent_socket=str(node.agent_socket),
        peers_socket=str(node.peers_socket),
        credentials=str(node.folder),
    )
    process = subprocess.Popen(
        [*prefix, sys.executable, "-m", "hearth.store.keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    stack.callback(process.wait)
    assert process.stdin is not None
    assert process.stdout is not None
    stack.callback(process.stdin.close)
    process.stdin.write(msgspec.json.encode(setup) + b"\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["error"] is None
    keeper = Keeper(node, process)
    node.held = partial(_held, keeper.socket)
    return keeper


def write_random(
    directory: Path, shape: Mapping[str, object], chunk_bytes: int = CHUNK_BYTES
) -> tuple[Path, Manifest]:
    """Write a model of random bytes."""
    arch = arch_from_config(dict(shape))
    num_bytes, chunks = layout_of(arch, "bfloat16").num_bytes, []
    directory.mkdir()
    with (directory / WEIGHTS).open("wb") as file:
        for begin in range(0, num_bytes, chunk_bytes):
            part = os.urandom(min(chunk_bytes, num_bytes - begin))
            chunks.append(chunk_of(part, on_all_cores=True))
            file.write(part)
    manifest = Manifest.of(arch, "bfloat16", "none", tuple(chunks), chunk_bytes, {})
    (directory / MANIFEST).write_text(manifest.to_json())
    return directory, manifest


def warm_up(sender: Keeper, directory: Path) -> None:
    """Bring a model into the sender's host memory."""
    with closing(LeaseClient(sender.socket, is_pinned=False)) as client:
        client.prefetch(client.open(directory)).wait()


def _held(socket: Path, digest: Digest) -> tuple[HeldChunks, ...]:
    try:
        return tuple(one for one in asyncio.run(KeeperClient(socket).report()).models if one.model == digest)
    except StoreError:
        return ()
