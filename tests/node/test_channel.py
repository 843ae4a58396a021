"""Channels and the port over real sockets and TLS, on both event loops: members, strangers, limits, leaks."""

from __future__ import annotations

import asyncio
import socket

import pytest

from hearth.core import wire
from hearth.core.errors import ConfigError, JoinRefused, Unreachable
from hearth.core.messages import Ping
from hearth.core.node_messages import (
    DATA_MAGIC,
    AskAuthority,
    AskTicket,
    AuthorityCertificate,
    HeadPulse,
    Join,
    NodeMessage,
    NodeRefused,
    QuestionRefused,
)
from hearth.core.types import HEAD, LOCAL, WorkerId
from hearth.node import channel as module
from hearth.node.channel import MAX_SILENT_PULSES, Channel, ClusterPort, Control, connect
from hearth.node.credentials import Authority
from hearth.node.link import MAX_UNREAD_BYTES
from hearth.node.tickets import STORE_TICKET_BYTES, WORKER_TICKET_BYTES, TicketCheck, TicketIssuer
from tests.node.test_link import Record
from tests.node.tls_cluster import ADDRESS, HELLO, Cluster, Scene, member, nameless, to_head


def test_members_exchange_messages_of_all_sizes(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            channel = await to_head(port, cluster.node)
            assert channel.peer == HEAD
            channel.send(HELLO)
            assert await channel.receive() == HeadPulse()
            numbers = [*range(1, 50), 99_999, 0]
            for number in numbers:
                channel.send(AskTicket(number, LOCAL))
            for number in numbers:
                assert await channel.receive() == QuestionRefused(number, "x" * number)
            assert await cluster.came.get() == ("gpu-1", HELLO)
            channel.close()
            assert await channel.receive() is None

    play(scene)


def test_a_peer_that_is_not_read_is_held_back_and_loses_nothing(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            channel = await to_head(port, cluster.node)
            channel.send(HELLO)
            num_messages = 200
            for number in range(num_messages):
                channel.send(AskTicket(100_000 * number + 99_999, LOCAL))
            await asyncio.sleep(0.2)
            assert channel._unread_bytes < 4 * MAX_UNREAD_BYTES
            assert await channel.receive() == HeadPulse()
            for number in range(num_messages):
                answer = await channel.receive()
                assert isinstance(answer, QuestionRefused)
                assert answer.number == 100_000 * number + 99_999
            channel.close()

    play(scene)


def test_a_silent_peer_is_given_up_after_some_pulses(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            channel = await to_head(port, cluster.node)
            for _ in range(3):
                for _ in range(MAX_SILENT_PULSES):
                    channel.count_pulse()
                channel.send(HELLO)
                assert await channel.receive() == HeadPulse()
            for _ in range(MAX_SILENT_PULSES + 1):
                channel.count_pulse()
            assert await channel.receive() is None
            assert channel.why_ended == "it was silent for 3 s"

    play(scene)


def test_receive_that_is_cancelled_loses_nothing(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            channel = await to_head(port, cluster.node)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await channel.receive()
            frame = wire.frame(HELLO)
            assert channel._transport is not None
            channel._transport.write(frame[:7])
            await asyncio.sleep(0.05)
            channel._transport.write(frame[7:])
            assert await channel.receive() == HeadPulse()
            channel.close()

    play(scene)


def test_a_channel_becomes_the_link_of_a_worker(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        record, is_link = Record(), asyncio.Event()

        async def on_channel(channel: Channel, first: NodeMessage) -> None:
            assert first == HELLO
            await asyncio.sleep(0.05)  # frames come meanwhile
            channel.become_link(WorkerId("w0"), record)
            channel.send(Ping(1))
            is_link.set()

        control = Control(cluster.head.server_context(), on_channel, cluster.authority.is_member)
        port = ClusterPort("127.0.0.1", 0, cluster.on_data, control)
        channel = await to_head(port.port, cluster.node)
        mine = Record()
        channel.send(HELLO)
        channel.become_link(WorkerId("w0"), mine)
        channel.forward(b"a" * 1000)
        await is_link.wait()
        channel.forward(b"b" * 100_000)
        await record.until(2, record.bodies)
        await mine.until(1, mine.bodies)
        await port.close()  # does not end a link
        assert not record.left_links
        channel.close()
        await record.until(1, record.left_links)
        await mine.until(1, mine.left_links)
        assert record.bodies == [b"a" * 1000, b"b" * 100_000]
        assert [wire.order_of(body) for body in mine.bodies] == [Ping(1)]
        with pytest.raises(ConnectionResetError):
            channel.become_link(WorkerId("w0"), mine)

    play(scene)


def test_strangers_may_only_ask_to_join(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            for question in (AskAuthority(), Join("1", "2", "gpu-9", b"")):
                asking = await nameless(port)
                asking.send(question)
                assert await asking.receive() == HeadPulse()
                assert await cluster.came.get() == (None, question)
                asking.close()
            for forbidden in (HELLO, AskTicket(1, LOCAL), AuthorityCertificate(b"")):
                stranger = await nameless(port)
                stranger.send(forbidden)
                answer = await stranger.receive()
                assert isinstance(answer, NodeRefused)
                assert "this machine is not a node of the cluster; to join" in answer.reason
                assert await stranger.receive() is None
            assert cluster.came.empty()

    play(scene)


def test_the_log_names_the_address_of_a_peer_that_sends_garbage(
    cluster: Cluster, play: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            stranger = await nameless(port)
            stranger.forward(b"GET / HTTP/1.1" * 2000)
            assert await stranger.receive() is None
        assert "peer_refused worker=None address=127.0.0.1 reason=" in caplog.text

    play(scene)


def test_a_removed_member_is_told_so(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            cluster.authority.remove("gpu-1")
            removed = await to_head(port, cluster.node)
            removed.send(HELLO)
            answer = await removed.receive()
            assert isinstance(answer, NodeRefused)
            assert "`gpu-1` is no longer a node of the cluster" in answer.reason
            assert await removed.receive() is None
            assert cluster.came.empty()

    play(scene)


def test_certificates_of_another_cluster_get_nowhere(cluster: Cluster, play: Scene) -> None:
    other = Authority.create(cluster.path / "other", ADDRESS)
    foreign = member(other, cluster.path / "b", "gpu-1")

    async def scene() -> None:
        async with cluster.listening() as port:
            with pytest.raises(JoinRefused, match="is not `head` of this cluster: "):
                await to_head(port, foreign)
            (cluster.path / "b" / "ca.pem").write_bytes(cluster.authority.certificate_pem)
            intruder = await to_head(port, foreign)  # it trusts this head, which does not trust it
            intruder.send(HELLO)
            assert await intruder.receive() is None
            assert cluster.came.empty()

    play(scene)


def test_a_member_does_not_take_another_for_the_head(cluster: Cluster, play: Scene) -> None:
    other = member(cluster.authority, cluster.path / "b", "gpu-2")

    async def scene() -> None:
        async with cluster.listening() as port:
            with pytest.raises(JoinRefused, match="is not `gpu-2` of this cluster"):
                await connect("127.0.0.1", port, other.client_context(), "gpu-2")

    play(scene)


def test_garbage_is_closed(cluster: Cluster, play: Scene) -> None:
    garbage = [
        b"\x00",
        b"GET / HTTP/1.1\r\n\r\n",
        b"SSH-2.0-x\r\n",
        b"\x16" + b"\xff" * 600,
        b"\x16\x03\x01\x00\x05garbage",
        b"HTTP" * 100,
        DATA_MAGIC + b"z" * 2 * STORE_TICKET_BYTES + b"\n",
        DATA_MAGIC + b"\xe9" * 2 * STORE_TICKET_BYTES + b"\n",
        DATA_MAGIC + b"0" * (2 * WORKER_TICKET_BYTES + 1),
        wire.frame(HELLO),
    ]

    async def scene() -> None:
        async with cluster.listening() as port:
            for first in garbage:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(first)
                answer = await _all(reader)
                assert answer == b"" or answer.startswith(b"\x15\x03")  # an alert of TLS
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()  # says nothing at all
            await cluster.no_strangers()
        assert cluster.came.empty()
        assert cluster.data == []

    play(scene)


async def _all(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:  # it was closed before all of the garbage was read
        return b""


@pytest.mark.parametrize(
    "frame",
    [
        wire.HEADER.pack(wire.MAX_FRAME_BYTES + 1),
        wire.HEADER.pack(5) + b"\xff" * 5,
        wire.HEADER.pack(len(wire.frame(HELLO)) - 9) + wire.frame(HELLO)[4:-5],
    ],
    ids=["too-large", "no-message", "cut-short"],
)
def test_first_frames_that_are_too_large_or_damaged_end_a_connection(
    cluster: Cluster, play: Scene, frame: bytes
) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            for open_one in (nameless(port), to_head(port, cluster.node)):
                channel = await open_one
                assert channel._transport is not None
                channel._transport.write(frame)
                assert await channel.receive() is None
            assert cluster.came.empty()

    play(scene)


def test_slow_strangers_are_closed(cluster: Cluster, play: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRANGER_S", 1.0)

    async def scene() -> None:
        async with cluster.listening() as port:
            raw = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            for (_, writer), start in zip(raw, (b"", b"\x16", b"\x16\x03\x01", DATA_MAGIC), strict=True):
                writer.write(start)
            silent = [await nameless(port), await to_head(port, cluster.node)]
            for channel in silent:
                assert channel._transport is not None
                channel._transport.write(wire.frame(HELLO)[:9])
            for reader, writer in raw:
                await _all(reader)
                writer.close()
            for channel in silent:
                assert await channel.receive() is None
            member_channel = await to_head(port, cluster.node)  # has all the time once it is known
            member_channel.send(HELLO)
            assert await member_channel.receive() == HeadPulse()
            await asyncio.sleep(1.5)
            member_channel.send(HELLO)
            assert await member_channel.receive() == HeadPulse()
            member_channel.close()

    play(scene)


def test_a_stranger_that_does_not_read_its_answer_is_closed(
    cluster: Cluster, play: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STRANGER_S", 1.0)

    async def scene() -> None:
        async with cluster.listening() as port:
            asking = await nameless(port)
            asking.send(AskAuthority())  # and keeps the connection open, which its handler waits for
            await cluster.came.get()
            await cluster.no_strangers()
            assert await asking.receive() == HeadPulse()
            assert await asking.receive() is None

    play(scene)


def test_beyond_the_limit_the_oldest_stranger_gives_way(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            known = await to_head(port, cluster.node)
            known.send(HELLO)
            assert await known.receive() == HeadPulse()
            slow = []
            for _ in range(2 * module.MAX_STRANGERS + 3):
                slow.append(await asyncio.open_connection("127.0.0.1", port))
                slow[-1][1].write(b"\x16")
            for reader, _ in slow[: -module.MAX_OF_ADDRESS]:
                assert await _all(reader) == b""
            assert cluster.port is not None
            assert len(cluster.port._strangers) <= module.MAX_OF_ADDRESS
            known.send(HELLO)  # members are not among them
            assert await known.receive() == HeadPulse()
            late = await to_head(port, cluster.node)
            late.send(HELLO)
            assert await late.receive() == HeadPulse()
            for _, writer in slow:
                writer.close()
            known.close()
            late.close()

    play(scene)


def test_strangers_of_one_address_do_not_crowd_out_others(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            other = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
            crowd = [
                await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * module.MAX_STRANGERS)
            ]
            for reader, _ in crowd[: -module.MAX_OF_ADDRESS]:
                assert await _all(reader) == b""
            assert not other[0].at_eof()
            more = [
                await asyncio.open_connection("127.0.0.1", port, local_addr=(f"127.0.0.{3 + number}", 0))
                for number in range(module.MAX_STRANGERS)
            ]
            assert await _all(other[0]) == b""  # the oldest of all
            assert cluster.port is not None
            assert len(cluster.port._strangers) <= module.MAX_STRANGERS
            for _, writer in (other, *crowd, *more):
                writer.close()

    play(scene)


def test_the_port_of_a_node_takes_data_connections_alone(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        port = ClusterPort("127.0.0.1", 0, cluster.on_data)
        with pytest.raises(Unreachable):
            await to_head(port.port, cluster.node)
        ticket = TicketIssuer().issue(LOCAL)
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        writer.write(DATA_MAGIC + ticket.hex().encode() + b"\nx")
        assert await reader.read() == b""
        writer.close()
        await port.close()
        assert cluster.data == [(ticket, b"x")]

    play(scene)


def test_a_data_connection_is_passed_on_behind_its_ticket(cluster: Cluster, play: Scene) -> None:
    ticket = TicketIssuer().issue(LOCAL)

    async def scene() -> None:
        async with cluster.listening() as port:
            line = DATA_MAGIC + ticket.hex().encode() + b"\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(line[:3])
            await asyncio.sleep(0.02)
            writer.write(line[3:100])
            await asyncio.sleep(0.02)
            writer.write(line[100:] + b"what follows")
            assert await reader.read() == b""
            writer.close()
        assert cluster.data == [(ticket, b"what follows")]

    play(scene)


def test_a_replayed_ticket_and_one_of_another_life_get_nowhere(cluster: Cluster, play: Scene) -> None:
    issuer, earlier = TicketIssuer(), TicketIssuer()
    check = TicketCheck(issuer.key)

    def admit(connection: socket.socket, ticket: bytes) -> None:
        with connection:
            if check.admit(ticket) is not None:
                connection.sendall(b"admitted")

    async def scene() -> None:
        cluster.on_data = admit  # type: ignore[method-assign] # as a node's agent does
        async with cluster.listening() as port:
            ticket = issuer.issue(LOCAL)
            for given, answer in (
                (bytes(STORE_TICKET_BYTES), b""),
                (ticket, b"admitted"),
                (ticket, b""),
                (earlier.issue(LOCAL), b""),
                (issuer.issue(LOCAL), b"admitted"),
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(DATA_MAGIC + given.hex().encode() + b"\n")
                assert await reader.read() == answer
                writer.close()

    play(scene)


def test_closing_the_port_ends_members_and_strangers(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            known = await to_head(port, cluster.node)
            known.send(HELLO)
            assert await known.receive() == HeadPulse()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x16")
        assert await known.receive() is None
        assert await _all(reader) == b""
        writer.close()
        with pytest.raises(Unreachable, match="cannot be reached: Connection refused; check"):
            await to_head(port, cluster.node)

    play(scene)


def test_a_port_in_use_is_named(cluster: Cluster, play: Scene) -> None:
    async def scene() -> None:
        async with cluster.listening() as port:
            with pytest.raises(ConfigError, match=f"cannot listen on `127.0.0.1:{port}` for the cluster"):
                ClusterPort("127.0.0.1", port, cluster.on_data)

    play(scene)


def test_a_server_that_never_answers_is_unreachable(
    cluster: Cluster, play: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_S", 0.2)

    async def scene() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            port = mute.getsockname()[1]
            with pytest.raises(Unreachable, match="no answer within"):
                await to_head(port, cluster.node)

    play(scene)
