"""A head and its nodes as their users have them: processes with data directories of their own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from bench.chaos.nodes import ClusterNode, free_port
from hearth.core import wire
from hearth.core.node_messages import VERSION, NodeHello, NodeRefused
from tests.service.checkpoints import write_lora
from tests.service.harness import (
    PATIENCE_S,
    SMALL,
    Json,
    Service,
    Shelf,
    assert_ended,
    eventually,
    keeper_of,
    run_hearth,
    running_services,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

#: Makes all processes of a node older than the head: they lack the last optional field of each message that
#: they send, and do not know a field of each that they get.
OLDER = """
import msgspec
from hearth.core import messages, node_messages, wire

node_messages.VERSION -= {num_versions}
encode, order_of, node_message_of = msgspec.msgpack.encode, wire.order_of, wire.node_message_of

def frame(message):
    told = msgspec.to_builtins(message, builtin_types=(bytes,))
    optional = [field.name for field in msgspec.structs.fields(message) if not field.required]
    for name in optional[-1:]:
        told.pop(name, None)
    body = encode(told)
    return wire.HEADER.pack(len(body)) + body

def with_news(body):
    told = msgspec.msgpack.decode(body, strict=False)
    if "engine" in told:
        told["engine"]["added_to_engine"] = 1
    return encode(told | {{"added": 1}})

