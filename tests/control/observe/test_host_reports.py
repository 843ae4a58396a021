"""What the keeper says of host memory, as whoever looks sees it."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

from hearth.control.observe.host_reports import HostReports
from hearth.control.observe.views import HostMemoryView
from hearth.store.keeper_client import KeeperClient
from hearth.store.transfer.lease_server import LeaseServer
from tests.store.stored import all_chunks, consume, tiers_at, write_model
from tests.worker.harness import folder


def test_host_memory_is_what_chunks_take_and_unknown_without_a_keeper(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    with folder() as place, tiers_at(tmp_path / "root", num_cells=64) as tiers:
        reports = HostReports(KeeperClient(place / "s"))
        model = tiers.open(tmp_path / "tiny")
        consume(tiers.fetch(model, all_chunks(model)))
        with closing(LeaseServer(tiers, place / "s")):
            asyncio.run(reports.refresh(10.0))
        num_chunks = len(set(model.manifest.chunk_ids))
        assert reports.view == HostMemoryView(num_chunks * (16 << 20) // 64, 16 << 20)

        asyncio.run(reports.refresh(10.0))
        assert reports.view is None


def test_a_keeper_that_is_slow_to_answer_has_what_it_had() -> None:
    async def scene(path: Path) -> None:
        reports = HostReports(KeeperClient(path))
        reports.view = HostMemoryView(3, 4)
        is_over = asyncio.Event()

        async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await is_over.wait()
            writer.close()

        async with await asyncio.start_unix_server(keep_silent, path):
            await reports.refresh(0.05)
            assert reports.view == HostMemoryView(3, 4)
            is_over.set()
        await reports.refresh(10.0)
        assert reports.view is None

    with folder() as place:
        asyncio.run(scene(place / "s"))
