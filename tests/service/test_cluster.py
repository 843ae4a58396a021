"""A head and its nodes as their users have them: processes with data directories of their own."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from bench.chaos.nodes import ClusterNode
from hearth.core import wire
from hearth.core.node_messages import VERSION, NodeHello, NodeRefused
from tests.service.harness import (
    PATIENCE_S,
    SMALL,
    Json,
    Service,
    Shelf,
    assert_ended,
    eventually,
    run_hearth,
    running_services,
)

MEMORY = ("--memory", "1GiB", "--host-memory", "256MiB")
#: Of the streams in which something breaks: long enough to break it in the middle.
NUM_TOKENS, BREAKS_AT = 300, 20


def join(data_dir: Path, *flags: str) -> ClusterNode:
    return ClusterNode(data_dir, *flags, "--device", "cpu", *MEMORY, "--set", "cluster.listen=127.0.0.1:0")


def stop(node: ClusterNode) -> int:
    """No process of it may be left."""
    children = psutil.Process(node.process.pid).children(recursive=True)
    code = node.stop()
    assert_ended(children)
    return code


def kill(node: ClusterNode) -> None:
    children = psutil.Process(node.process.pid).children(recursive=True)
    node.kill()
    assert_ended(children)


class SmallCluster:
    """A head, and the nodes of its tests. Mutable; used by one test at a time."""

    def __init__(self, shelf: Shelf, root: Path) -> None:
        self.root = root
        self.data_dir = shelf.copy(root / "head")
        self.port = _free_port()
        made = run_hearth(
            "cluster", "init", "--address", f"127.0.0.1:{self.port}", "--data-dir", str(self.data_dir)
        )
        assert made.returncode == 0, made.stderr
        #: The words after `hearth` of the command that joins.
        self.invitation = made.stdout.split()[1:]
        self.nodes: dict[str, ClusterNode] = {}
        self.start_head()

    def start_head(self) -> None:
        self.head = Service(self.data_dir, *SMALL, *MEMORY, "--set", f"cluster.listen=127.0.0.1:{self.port}")

    def start(self, name: str) -> ClusterNode:
        """A node that has joined before needs no token."""
        is_new = not (self.root / name).exists()
        words = (*self.invitation[1:], "--name", name) if is_new else ()
        node = self.nodes[name] = join(self.root / name, *words)
        return node

    def wait_for(self, name: str) -> str:
        """The id of a node, when its worker serves."""

        def node_id() -> str | None:
            node = self.nodes[name]
            assert node.process.poll() is None, node.output()
            found = self.node(name)
            return str(found["node"]) if found is not None and found["num_ready_workers"] else None

        return eventually(f"the worker of {name} is ready", node_id, 0.1)

    def node(self, name: str) -> dict[str, Json] | None:
        """As `hearth nodes` shows it."""
        found = self.head.http.get("/hearth/nodes").json()
        return next((one for one in found if one["name"] == name), None)

    def drain(self, name: str, *, undo: bool = False) -> None:
        answer = self.head.http.post(f"/hearth/nodes/{name}/drain", json={"undo": undo})
        assert answer.is_success, answer.text

    def close(self) -> None:
        for node in self.nodes.values():
            if node.process.poll() is None:
                assert stop(node) == 0, node.output()
        assert self.head.stop() == 0


@pytest.fixture(scope="module")
def whole(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    cluster = SmallCluster(shelf, tmp_path_factory.mktemp("cluster"))
    cluster.start("one")
    try:
        yield cluster
        cluster.close()
    finally:
        for node in cluster.nodes.values():
            node.process.kill()


@pytest.fixture
def cluster(whole: SmallCluster) -> Iterator[SmallCluster]:
    """The node `one` is up, and the head's own worker gets no requests."""
    whole.wait_for("one")
    whole.drain("local")
    yield whole
    if whole.head in running_services:
        whole.drain("local", undo=True)


class Told:
    """What a stream has told."""

    def __init__(self) -> None:
        self.text = ""
        self.request_id = ""


