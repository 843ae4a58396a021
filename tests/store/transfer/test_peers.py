"""Chunks between the stores of several nodes, over real connections; agents and bad nodes are stand-ins."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from bench import bad_server
from bench.bad_server import BadServer
from bench.cluster.nodes import Cluster, Node
from bench.failing_disk import failing_writes
from hearth.core.config import StoreConfig
from hearth.core.errors import ChunkCorrupt, ChunkMissing, LoadCancelled, StoreError, Unreachable
from hearth.core.messages import KeeperSetup
from hearth.core.node_messages import HeldChunks, PlannedFetch, TicketGranted
from hearth.core.types import LOCAL, Digest, NodeId, Rung, server_name
from hearth.models.families import arch_from_config
from hearth.models.layout import layout_of
from hearth.store.format.manifest import MANIFEST, WEIGHTS, Manifest, TextFile, chunk_of, digest_of
from hearth.store.keeper_client import KeeperClient
from hearth.store.tiers.model import StoredModel
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer import fetch_plan, peer_server
from hearth.store.transfer.fetch import Fetch, HostChunk
from hearth.store.transfer.lease_client import LeaseClient
from hearth.store.transfer.peer_model import PeerModel
from hearth.store.transfer.peer_server import PeerServer
from hearth.store.transfer.peer_stream import FAILED, HEADER, WAIT, failure_line
from hearth.store.transfer.peers import Patience, Peers
from hearth.store.transfer.send_turns import SendLimit
from tests.store.s3_server import S3Server
from tests.store.stored import (
    CHUNK_BYTES,
    PATIENCE_S,
    all_chunks,
    consume,
    files_of,
    stored_at,
    until,
    write_model,
)
from tests.worker.harness import keeping

TEXT = b'{"a": "tokenizer"}'
#: A node that fails stays left out for the rest of a test.
QUICK = Patience(stall_s=4.0, left_out_s=60.0, distrusted_s=60.0, give_up_s=0.5, sources_s=0.0, unknown_s=0.0)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model with a file beside its weights."""
    directory = tmp_path / "made" / "tiny"
    write_model(directory)
    (directory / "tokenizer.json").write_bytes(TEXT)
    file = TextFile("tokenizer.json", digest_of(TEXT), len(TEXT))
    manifest = replace(stored_at(directory).manifest, files=(file,))
    (directory / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return directory


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def any_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with a_cluster(is_encrypted=request.param) as cluster:
        yield cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with a_cluster() as cluster:
        yield cluster


@contextmanager
def a_cluster(*, is_encrypted: bool = False) -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="hearth-") as folder,  # a socket's name must be short
        closing(Cluster(Path(folder), is_encrypted)) as cluster,
    ):
        yield cluster


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a disk, as `shutil.disk_usage` tells it."""

    free: int


@dataclass(frozen=True, slots=True)
class Store:
    node: Node
    tiers: Tiers
    server: PeerServer


@contextmanager
def a_store(
    cluster: Cluster,
    name: str,
    *,
    num_cells: int = 64,
    disk_bytes: int | None = None,
    keeps_chunks: bool = True,
    root: Path | None = None,
    patience: Patience = QUICK,
    limit: SendLimit | None = None,
    stall_s: float = QUICK.stall_s,
) -> Iterator[Store]:
    node = cluster.add(name)
    config = StoreConfig(path=str(root or node.folder / "store"), host_bytes=16 << 20, disk_bytes=disk_bytes)
    peers = Peers(node.agent_socket, node.folder, patience)
    tiers = Tiers(
        config, config.host_bytes // num_cells, is_pinned=False, keeps_chunks=keeps_chunks, peers=peers
    )
    node.held = lambda digest: [one for one in tiers.held() if one.model == digest]
    server = PeerServer(tiers, node.peers_socket, node.folder, limit, stall_s=stall_s)
    with closing(tiers), closing(server):
        yield Store(node, tiers, server)
    tiers.fetcher.book.check()


def weights(source: Path) -> bytes:
    return (source / WEIGHTS).read_bytes()


def where(source: Path) -> str:
    return f"hearth://{stored_at(source).manifest.digest}"


def load(store: Store, source: Path, order: range | list[int] | None = None) -> tuple[bytes, list[str]]:
    """Load a model from other nodes; return its bytes, and where each chunk came from."""
    model = store.tiers.open(where(source))
    return take(store.tiers.fetch(model, all_chunks(model) if order is None else order))


def take(fetch: Fetch) -> tuple[bytes, list[str]]:
    data, sources = bytearray(), []
    for chunk in fetch:
        data += chunk.data
        sources.append("host" if chunk.delivery is None else chunk.delivery.source or chunk.delivery.rung)
        fetch.release(chunk)
    return bytes(data), sources


def kept_bytes(store: Store) -> int:
    """Wait until every chunk is kept on disk, or not: it is leased until then."""
    until(lambda: store.tiers.fetcher.book.num_leased == 0)
    return store.tiers.disk.used_bytes


def holding(model: StoredModel, chunks: range) -> Callable[[Digest], list[HeldChunks]]:
    mask = sum(1 << index for index in chunks).to_bytes(len(all_chunks(model)) // 8 + 1, "little")
    return lambda digest: [HeldChunks(digest, mask, bytes(len(mask)))]


class TestOpening:
    def test_the_description_is_on_disk_afterwards(self, any_cluster: Cluster, source: Path) -> None:
        with a_store(any_cluster, "local") as head, a_store(any_cluster, "gpu-2") as store:
            head.tiers.open(source)
            model = store.tiers.open(where(source))
            assert model.manifest == stored_at(source).manifest
            assert (model.directory / "tokenizer.json").read_bytes() == TEXT
            num_tickets = any_cluster.num_tickets
            assert store.tiers.open(where(source)) is model
            head.node.close()
            with closing(
                Tiers(StoreConfig(path=str(store.tiers.disk.root)), peers=store.tiers.peers)
            ) as again:
                assert again.open(where(source)).manifest == model.manifest
            assert any_cluster.num_tickets == num_tickets

    def test_a_model_that_the_head_was_told_of_is_opened_there(self, cluster: Cluster, source: Path) -> None:
        with a_store(cluster, "local") as head, a_store(cluster, "gpu-2") as store:
            with pytest.raises(ChunkMissing, match=r"no node can send `manifest.json`.*no model .* is known"):
                store.tiers.open(where(source))
            head.tiers.set_known_models({stored_at(source).manifest.digest: str(source)})
            assert load(store, source)[0] == weights(source)

    def test_a_model_that_the_head_is_told_of_late_is_waited_for(
        self, cluster: Cluster, source: Path
    ) -> None:
        patient = replace(QUICK, unknown_s=PATIENCE_S)
        with (
            a_store(cluster, "local") as head,
            a_store(cluster, "gpu-2", patience=patient) as store,
            ThreadPoolExecutor(1) as threads,
        ):
            opening = threads.submit(store.tiers.open, where(source))
            until(lambda: cluster.num_tickets > 0)
            head.tiers.set_known_models({stored_at(source).manifest.digest: str(source)})
            assert opening.result().manifest == stored_at(source).manifest

    def test_chunks_of_a_model_that_the_head_is_told_of_again_are_waited_for(
        self, cluster: Cluster, source: Path
    ) -> None:
        """As of a store that has just taken the place of one that died."""
        patient = replace(QUICK, unknown_s=16.0)
        known = {stored_at(source).manifest.digest: str(source)}
        with (
            a_store(cluster, "local") as head,
            a_store(cluster, "gpu-2", patience=patient) as store,
            ThreadPoolExecutor(1) as threads,
        ):
            head.tiers.set_known_models(known)
            store.tiers.open(where(source))
            find, refused = head.tiers.find, list[Digest]()

            def forgotten(digest: Digest) -> StoredModel:
                refused.append(digest)
                raise ChunkMissing(f"no model {digest} is known on this node")

            head.tiers.find = forgotten  # type: ignore[method-assign]
            head.server._drop(store.node.name)  # a connection knows its model
            loading = threads.submit(load, store, source)
            until(lambda: len(refused) > 1)  # the first one was asked for a URL
            head.tiers.find = find  # type: ignore[method-assign]
            assert loading.result()[0] == weights(source)

    def test_host_memory_that_lacks_a_chunk_is_not_waited_for(
        self, cluster: Cluster, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """This node's own disk has it."""

        def wait(seconds: float) -> None:
            raise AssertionError(f"waited for {seconds} s")

        patient = replace(QUICK, unknown_s=PATIENCE_S)
        with (
            a_store(cluster, "local") as head,
            a_store(cluster, "gpu-2", patience=patient) as store,
        ):
            head.tiers.open(source)
            model = store.tiers.open(where(source))
            assert isinstance(model.remote, PeerModel)
            buffer = memoryview(bytearray(model.manifest.chunks[0].num_bytes))
            cluster.said[LOCAL] = holding(model, range(1))
            monkeypatch.setattr(time, "sleep", wait)
            with pytest.raises(ChunkMissing, match="not in host memory"):
                model.remote.read_chunk(model.manifest, 0, buffer, lambda: True, is_host_only=True)

    def test_a_node_outside_a_cluster_refuses(self, tmp_path: Path, source: Path) -> None:
        refused = pytest.raises(StoreError, match="this one is in no cluster")
        with closing(Tiers(StoreConfig(path=str(tmp_path / "store")), is_pinned=False)) as tiers, refused:
            tiers.open(where(source))

    def test_another_description_than_asked_for_is_refused(
        self, cluster: Cluster, source: Path, tmp_path: Path
    ) -> None:
        write_model(tmp_path / "other", seed=1)
        with a_store(cluster, "local") as head, a_store(cluster, "gpu-2") as store:
            head.tiers.find = lambda digest: head.tiers.open(tmp_path / "other")  # type: ignore[method-assign]
            with pytest.raises(
                ChunkCorrupt, match=f"`local`: it sent the manifest of .* for {where(source)}"
            ):
                store.tiers.open(where(source))
            assert not list((store.tiers.disk.root / "models").glob("*/manifest.json"))

    @pytest.mark.parametrize("name", [MANIFEST, "tokenizer.json"])
    def test_a_damaged_description_comes_from_another_node(
        self, cluster: Cluster, source: Path, tmp_path: Path, name: str
    ) -> None:
        shutil.copytree(source, tmp_path / "copy")
        with ExitStack() as stack:
            bad, good, store = (stack.enter_context(a_store(cluster, name)) for name in ("a", "b", "c"))
            good.tiers.open(source)
            bad.tiers.open(tmp_path / "copy")
            (tmp_path / "copy" / name).write_bytes(b"{}")
            model = store.tiers.open(where(source))
            assert (model.directory / "tokenizer.json").read_bytes() == TEXT
            assert load(store, source)[1] == ["b"] * len(all_chunks(model))

    def test_forgetting_frees_the_disk(self, cluster: Cluster, source: Path) -> None:
        with a_store(cluster, "local") as head, a_store(cluster, "gpu-2") as store:
            head.tiers.open(source)
            load(store, source)
            assert kept_bytes(store) == len(weights(source))
            directory = store.tiers.forget(where(source))
            assert not directory.exists()
            assert store.tiers.disk.used_bytes == 0
            with pytest.raises(StoreError, match="is known on this node"):
                store.tiers.find(stored_at(source).manifest.digest)


