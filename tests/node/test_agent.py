"""What the agent of a node does with the head's messages, with real stores and connections."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

from hearth.core.config import HearthConfig
from hearth.core.node_messages import NodeMessage, RequestCounts
from hearth.node.agent import Agent
from hearth.node.channel import Channel
from hearth.node.devices import Devices
from hearth.node.local_node import LocalNode
from hearth.store.transfer.lease_server import LeaseServer
from tests.node.tls_cluster import HELLO, Cluster, Scene, to_head
from tests.store.stored import stored_at, write_model
from tests.store.transfer.test_peers import Store, a_cluster, a_store
from tests.worker.harness import folder


def test_an_expected_model_comes_from_the_head_to_the_host_memory_of_a_node(
    tmp_path: Path, cluster: Cluster, play: Scene
) -> None:
    write_model(tmp_path / "tiny")
    manifest = stored_at(tmp_path / "tiny").manifest

    def num_in_host(node: Store) -> int:
        held = (one.host for one in node.tiers.held() if one.model == manifest.digest)
        return sum(int.from_bytes(mask).bit_count() for mask in held)

    async def order(channel: Channel, _: NodeMessage) -> None:
        channel.send(RequestCounts({}, {manifest.digest: 0.5}))
        await channel.receive()

    async def scene() -> None:
        cluster.on_channel = order  # type: ignore[method-assign] # as the head's
        async with cluster.listening() as port:
            channel = await to_head(port, cluster.node)
            channel.send(HELLO)
            with (
                a_cluster() as stores,
                folder() as sockets,
                a_store(stores, "local") as head,
                a_store(stores, "gpu-1") as node,
                closing(LeaseServer(node.tiers, sockets / "keeper.sock")),
            ):
                head.tiers.set_known_models({manifest.digest: str(tmp_path / "tiny")})
                config, devices = HearthConfig(), Devices("cpu", (0,), 0)
                agent = Agent(config, devices, tmp_path, cluster.node, None)
                agent._local = LocalNode(config, devices, tmp_path, sockets, None, agent)
                receiving = asyncio.create_task(agent._receive(channel))
                while num_in_host(node) < len(manifest.chunks):
                    await asyncio.sleep(0.005)
                await asyncio.gather(*agent._tasks)
                channel.close()
                await receiving

    play(scene)
