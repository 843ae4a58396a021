"""The keeper's questions, asked as it asks them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from hearth.core.errors import Unreachable
from hearth.core.node_messages import HeldChunks, Source, TicketGranted
from hearth.core.types import Digest, NodeId
from hearth.node.agent_socket import answer_keeper
from hearth.store.transfer.peer_stream import AgentClient

T = TypeVar("T")


class Guide:
    async def sources(self, model: Digest) -> Sequence[Source]:
        return [Source(NodeId("gpu-2"), HeldChunks(model, b"\x05", b"\xff\x01"))]

    async def ticket(self, node: NodeId) -> TicketGranted:
        if node != "gpu-2":
            raise Unreachable(f"node `{node}` is not up")
        return TicketGranted(0, "10.0.0.2", 7610, b"\x01\x02", is_encrypted=True)


def asked(path: Path, question: Callable[[AgentClient], T]) -> T:
    async def scene() -> T:
        server = await answer_keeper(path, Guide())
        async with server:
            return await asyncio.to_thread(question, AgentClient(path))

    return asyncio.run(scene())


def test_sources_and_tickets_are_told(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    (found,) = asked(path, lambda agent: agent.sources(Digest("d")))
    assert (found.node, found.host, found.disk) == ("gpu-2", "05", "ff01")
    ticket = asked(path, lambda agent: agent.ticket(NodeId("gpu-2")))
    assert (ticket.host, ticket.port, ticket.ticket, ticket.is_encrypted) == ("10.0.0.2", 7610, "0102", True)


def test_a_node_that_is_not_up_has_no_ticket(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="node `gpu-3` is not up"):
        asked(tmp_path / "agent.sock", lambda agent: agent.ticket(NodeId("gpu-3")))


def test_the_socket_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    assert asked(path, lambda _: path.stat().st_mode & 0o777) == 0o600
