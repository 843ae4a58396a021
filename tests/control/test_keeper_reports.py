"""The gateway tells the keeper of requests, and asks it where bytes are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from hearth.control.datadir import DataDir
from hearth.control.deploy.deployed import Deployed
from hearth.control.deploy.registry import Registry
from hearth.control.keeper_reports import KeeperReports
from hearth.control.observe.views import HostMemoryView
from hearth.core.errors import StoreError
from hearth.core.node_messages import HeldChunks
from hearth.core.types import LOCAL, Digest, ModelId, NodeId, Rung, WorkerId
from hearth.policy.fleet.events import ModelReady, Prewarm, TimerFired
from hearth.store.keeper_client import KeeperClient
from hearth.store.transfer.lease_messages import KeeperReport
from hearth.store.transfer.lease_server import LeaseServer
from tests.control.gateway_rig import GatewayRig, with_rig
from tests.store.stored import all_chunks, consume, tiers_at, write_model
from tests.worker.harness import folder


class Keeper(KeeperClient):
    """Answers without a process. Mutable; the test says whether it is there."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.told: list[dict[str, int]] = []
        self.held: tuple[HeldChunks, ...] = ()
        self.is_there = True
        self.was_asked = asyncio.Event()

    async def count_requests(self, num_by_digest: Mapping[str, int]) -> None:
        self.was_asked.set()
        if not self.is_there:
            raise StoreError("no keeper answers")
        self.told.append(dict(num_by_digest))

    async def report(self) -> KeeperReport:
        return KeeperReport(0, 0, self.held)


def with_reports(
    data_dir: DataDir,
    scene: Callable[[KeeperReports, GatewayRig], Awaitable[None]],
    keeper: KeeperClient,
) -> None:
    async def run() -> None:
        with closing(GatewayRig(data_dir)) as rig:
            reports = KeeperReports(keeper, rig.catalog, rig.driver, rig.metrics, interval_s=0.01)
            try:
                async with asyncio.timeout(60):
                    await scene(reports, rig)
            finally:
                await reports.close()

    asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_every_request_is_told_once(data_dir: DataDir, deployed: Deployed) -> None:
    keeper = Keeper()

    async def scene(reports: KeeperReports, _: GatewayRig) -> None:
        for digest in ("a", "b", "a", "a"):
            reports.request_came(digest)
        await until(lambda: bool(keeper.told))
        reports.request_came("b")
        await until(lambda: len(keeper.told) == 2)
        assert keeper.told == [{"a": 3, "b": 1}, {"b": 1}]

    with_reports(data_dir, scene, keeper)


