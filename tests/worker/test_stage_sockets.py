"""Connections between workers of several nodes, over real ports, tickets and TLS. The workers are threads."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec
import pytest

from hearth.control.datadir import DataDir
from hearth.core import node_messages as messages
from hearth.core.config import HearthConfig
from hearth.core.errors import ServiceError, StoreError
from hearth.core.types import LOCAL, NodeId, WorkerId, stage_socket
from hearth.node.agent_socket import AgentSocket
from hearth.node.channel import Channel, ClusterPort
from hearth.node.data_admission import PEERS_SOCKET, DataAdmission
from hearth.node.devices import Devices
from hearth.node.local_node import AGENT_SOCKET, LocalNode, socket_directory
from hearth.store.transfer import data_connection
from hearth.store.transfer.data_connection import call, show_ticket
from hearth.store.transfer.peer_stream import AgentClient
from hearth.worker.stage_sockets import StageListener, connect_to_worker
from tests.control.test_cluster import HELLO, HeadRig, play
from tests.node.test_link import Record
from tests.worker.harness import folder

PATIENCE_S = 120.0


class StageWorker:
    """A worker as far as other workers reach it, with the setup that its node gives it."""

    def __init__(self, local: LocalNode, worker: WorkerId) -> None:
        self.name = worker
        setup = local._setup_of(0, worker)
        self.stages_path = Path(setup.stages_path)
        self.agent_socket = None if setup.agent_socket is None else Path(setup.agent_socket)
        self.credentials = None if setup.credentials is None else Path(setup.credentials)
        self._taken: SimpleQueue[tuple[socket.socket, bool]] = SimpleQueue()
        self.listener = StageListener(self.stages_path, worker, self.credentials, self._take)

    def _take(self, connection: socket.socket, source: NodeId | None) -> None:
        self._taken.put((connection, source is None))

    def taken(self) -> tuple[socket.socket, bool]:
        return self._taken.get(timeout=PATIENCE_S)

    def has_taken(self) -> bool:
        try:
            self._taken.get_nowait()[0].close()
        except Empty:
            return False
        return True

    def connect(self, worker: WorkerId) -> socket.socket:
        return connect_to_worker(worker, self.name, self.stages_path, self.agent_socket, self.credentials)

    def ticket(self, node: NodeId, worker: WorkerId | None) -> messages.TicketGranted:
        assert self.agent_socket is not None
        return AgentClient(self.agent_socket).ticket(node, worker)

    def show(self, ticket: messages.TicketGranted, worker: StageWorker) -> socket.socket:
        """Connect to another worker's node with a ticket."""
        connection = socket.create_connection((ticket.host, ticket.port), PATIENCE_S)
        node = NodeId(worker.name.rpartition("/")[0])
        return show_ticket(connection, node, ticket, self.credentials)


@asynccontextmanager
async def a_worker(head: HeadRig, name: str, path: Path) -> AsyncIterator[StageWorker]:
    """A node that has joined, and its worker, which is linked. Of its agent the processes are missing."""
    (path / "run").mkdir(parents=True)
    async with AsyncExitStack() as stack:
        questions, sockets = AgentSocket(), stack.enter_context(socket_directory(path))
        devices, credentials = Devices("cpu", (0,), 1), head.nodes[name].path
        local = LocalNode(
            HearthConfig(),
            devices,
            path,
            sockets,
            None,
            Record(),
            credentials=credentials,
        )
        stack.push_async_callback(local.close)
        data = DataAdmission(sockets)
        port = ClusterPort("127.0.0.1", 0, data.take)
        stack.push_async_callback(port.close)
        stack.callback((await questions.listen(sockets / AGENT_SOCKET)).close)
        channel = await head.connect(name)
        stack.callback(channel.close)
        channel.send(msgspec.structs.replace(HELLO, name=name, port=port.port))
        welcome = await channel.receive()
        assert isinstance(welcome, messages.NodeWelcome)
        data.begin(welcome.ticket_key, is_encrypted=welcome.is_encrypted)
        questions.head_found(channel.send)
        receiving = asyncio.create_task(receive(channel, questions, data, head.port))
        stack.callback(receiving.cancel)
        worker = WorkerId(f"{welcome.node}/w0")
        link = await head.open_worker(welcome.node, "w0", name)
        stack.callback(link.close)
        while worker not in head.rig.driver.fleet.workers:
            await asyncio.sleep(0.005)
        stage = StageWorker(local, worker)
        stack.callback(stage.listener.close)
        yield stage


