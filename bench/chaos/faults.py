"""Faults that strike a service from outside, one function each. None needs rights that the service lacks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from random import Random

from bench.bad_server import BadServer
from bench.chaos.nodes import NAMES, Nodes
from bench.chaos.object_store import LIES, SLOWNESS, behaving
from bench.chaos.schedule import Strike
from bench.chaos.service import FAR_MODELS, SPARE_MODEL, Models, ServiceUnderTest
from bench.failing_disk import allow_writes, failing_writes
from bench.service.client import Reply, ask, request, with_key
from bench.service.process import descent

#: How long what passes by itself lasts.
PAUSE_S, GATEWAY_PAUSE_S = (2.0, 4.0), (0.5, 2.0)
STORE_S, DISK_S = 6.0, 6.0
NODE_PAUSE_S = 5.0  #: a node is lost after 3 s
DRAIN_S, CUT_S = (3.0, 6.0), (0.5, 2.0)
#: Nodes that are silent for 3 s are lost.
SILENT_S = (2.0, 6.0)
SLOW_BYTES_PER_S = (2e5, 5e6)
#: A process that hangs is replaced within this, on a busy machine too.
FOUND_S = 60.0
#: What an operator's order may be answered with while the disk fails.
DONE, HONEST_REFUSALS = (200, 201), (409, 503, 507)
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that has struck, on the clock of `time.perf_counter`."""

    fault: str
    began_s: float
    ended_s: float


@dataclass(slots=True)
class Scene:
    """All that faults can reach, and what they did. Mutable; used on the event loop alone."""

    service: ServiceUnderTest
    store: BadServer
    models: Models
    struck: list[Struck] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    async def strike(self, strike: Strike) -> None:
        """Let a fault strike, as soon as the gateway is there."""
        await self.service.is_up.wait()
        began_s = time.perf_counter()
        try:
            await {**FAULTS, **NODE_FAULTS}[strike.fault](self, Random(strike.seed))
        except (OSError, RuntimeError, ValueError) as error:
            self.violate(began_s, f"{strike.fault} could not be carried out: {error!r}")
        self.counts[strike.fault] += 1
        self.struck.append(Struck(strike.fault, began_s, time.perf_counter()))

    def violate(self, began_s: float, what: str) -> None:
        """Note what must not be, unless the gateway was killed since a fault began and explains it."""
        if not self.service.was_absent(began_s, time.perf_counter()):
            self.violations.append(what)

    def pick(self, role: str, random: Random) -> int | None:
        """Return one of the processes of a role; None where there is none at the moment."""
        pids = sorted(self.service.processes()[role])
        return random.choice(pids) if pids else None

    @property
    def nodes(self) -> Nodes:
        assert self.service.nodes is not None, "faults of nodes need --cluster"
        return self.service.nodes

    async def wait_nodes(self, names: Sequence[str]) -> None:
        """Wait until nodes serve, whatever has struck them."""
        began_s, found = time.perf_counter(), []
        while time.perf_counter() < began_s + FOUND_S:
            await self.service.is_up.wait()
            found = json.loads((await self.order("GET", "/hearth/nodes")).body)
            if set(names) <= {one["name"] for one in found if one["num_ready_workers"]}:
                return
            await asyncio.sleep(_LOOK_S)
        self.violate(began_s, f"nodes {', '.join(names)} do not serve after {FOUND_S:.0f} s: {found}")

    async def order(self, method: str, path: str, body: dict[str, object] | None = None) -> Reply:
        """Ask as the operator."""
        key = self.service.data_dir.read_admin_token()
        return await ask(self.service.port, with_key(request(method, path, body), key))


async def kill_worker(scene: Scene, random: Random) -> None:
    _signal(scene.pick("worker", random), signal.SIGKILL)


async def kill_keeper(scene: Scene, random: Random) -> None:
    _signal(scene.pick("keeper", random), signal.SIGKILL)


async def kill_gateway(scene: Scene, random: Random) -> None:
    await scene.service.kill_gateway()


async def pause_worker(scene: Scene, random: Random) -> None:
    await _pause(scene.pick("worker", random), random.uniform(*PAUSE_S))


async def pause_keeper(scene: Scene, random: Random) -> None:
    await _pause(scene.pick("keeper", random), random.uniform(*PAUSE_S))


async def pause_gateway(scene: Scene, random: Random) -> None:
    await _pause(scene.pick("gateway", random), random.uniform(*GATEWAY_PAUSE_S))


async def hang_worker(scene: Scene, random: Random) -> None:
    await _hang(scene, "worker", random)


async def hang_keeper(scene: Scene, random: Random) -> None:
    await _hang(scene, "keeper", random)


async def slow_store(scene: Scene, random: Random) -> None:
    with behaving(scene.store, SLOWNESS, random.getrandbits(32)):
        await _fetch_anew(scene)


async def lying_store(scene: Scene, random: Random) -> None:
    with behaving(scene.store, LIES, random.getrandbits(32)):
        await _fetch_anew(scene)