def test_what_the_keeper_could_not_be_told_is_told_with_the_next_request(
    data_dir: DataDir, deployed: Deployed, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = Keeper()

    async def scene(reports: KeeperReports, _: GatewayRig) -> None:
        keeper.is_there = False
        reports.request_came("a")
        await keeper.was_asked.wait()
        keeper.is_there = True
        reports.request_came("a")
        await until(lambda: bool(keeper.told))
        assert keeper.told == [{"a": 2}]

    with_reports(data_dir, scene, keeper)
    assert [record.message for record in caplog.records if "request_counts_not_sent" in record.message]


def test_requests_at_the_gateway_keep_a_busy_model_dear_in_the_keepers_host_memory(tmp_path: Path) -> None:
    write_model(tmp_path / "busy")
    with tiers_at(tmp_path / "store") as tiers:
        model = tiers.open(tmp_path / "busy")
        tiers.prices.load_began(model)
        socket = tmp_path / "lend.sock"
        digest, chunk = model.manifest.digest, model.manifest.chunk_ids[0]
        with closing(LeaseServer(tiers, socket)):
            client = KeeperClient(socket)
            before = tiers.prices.of_host_chunk(chunk)
            asyncio.run(client.count_requests({digest: 1}))
            asyncio.run(client.count_requests({digest: 50, "unknown": 7}))
            assert tiers.prices.of_host_chunk(chunk) > before
            with pytest.raises(StoreError):
                asyncio.run(client.count_requests({digest: 0}))


def test_every_name_of_the_same_bytes_is_reported(data_dir: DataDir, deployed: Deployed) -> None:
    with Registry(data_dir) as registry:
        registry.add(replace(deployed, name="another"))
        registry.add(replace(deployed, name="other", digest="of other bytes"))
    keeper = Keeper()
    digests = (Digest(deployed.digest), Digest("of other bytes"))
    keeper.held = tuple(HeldChunks(digest, b"\0", b"\1") for digest in digests)
    on_disk = {Rung.HOST: 0, Rung.DISK: deployed.facts.num_bytes}

    async def scene(reports: KeeperReports, rig: GatewayRig) -> None:
        models = rig.driver.fleet.models
        assert models.keys() == {ModelId("tiny"), ModelId("another"), ModelId("other")}
        reports.observe(ModelReady(0.0, WorkerId("w0"), ModelId("tiny"), (), 1.0), ())
        await until(lambda: all(model.bytes_by_rung(LOCAL) == on_disk for model in models.values()))

    with_reports(data_dir, scene, keeper)


def test_host_memory_is_what_chunks_take_and_unknown_without_a_keeper(
    tmp_path: Path, data_dir: DataDir, deployed: Deployed
) -> None:
    write_model(tmp_path / "tiny")
    with folder() as place, tiers_at(tmp_path / "root", num_cells=64) as tiers:
        model = tiers.open(tmp_path / "tiny")
        consume(tiers.fetch(model, all_chunks(model)))

        async def scene(reports: KeeperReports, _: GatewayRig) -> None:
            with closing(LeaseServer(tiers, place / "s")):
                await reports.refresh_host_memory(10.0)
            num_chunks = len(set(model.manifest.chunk_ids))
            assert reports.host_memory == HostMemoryView(num_chunks * (16 << 20) // 64, 16 << 20)

            await reports.refresh_host_memory(10.0)
            assert reports.host_memory is None

        with_reports(data_dir, scene, KeeperClient(place / "s"))


def test_a_model_is_brought_to_host_memory_for_its_forecast(
    tmp_path: Path, data_dir: DataDir, deployed: Deployed
) -> None:
    order = Prewarm(ModelId("tiny"), WorkerId("w0"), True, 1.0, 0.1, 1.0)
    with folder() as place, tiers_at(tmp_path / "root", num_cells=64) as tiers:

        async def scene(reports: KeeperReports, rig: GatewayRig) -> None:
            with closing(LeaseServer(tiers, place / "s")):
                reports.observe(TimerFired(0.0), [msgspec.structs.replace(order, is_advice=True)])
                reports.observe(TimerFired(0.0), [order])
                model = rig.driver.fleet.models[ModelId("tiny")]
                await until(lambda: bool((model.bytes_by_rung(LOCAL) or {}).get(Rung.HOST)))

        with_reports(data_dir, scene, KeeperClient(place / "s"))


def test_a_model_is_brought_to_host_memory_on_another_node(data_dir: DataDir, deployed: Deployed) -> None:
    order = Prewarm(ModelId("tiny"), WorkerId("gpu-2.1/w0"), True, 1.0, 0.1, 1.0)
    told: list[tuple[NodeId, Digest, float]] = []

    async def scene(reports: KeeperReports, _: GatewayRig) -> None:
        reports.prefetch_on = lambda node, model, weight: told.append((node, model, weight))
        reports.observe(TimerFired(0.0), [order])
        await until(lambda: bool(told))

    with_reports(data_dir, scene, Keeper())
    assert told == [(NodeId("gpu-2.1"), Digest(deployed.digest), 1.0)]


def test_chunks_that_no_disk_keeps_are_counted_over_the_lives_of_keepers_and_noted(
    tmp_path: Path, data_dir: DataDir, deployed: Deployed
) -> None:
    with folder() as place, tiers_at(tmp_path / "root") as tiers:

        async def scene(reports: KeeperReports, rig: GatewayRig) -> None:
            async def counted(num_chunks: int) -> float | None:
                tiers.disk.counters.num_not_kept = num_chunks
                await reports.refresh_host_memory(10.0)
                return rig.metrics.registry.get_sample_value(
                    "hearth_fallbacks_total", {"what": "chunks_not_kept"}
                )

            with closing(LeaseServer(tiers, place / "s")):
                assert await counted(0) == 0
                assert reports.note is None
                assert [await counted(num) for num in (3, 3, 5)] == [3, 3, 5]
                assert "5 on node `local`;" in (reports.note or "")
                assert [await counted(num) for num in (2, 0)] == [7, 7]  # another keeper, and another
                assert reports.note is None
                reports.chunks_not_kept(NodeId("gpu-2.1"), 4)
                assert await counted(1) == 12
                assert "1 on node `local`, 4 on node `gpu-2`;" in (reports.note or "")

        with_reports(data_dir, scene, KeeperClient(place / "s"))


def test_a_keeper_that_is_slow_to_answer_has_what_it_had(data_dir: DataDir, deployed: Deployed) -> None:
    with folder() as place:

        async def scene(reports: KeeperReports, _: GatewayRig) -> None:
            reports.host_memory = HostMemoryView(3, 4)
            is_over = asyncio.Event()

            async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await is_over.wait()
                writer.close()

            async with await asyncio.start_unix_server(keep_silent, place / "s"):
                await reports.refresh_host_memory(0.05)
                assert reports.host_memory == HostMemoryView(3, 4)
                is_over.set()
            await reports.refresh_host_memory(10.0)
            assert reports.host_memory is None

        with_reports(data_dir, scene, KeeperClient(place / "s"))


def test_what_another_node_has_is_reported_in_bytes(data_dir: DataDir, deployed: Deployed) -> None:
    node, digest = NodeId("gpu-2"), Digest(deployed.digest)

    async def scene(rig: GatewayRig) -> None:
        rig.keeper.node_reported(node, [HeldChunks(digest, b"", b"\x01"), HeldChunks(Digest("x"), b"", b"")])
        known = rig.driver.fleet.models[ModelId("tiny")]
        assert known.bytes_by_rung(node) == {Rung.HOST: 0, Rung.DISK: deployed.facts.num_bytes}

    with_rig(data_dir, scene)