async def receive(channel: Channel, questions: AgentSocket, data: DataAdmission, head_port: int) -> None:
    """Take the messages of the head as an agent does."""
    while (message := await channel.receive()) is not None:
        match message:
            case messages.DropPeer(node):
                data.drop_peer(node)
            case messages.TicketGranted(host=""):
                questions.answered(msgspec.structs.replace(message, host="127.0.0.1", port=head_port))
            case messages.TicketGranted() | messages.QuestionRefused():
                questions.answered(message)


def of_head(head: HeadRig) -> StageWorker:
    worker = WorkerId("w0")
    head.rig.join(worker=worker)
    return StageWorker(head.rig.local, worker)


@asynccontextmanager
async def two_workers(head: HeadRig, tmp_path: Path) -> AsyncIterator[tuple[StageWorker, StageWorker]]:
    async with a_worker(head, "gpu-1", tmp_path / "1") as one, a_worker(head, "gpu-2", tmp_path / "2") as two:
        yield one, two


def talk(one: StageWorker, two: StageWorker) -> None:
    """Connect and send bytes both ways at once, more than sockets buffer."""
    with one.connect(two.name) as near:
        far, is_same_machine = two.taken()
        with far:
            assert not is_same_machine
            assert all(isinstance(end, ssl.SSLSocket) for end in (near, far))
            for end in (near, far):
                assert end.gettimeout() is None
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 6
                assert end.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 0x48
            for sender, receiver in ((near, far), (far, near)):
                content = os.urandom(8 << 20)
                sending = threading.Thread(target=sender.sendall, args=(content,))
                sending.start()
                assert read(receiver, len(content)) == content
                sending.join()
        assert near.recv(1) == b"", "closed in order"


def read(connection: socket.socket, num_bytes: int) -> bytes:
    with connection.makefile("rb") as incoming:
        return incoming.read(num_bytes)


def is_refused(one: StageWorker, ticket: messages.TicketGranted, two: StageWorker) -> bool:
    try:
        with one.show(ticket, two) as connection:
            return is_closed(connection)
    except (ConnectionError, ssl.SSLError):
        return True


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(PATIENCE_S)
    try:
        return connection.recv(1) == b""
    except (ConnectionError, ssl.SSLError):
        return True


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["weights_plain", "weights_encrypted"])
def test_workers_of_all_nodes_reach_each_other_encrypted(tmp_path: Path, is_encrypted: bool) -> None:
    async def scene(head: HeadRig) -> None:
        async with two_workers(head, tmp_path) as (one, two):
            with closing((own := of_head(head)).listener):
                for near, far in ((one, two), (one, own), (own, one)):
                    await asyncio.to_thread(talk, near, far)

    play(DataDir.open(tmp_path / "data"), scene, is_encrypted=is_encrypted)


def test_what_cannot_be_reached_is_named(tmp_path: Path) -> None:
    async def scene(head: HeadRig) -> None:
        async with two_workers(head, tmp_path) as (one, two):
            for worker, reason in (
                ("gpu-2/w7", r"worker `gpu-2/w7` is not up on node `gpu-2`"),
                ("w0", r"worker `w0` is not up on node `local`"),
                ("gpu-2.1/w0", r"node `gpu-2\.1` is not up"),
                ("gpu-1/w7", r"No such file"),
            ):
                refused = f"`gpu-1/w0` cannot connect to worker `{worker}`: .*{reason}"
                with pytest.raises(ServiceError, match=refused):
                    await asyncio.to_thread(one.connect, WorkerId(worker))
            two.listener.close()
            with pytest.raises(ServiceError, match=r"closed unconfirmed|[Rr]eset|EOF"):
                await asyncio.to_thread(one.connect, two.name)
            one.agent_socket = None
            with pytest.raises(ServiceError, match="this node is in no cluster"):
                await asyncio.to_thread(one.connect, two.name)

    play(DataDir.open(tmp_path / "data"), scene)


