"""The head's side of a cluster, asked by nodes over TLS. No process runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from hearth.control.cluster import Cluster
from hearth.control.datadir import DataDir
from hearth.control.deploy.deployed import Deployed
from hearth.control.link_receiver import LinkReceiver
from hearth.control.multicasts import Multicasts
from hearth.control.observe.views import LinkView
from hearth.control.requests.fact_decoder import FactDecoder
from hearth.core import messages
from hearth.core.config import ClusterConfig, HearthConfig
from hearth.core.errors import RequestError, StoreError
from hearth.core.node_messages import (
    VERSION,
    AskSources,
    AskTicket,
    ChunkReport,
    DropPeer,
    ForgetChunks,
    HeadPulse,
    HeldChunks,
    LinkReport,
    LinkSpeed,
    NodeHello,
    NodePulse,
    NodeRefused,
    NodeWelcome,
    QuestionRefused,
    RequestCounts,
    Source,
    Sources,
    TicketGranted,
    WorkerOpened,
    WorkerStatus,
)
from hearth.core.types import LOCAL, Digest, ModelId, NodeId, WorkerId
from hearth.node.channel import Channel
from hearth.node.credentials import Authority, Credentials
from hearth.node.tickets import TicketCheck, TicketClaim
from hearth.policy.fleet import events
from hearth.text.tokenizer import Tokenizer
from tests.control.gateway_rig import GatewayRig, with_rig
from tests.control.requests.test_active_request import request_of
from tests.node.tls_cluster import ADDRESS, member, to_head

HELLO = NodeHello(VERSION, "gpu-1", "cpu", ("a CPU",), 1 << 30, 7610)
MODEL = Digest("d" * 64)


@dataclass
class HeadRig:
    """A head that listens, and a node's credentials."""

    rig: GatewayRig
    cluster: Cluster
    port: int
    nodes: dict[str, Credentials]
    known: dict[Digest, str]  #: where models are, besides those that are deployed

    async def connect(self, name: str = "gpu-1") -> Channel:
        return await to_head(self.port, self.nodes[name])

    async def join(self, name: str = "gpu-1") -> tuple[Channel, NodeWelcome]:
        channel = await self.connect(name)
        channel.send(msgspec.structs.replace(HELLO, name=name))
        welcome = await channel.receive()
        assert isinstance(welcome, NodeWelcome), welcome
        return channel, welcome

    async def leave(self, channel: Channel, node: NodeId) -> None:
        channel.close()
        while node in self.rig.nodes.others:
            await asyncio.sleep(0.005)

    async def open_worker(
        self, node: NodeId, seat: str = "w0", name: str = "gpu-1", version: int = messages.VERSION
    ) -> Channel:
        channel = await self.connect(name)
        worker = WorkerId(f"{node}/{seat}")
        hello = messages.WorkerHello(version, worker, b"", b"", 1, "cpu", "a CPU", 1 << 30, False)
        channel.send(WorkerOpened(node, hello))
        return channel

    def stale(self) -> float | None:
        return self.rig.metrics.registry.get_sample_value("hearth_cluster_stale_total")


@asynccontextmanager
async def heading(rig: GatewayRig, data_dir: DataDir, *, is_encrypted: bool = True) -> AsyncIterator[HeadRig]:
    authority = Authority.create(data_dir.path / "cluster", ADDRESS)
    nodes = {name: member(authority, data_dir.path / name, name) for name in ("gpu-1", "gpu-2")}
    decoder = FactDecoder(asyncio.get_running_loop(), rig.driver.requests.by_run, rig.driver.receive)
    cluster = Cluster(
        authority,
        rig.nodes,
        rig.driver,
        LinkReceiver(rig.catalog, rig.driver, decoder, rig.nodes.labels_of),
        HearthConfig(cluster=ClusterConfig(listen="127.0.0.1:0", encrypt_weights=is_encrypted)),
        data_dir.run_path,
        lambda: {**head.known, **rig.gateway.deployments.places()},
        Multicasts(rig.catalog.manifest_of),
        rig.keeper,
        rig.metrics,
    )
    head = HeadRig(rig, cluster, 0, nodes, {MODEL: "/models/it"})
    try:
        await cluster.start(data_dir.path / "cluster")
        assert cluster._port is not None
        head.port = cluster._port.port
        yield head
    finally:
        await cluster.close()
        await asyncio.sleep(0.05)
        decoder.close()