async def fail_writes(scene: Scene, random: Random) -> None:
    """Have the gateway and the keeper write nothing for a while, and deploy a model meanwhile and after."""
    began_s, processes = time.perf_counter(), scene.service.processes()
    with failing_writes([*processes["gateway"], *processes["keeper"]]):
        await _fetch_anew(scene, DISK_S / 2)
        refused = await _deploy_spare(scene)
        await asyncio.sleep(DISK_S / 2)
    for pids in scene.service.processes().values():  # what was started meanwhile fails to write, too
        allow_writes(pids)
    if refused.status not in (*DONE, *HONEST_REFUSALS):
        scene.violate(began_s, f"deploying on a full disk: {refused.status} {_tail(refused)}")
    if refused.status not in DONE:
        deployed = await _deploy_spare(scene)
        if deployed.status not in DONE:
            scene.violate(began_s, f"deploying after a full disk: {deployed.status} {_tail(deployed)}")
    await scene.order("DELETE", f"/hearth/models/{SPARE_MODEL}")


async def kill_node(scene: Scene, random: Random) -> None:
    """Kill an agent and start it again; nothing of its first life may be left when the second serves."""
    name = random.choice(NAMES)
    node = scene.nodes.nodes[name]
    ids = descent(node.process.pid)
    node.kill()
    scene.nodes.start(name)
    await scene.wait_nodes([name])
    scene.service.check_gone(ids)


async def pause_node(scene: Scene, random: Random) -> None:
    """Stop an agent until the head has given it up."""
    name = random.choice(NAMES)
    await _pause(scene.nodes.nodes[name].process.pid, NODE_PAUSE_S)
    await scene.wait_nodes([name])


async def drain_node(scene: Scene, random: Random) -> None:
    path = f"/hearth/nodes/{random.choice(NAMES)}/drain"
    await scene.order("POST", path, {})
    await asyncio.sleep(random.uniform(*DRAIN_S))
    deadline_s = time.perf_counter() + FOUND_S
    while (await scene.order("POST", path, {"undo": True})).status not in DONE:  # while the node is not up
        if time.perf_counter() > deadline_s:
            raise RuntimeError(f"it could not be had back in {FOUND_S:.0f} s")
        await asyncio.sleep(_LOOK_S)


async def cut_links(scene: Scene, random: Random) -> None:
    """End all connections of nodes to the head."""
    with scene.nodes.to_head.cut():
        await asyncio.sleep(random.uniform(*CUT_S))


async def silence_links(scene: Scene, random: Random) -> None:
    """Let nothing pass between nodes and head, mostly until the nodes are given up."""
    with scene.nodes.to_head.silent():
        await asyncio.sleep(random.uniform(*SILENT_S))
    await scene.wait_nodes(NAMES)


async def slow_links(scene: Scene, random: Random) -> None:
    """Slow down all links, and have models fetched meanwhile."""
    links = (scene.nodes.to_head, *scene.nodes.to_stores.values())
    with ExitStack() as stack:
        for link in links:
            stack.enter_context(link.slow(random.uniform(*SLOW_BYTES_PER_S)))
        await _fetch_anew(scene, random.uniform(*CUT_S))


async def cut_data(scene: Scene, random: Random) -> None:
    """Cut all other stores off from that of a node, and have models fetched meanwhile."""
    with scene.nodes.to_stores[random.choice(NAMES)].cut():
        await _fetch_anew(scene, random.uniform(*CUT_S))


FAULTS: dict[str, Callable[[Scene, Random], Awaitable[None]]] = {
    "worker_kill": kill_worker,
    "worker_pause": pause_worker,
    "worker_hang": hang_worker,
    "keeper_kill": kill_keeper,
    "keeper_pause": pause_keeper,
    "keeper_hang": hang_keeper,
    "gateway_kill": kill_gateway,
    "gateway_pause": pause_gateway,
    "disk_full": fail_writes,
    "store_slow": slow_store,
    "store_lies": lying_store,
}
#: With --cluster alone.
NODE_FAULTS: dict[str, Callable[[Scene, Random], Awaitable[None]]] = {
    "node_kill": kill_node,
    "node_pause": pause_node,
    "node_drain": drain_node,
    "link_cut": cut_links,
    "data_cut": cut_data,
    "link_silent": silence_links,
    "link_slow": slow_links,
}


def _signal(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def _hang(scene: Scene, role: str, random: Random) -> None:
    """Stop a process for good: the service must find out and start another."""
    pid = scene.pick(role, random)
    _signal(pid, signal.SIGSTOP)
    deadline_s = time.perf_counter() + FOUND_S
    while pid in scene.service.processes()[role]:
        if time.perf_counter() > deadline_s:
            scene.violations.append(f"a {role} that hangs was not replaced in {FOUND_S:.0f} s")
            _signal(pid, signal.SIGKILL)
            return
        await asyncio.sleep(_LOOK_S)


async def _pause(pid: int | None, seconds: float) -> None:
    _signal(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        _signal(pid, signal.SIGCONT)


async def _fetch_anew(scene: Scene, seconds: float = STORE_S) -> None:
    """Take the far models from memory, so that they are fetched while a fault lasts."""
    for name in FAR_MODELS:
        await scene.order("POST", f"/hearth/models/{name}/unload", {"free": True})
    await asyncio.sleep(seconds)


async def _deploy_spare(scene: Scene) -> Reply:
    source = str(scene.models.near / SPARE_MODEL)
    return await scene.order("POST", "/hearth/models", {"source": source, "name": SPARE_MODEL})


def _tail(reply: Reply) -> str:
    try:
        return str(json.loads(reply.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return repr(reply.body[-300:])