wire.frame = frame
wire.order_of = lambda body: order_of(with_news(body))
wire.node_message_of = lambda body: node_message_of(with_news(body))
"""
MEMORY = ("--memory", "1GiB", "--host-memory", "256MiB")
#: Of the streams in which something breaks: long enough to break it in the middle.
NUM_TOKENS, BREAKS_AT = 300, 20


def join(data_dir: Path, *flags: str, host: str = "127.0.0.1") -> ClusterNode:
    return ClusterNode(data_dir, *flags, "--device", "cpu", *MEMORY, "--set", f"cluster.listen={host}:0")


@contextmanager
def on_loopback(_: str) -> Iterator[str]:
    """All machines are this one."""
    yield "127.0.0.1"


def stop(node: ClusterNode) -> int:
    """No process of it may be left."""
    children = psutil.Process(node.process.pid).children(recursive=True)
    code = node.stop()
    assert_ended(children)
    return code


def kill(node: ClusterNode) -> None:
    node.process.send_signal(signal.SIGSTOP)  # or streams could end while its children are listed
    children = psutil.Process(node.process.pid).children(recursive=True)
    node.kill()
    assert_ended(children)


class SmallCluster:
    """A head, and the nodes of its tests. Mutable; used by one test at a time."""

    def __init__(
        self,
        shelf: Shelf,
        root: Path,
        place: Callable[[str], AbstractContextManager[str]] = on_loopback,
        *flags: str,
    ) -> None:
        """`place`: enters the machine with a name, and tells its address. `flags`: of the head."""
        self.root, self._place, self._flags = root, place, flags
        self.data_dir = shelf.copy(root / "head")
        self.port = free_port()
        with place("head") as host:
            made = run_hearth(
                "cluster", "init", "--address", f"{host}:{self.port}", "--data-dir", str(self.data_dir)
            )
        assert made.returncode == 0, made.stderr
        #: The words after `hearth` of the command that joins.
        self.invitation = made.stdout.split()[1:]
        self.nodes: dict[str, ClusterNode] = {}
        self.start_head()

    def start_head(self) -> None:
        with self._place("head") as host:
            listen = f"cluster.listen={host}:{self.port}"
            self.head = Service(self.data_dir, *SMALL, *MEMORY, "--set", listen, *self._flags)

    def start(self, name: str, *flags: str) -> ClusterNode:
        """A node that has joined before needs no token."""
        is_new = not (self.root / name).exists()
        words = (*self.invitation[1:], "--name", name) if is_new else ()
        with self._place(name) as host:
            node = self.nodes[name] = join(self.root / name, *words, *flags, host=host)
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

    def kill_nodes(self) -> None:
        for node in self.nodes.values():
            node.process.kill()
            node.process.wait()


@pytest.fixture(scope="module")
def whole(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    cluster = SmallCluster(shelf, tmp_path_factory.mktemp("cluster"))
    cluster.start("one")
    try:
        yield cluster
        cluster.close()
    finally:
        cluster.kill_nodes()


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


def stream(service: Service, at_break: Callable[[], None] = lambda: None, model: str = "tiny-a") -> Told:
    told = Told()
    with service.client() as client:
        parts = client.completions.create(
            model=model,
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


def answer(service: Service, model: str) -> tuple[str, str]:
    """Return the text, and which worker made it."""
    with service.client() as client:
        made = client.completions.create(
            model=model, prompt="The capital of France is", max_tokens=12, seed=3, temperature=0.8
        )
    return made.choices[0].text, str(service.explain(made.id)["worker"])


def test_a_node_answers_as_the_head_does(cluster: SmallCluster) -> None:
    text, worker = answer(cluster.head, "smollm2")
    assert worker.startswith("one/w0")
    explained = cluster.head.explain(stream(cluster.head).request_id)
    rungs = explained["rungs"]
    assert isinstance(rungs, list)
    assert [one["rung"] for one in rungs if isinstance(one, dict)] == ["peer"], "it had nothing before"
    cluster.drain("local", undo=True)
    cluster.drain("one")
    try:
        assert answer(cluster.head, "smollm2") == (text, "w0")
    finally:
        cluster.drain("one", undo=True)
    assert 'hearth_node_up{node="one"} 1.0' in cluster.head.http.get("/metrics").text
    assert "one/w0" in cluster.head.cli("ps").stdout
    assert "one" in cluster.head.cli("nodes").stdout
    asked_there = run_hearth("ps", "--data-dir", str(cluster.root / "one"))
    assert asked_there.returncode != 0
    assert f"run this on the head, whose address for nodes is 127.0.0.1:{cluster.port}" in asked_there.stderr


def test_a_node_answers_with_an_adapter_as_the_head_does(cluster: SmallCluster, tmp_path: Path) -> None:
    deployed = cluster.head.deploy(write_lora(tmp_path / "lora", seed=1), "lora", base="tiny-a")
    assert deployed.is_success, deployed.text
    text, worker = answer(cluster.head, "lora")
    assert worker.startswith("one/w0")
    assert text != answer(cluster.head, "tiny-a")[0]
    cluster.drain("local", undo=True)
    cluster.drain("one")
    try:
        assert answer(cluster.head, "lora") == (text, "w0")
    finally:
        cluster.drain("one", undo=True)
    assert cluster.head.http.delete("/hearth/models/lora").is_success


def test_a_node_replaces_a_worker_that_dies(cluster: SmallCluster) -> None:
    whole_text = stream(cluster.head).text

    def interrupted() -> dict[str, Json] | None:
        """A stream whose worker was killed; None: all of it was there before."""
        cluster.wait_for("one")
        (worker,) = (one for one in cluster.head.workers() if one["node"] == "one")
        pid = worker["pid"]
        assert isinstance(pid, int)

        def kill() -> None:
            with suppress(psutil.NoSuchProcess):  # killed before, and still listed
                psutil.Process(pid).kill()

        told = stream(cluster.head, kill)
        assert told.text == whole_text
        explained = cluster.head.explain(told.request_id)
        return {**explained, "killed": worker["worker"]} if explained["num_resumes"] else None

    explained = eventually("a stream is interrupted", interrupted)
    assert explained["num_resumes"] == 1
    assert re.fullmatch(r"one/w0\.\d+", str(explained["worker"]))
    assert explained["worker"] != explained["killed"]
    assert f"{explained['killed']} died" in str(explained["marks"])


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
    eventually("its worker is gone", lambda: "worker_lost worker=two/w0" in cluster.head.logs())
    assert not re.search("ERROR .* worker_lost worker=two/w0", cluster.head.logs()), "its node was stopped"


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


def test_nodes_and_drains_return_to_a_restarted_head_and_host_memory_for_as_long_as_it_is_kept(
    cluster: SmallCluster,
) -> None:
    whole_text = stream(cluster.head).text
    brief = cluster.start("brief", "--set", "cluster.keep_host_s=0.1")
    cluster.wait_for("brief")
    kept = keeper_of(cluster.nodes["one"].process.pid)
    assert None not in (kept, keeper_of(brief.process.pid))
    assert cluster.head.stop() == 0
    eventually("the node notices", lambda: "lost the head" in cluster.nodes["one"].output())
    eventually("host memory is given up", lambda: keeper_of(brief.process.pid) is None)
    cluster.start_head()
    cluster.wait_for("one")
    assert keeper_of(cluster.nodes["one"].process.pid) == kept
    cluster.wait_for("brief")
    assert stop(brief) == 0
    assert cluster.head.cli("nodes", "rm", "brief", "--yes").returncode == 0
    local = cluster.node("local")
    assert local is not None
    assert local["state"] == "draining"
    assert stream(cluster.head).text == whole_text


def test_a_model_with_labels_runs_only_on_nodes_that_have_them(whole: SmallCluster, shelf: Shelf) -> None:
    def ask() -> httpx.Response:
        return whole.head.http.post("/v1/completions", json={"model": "labelled", "prompt": "x"})

    assert whole.head.deploy(shelf.places["tiny-a"], "labelled", labels=["zone=a"]).is_success
    reason = "needs nodes labelled zone=a, which `cpu` is not"
    refused = ask()  # once no node is awaited, which may have the label
    assert (refused.status_code, reason in refused.text) == (503, True)
    assert reason in str(whole.head.get("/hearth/models/labelled")["warning"])
    whole.start("three", "--set", 'cluster.labels=["zone=a", "disk=ssd"]')
    whole.wait_for("three")
    assert "zone=a, disk=ssd" in whole.head.cli("nodes").stdout
    assert whole.head.get("/hearth/models/labelled")["warning"] is None
    explained = whole.head.explain(ask().json()["id"])
    assert explained["worker"] == "three/w0"
    assert reason in str(explained["options"])
    assert stop(whole.nodes["three"]) == 0
    assert whole.head.cli("nodes", "rm", "three", "--yes").returncode == 0
    eventually("its node is gone", lambda: reason in ask().text)


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


def test_a_node_of_the_version_before_serves_and_an_older_one_is_told_to_upgrade(
    cluster: SmallCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_text = stream(cluster.head).text
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "sitecustomize.py").write_text(OLDER.format(num_versions=2))
    refused = cluster.start("older")
    assert refused.process.wait(PATIENCE_S) == 1
    assert "upgrade Hearth on the node" in refused.output()

    (tmp_path / "sitecustomize.py").write_text(OLDER.format(num_versions=1))
    cluster.start("older")
    cluster.wait_for("older")
    cluster.drain("one")
    try:
        told = stream(cluster.head)
    finally:
        cluster.drain("one", undo=True)
    assert told.text == whole_text
    assert cluster.head.explain(told.request_id)["worker"] == "older/w0"
    assert stop(cluster.nodes["older"]) == 0
    assert "settings_ignored engine=added_to_engine" in cluster.nodes["older"].output()


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