class TestReceiving:
    def test_every_chunk_comes_from_the_node_and_is_kept(self, any_cluster: Cluster, source: Path) -> None:
        with a_store(any_cluster, "gpu-1") as sender, a_store(any_cluster, "gpu-2") as store:
            sender.tiers.open(source)
            data, sources = load(store, source)
            assert data == weights(source)
            assert set(sources) == {"gpu-1"}
            assert kept_bytes(store) == len(data)
            assert store.tiers.peers is not None
            (link,) = store.tiers.peers.links()
            assert link.source == "gpu-1"
            assert link.bytes_per_s > 0
            assert load(store, source)[1] == ["host"] * len(sources)

    def test_what_the_own_disk_has_is_read_there(self, cluster: Cluster, source: Path) -> None:
        with a_store(cluster, "gpu-1") as sender, a_store(cluster, "gpu-2") as store:
            sender.tiers.open(source)
            data, _ = load(store, source)
            assert kept_bytes(store) == len(data)
            root = store.tiers.disk.root
        with a_cluster() as other, a_store(other, "gpu-2") as store:
            again = Tiers(StoreConfig(path=str(root)), is_pinned=False, peers=store.tiers.peers)
            with closing(again):
                model = again.open(where(source))
                assert take(again.fetch(model, all_chunks(model))) == (
                    data,
                    ["disk"] * len(all_chunks(model)),
                )

    def test_a_restarted_store_reports_and_sends_what_is_on_its_disk(
        self, cluster: Cluster, source: Path
    ) -> None:
        with a_store(cluster, "local") as head, a_store(cluster, "gpu-1") as store:
            head.tiers.open(source)
            data, sources = load(store, source)
            assert kept_bytes(store) == len(data)
            root = store.tiers.disk.root
        with a_cluster() as other, a_store(other, "gpu-1", root=root) as again, a_store(other, "c") as store:
            (held,) = again.tiers.held()
            assert held.model == stored_at(source).manifest.digest
            assert int.from_bytes(held.disk, "little") == (1 << len(sources)) - 1
            assert load(store, source) == (data, ["gpu-1"] * len(sources))

    def test_host_memory_of_a_faster_node_comes_before_the_own_disk(
        self, cluster: Cluster, source: Path
    ) -> None:
        with a_store(cluster, "gpu-1") as sender, a_store(cluster, "gpu-2", keeps_chunks=False) as store:
            consume(sender.tiers.fetch(model := sender.tiers.open(source), all_chunks(model)))
            data, _ = load(store, source)
            assert kept_bytes(store) == len(data)
            assert load(store, source, [2, 3])[1] == ["disk", "disk"]
            store.tiers.prices.moved(Rung.DISK, 1 << 30, 1e6)  # a very slow one
            assert load(store, source, [2, 3])[1] == ["gpu-1", "gpu-1"]

    def test_a_chunk_that_left_a_faster_nodes_memory_is_read_from_the_own_disk(
        self, cluster: Cluster, source: Path
    ) -> None:
        with (
            a_store(cluster, "gpu-1", keeps_chunks=False) as sender,
            a_store(cluster, "gpu-2", keeps_chunks=False) as store,
        ):
            model = sender.tiers.open(source)
            data, _ = load(store, source)
            assert kept_bytes(store) == len(data)
            store.tiers.prices.moved(Rung.DISK, 1 << 30, 1e6)  # a very slow one
            cluster.said[sender.node.name] = holding(model, all_chunks(model))
            fetch = sender.tiers.fetch(model, [2])
            for chunk in fetch:  # in host memory until it is released
                assert load(store, source, [2, 3])[1] == ["gpu-1", "disk"]
                fetch.release(chunk)

    def test_a_new_life_of_a_node_replaces_the_one_before(
        self, cluster: Cluster, source: Path, tmp_path: Path
    ) -> None:
        write_model(tmp_path / "other", seed=1)
        with a_store(cluster, "local") as head, a_store(cluster, "gpu-2") as store:
            assert store.tiers.peers is not None
            for life, directory in (("gpu-1", source), ("gpu-1.1", tmp_path / "other")):
                with a_store(cluster, life) as sender:
                    sender.tiers.open(directory)
                    assert set(load(store, directory)[1]) == {life}
                sender.node.close()
                del cluster.nodes[sender.node.name]
            assert [link.source for link in store.tiers.peers.links()] == ["gpu-1.1"]
            assert not list(head.tiers.held())

    def test_holders_of_parts_together_deliver_the_whole(self, cluster: Cluster, source: Path) -> None:
        with ExitStack() as stack:
            one, two, store = (stack.enter_context(a_store(cluster, name)) for name in ("a", "b", "c"))
            model = one.tiers.open(source)
            two.tiers.open(source)
            half = len(all_chunks(model)) // 2
            cluster.said = {
                one.node.name: holding(model, range(half)),
                two.node.name: holding(model, range(half, len(all_chunks(model)))),
            }
            data, sources = load(store, source)
            assert data == weights(source)
            assert sources == ["a"] * half + ["b"] * (len(sources) - half)

    def test_what_no_node_has_the_head_fetches(self, cluster: Cluster, source: Path) -> None:
        with a_store(cluster, "local") as head, a_store(cluster, "gpu-2") as store:
            model = head.tiers.open(source)
            cluster.said[LOCAL] = holding(model, range(0))
            assert load(store, source) == (weights(source), ["local"] * len(all_chunks(model)))

    def test_a_receiver_sends_on_while_it_receives(self, cluster: Cluster, source: Path) -> None:
        with ExitStack() as stack:
            one, two, three = (stack.enter_context(a_store(cluster, name)) for name in ("a", "b", "c"))
            one.tiers.open(source)
            model = two.tiers.open(where(source))
            fetch = two.tiers.fetch(model, all_chunks(model))
            chunks = iter(fetch)
            taken = [next(chunks) for _ in range(3)]  # the load of `b` is under way, and holds these
            cluster.said[one.node.name] = holding(model, range(3, len(all_chunks(model))))
            data, sources = load(three, source)
            assert data == weights(source)
            assert sources[:3] == ["b"] * 3
            fetch.release(*taken)
            for chunk in chunks:
                fetch.release(chunk)

    def test_a_host_segment_smaller_than_the_model_is_streamed_through(
        self, any_cluster: Cluster, source: Path
    ) -> None:
        with (
            a_store(any_cluster, "a", num_cells=2, keeps_chunks=False) as sender,
            a_store(any_cluster, "b", num_cells=2, keeps_chunks=False) as store,
        ):
            sender.tiers.open(source)
            assert len(stored_at(source).manifest.chunks) > 2
            assert load(store, source)[0] == weights(source)

    def test_the_quota_of_the_disk_holds(self, cluster: Cluster, source: Path) -> None:
        quota_bytes = 3 * CHUNK_BYTES
        with a_store(cluster, "a") as sender, a_store(cluster, "b", disk_bytes=quota_bytes) as store:
            sender.tiers.open(source)
            assert load(store, source)[0] == weights(source)
            assert 0 < kept_bytes(store) <= quota_bytes

    def test_a_disk_that_fails_every_write_does_not_stop_a_load(
        self, cluster: Cluster, source: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with a_store(cluster, "a") as sender, a_store(cluster, "b") as store:
            sender.tiers.open(source)
            model = store.tiers.open(where(source))
            with failing_writes([os.getpid()]):
                assert load(store, source)[0] == weights(source)
                assert kept_bytes(store) == 0
            assert caplog.text.count("chunks_not_kept") == 1
            assert store.tiers.disk.counters.num_not_kept == len(all_chunks(model))

    def test_chunks_give_way_to_the_description_of_another_model(
        self, cluster: Cluster, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_model(tmp_path / "other", seed=1)
        with a_store(cluster, "a") as sender, a_store(cluster, "b") as store:
            for directory in (source, tmp_path / "other"):
                sender.tiers.open(directory)
            load(store, source)
            capacity_bytes = kept_bytes(store) + CHUNK_BYTES // 2
            monkeypatch.setattr(
                shutil, "disk_usage", lambda _: Usage(capacity_bytes - store.tiers.disk.used_bytes)
            )
            model = store.tiers.open(where(tmp_path / "other"))
            assert (model.directory / MANIFEST).is_file()
            assert store.tiers.disk.counters.num_evicted > 0

    def test_a_cancelled_load_leaves_the_sender_nothing_leased(self, cluster: Cluster, source: Path) -> None:
        with a_store(cluster, "a") as sender, a_store(cluster, "b") as store:
            sender.tiers.open(source)
            model = store.tiers.open(where(source))
            fetch = store.tiers.fetch(model, all_chunks(model))
            fetch.cancel()
            with pytest.raises(LoadCancelled):
                next(iter(fetch))
            until(lambda: sender.tiers.fetcher.book.num_leased == 0)


class TestObjectStorage:
    @pytest.fixture
    def bucket(self, s3: S3Server, source: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        for path, content in files_of(source, "signed").items():
            s3.bucket("models").put(path, content)
        for name, value in s3.environment.items():
            monkeypatch.setenv(name, value)
        return "s3://models/signed"

    @pytest.mark.e2e
    def test_a_node_reads_by_signed_urls_and_asks_again_when_they_expire(
        self, any_cluster: Cluster, source: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(peer_server, "SIGNED_S", 6.0)
        with a_store(any_cluster, "local") as head, a_store(any_cluster, "gpu-2") as store:
            opened = head.tiers.open(head.tiers.resolve(bucket)).remote
            assert isinstance(opened, PeerModel)
            assert opened.origin is not None
            remote = opened.origin
            num_requests = remote.counters.num_requests
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
                monkeypatch.delenv(name)
            assert load(store, source, [0])[1] == ["object"]
            monkeypatch.setattr(peer_server, "SIGNED_S", 600.0)
            time.sleep(7.5)
            data, sources = load(store, source)
            assert data == weights(source)
            assert sources == ["host"] + ["object"] * (len(sources) - 1)
            assert remote.counters.num_requests == num_requests
            assert kept_bytes(store) == len(data)
            assert store.tiers.peers is not None
            assert store.tiers.peers.links() == ()

    def test_a_public_url_is_read_by_the_node_itself(
        self, cluster: Cluster, source: Path, server: BadServer
    ) -> None:
        with a_store(cluster, "local") as head, a_store(cluster, "gpu-2") as store:
            head.tiers.open(head.tiers.resolve(f"{server.url}/tiny"))
            data, sources = load(store, source)
            assert (data, set(sources)) == (weights(source), {"object"})

    def test_object_storage_that_refuses_twice_is_left_to_the_head(
        self, cluster: Cluster, source: Path, server: BadServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        with a_store(cluster, "local") as head, a_store(cluster, "gpu-2") as store:
            head.tiers.open(head.tiers.resolve(f"{server.url}/tiny"))
            store.tiers.open(where(source))
            server.plan.extend([bad_server.says(403)] * 2)
            assert load(store, source, [0])[1] == ["local"]
            assert f"peer_left_out node={server.url}/" in caplog.text
            assert set(load(store, source)[1][1:]) == {"local"}

    def test_object_storage_that_sends_wrong_bytes_is_left_out(
        self, cluster: Cluster, source: Path, server: BadServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        with ExitStack() as stack:
            head, other, store = (stack.enter_context(a_store(cluster, name)) for name in ("local", "b", "c"))
            head.tiers.open(head.tiers.resolve(f"{server.url}/tiny"))
            other.tiers.open(source)
            store.tiers.open(where(source))
            server.plan.append(bad_server.flips_a_bit)
            cluster.said[other.node.name] = lambda _: ()
            assert load(store, source, [0]) == (weights(source)[:CHUNK_BYTES], ["local"])
            assert f"source={server.url}/ found=" in caplog.text
            del cluster.said[other.node.name]
            data, sources = load(store, source)
            assert (data, set(sources[1:])) == (weights(source), {"b"})

    def test_the_head_loads_from_nodes_and_from_its_object_storage(
        self, cluster: Cluster, source: Path, server: BadServer
    ) -> None:
        with a_store(cluster, "local") as head, a_store(cluster, "gpu-2") as other:
            model = head.tiers.open(head.tiers.resolve(f"{server.url}/tiny"))
            held = other.tiers.open(source)
            cluster.said[other.node.name] = holding(held, range(2))
            num_asked = len(server.asked)
            data, sources = take(head.tiers.fetch(model, all_chunks(model)))
            assert data == weights(source)
            assert "gpu-2" in sources[:2]
            assert set(sources[2:]) == {"object"}
            assert len(server.asked) - num_asked == sources.count("object")
            assert head.tiers.peers is not None
            assert [link.source for link in head.tiers.peers.links()] == [other.node.name]

    def test_the_head_goes_on_with_object_storage_that_has_failed(
        self, cluster: Cluster, source: Path, server: BadServer
    ) -> None:
        with a_store(cluster, "local") as head:
            model = head.tiers.open(head.tiers.resolve(f"{server.url}/tiny"))
            server.plan.append(bad_server.says(403))
            with pytest.raises(Unreachable, match="403"):
                take(head.tiers.fetch(model, [0]))
            server.plan.append(bad_server.flips_a_bit)
            data, sources = take(head.tiers.fetch(model, all_chunks(model)))
            assert (data, set(sources)) == (weights(source), {"object"})

    def test_a_model_that_was_deployed_from_a_directory_has_no_url(
        self, cluster: Cluster, source: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        with a_store(cluster, "local") as head, a_store(cluster, "gpu-2") as store:
            head.tiers.open(source)
            assert set(load(store, source)[1]) == {"local"}
        assert caplog.text.count("store_not_direct") == 1
        assert "`tiny` was not deployed from object storage" in caplog.text


class TestFailures:
    def test_a_node_that_dies_in_the_middle_is_replaced(self, cluster: Cluster, source: Path) -> None:
        with ExitStack() as stack:
            good, store = (stack.enter_context(a_store(cluster, name)) for name in ("a", "b"))
            model = good.tiers.open(source)
            bad = cluster.add("bad")
            bad.take = lambda connection: answer(connection, model, num_bytes=CHUNK_BYTES // 2)
            bad.held = holding(model, all_chunks(model))
            data, sources = load(store, source)
            assert (data, set(sources)) == (weights(source), {"a"})

    def test_a_store_that_is_closed_in_the_middle_of_a_load(self, cluster: Cluster, source: Path) -> None:
        with ExitStack() as stack:
            one, two, store = (stack.enter_context(a_store(cluster, name)) for name in ("a", "b", "c"))
            for sender in (one, two):
                sender.tiers.open(source)
            model = store.tiers.open(where(source))
            fetch = store.tiers.fetch(model, all_chunks(model))
            chunks = iter(fetch)
            data = bytearray()
            for chunk in chunks:
                if chunk.index == 1:
                    one.node.close()
                    one.server.close()
                data += chunk.data
                fetch.release(chunk)
            assert bytes(data) == weights(source)

    def test_a_stalling_node_is_left_out(self, cluster: Cluster, source: Path) -> None:
        impatient = replace(QUICK, stall_s=1.0)
        with a_store(cluster, "a") as good, a_store(cluster, "b", patience=impatient) as store:
            model = good.tiers.open(source)
            bad, stay = cluster.add("bad"), threading.Event()
            bad.take = lambda connection: answer(connection, model, num_bytes=100, stay=stay)
            bad.held = holding(model, all_chunks(model))
            data, sources = load(store, source)
            stay.set()
            assert (data, set(sources)) == (weights(source), {"a"})

    def test_a_node_that_fails_every_time_is_asked_so_many_times(
        self, cluster: Cluster, source: Path
    ) -> None:
        at_once = replace(QUICK, left_out_s=0.0)
        with a_store(cluster, "a") as good, a_store(cluster, "b", patience=at_once) as store:
            model = good.tiers.open(source)
            opened = store.tiers.open(where(source))
            bad = cluster.add("bad")
            bad.take = lambda connection: answer(connection, model, num_bytes=100)
            bad.held = holding(model, range(1))
            cluster.said[good.node.name] = lambda _: ()
            with pytest.raises(
                Unreachable, match=r"chunk 0 of hearth://.* within 8 tries: node `bad`: it closed"
            ):
                take(store.tiers.fetch(opened, [0]))

    def test_wrong_bytes_condemn_their_node_and_not_the_load(
        self, cluster: Cluster, source: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with a_store(cluster, "a") as good, a_store(cluster, "b") as store:
            model = good.tiers.open(source)
            bad = cluster.add("bad")
            bad.take = lambda connection: answer(connection, model)
            bad.held = holding(model, range(1))
            cluster.said[good.node.name] = holding(model, range(1, len(all_chunks(model))))
            first = store.tiers.open(where(source))
            with pytest.raises(StoreError, match=r"chunk 0 of .*`bad` sent bytes that hash to"):
                take(store.tiers.fetch(first, [0]))
            assert "peer_corrupt" in caplog.text
            assert "peer_left_out node=bad" in caplog.text
            del cluster.said[good.node.name]
            data, sources = load(store, source)
            assert (data, set(sources)) == (weights(source), {"a"})

    def test_a_node_that_lost_the_chunk_is_asked_no_more_for_it(self, cluster: Cluster, source: Path) -> None:
        with ExitStack() as stack:
            good, lost, store = (stack.enter_context(a_store(cluster, name)) for name in ("a", "lost", "c"))
            model = good.tiers.open(source)
            lost.tiers.open(where(source))  # its description, and no chunk
            cluster.said = {
                lost.node.name: holding(model, all_chunks(model)),
                good.node.name: holding(model, range(1, len(all_chunks(model)))),
            }
            with pytest.raises(StoreError, match=r"chunk 0 of .* could not be read: no node can send"):
                load(store, source, [0])
            del cluster.said[good.node.name]
            assert load(store, source) == (weights(source), ["a"] * len(all_chunks(model)))

    def test_a_chunk_that_takes_long_to_read_is_waited_for(self, cluster: Cluster, source: Path) -> None:
        with a_store(cluster, "a") as good, a_store(cluster, "b") as store:
            model = good.tiers.open(source)
            store.tiers.open(where(source))
            slow = cluster.add("slow")
            slow.take = lambda connection: answer(connection, model, right=weights(source), num_waits=3)
            slow.held = holding(model, all_chunks(model))
            cluster.said[good.node.name] = lambda _: ()
            assert load(store, source, [0]) == (weights(source)[:CHUNK_BYTES], ["slow"])

    def test_without_any_node_the_error_names_chunk_and_cause(self, cluster: Cluster, source: Path) -> None:
        with a_store(cluster, "a") as good, a_store(cluster, "b") as store:
            model = good.tiers.open(source)
            store.tiers.open(where(source))
            good.node.close()
            with pytest.raises(
                Unreachable, match=r"chunk \d+ of .*: no node can send chunk \d+ of hearth://.*node `a`"
            ):
                take(store.tiers.fetch(store.tiers.open(where(source)), all_chunks(model)))

    def test_a_receiver_that_takes_nothing_is_cut_off(self, cluster: Cluster, source: Path) -> None:
        with a_store(cluster, "a", stall_s=1.0) as sender:
            digest = sender.tiers.open(source).manifest.digest
            with connected(cluster, sender.node) as connection:
                connection.sendall(b'{"chunk": ["%s", 0]}\n' % digest.encode())
                still_being_read = HEADER.pack(0, WAIT)
                while (header := connection.recv(HEADER.size, socket.MSG_WAITALL)) == still_being_read:
                    pass
                assert HEADER.unpack(header) == (0, CHUNK_BYTES)
                assert len(connection.recv(CHUNK_BYTES, socket.MSG_WAITALL)) == CHUNK_BYTES
                assert sender.tiers.fetcher.book.num_leased == 1  # until it is confirmed
                with pytest.raises(ConnectionResetError):
                    connection.recv(1)
            until(lambda: sender.tiers.fetcher.book.num_leased == 0)

    def test_a_receiver_that_is_too_slow_is_cut_off(
        self,
        cluster: Cluster,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(peer_server, "MIN_BYTES_PER_S", 1 << 30)
        num_bytes = write_large_model(tmp_path / "large")
        with (
            a_store(cluster, "a", num_cells=1, stall_s=1.0) as sender,
            socket.socket() as connection,
        ):
            digest = sender.tiers.open(tmp_path / "large").manifest.digest
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connect(cluster, sender.node, connection)
            connection.sendall(b'{"chunk": ["%s", 0]}\n' % digest.encode())
            with pytest.raises(ConnectionResetError):
                receive_slowly(connection, HEADER.size + num_bytes)
            assert f"of {num_bytes} bytes of chunk 0 in 1.0" in caplog.text
            until(lambda: sender.tiers.fetcher.book.num_leased == 0)

    @pytest.mark.parametrize(
        "line",
        [
            '{"wish": ["DIGEST", 1]}',
            '{"chunk": ["DIGEST", 99999]}',
            '{"chunk": ["DIGEST", -1]}',
            '{"chunk": ["unknown", 0]}',
            '{"file": ["DIGEST", "../../secret"]}',
            '{"file": ["DIGEST", "weights.bin"]}',
        ],
    )
    def test_what_is_not_there_is_refused_and_the_connection_stays(
        self, cluster: Cluster, source: Path, line: str
    ) -> None:
        with a_store(cluster, "a") as sender:
            digest = sender.tiers.open(source).manifest.digest
            with connected(cluster, sender.node) as connection, connection.makefile("rb") as answers:
                for _ in range(2):
                    connection.sendall(line.replace("DIGEST", digest).encode() + b"\n")
                    assert HEADER.unpack(answers.read(HEADER.size)) == (0, FAILED)
                    assert b'{"error":' in answers.readline()

    @pytest.mark.parametrize("line", [b"no json", b'{"chunk": 3}', b"x" * (1 << 20)])
    def test_nonsense_ends_the_connection(self, cluster: Cluster, source: Path, line: bytes) -> None:
        with a_store(cluster, "a") as sender, connected(cluster, sender.node) as connection:
            connection.sendall(line + b"\n")
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""

    def test_a_certificate_of_another_node_is_refused(self, source: Path) -> None:
        with (
            a_cluster(is_encrypted=True) as cluster,
            a_store(cluster, "a") as sender,
            a_store(cluster, "b") as store,
        ):
            sender.tiers.open(source)
            for name in ("node.pem", "node.key"):
                (sender.node.folder / name).write_bytes((store.node.folder / name).read_bytes())
            with pytest.raises(StoreError, match=r"certificate is not valid for 'a\.node\.hearth'"):
                load(store, source)


def test_keepers_in_processes_serve_each_other(cluster: Cluster, source: Path) -> None:
    """As in a cluster: the gateway tells the head's keeper where models are, workers open them by digest."""
    model = stored_at(source)
    digest, num_chunks = model.manifest.digest, len(all_chunks(model))
    nodes = [cluster.add(name) for name in ("local", "gpu-1", "gpu-2")]
    for node in nodes:
        node.held = partial(held_by, KeeperClient(node.folder / "keeper.sock"))
    with ExitStack() as stack:
        head, *others = [stack.enter_context(keeping(keeper_setup_of(node))) for node in nodes]
        clients = [KeeperClient(node.folder / "keeper.sock") for node in nodes]
        asyncio.run(clients[0].set_known_models({digest: str(source)}))
        first, second = (
            stack.enter_context(closing(LeaseClient(node.folder / "keeper.sock", is_pinned=False)))
            for node in nodes[1:]
        )
        assert sources_of(leased(first, source)) == {"local"}
        (held,) = until_kept(clients[1], digest, num_chunks)
        assert int.from_bytes(held.disk, "little") == (1 << num_chunks) - 1
        head.kill()
        head.wait()
        assert sources_of(leased(second, source)) == {"gpu-1"}
        assert [link.source for link in asyncio.run(clients[2].report()).links] == ["gpu-1"]
        assert all(other.poll() is None for other in others)


def keeper_setup_of(node: Node) -> KeeperSetup:
    return KeeperSetup(
        socket=str(node.folder / "keeper.sock"),
        kind="cpu",
        path=str(node.folder / "store"),
        disk_bytes=None,
        host_bytes=32 << 20,
        log_level="warning",
        agent_socket=str(node.agent_socket),
        peers_socket=str(node.peers_socket),
        credentials=str(node.folder),
    )


def held_by(client: KeeperClient, digest: Digest) -> tuple[HeldChunks, ...]:
    try:
        return tuple(one for one in asyncio.run(client.report()).models if one.model == digest)
    except StoreError:  # it was killed, and its agent has not told yet
        return ()


def until_kept(client: KeeperClient, digest: Digest, num_chunks: int) -> tuple[HeldChunks, ...]:
    def num_kept() -> int:
        (held,) = held_by(client, digest)
        return int.from_bytes(held.disk, "little").bit_count()

    until(lambda: num_kept() == num_chunks)
    return held_by(client, digest)


def leased(client: LeaseClient, source: Path) -> list[HostChunk]:
    """Load a model by its digest, compare its bytes, and return what was leased."""
    model = client.open(where(source))
    grant = client.grant(model, range(len(model.manifest.chunks)))
    data, chunks = bytearray(), []
    for chunk in grant:
        data += chunk.data
        chunks.append(chunk)
        grant.release(chunk)
    assert bytes(data) == weights(source)
    return chunks


def sources_of(chunks: list[HostChunk]) -> set[str | None]:
    return {None if chunk.delivery is None else chunk.delivery.source for chunk in chunks}


def test_names_in_certificates() -> None:
    names = [server_name(node) for node in (LOCAL, "gpu-2", "gpu-2.1")]
    assert names == ["head.node.hearth", "gpu-2.node.hearth", "gpu-2.node.hearth"]


@contextmanager
def connected(cluster: Cluster, node: Node) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        connect(cluster, node, connection)
        yield connection


def connect(cluster: Cluster, node: Node, connection: socket.socket) -> None:
    granted = cluster.ticket(node.name, NodeId("b"))
    assert isinstance(granted, TicketGranted)
    connection.settimeout(30.0)
    connection.connect((node.host, node.port))
    connection.sendall(f"HEARTH1 {granted.ticket.hex()}\n".encode())


def receive_slowly(connection: socket.socket, num_bytes: int) -> None:
    while num_bytes > 0:
        num_bytes -= len(connection.recv(4096))
        time.sleep(0.005)


def write_large_model(directory: Path) -> int:
    """Write a model of one chunk that no socket buffers, and return its bytes."""
    shape = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    arch = arch_from_config({"model_type": "llama", "vocab_size": 24_000, **shape})
    num_bytes = layout_of(arch, "float32").num_bytes
    directory.mkdir()
    (directory / WEIGHTS).write_bytes(bytes(num_bytes))
    manifest = Manifest.of(arch, "float32", "none", (chunk_of(bytes(num_bytes)),), 16 << 20, {})
    (directory / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return num_bytes


def answer(
    connection: socket.socket,
    model: StoredModel,
    *,
    num_bytes: int = CHUNK_BYTES,
    right: bytes | None = None,
    num_waits: int = 0,
    stay: threading.Event | None = None,
) -> None:
    """Answer requests for chunks, with wrong bytes unless `right` are given, and only so many of a chunk."""
    with connection.makefile("rb") as lines:
        for line in lines:
            if b'"file"' in line:
                connection.sendall(HEADER.pack(0, FAILED) + failure_line("no file is here"))
                continue
            if line == b"\n":
                continue
            index = msgspec.json.decode(line)["chunk"][1]
            size = model.manifest.chunks[index].num_bytes
            begin = index * CHUNK_BYTES
            content = bytes(size) if right is None else right[begin : begin + size]
            connection.sendall(HEADER.pack(index, WAIT) * num_waits + HEADER.pack(index, size))
            connection.sendall(content[: min(size, num_bytes)])
            if num_bytes < CHUNK_BYTES:
                if stay is not None:
                    stay.wait(30.0)
                return


def test_two_object_stores_are_no_lives_of_one_node(tmp_path: Path) -> None:
    peers = Peers(tmp_path / "agent")
    names = [
        NodeId(name) for name in ("https://s3.us-east-1.x.com/", "https://s3.eu-west-1.x.com/", "a", "a.1")
    ]
    for name in names:
        peers._node(name)
    assert list(peers._nodes) == [names[0], names[1], names[3]]


def planned(store: Store, source: Path, stack: ExitStack) -> Fetch:
    """Begin the load of a node that follows a plan; it ends with the stack at the latest."""
    fetch = store.tiers.fetch_planned(store.tiers.open(where(source)))
    assert fetch is not None
    stack.callback(fetch.cancel)
    return fetch


class TestPlans:
    """Nodes a, b and c fetch a model that only the head has, each in an order of its own."""

    @pytest.fixture
    def nodes(self, cluster: Cluster, source: Path) -> Iterator[tuple[Store, ...]]:
        with ExitStack() as stack:
            nodes = tuple(stack.enter_context(a_store(cluster, name)) for name in (LOCAL, "a", "b", "c"))
            nodes[0].tiers.open(source)
            yield nodes

    def plan(self, cluster: Cluster, source: Path) -> int:
        """A gets the even chunks from the head and the rest from b, b the other way round; c from both."""
        num_chunks = len(all_chunks(stored_at(source)))
        even, odd = range(0, num_chunks, 2), range(1, num_chunks, 2)

        def fetches(*given: tuple[range, str]) -> tuple[PlannedFetch, ...]:
            return tuple(
                PlannedFetch(at, at + 1, NodeId(name), at) for chunks, name in given for at in chunks
            )

        cluster.plans = {
            NodeId("a"): fetches((even, LOCAL), (odd, "b")),
            NodeId("b"): fetches((odd, LOCAL), (even, "a")),
            NodeId("c"): fetches((odd[::-1], "b"), (even, "a")),
        }
        return num_chunks

    def test_nodes_fetch_in_their_orders_from_nodes_that_still_receive(
        self, cluster: Cluster, source: Path, nodes: tuple[Store, ...]
    ) -> None:
        num_chunks = self.plan(cluster, source)
        with ExitStack() as stack:
            fetches = {one.node.name: planned(one, source, stack) for one in reversed(nodes[1:])}
            threads = ThreadPoolExecutor(len(fetches))
            stack.callback(threads.shutdown)
            came = dict(zip(fetches, threads.map(take, fetches.values()), strict=True))
        for name, (_, sources) in came.items():
            assert sources == [one.node for one in cluster.plans[name]]
        num_sent = Counter(name for _, sources in came.values() for name in sources)
        assert num_sent[LOCAL] == num_chunks, "each chunk leaves the head once"
        for one in nodes[1:]:
            assert load(one, source) == (weights(source), ["host"] * num_chunks)

    def test_the_loads_own_order_waits_for_the_plan(
        self, cluster: Cluster, source: Path, nodes: tuple[Store, ...]
    ) -> None:
        num_chunks = self.plan(cluster, source)
        cluster.plans = {NodeId("a"): (PlannedFetch(1, num_chunks, LOCAL, 0), PlannedFetch(0, 1, LOCAL, 1))}
        with ExitStack() as stack, ThreadPoolExecutor(1) as threads:
            fetch = planned(nodes[1], source, stack)
            loading = threads.submit(load, nodes[1], source)
            _, came = take(fetch)
            content, sources = loading.result()
        assert content == weights(source)
        assert set(sources) <= {LOCAL, "host"}, "what had come when it was asked for is in host memory"
        assert came == [LOCAL] * num_chunks

    def test_a_node_that_never_begins_is_left_out(
        self, cluster: Cluster, source: Path, nodes: tuple[Store, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fetch_plan, "START_S", 0.3)
        num_chunks = self.plan(cluster, source)
        with ExitStack() as stack:
            _, sources = take(planned(nodes[1], source, stack))
        assert sorted(sources) == [LOCAL] * num_chunks
        assert load(nodes[1], source)[0] == weights(source)

    def test_a_node_that_dies_or_is_late_is_left_out(
        self, cluster: Cluster, source: Path, nodes: tuple[Store, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fetch_plan, "LATE_S", 0.3)
        monkeypatch.setattr(fetch_plan, "LATE_CHUNKS", 0)
        self.plan(cluster, source)
        late = nodes[2].tiers.open(where(source))
        with ExitStack() as stack:
            held = nodes[2].tiers.fetcher.fetch_planned(late, all_chunks(late))  # nobody takes these
            stack.callback(held.cancel)
            assert set(take(planned(nodes[1], source, stack))[1]) <= {LOCAL, "b"}
            nodes[2].server.close()
            _, sources = take(planned(nodes[3], source, stack))
        assert "b" not in sources
        assert load(nodes[3], source)[0] == weights(source)

    def test_a_second_load_leaves_the_plan_to_the_first(
        self, cluster: Cluster, source: Path, nodes: tuple[Store, ...]
    ) -> None:
        num_chunks = len(all_chunks(stored_at(source)))
        cluster.plans = {NodeId("a"): (PlannedFetch(0, num_chunks, LOCAL, 0),)}
        with ExitStack() as stack:
            fetch = planned(nodes[1], source, stack)
            assert nodes[1].tiers.fetch_planned(fetch.model) is None
            assert isinstance(fetch.model.remote, PeerModel)
            assert fetch.model.remote.plan.order
            assert take(fetch)[1] == [LOCAL] * num_chunks

    def test_a_plan_is_not_followed_where_chunks_do_not_stay(self, cluster: Cluster, source: Path) -> None:
        cluster.plans = {NodeId("a"): (PlannedFetch(0, 1, LOCAL, 0),)}
        with (
            a_store(cluster, LOCAL) as head,
            a_store(cluster, "a", keeps_chunks=False, disk_bytes=0) as store,
        ):
            head.tiers.open(source)
            assert store.tiers.fetch_planned(store.tiers.open(where(source))) is None
            assert load(store, source)[0] == weights(source)

    def test_a_cancelled_plan_stops_nobody(
        self, cluster: Cluster, source: Path, nodes: tuple[Store, ...]
    ) -> None:
        self.plan(cluster, source)
        with ExitStack() as stack:
            fetch = planned(nodes[1], source, stack)
            fetch.cancel()
            nodes[1].tiers.end_plan(fetch.model)
        assert load(nodes[1], source)[0] == weights(source)