def play(
    data_dir: DataDir, scene: Callable[[HeadRig], Awaitable[None]], *, is_encrypted: bool = True
) -> None:
    async def whole(rig: GatewayRig) -> None:
        async with asyncio.timeout(60), heading(rig, data_dir, is_encrypted=is_encrypted) as head:
            await scene(head)

    with_rig(data_dir, whole)


def test_each_life_of_a_node_has_an_id_of_its_own(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        channel, welcome = await head.join()
        assert welcome.node == "gpu-1"
        channel.send(NodePulse((), 0))
        assert await channel.receive() == HeadPulse()
        await head.leave(channel, welcome.node)
        _, again = await head.join()
        assert again.node == "gpu-1.1"
        assert again.ticket_key != welcome.ticket_key
        await head.cluster.remove("gpu-1")
        authority = Authority.open(data_dir.path / "cluster")
        head.nodes["gpu-1"] = member(authority, data_dir.path / "again", "gpu-1")
        _, last = await head.join()
        assert last.node == "gpu-1.2", "also after it was removed"

    play(data_dir, scene)


@pytest.mark.parametrize(
    ("hello", "reason", "is_final"),
    [
        (msgspec.structs.replace(HELLO, version=VERSION - 2), "upgrade Hearth on the node", True),
        (msgspec.structs.replace(HELLO, version=VERSION + 1), "upgrade Hearth on the head first", True),
        (msgspec.structs.replace(HELLO, name="gpu-2"), "the certificate is that of `gpu-1`", True),
        (HELLO, "a node called `gpu-1` is up", False),
    ],
)
def test_a_node_is_refused(data_dir: DataDir, hello: NodeHello, reason: str, is_final: bool) -> None:
    async def scene(head: HeadRig) -> None:
        await head.join()
        channel = await head.connect()
        channel.send(hello)
        answer = await channel.receive()
        assert isinstance(answer, NodeRefused)
        assert reason in answer.reason
        assert answer.is_final is is_final

    play(data_dir, scene)


def test_a_worker_of_an_earlier_life_is_refused_and_counted(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        channel, first = await head.join()
        await head.leave(channel, first.node)
        _, second = await head.join()
        for node, name, seat in (
            (first.node, "gpu-1", "w0"),
            (second.node, "gpu-2", "w0"),  # gpu-2 is not that node
            (second.node, "gpu-1", "other/w0"),
        ):
            assert await (await head.open_worker(node, seat, name)).receive() is None
        assert head.stale() == 3
        assert not head.rig.driver.fleet.workers

    play(data_dir, scene)


def test_a_worker_of_another_version_takes_part_without_stages(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        _, welcome = await head.join()
        fleet = head.rig.driver.fleet
        for seat, version in (("w0", messages.VERSION), ("w1", messages.VERSION - 1)):
            await head.open_worker(welcome.node, seat, version=version)
        while len(fleet.workers) < 2:
            await asyncio.sleep(0.005)
        assert {name: one.runs_stages for name, one in fleet.workers.items()} == {
            "gpu-1/w0": True,
            "gpu-1/w1": False,
        }

    play(data_dir, scene)


def test_a_worker_takes_part_until_its_node_is_lost(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        channel, welcome = await head.join()
        await head.open_worker(welcome.node)
        fleet = head.rig.driver.fleet
        while not fleet.workers:
            await asyncio.sleep(0.005)
        assert fleet.workers[WorkerId("gpu-1/w0")].node == "gpu-1"
        await head.leave(channel, welcome.node)
        while fleet.workers:
            await asyncio.sleep(0.005)

    play(data_dir, scene)


def test_workers_of_nodes_that_may_return_are_awaited_for_a_while(
    data_dir: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(head: HeadRig) -> None:
        awaited = head.rig.driver.fleet.most_by_node
        assert awaited == {"gpu-1.next": 1, "gpu-2.next": 1}, "members, when the service starts"
        channel, welcome = await head.join()
        await head.leave(channel, welcome.node)
        channel, welcome = await head.join()
        assert awaited == {"gpu-1.1": 1, "gpu-2.next": 1}
        channel.send(NodePulse((WorkerStatus(WorkerId("gpu-1.1/w0"), "failing", 0, 1, None, "it exits"),), 0))
        while "gpu-1.1" in awaited:
            await asyncio.sleep(0.005)
        await head.leave(channel, welcome.node)
        assert awaited == {"gpu-1.next": 1, "gpu-2.next": 1}, "a node that was lost"
        await head.cluster.remove("gpu-1")
        assert awaited == {"gpu-2.next": 1}
        monkeypatch.setattr("hearth.control.cluster.NO_NODE_S", 0.0)
        other, welcome = await head.join("gpu-2")
        await head.leave(other, welcome.node)
        while awaited:
            await asyncio.sleep(0.005)

    play(data_dir, scene)


def test_sources_and_tickets_are_told(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        one, welcome = await head.join("gpu-1")
        two, _ = await head.join("gpu-2")
        held = HeldChunks(MODEL, b"\x01", b"\x03")
        one.send(ChunkReport((held,)))
        one.send(NodePulse((), 0))
        assert await one.receive() == HeadPulse()  # so it was taken
        two.send(AskSources(5, MODEL))
        assert await two.receive() == Sources(5, (Source(NodeId("gpu-1"), held),))
        one.send(AskSources(6, MODEL))
        assert await one.receive() == Sources(6, ()), "without the node that asks"
        two.send(AskTicket(7, NodeId("gpu-1")))
        granted = await two.receive()
        assert isinstance(granted, TicketGranted)
        assert (granted.host, granted.port) == ("127.0.0.1", 7610)
        assert TicketCheck(welcome.ticket_key).admit(granted.ticket) == TicketClaim(NodeId("gpu-2"))
        two.send(AskTicket(8, NodeId("gpu-9")))
        assert isinstance(await two.receive(), QuestionRefused)
        two.send(AskTicket(9, LOCAL))
        own = await two.receive()
        assert isinstance(own, TicketGranted)
        assert own.host == "", "a node knows how it reaches the head"

    play(data_dir, scene)


def test_a_node_forgets_what_was_removed_while_it_was_away(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        one, _ = await head.join("gpu-1")
        removed = Digest("e" * 64)
        one.send(ChunkReport((HeldChunks(MODEL, b"\x01", b""), HeldChunks(removed, b"\x01", b""))))
        assert await one.receive() == ForgetChunks(removed)

    play(data_dir, scene)


def test_a_drained_node_stays_drained_in_its_next_life(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        channel, welcome = await head.join()
        head.cluster.drain("gpu-1", is_draining=True)
        await head.leave(channel, welcome.node)
        _, again = await head.join()
        assert list(head.rig.driver.fleet.draining) == [again.node]
        head.cluster.drain("gpu-1", is_draining=False)
        assert not head.rig.driver.fleet.draining
        with pytest.raises(RequestError, match="no node is called `gpu-9`; nodes: local, gpu-1, gpu-2"):
            head.cluster.drain("gpu-9", is_draining=True)

    play(data_dir, scene)


def test_a_node_that_is_down_can_be_drained_and_had_back(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        head.cluster.drain("gpu-1", is_draining=True)
        head.cluster.drain("gpu-2", is_draining=True)
        head.cluster.drain("gpu-2", is_draining=False)
        for name in ("gpu-1", "gpu-2"):
            await head.join(name)
        assert list(head.rig.driver.fleet.draining) == ["gpu-1"]

    play(data_dir, scene)


def test_a_drain_that_cannot_be_kept_changes_nothing_and_a_removal_all_the_same(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        channel, _ = await head.join()
        await head.join("gpu-2")
        head.cluster.drain("gpu-1", is_draining=True)
        kept = data_dir.path / "cluster" / "drained.json"
        kept.unlink()
        kept.mkdir()
        with pytest.raises(OSError, match=r"drained\.json"):
            head.cluster.drain("gpu-2", is_draining=True)
        assert [view.state for view in head.cluster.views()] == ["draining", "up"]
        with pytest.raises(OSError, match=r"drained\.json"):
            await head.cluster.remove("gpu-1")
        assert isinstance(await channel.receive(), NodeRefused)

    play(data_dir, scene)


def test_a_removed_node_is_told_and_stays_out(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        channel, welcome = await head.join()
        other, _ = await head.join("gpu-2")
        await head.cluster.remove("gpu-1")
        assert isinstance(await channel.receive(), NodeRefused)
        assert await other.receive() == DropPeer(welcome.node)
        assert await channel.receive() is None
        again = await head.connect()
        again.send(HELLO)
        assert isinstance(await again.receive(), NodeRefused)
        assert [view.name for view in head.cluster.views()] == ["gpu-2"]

    play(data_dir, scene)


def test_nodes_forget_what_was_removed_when_its_requests_have_ended(
    data_dir: DataDir, deployed: Deployed
) -> None:
    async def scene(head: HeadRig) -> None:
        deployments, requests = head.rig.gateway.deployments, head.rig.driver.requests
        deployments.tell_nodes = head.cluster.models_changed
        channel, _ = await head.join()
        request = request_of(Tokenizer.load(Path(deployed.directory)), "mine", ModelId("tiny"))
        requests.add(request)
        await deployments.remove("tiny")
        channel.send(NodePulse((), 0))
        assert await channel.receive() == HeadPulse()
        requests.end(request)
        assert await channel.receive() == ForgetChunks(Digest(deployed.digest))

    play(data_dir, scene)


def test_the_end_of_a_released_worker_is_no_error(
    data_dir: DataDir, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(head: HeadRig) -> None:
        _, welcome = await head.join()
        for seat, is_released in (("w0", False), ("w1", True)):
            worker = await head.open_worker(welcome.node, seat)
            while not head.rig.driver.fleet.workers:
                await asyncio.sleep(0.005)
            if is_released:
                head.cluster.observe(events.TimerFired(0.0), [events.ReleaseWorkers(welcome.node)])
            worker.send(messages.WorkerEnded("died"))
            worker.close()
            while head.rig.driver.fleet.workers:
                await asyncio.sleep(0.005)

    caplog.set_level("INFO")
    play(data_dir, scene)
    lost = [(one.levelname, one.message) for one in caplog.records if "worker_lost" in one.message]
    assert lost == [
        ("ERROR", "worker_lost worker=gpu-1/w0 model=None reason=`died`"),
        ("INFO", "worker_lost worker=gpu-1/w1 model=None reason=`was released with its node`"),
    ]


def test_chunks_that_a_node_could_not_keep_are_noted_until_it_is_removed(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        channel, _ = await head.join("gpu-1")
        channel.send(NodePulse((), 0, num_not_kept=3))
        assert await channel.receive() == HeadPulse()
        assert "3 on node `gpu-1`;" in (head.rig.keeper.note or "")
        await head.cluster.remove("gpu-1")
        assert head.rig.keeper.note is None

    play(data_dir, scene)


def test_the_speed_of_a_link_is_shown_while_both_its_nodes_are_up(
    data_dir: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(head: HeadRig) -> None:
        own = asyncio.Queue[tuple[LinkSpeed, ...]]()

        async def changes() -> tuple[tuple[HeldChunks, ...], tuple[LinkSpeed, ...]]:
            return (), await own.get()

        monkeypatch.setattr(head.rig.local, "changes", changes)
        lives = dict[str, NodeId]()
        channels = dict[str, Channel]()
        for name in ("gpu-1", "gpu-2"):
            channels[name], welcome = await head.join(name)
            lives[name] = welcome.node

        async def report(name: str, *sources: NodeId) -> None:
            links = tuple(LinkSpeed(source, 1e9, 0.001) for source in sources)
            for message in (LinkReport(links), NodePulse((), 0)):
                channels[name].send(message)
            assert await channels[name].receive() == HeadPulse()

        def shown() -> list[tuple[str, str, float]]:
            (family,) = head.rig.metrics.link_speed.collect()
            return [(one.labels["source"], one.labels["node"], one.value) for one in family.samples]

        await report("gpu-1", LOCAL, lives["gpu-2"])
        await report("gpu-2", LOCAL, lives["gpu-1"], NodeId("gpu-9"))
        assert shown() == [
            ("local", "gpu-1", 1e9),
            ("gpu-2", "gpu-1", 1e9),
            ("local", "gpu-2", 1e9),
            ("gpu-1", "gpu-2", 1e9),
        ]
        await own.put((LinkSpeed(lives["gpu-1"], 2e9, 0.001),))
        while len(shown()) < 5:
            await asyncio.sleep(0.005)
        assert shown()[-1] == ("gpu-1", "local", 2e9)
        assert head.cluster.links_to(LOCAL) == (LinkView(lives["gpu-1"], 2e9),)
        await head.leave(channels["gpu-1"], lives["gpu-1"])
        assert shown() == [("local", "gpu-2", 1e9)]
        assert head.cluster.links_to(LOCAL) == ()

    play(data_dir, scene)


def test_demand_is_told_to_nodes(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(head: HeadRig) -> None:
        channel, _ = await head.join()
        head.cluster.count_requests({MODEL: 3})
        assert await channel.receive() == RequestCounts({MODEL: 3})

    play(data_dir, scene)


def test_a_node_is_told_what_to_bring_to_host_memory(data_dir: DataDir, deployed: Deployed) -> None:
    async def scene(head: HeadRig) -> None:
        (first, welcome), (second, _) = await head.join("gpu-1"), await head.join("gpu-2")
        head.cluster.prefetch(NodeId("gone"), MODEL, 1.0)
        head.cluster.prefetch(welcome.node, MODEL, 0.5)
        head.cluster.count_requests({MODEL: 1})
        assert await first.receive() == RequestCounts({}, {MODEL: 0.5})
        assert await second.receive() == RequestCounts({MODEL: 1})

    play(data_dir, scene)


def test_frames_of_a_worker_reach_the_driver(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        _, welcome = await head.join()
        opened = await head.open_worker(welcome.node)
        body = msgspec.msgpack.encode(messages.Pong(1, 100, 40, 0, 0, 0, {}, ()))
        opened.forward(body)
        sample = head.rig.metrics.registry.get_sample_value
        while sample("hearth_device_used_bytes") != 60:
            await asyncio.sleep(0.005)
        opened.abort()

    play(data_dir, scene)


def test_a_model_that_was_removed_and_returns_is_not_taken_to_be_where_it_was(data_dir: DataDir) -> None:
    async def scene(head: HeadRig) -> None:
        one, _ = await head.join("gpu-1")
        two, _ = await head.join("gpu-2")
        known = head.known
        for held in (HeldChunks(MODEL, b"\x01", b""), HeldChunks(MODEL, b"", b"")):
            head.known = known if held.host else {}
            one.send(ChunkReport((held,)))
            one.send(NodePulse((), 0))
            assert await one.receive() == HeadPulse()
        head.known = known
        two.send(AskSources(1, MODEL))
        assert await two.receive() == Sources(1, ())

    play(data_dir, scene)


def test_a_keeper_that_did_not_answer_is_told_again_what_others_may_ask_of_it(
    data_dir: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list[dict[Digest, str]]()

    async def set_known_models(known: dict[Digest, str]) -> None:
        told.append(known)
        if len(told) == 2:
            raise StoreError("the keeper has not answered for 10 s")

    async def scene(head: HeadRig) -> None:
        keeper = head.rig.local.keeper
        monkeypatch.setattr(keeper, "set_known_models", set_known_models)
        head.rig.supervisor.keeper.num_starts = 1
        while not told:
            await asyncio.sleep(0.005)
        head.known = {Digest("e" * 64): "/models/other"}
        head.cluster.models_changed()
        while len(told) < 3:
            await asyncio.sleep(0.005)
        assert told[0] != told[1] == told[2]

    play(data_dir, scene)
