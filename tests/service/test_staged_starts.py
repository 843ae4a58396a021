"""Two nodes that load a model at once for a burst serve it together until each has all of it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.service import test_cluster
from tests.service.checkpoints import write_tiny
from tests.service.harness import PATIENCE_S, Json, Service, Shelf, eventually, keeper_of
from tests.service.test_cluster import SmallCluster
from tests.service.test_faults import STREAMS, Told, stream_by

pytestmark = pytest.mark.e2e

#: Greedy, with penalties, with a grammar, and with a random stream.
OPTIONS = [{**STREAMS[at], "max_tokens": 64, "model": "wide"} for at in (0, 3, 5, 1)]
OPTIONS[0]["content"] = "Tell me a story. " * 25  # so long that its KV may move
NUM_LAYERS = 8
NUM_STREAMS = 8  #: far more than a worker has slots for
ENGINE = ("--set", "engine.max_seqs=3", "--set", "engine.max_batch_tokens=64")
#: The keepers, which are suspended meanwhile, are not killed for it before the test gives up.
VIGILANCE = ("--set", f"service.max_missed={10 * PATIENCE_S:.0f}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("wide")
    return write_tiny(root / "wide", seed=50, hidden_size=32, num_layers=NUM_LAYERS, intermediate_size=32768)


@pytest.fixture(scope="module")
def cluster(shelf: Shelf, place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_cluster, "SMALL", ENGINE)
        settings = ("--set", "service.staged_start_gain=0", *VIGILANCE)
        cluster = SmallCluster(
            shelf, tmp_path_factory.mktemp("staged_starts"), test_cluster.on_loopback, *settings
        )
        try:
            assert cluster.head.deploy(place, "wide").is_success
            cluster.start("one", *VIGILANCE)
            cluster.wait_for("one")
            yield cluster
            cluster.close()
        finally:
            cluster.kill_nodes()


@pytest.fixture(scope="module")
def expected(cluster: SmallCluster) -> list[str]:
    """What the node says alone, which has the model on its own disk from then on."""
    cluster.drain("local")
    with cluster.head.client() as client:
        told = [stream_by(client, number, options) for number, options in enumerate(OPTIONS)]
    cluster.drain("local", undo=True)
    assert not any("staged" in mark for one in told for mark in marks(cluster.head, one))
    return [one.text for one in told] * (NUM_STREAMS // len(OPTIONS))


@pytest.fixture
def head(cluster: SmallCluster, expected: list[str]) -> Service:
    """Both nodes are there, and the model is on their disks alone."""
    if cluster.nodes["one"].process.poll() is not None:
        cluster.start("one", *VIGILANCE)
    cluster.wait_for("one")
    head = cluster.head
    head.wait_for_workers()
    head.unload("wide", free=True)
    eventually("nothing is in memory", lambda: not head.residents())
    eventually("the head has heard that host memory is empty", lambda: not any(host_used(head)))
    return head


def burst(cluster: SmallCluster, disturb: Callable[[], None] = lambda: None) -> list[Told]:
    """Streams with each of `OPTIONS` by turns, and something that happens once one of them has begun.

    No weights come before the nodes are a pipeline.
    """
    head, begun = cluster.head, threading.Event()
    keepers = [keeper_of(head.process.pid), keeper_of(cluster.nodes["one"].process.pid)]
    with head.client() as client, ThreadPoolExecutor(NUM_STREAMS) as threads:
        for keeper in keepers:
            assert keeper is not None
            keeper.suspend()
        try:
            numbers = [at % len(OPTIONS) for at in range(NUM_STREAMS)]
            jobs = [threads.submit(stream_by, client, number, OPTIONS[number], begun) for number in numbers]
            eventually("it is formed", lambda: has_two_stages(head))
        finally:
            for keeper in keepers:
                assert keeper is not None
                keeper.resume()
        assert begun.wait(PATIENCE_S)
        disturb()
        told = [job.result() for job in jobs]
    num_staged = sum("staged wide~" in mark for one in told for mark in marks(head, one))
    assert num_staged >= 3, "as many as there are slots"
    return told


def marks(head: Service, told: Told) -> list[str]:
    found = head.explain(told.answer_id)["marks"]
    assert isinstance(found, list)
    return [f"{one['what']} {one['detail']}" for one in found if isinstance(one, dict)]


def host_used(head: Service) -> list[Json]:
    """Bytes by node: of a model that is in host memory, no staged start is made."""
    return [node["host_used_bytes"] for node in head.http.get("/hearth/nodes").json()]


def has_two_stages(head: Service) -> bool:
    """Where they meet follows from the times of stages so far."""
    residents = head.get("/hearth/ps")["models"]
    assert isinstance(residents, list)
    found = [one for one in residents if isinstance(one, dict) and str(one["model"]).startswith("wide~")]
    layers = "".join(sorted(str(one["layers"]) for one in found))
    return re.fullmatch(rf"\[0, (\d)\]\[\1, {NUM_LAYERS}\]", layers) is not None


def test_a_burst_is_served_in_stages_and_then_by_whole_replicas(
    cluster: SmallCluster, head: Service, expected: list[str]
) -> None:
    before = head.metrics()
    told = burst(cluster)
    assert [one.text for one in told] == expected
    found = [marks(head, one) for one in told]
    num_switched = sum(": switched" in mark for one in found for mark in one)
    num_decided = sum(mark.startswith(("kv moved to", "kv computed again")) for one in found for mark in one)
    assert num_decided <= num_switched, "a pipeline that comes too late is given up, and has no KV"
    after = head.metrics()
    assert after["hearth_switches_total"] - before["hearth_switches_total"] == num_switched
    assert after["hearth_resumes_total"] == before["hearth_resumes_total"]
    has_come = any(mark.startswith("kv_moved") for one in found for mark in one)
    assert has_come or after["hearth_kv_moved_bytes_total"] == before["hearth_kv_moved_bytes_total"]
    eventually("only whole replicas are left", lambda: head.hosted() == {"wide"})


def test_streams_survive_the_loss_of_a_worker(
    cluster: SmallCluster, head: Service, expected: list[str]
) -> None:
    (local,) = [one for one in head.workers() if one["node"] == "local"]
    told = burst(cluster, psutil.Process(int(str(local["pid"]))).kill)
    assert [one.text for one in told] == expected


def test_streams_survive_the_loss_of_a_node(
    cluster: SmallCluster, head: Service, expected: list[str]
) -> None:
    told = burst(cluster, lambda: test_cluster.kill(cluster.nodes["one"]))
    assert [one.text for one in told] == expected