def test_a_worker_of_another_node_is_not_admitted_by_the_name_of_a_node(tmp_path: Path) -> None:
    async def scene(head: HeadRig) -> None:
        async with two_workers(head, tmp_path) as (one, two):
            for node in (NodeId("gpu-1"), LOCAL):
                with pytest.raises(StoreError, match=f"worker `gpu-2/w0` is not up on node `{node}`"):
                    await asyncio.to_thread(one.ticket, node, two.name)

    play(DataDir.open(tmp_path / "data"), scene)


def test_a_ticket_is_good_for_one_connection_to_what_it_names(tmp_path: Path) -> None:
    async def scene(head: HeadRig) -> None:
        async with two_workers(head, tmp_path) as (one, two):
            with socket.socket(socket.AF_UNIX) as store:
                store.bind(str(two.stages_path / PEERS_SOCKET))
                store.listen()
                store.settimeout(PATIENCE_S)
                await asyncio.to_thread(use_tickets, one, two, store)

    play(DataDir.open(tmp_path / "data"), scene, is_encrypted=False)


def use_tickets(one: StageWorker, two: StageWorker, store: socket.socket) -> None:
    ticket = one.ticket(NodeId("gpu-2"), None)
    with one.show(ticket, two), store.accept()[0] as agent:
        assert agent.recv(100) == b"Pgpu-1"
    assert not two.has_taken()
    ticket = one.ticket(NodeId("gpu-2"), two.name)
    with one.show(ticket, two) as connection, two.taken()[0]:
        assert connection.recv(1) == b"\n"
    assert is_refused(one, ticket, two)
    store.setblocking(False)
    with pytest.raises(BlockingIOError):
        store.accept()
    assert not two.has_taken()


def test_a_ticket_of_another_node_is_of_no_use(tmp_path: Path) -> None:
    async def scene(head: HeadRig) -> None:
        async with two_workers(head, tmp_path) as (one, two):
            with closing((own := of_head(head)).listener):
                await asyncio.to_thread(steal, one, two, own)

    play(DataDir.open(tmp_path / "data"), scene)


def steal(one: StageWorker, two: StageWorker, own: StageWorker) -> None:
    ticket = one.ticket(LOCAL, own.name)
    connection = socket.create_connection((ticket.host, ticket.port), PATIENCE_S)
    with show_ticket(connection, LOCAL, ticket, two.credentials) as stolen:
        assert is_closed(stolen)
    assert not own.has_taken()


def test_a_slow_handshake_holds_up_nobody(tmp_path: Path) -> None:
    async def scene(head: HeadRig) -> None:
        async with two_workers(head, tmp_path) as (one, two):
            await asyncio.to_thread(dawdle, one, two)

    play(DataDir.open(tmp_path / "data"), scene)


def dawdle(one: StageWorker, two: StageWorker) -> None:
    ticket = one.ticket(NodeId("gpu-2"), two.name)
    with one.show(msgspec.structs.replace(ticket, is_encrypted=False), two):
        talk(one, two)


