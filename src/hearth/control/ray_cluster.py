"""Nodes on the machines of a Ray cluster: an actor on each of them runs the agent of `hearth join`.

Ray places the actors, reserves GPUs for them and starts them anew when they die. The head polls which nodes
Ray has; a node is up or lost by its own connection to the head, as any other. Requests, weights and
heartbeats never pass through Ray. The actors end with the process that asked for them (`ray_process.py`).

The brain may order one more machine: one that was given back and is still there, or else one that Ray's
autoscaler is asked for. To give a machine back is to end its actor: the autoscaler takes idle machines away.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import ray
import uvloop
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hearth.control.datadir import DataDir
from hearth.control.node_service import run_agent
from hearth.core.config import ClusterConfig, HearthConfig, address_of, parse_address
from hearth.core.errors import ConfigError, JoinRefused
from hearth.node.credentials import Authority, Credentials, keep_head, node_name
from hearth.node.devices import Devices, check_host_memory, resolve
from hearth.node.join import join

#: Between two looks at the nodes of Ray.
POLL_S = 2.0
#: Before the agent of a node that has failed is tried again.
RETRY_S = 30.0
#: How long the token of an agent is valid. It joins at once, and later uses its certificate.
TOKEN_S = 120.0
#: Time for the workers of an agent to start, before another machine is asked for.
START_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RayNode:
    """One life of a machine in a Ray cluster."""

    ray_id: str
    address: str
    name: str  #: in Hearth's cluster
    num_gpus: float
    num_cpus: float

    @property
    def bundle(self) -> dict[str, float]:
        """All that it has: two bundles never share a machine."""
        return {"GPU": self.num_gpus, "CPU": self.num_cpus} if self.num_gpus else {"CPU": self.num_cpus}


class RayNodes:
    """Keeps one actor on each node of Ray. Mutable; used on the event loop alone."""

    def __init__(self, config: HearthConfig, cluster_path: Path, *, uses_own_node: bool) -> None:
        """Connect to Ray, and make this machine the head of a cluster if it is none. Raises ConfigError.

        `cluster_path`: the directory of the authority. `uses_own_node`: the Ray node of this machine gets an
        actor, too, because the head itself has no workers.
        """
        cluster = config.cluster
        check_auth(cluster)
        _connect(cluster)
        self._config = config
        self._own_id = str(ray.get_runtime_context().get_node_id())
        self._uses_own_node = uses_own_node
        port = parse_address(cluster.listen)[1]
        self._head = cluster.address or address_of(ray.util.get_node_ip_address(), port)
        if not (cluster_path / "ca.key").exists():
            Authority.create(cluster_path, self._head)
        keep_head(cluster_path, self._head)
        self._authority = Authority.open(cluster_path)
        self._agents: dict[RayNode, asyncio.Task[None]] = {}
        self._serving_since_s: dict[RayNode, float] = {}  #: of agents that run
        self._alive: set[RayNode] = set()
        self._released: set[RayNode] = set()  #: given back to Ray, and still there
        self._num_wanted = 0  #: nodes that Ray should have; 0: those that it has
        self._asked: list[dict[str, float]] | None = None  #: of the autoscaler; None: unknown

    async def follow(self) -> None:
        """Run the agents of all nodes that Ray has, as they come and go. Call it when the head listens."""
        while True:
            try:
                self._alive = set(usable(await asyncio.to_thread(ray.nodes), self._config.cluster.ray_cpus))
                self._update()
                await self._ask()
            except RayError as error:  # its control store restarts, say
                log.warning("ray_not_reached reason=`%s`", error)
            await asyncio.sleep(POLL_S)

    def add(self) -> None:
        """Have one more node than now, unless agents are still starting or failing."""
        if self._is_any_starting(time.monotonic() - START_S):
            return
        if self._released:
            self._released.pop()
        else:
            self._num_wanted = len(self._alive) + 1

    def release(self, name: str) -> None:
        """End the agent of a node, which has no requests."""
        self._num_wanted = 0
        self._released |= {node for node in self._agents if node.name == name}
        self._update()

    def _update(self) -> None:
        self._released &= self._alive
        wanted = {
            one for one in self._alive - self._released if self._uses_own_node or one.ray_id != self._own_id
        }
        for name in departed(self._agents.keys(), wanted):
            with suppress(ConfigError):  # it never joined, or was removed by hand
                self._authority.remove(name)
        for node in self._agents.keys() - wanted:
            log.info("ray_node_gone name=%s address=%s", node.name, node.address)
            self._agents.pop(node).cancel()
        for node in wanted - self._agents.keys():
            self._agents[node] = asyncio.create_task(self._keep_agent(node))

    async def close(self) -> None:
        """Withdraw what the autoscaler is asked for: it would keep machines without this service."""
        self._num_wanted = 0
        await self._ask()

    def _is_any_starting(self, before_s: float) -> bool:
        """True if an agent does not run, or not since then. Those of refused nodes do not count."""
        nodes = (node for node, task in self._agents.items() if not task.done())
        return any(self._serving_since_s.get(node, math.inf) > before_s for node in nodes)

    async def _ask(self) -> None:
        """Ask the autoscaler for machines until they run agents, which keep them from then on."""
        cluster = self._config.cluster
        if len(self._alive) >= self._num_wanted and not self._is_any_starting(time.monotonic()):
            self._num_wanted = 0
        bundles = bundles_of(self._alive, self._num_wanted, cluster.ray_cpus)
        if cluster.min_nodes is not None and bundles != self._asked:
            await asyncio.to_thread(request_resources, bundles=bundles)
            self._asked = bundles
            log.info("ray_asked bundles=%s", bundles)

    async def _keep_agent(self, node: RayNode) -> None:
        """Run the agent of a node until cancelled, or until the node is refused."""
        while True:
            log.info("ray_agent_asked_for name=%s gpus=%g cpus=%g", node.name, node.num_gpus, node.num_cpus)
            actor = (
                ray.remote(NodeActor)
                .options(
                    num_gpus=node.num_gpus,
                    num_cpus=0 if node.num_gpus else node.num_cpus,
                    max_restarts=-1,
                    max_task_retries=-1,  # `serve` is called again in the process that replaces a dead one
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.ray_id, soft=False),
                )
                .remote()
            )
            try:
                await actor.__ray_ready__.remote()  # it may wait for GPUs, for longer than a token lasts
                token = await asyncio.to_thread(self._new_token, node.name)
                log.info("ray_agent_starting name=%s address=%s", node.name, node.address)
                self._serving_since_s[node] = time.monotonic()
                await actor.serve.remote(self._config_of(node), self._head, node.name, token)
            except JoinRefused as error:
                log.warning("ray_agent_refused name=%s reason=`%s`", node.name, _cause(error))
                return
            except Exception as error:  # Ray raises what the actor does, and errors of its own
                log.warning(
                    "ray_agent_failed name=%s retry_s=%g reason=`%s`", node.name, RETRY_S, _cause(error)
                )
            finally:
                self._serving_since_s.pop(node, None)
                with suppress(RayError):
                    ray.kill(actor)
            await asyncio.sleep(RETRY_S)

    def _new_token(self, name: str) -> str:
        """Return a token for a node. An earlier node of that name is gone, and perhaps its key with it."""
        with suppress(ConfigError):
            self._authority.remove(name)
        return self._authority.new_token(TOKEN_S)

    def _config_of(self, node: RayNode) -> HearthConfig:
        """Return the settings of a node: those of the head, except what is about one machine."""
        cluster, service = self._config.cluster, self._config.service
        port = 0 if node.ray_id == self._own_id else parse_address(cluster.listen)[1]
        return replace(
            self._config,
            service=replace(service, workers=None, device="cuda" if node.num_gpus else "cpu"),
            cluster=replace(cluster, listen=address_of(node.address, port), address=None, labels=()),
        )


class NodeActor:
    """The process of a node, started by Ray."""

    def serve(self, config: HearthConfig, head: str, name: str, token: str) -> None:
        """Run the agent, on the main thread: processes of the node end with the thread that started them."""
        devices = resolve(config.service)
        check_host_memory(config.store, devices)
        with (
            DataDir.hold(config.cluster.node_data_dir) as data_dir,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            logging.basicConfig(
                filename=data_dir.log_path,
                level=config.log.level.upper(),
                format="%(asctime)s %(levelname)s %(name)s %(message)s",
            )
            runner.run(_run(config, devices, data_dir, head, name, token))


async def _run(
    config: HearthConfig, devices: Devices, data_dir: DataDir, head: str, name: str, token: str
) -> None:
    try:
        credentials = await join(head, token, name, data_dir.cluster_path)
    except JoinRefused:  # Ray calls `serve` again with the same token, which has expired
        known = Credentials.open(data_dir.cluster_path)
        if known is None:
            raise
        credentials = known
    await run_agent(config, devices, data_dir, credentials)


def check_auth(cluster: ClusterConfig) -> None:
    """Raises ConfigError if Ray would run the code of anyone who reaches its ports."""
    if os.environ.get("RAY_AUTH_MODE") != "token" and not cluster.ray_without_auth:
        raise ConfigError(
            "Ray runs without authentication here: anyone who reaches its ports can run programs on all "
            "its machines (CVE-2023-48022, CVE-2025-62593); start Ray and Hearth with RAY_AUTH_MODE=token "
            "and one RAY_AUTH_TOKEN everywhere, or set `cluster.ray_without_auth` if only trusted machines "
            "reach it"
        )


def _connect(cluster: ClusterConfig) -> None:
    address = (cluster.manager or "").partition(":")[2] or "auto"
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        at = "of this machine" if address == "auto" else f"at {address}"
        raise ConfigError(
            f"the Ray cluster {at} cannot be used: {error}; start Ray on this machine with `ray start`, and "
            "give Hearth the same RAY_AUTH_TOKEN"
        ) from error


def usable(nodes: list[dict[str, object]], min_cpus: int) -> list[RayNode]:
    """Return the nodes alive that have GPUs, or else enough CPUs; `min_cpus` 0: only those with GPUs."""
    found = []
    for node in nodes:
        resources = node["Resources"]
        assert isinstance(resources, dict), f"{resources=}"
        num_gpus, num_cpus = float(resources.get("GPU", 0.0)), float(resources.get("CPU", 0.0))
        if node["Alive"] and (num_gpus or 0 < min_cpus <= num_cpus):
            name, address = str(node["NodeName"]), str(node["NodeManagerAddress"])
            found.append(RayNode(str(node["NodeID"]), address, node_name(name), num_gpus, num_cpus))
    return found


def departed(before: Collection[RayNode], now: Collection[RayNode]) -> set[str]:
    """Return the names of machines that are gone. One that is back has its name, and another id."""
    return {node.name for node in before} - {node.name for node in now}


def bundles_of(alive: Collection[RayNode], num_wanted: int, min_cpus: int) -> list[dict[str, float]]:
    """Return the machines that there are and more like the largest; nothing if none are wanted."""
    if not num_wanted:
        return []
    there = sorted(alive, key=lambda node: (node.num_gpus, node.num_cpus, node.ray_id))
    first: dict[str, float] = {"CPU": min_cpus} if min_cpus else {"GPU": 1}
    return [node.bundle for node in there] + (num_wanted - len(there)) * [
        there[-1].bundle if there else first
    ]


def _cause(error: Exception) -> str:
    """Return one line: what the actor raised, without the traceback that Ray adds."""
    return str(getattr(error, "cause", None) or error).strip().partition("\n")[0].replace("`", "")
