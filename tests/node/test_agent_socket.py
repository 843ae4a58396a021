"""The keeper's questions, asked as it asks them, and a head that answers over TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from hearth.core.errors import Unreachable
from hearth.core.node_messages import (
    AskSources,
    AskTicket,
    HeldChunks,
    NodeMessage,
    QuestionRefused,
    Source,
    Sources,
    TicketGranted,
)
from hearth.core.types import Digest, NodeId
from hearth.node import agent_socket as module
from hearth.node.agent_socket import AgentSocket
from hearth.node.channel import Channel
from hearth.store.transfer.peer_stream import AgentClient
from tests.node.tls_cluster import HELLO, Cluster, Scene, to_head

MODEL = Digest("d")
HELD = Source(NodeId("gpu-2"), HeldChunks(MODEL, b"\x05", b"\xff\x01"))


async def answer(channel: Channel, first: NodeMessage) -> None:
    """Answer as the head does; about `silent` it says nothing, at `leave` it closes the connection."""
    while (message := await channel.receive()) is not None:
        match message:
            case AskSources(number):
                channel.send(Sources(number, (HELD,)))
            case AskTicket(number, "gpu-2"):
                channel.send(TicketGranted(number, "10.0.0.2", 7610, b"\x01\x02", is_encrypted=True))
            case AskTicket(number, "gpu-3"):
                channel.send(QuestionRefused(number, "node `gpu-3` is not up"))
            case AskTicket(_, "leave"):
                return


@asynccontextmanager
async def relayed(cluster: Cluster) -> AsyncIterator[AgentClient]:
    cluster.on_channel = answer  # type: ignore[method-assign] # as the head's
    questions, path = AgentSocket(), cluster.path / "agent.sock"
    async with cluster.listening() as port, await questions.listen(path):
        agent = AgentClient(path)
        with pytest.raises(Unreachable, match="the head of the cluster is not reached"):
            await asyncio.to_thread(agent.sources, MODEL)
        channel = await to_head(port, cluster.node)
        channel.send(HELLO)
        questions.head_found(channel.send)
        receiving = asyncio.create_task(receive(channel, questions))
        yield agent
        channel.close()
        await receiving


async def receive(channel: Channel, questions: AgentSocket) -> None:
    while (message := await channel.receive()) is not None:
        assert isinstance(message, Sources | TicketGranted | QuestionRefused)
        questions.answered(message)
    questions.head_lost()


def test_answers_of_the_head_reach_the_keeper(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with relayed(cluster) as agent:
            found = await asyncio.gather(*(asyncio.to_thread(agent.sources, MODEL) for _ in range(8)))
            assert [one.sources for one in found] == [(HELD,)] * 8
            ticket = await asyncio.to_thread(agent.ticket, NodeId("gpu-2"))
            assert (ticket.host, ticket.port, ticket.ticket) == ("10.0.0.2", 7610, b"\x01\x02")
            assert ticket.is_encrypted
            with pytest.raises(Unreachable, match="node `gpu-3` is not up"):
                await asyncio.to_thread(agent.ticket, NodeId("gpu-3"))

    play(scene)


def test_a_question_ends_with_the_connection_to_the_head(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with relayed(cluster) as agent:
            with pytest.raises(Unreachable, match="the head of the cluster was lost"):
                await asyncio.to_thread(agent.ticket, NodeId("leave"))

    play(scene)


def test_a_head_that_says_nothing_is_not_waited_for(
    cluster: Cluster, play: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.1)

    async def scene() -> None:
        async with relayed(cluster) as agent:
            with pytest.raises(Unreachable, match=r"has not answered within 0\.1 s"):
                await asyncio.to_thread(agent.ticket, NodeId("silent"))

    play(scene)
