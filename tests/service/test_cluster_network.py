"""A head and three nodes on a network that is cut and slow. Each machine is a network namespace."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.cluster.netlab import cut, entered, obstacle, shaped_links, slow
from tests.service.checkpoints import write_tiny
from tests.service.harness import Service, Shelf, eventually
from tests.service.test_cluster import SmallCluster, kill, stream

NODES = ("one", "two", "three")
MACHINES = ("head", *NODES)


class NetworkCluster:
    """The cluster, what a stream of it says, and the namespaces of its machines by name."""

    def __init__(self, cluster: SmallCluster, namespaces: dict[str, str]) -> None:
        self.cluster, self.namespaces = cluster, namespaces
        self.texts = {model: stream(cluster.head, model=model).text for model in ("tiny-a", "tiny-b")}

    def use(self, *names: str) -> None:
        """Have new requests go to these machines alone."""
        for name in ("local", *self.cluster.nodes):
            self.cluster.drain(name, undo=name in names)


@pytest.fixture(scope="module")
def network(shelf: Shelf, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkCluster]:
    unique = secrets.token_hex(2)
    namespaces = {name: f"{unique}-{name}" for name in MACHINES}
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    with shaped_links(dict.fromkeys(namespaces.values(), 1000)) as addresses, ExitStack() as stack:

        @contextmanager
        def place(name: str) -> Iterator[str]:
            with entered(namespaces[name]):
                yield addresses[namespaces[name]]

        stack.enter_context(entered(namespaces["head"]))  # tests ask the head from there
        spread = ("--set", f"models.tiny-c.min_replicas={len(NODES)}")
        cluster = SmallCluster(shelf, tmp_path_factory.mktemp("network"), place, *spread)
        try:
            whole = NetworkCluster(cluster, namespaces)
            for name in NODES:
                cluster.start(name)
            for name in NODES:
                cluster.wait_for(name)
            yield whole
            cluster.close()
        finally:
            cluster.kill_nodes()


@pytest.mark.e2e
@pytest.mark.slow
def test_a_stream_outlives_the_network_of_its_node(network: NetworkCluster) -> None:
    cluster = network.cluster
    network.use("one")
    with ExitStack() as stack:

        def cut_off() -> None:
            network.use("one", "two")
            stack.enter_context(cut(network.namespaces["one"]))

        told = stream(cluster.head, cut_off)
        assert told.text == network.texts["tiny-a"], "as on one machine"
        explained = cluster.head.explain(told.request_id)
        assert (explained["worker"], explained["num_resumes"]) == ("two/w0", 1)
        lost = cluster.node("one")
        assert lost is not None
        assert lost["state"] == "down"
    assert cluster.wait_for("one") == "one.1", "another life"
    network.use("one")
    again = stream(cluster.head)
    assert again.text == network.texts["tiny-a"]
    assert cluster.head.explain(again.request_id)["worker"] == "one.1/w0"


@pytest.mark.e2e
@pytest.mark.slow
def test_a_node_behind_a_slow_link_answers_the_same(network: NetworkCluster) -> None:
    for name in ("head", "one"):
        slow(network.namespaces[name], mbit=20, delay_ms=400)
    network.use("one")
    told = stream(network.cluster.head, model="tiny-b")
    assert told.text == network.texts["tiny-b"]
    explained = network.cluster.head.explain(told.request_id)
    assert str(explained["worker"]).startswith("one")
    assert "peer" in str(explained["rungs"]), "its weights came over the link"


def is_loading(head: Service) -> bool:
    found = head.get("/hearth/ps")["models"]
    assert isinstance(found, list)
    return any(isinstance(one, dict) and one["state"] == "loading" for one in found)


@pytest.mark.e2e
@pytest.mark.slow
def test_nodes_pass_a_model_on_to_each_other_and_one_dies(network: NetworkCluster, tmp_path: Path) -> None:
    cluster, head = network.cluster, network.cluster.head
    lives = {name: cluster.wait_for(name) for name in NODES}
    network.use(*NODES)
    eventually("nothing is sent", lambda: not is_loading(head))  # a full link that is reshaped stays shut
    for name in MACHINES:
        slow(network.namespaces[name], mbit=100, delay_ms=50)
    wide = write_tiny(tmp_path / "wide", seed=70, hidden_size=32, num_layers=12, intermediate_size=8192)
    num_plans = cluster.nodes["two"].output().count("plan_followed")
    assert head.deploy(wide, "tiny-c", overwrite=True).is_success
    eventually(
        "nodes follow a plan",
        lambda: cluster.nodes["two"].output().count("plan_followed") > num_plans,
        0.02,
    )
    sources = [one["receives"].get("tiny-c") for one in head.http.get("/hearth/nodes").json()]
    assert any(found and set(found) <= {"local", *NODES} for found in sources), sources
    kill(cluster.nodes["two"])
    answers = list[str]()
    for name in ("one", "three"):
        network.use(name)
        told = stream(head, model="tiny-c")
        answers.append(told.text)
        assert head.explain(told.request_id)["worker"] == f"{lives[name]}/w0"
    network.use("local")
    assert answers == [stream(head, model="tiny-c").text] * 2, "as on one machine"
    loads = [
        line.partition("sources=")[2]
        for name in ("one", "three")
        for line in cluster.nodes[name].output().splitlines()
        if "model_loaded model=tiny-c" in line
    ]
    assert any(lives[name] in one for one in loads for name in NODES), "not all from the head"