def stream(service: Service, at_break: Callable[[], None] = lambda: None) -> Told:
    told = Told()
    parts = service.client().completions.create(
        model="tiny-a",
        prompt="Once upon a time",
        max_tokens=NUM_TOKENS,
        seed=7,
        temperature=1.0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for number, part in enumerate(parts):
        told.request_id = part.id
        told.text += part.choices[0].text
        if number == BREAKS_AT:
            at_break()
    return told


def test_a_node_answers_as_the_head_does(cluster: SmallCluster) -> None:
    def answer() -> tuple[str, str]:
        made = cluster.head.client().completions.create(
            model="smollm2", prompt="The capital of France is", max_tokens=12, seed=3, temperature=0.8
        )
        return made.choices[0].text, str(cluster.head.explain(made.id)["worker"])

    text, worker = answer()
    assert worker.startswith("one/w0")
    explained = cluster.head.explain(stream(cluster.head).request_id)
    rungs = explained["rungs"]
    assert isinstance(rungs, list)
    assert [one["rung"] for one in rungs if isinstance(one, dict)] == ["peer"], "it had nothing before"
    cluster.drain("local", undo=True)
    cluster.drain("one")
    try:
        assert answer() == (text, "w0")
    finally:
        cluster.drain("one", undo=True)
    assert 'hearth_node_up{node="one"} 1.0' in cluster.head.http.get("/metrics").text
    assert "one/w0" in cluster.head.cli("ps").stdout
    assert "one" in cluster.head.cli("nodes").stdout


def test_a_node_replaces_a_worker_that_dies(cluster: SmallCluster) -> None:
    whole_text = stream(cluster.head).text
    (worker,) = (one for one in cluster.head.workers() if one["node"] == "one")
    pid = worker["pid"]
    assert isinstance(pid, int)
    told = stream(cluster.head, psutil.Process(pid).kill)
    assert told.text == whole_text
    explained = cluster.head.explain(told.request_id)
    assert (explained["worker"], explained["num_resumes"]) == ("one/w0.1", 1)
    assert f"{worker['worker']} died" in str(explained["marks"])


def test_a_stream_goes_on_at_another_node(cluster: SmallCluster) -> None:
    whole_text = stream(cluster.head).text
    cluster.start("two")
    cluster.wait_for("two")
    told = stream(cluster.head, lambda: kill(cluster.nodes["one"]))
    assert told.text == whole_text
    explained = cluster.head.explain(told.request_id)
    assert (explained["worker"], explained["num_resumes"]) == ("two/w0", 1)
    assert "was lost with its" in str(explained["marks"])
    lost = cluster.node("one")
    assert lost is not None
    assert lost["state"] == "down"
    assert "node `one` is down" in cluster.head.cli("doctor").stdout
    cluster.start("one")
    assert cluster.wait_for("one") == "one.1", "another life"
    assert stop(cluster.nodes["two"]) == 0


def test_a_node_that_was_stopped_returns_with_another_id(cluster: SmallCluster) -> None:
    before = cluster.wait_for("one")
    whole_text = stream(cluster.head).text

    def pause() -> None:
        cluster.drain("local", undo=True)
        cluster.nodes["one"].process.send_signal(signal.SIGSTOP)

    try:
        told = stream(cluster.head, pause)  # the agent relays nothing, so it waits until the node is lost
        assert told.text == whole_text
        assert cluster.head.explain(told.request_id)["num_resumes"] == 1
    finally:
        cluster.nodes["one"].process.send_signal(signal.SIGCONT)
    eventually("it joins again", lambda: (found := cluster.node("one")) and found["node"] not in ("", before))
    cluster.drain("local")
    cluster.wait_for("one")
    assert stream(cluster.head).text == whole_text


def test_nodes_return_to_a_head_that_was_restarted(cluster: SmallCluster) -> None:
    whole_text = stream(cluster.head).text
    assert cluster.head.stop() == 0
    eventually("the node notices", lambda: "lost the head" in cluster.nodes["one"].output())
    cluster.start_head()
    cluster.wait_for("one")
    cluster.drain("local")
    assert stream(cluster.head).text == whole_text


def test_a_name_belongs_to_one_machine(cluster: SmallCluster) -> None:
    other = join(cluster.root / "other", *cluster.invitation[1:], "--name", "one")
    assert other.process.wait(PATIENCE_S) == 1
    assert "another node of the cluster is called `one`" in other.output()
    shutil.copytree(cluster.root / "one" / "cluster", cluster.root / "copied" / "cluster")
    copied = join(cluster.root / "copied")
    eventually("it is refused", lambda: "a node called `one` is up" in copied.output())
    assert stop(copied) == 0
    cluster.wait_for("one")


def test_strangers_get_nothing(cluster: SmallCluster) -> None:
    with socket.create_connection(("127.0.0.1", cluster.port), PATIENCE_S) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with suppress(ConnectionResetError):  # closed before all was read
            assert connection.recv(1) == b""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", cluster.port), PATIENCE_S) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall(wire.frame(NodeHello(VERSION, "one", "cpu", (), 0, 7610)))
        with connection.makefile("rb") as answers:
            (length,) = wire.HEADER.unpack(answers.read(wire.HEADER.size))
            answer = wire.node_message_of(answers.read(length))
    assert isinstance(answer, NodeRefused)


def test_a_removed_node_stays_out(cluster: SmallCluster) -> None:
    """The last test: the node is gone then."""
    whole_text = stream(cluster.head).text

    def remove() -> None:
        cluster.drain("local", undo=True)
        assert cluster.head.cli("nodes", "rm", "one", "--yes").returncode == 0

    assert stream(cluster.head, remove).text == whole_text
    node = cluster.nodes["one"]
    assert node.process.wait(PATIENCE_S) == 1
    assert "was removed from the cluster" in node.output()
    again = cluster.start("one")
    assert again.process.wait(PATIENCE_S) == 1
    assert "no longer a node of the cluster" in again.output()
    assert cluster.node("one") is None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
