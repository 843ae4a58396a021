"""Requests at the gateway reach the keeper, and price chunks in its host memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from hearth.control.demand_reports import DemandReports
from hearth.core.errors import StoreError
from hearth.store.keeper_client import KeeperClient
from hearth.store.transfer.lease_server import LeaseServer
from tests.store.stored import tiers_at, write_model


class Keeper(KeeperClient):
    """Answers without a process. Mutable; the test says whether it is there."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.told: list[dict[str, int]] = []
        self.is_there = True
        self.was_asked = asyncio.Event()

    async def count_requests(self, num_by_digest: Mapping[str, int]) -> None:
        self.was_asked.set()
        if not self.is_there:
            raise StoreError("no keeper answers")
        self.told.append(dict(num_by_digest))


def run(scene: Callable[[Keeper, DemandReports], Awaitable[None]]) -> None:
    async def play() -> None:
        keeper = Keeper()
        reports = DemandReports(keeper, interval_s=0.01)
        try:
            async with asyncio.timeout(60):
                await scene(keeper, reports)
        finally:
            await reports.close()

    asyncio.run(play())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


def test_every_request_is_told_once() -> None:
    async def scene(keeper: Keeper, reports: DemandReports) -> None:
        for digest in ("a", "b", "a", "a"):
            reports.request_came(digest)
        await until(lambda: bool(keeper.told))
        reports.request_came("b")
        await until(lambda: len(keeper.told) == 2)
        assert keeper.told == [{"a": 3, "b": 1}, {"b": 1}]

    run(scene)


def test_what_the_keeper_could_not_be_told_is_told_with_the_next_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(keeper: Keeper, reports: DemandReports) -> None:
        keeper.is_there = False
        reports.request_came("a")
        await keeper.was_asked.wait()
        keeper.is_there = True
        reports.request_came("a")
        await until(lambda: bool(keeper.told))
        assert keeper.told == [{"a": 2}]

    run(scene)
    assert [record.message for record in caplog.records if "demand_not_told" in record.message]


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