def test_a_removed_node_loses_its_connections(tmp_path: Path) -> None:
    async def scene(head: HeadRig) -> None:
        async with two_workers(head, tmp_path) as (one, two):
            late = await asyncio.to_thread(one.ticket, NodeId("gpu-2"), two.name)
            near, here = await asyncio.to_thread(lambda: (one.connect(two.name), two.connect(two.name)))
            with near, here:
                ends = {is_same_machine: end for end, is_same_machine in (two.taken(), two.taken())}
                with ends[False], ends[True]:
                    await head.cluster.remove("gpu-1")
                    assert await asyncio.to_thread(is_closed, near)
                    assert await asyncio.to_thread(is_closed, ends[False])
                    here.sendall(b"x")
                    assert ends[True].recv(1) == b"x"
                    assert await asyncio.to_thread(is_refused, one, late, two)
            assert not two.has_taken()

    play(DataDir.open(tmp_path / "data"), scene, is_encrypted=False)


def test_a_connection_whose_node_was_dropped_during_its_handshake_is_refused() -> None:
    with folder() as place:
        taken: SimpleQueue[tuple[socket.socket, bool]] = SimpleQueue()
        own, lost = WorkerId("w0"), NodeId("gpu-1")
        with closing(StageListener(place, own, None, lambda *one: taken.put(one))) as listener:
            listener._drop(lost)
            near, far = socket.socketpair()
            with near, pytest.raises(ConnectionError, match="gpu-1 was lost"):
                listener._take(far, lost)  # its handshake took longer than the node lived
            assert far.fileno() == -1, "closed"
            assert taken.empty()


def test_workers_of_one_machine_connect_directly_and_may_send_a_descriptor_at_once() -> None:
    with folder() as place:
        taken: SimpleQueue[tuple[socket.socket, bool]] = SimpleQueue()
        own, other = WorkerId("gpu-2/w0.3"), WorkerId("gpu-2/w1")
        with closing(StageListener(place, own, None, lambda end, source: taken.put((end, source is None)))):
            memory = os.memfd_create("hidden")
            os.write(memory, b"states")
            with connect_to_worker(own, other, place, None, None) as near:
                socket.send_fds(near, [b"first"], [memory])
                os.close(memory)
                far, is_same_machine = taken.get(timeout=PATIENCE_S)
                with far:
                    assert is_same_machine
                    assert far.gettimeout() is None
                    message, (descriptor,), _, _ = socket.recv_fds(far, 100, 1)
                    assert message == b"first"
                    assert os.pread(descriptor, 100, 0) == b"states"
                    os.close(descriptor)
                    far.sendall(b"back")
                    assert near.recv(100) == b"back"


def test_a_descriptor_sent_before_the_confirmation_reaches_the_owner() -> None:
    """The preamble is one byte: nothing that follows it is read, however early it comes."""
    with folder() as place, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place / "w0.sock"))
        listener.listen()
        with call(place / "w0.sock", PATIENCE_S) as near, listener.accept()[0] as far:
            socket.send_fds(near, [b"first"], [near.fileno()])
            assert data_connection.receive(far) is None
            message, (descriptor,), _, _ = socket.recv_fds(far, 100, 1)
            os.close(descriptor)
            assert message == b"first"


def test_a_socket_left_behind_is_no_obstacle() -> None:
    with folder() as place:
        own = WorkerId("w0")
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(stage_socket(place, own)))
            killed.listen()
        taken: SimpleQueue[tuple[socket.socket, bool]] = SimpleQueue()
        with closing(StageListener(place, own, None, lambda *one: taken.put(one))) as listener:
            with connect_to_worker(own, WorkerId("w1"), place, None, None), taken.get(timeout=PATIENCE_S)[0]:
                pass
            listener.close()
        assert not stage_socket(place, own).exists()
        with pytest.raises(ServiceError, match="No such file"):
            connect_to_worker(own, WorkerId("w1"), place, None, None)


def test_closing_waits_for_no_caller() -> None:
    with folder() as place:
        taken: SimpleQueue[tuple[socket.socket, bool]] = SimpleQueue()
        own = WorkerId("w0")
        listener = StageListener(place, own, None, lambda *one: taken.put(one))
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(str(stage_socket(place, own)))
            with connect_to_worker(own, own, place, None, None), taken.get(timeout=PATIENCE_S)[0]:
                listener.close()
            silent.sendall(b"L")
            assert is_closed(silent)
        assert taken.empty()
