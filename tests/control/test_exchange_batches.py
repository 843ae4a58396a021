from __future__ import annotations

import asyncio

import pytest

from hearth.control import exchange_batches
from hearth.control.exchange_batches import MAX_WAITING, ExchangeBatches
from hearth.control.exchange_record import ExchangeRecord
from hearth.control.metrics import Metrics


def test_records_are_handed_on_when_enough_wait_and_one_sink_is_done_before_the_next() -> None:
    async def scene() -> None:
        told: list[tuple[str, str]] = []
        batches = ExchangeBatches(
            [lambda one: told.append(("first", one.path)), lambda one: told.append(("second", one.path))],
            Metrics(),
        )
        for index in range(MAX_WAITING - 1):
            batches.add(ExchangeRecord("GET", f"/{index}"))
        assert told == []

        batches.add(ExchangeRecord("GET", f"/{MAX_WAITING - 1}"))

        paths = [f"/{index}" for index in range(MAX_WAITING)]
        assert told == [("first", path) for path in paths] + [("second", path) for path in paths]

    asyncio.run(scene())


def test_a_record_that_no_other_follows_is_handed_on_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_batches, "DELAY_S", 0.001)

    async def scene() -> None:
        told: asyncio.Queue[ExchangeRecord] = asyncio.Queue()
        batches = ExchangeBatches([told.put_nowait], Metrics())
        for path in ("/one", "/two"):  # twice, for the timer is to begin anew
            batches.add(ExchangeRecord("GET", path))
            async with asyncio.timeout(30):
                assert (await told.get()).path == path

    asyncio.run(scene())


def test_the_end_of_the_service_leaves_nothing_waiting() -> None:
    async def scene() -> None:
        told: list[ExchangeRecord] = []
        batches = ExchangeBatches([told.append], Metrics())
        batches.add(ExchangeRecord())
        batches.close()
        assert len(told) == 1
        batches.close()
        assert len(told) == 1

        batches.add(ExchangeRecord())  # of a request that was cut off
        assert len(told) == 2

    asyncio.run(scene())


def test_a_sink_that_breaks_costs_no_other_record_and_no_request(caplog: pytest.LogCaptureFixture) -> None:
    def breaks_at_times(record: ExchangeRecord) -> None:
        if record.path in ("/1", "/2"):
            raise ValueError("a sampler")
        told.append(("first", record.path))

    told: list[tuple[str, str]] = []
    metrics = Metrics()

    async def scene() -> None:
        batches = ExchangeBatches([breaks_at_times, lambda one: told.append(("second", one.path))], metrics)
        for index in range(MAX_WAITING):
            batches.add(ExchangeRecord("GET", f"/{index}"))
        assert "a sampler" in (batches.note or "")

    asyncio.run(scene())

    paths = [f"/{index}" for index in range(MAX_WAITING)]
    assert told == [
        *(("first", path) for path in paths if path not in ("/1", "/2")),
        *(("second", path) for path in paths),
    ]
    assert caplog.text.count("exchange_unwritten") == 1
    label = {"what": "exchange_unwritten"}
    assert metrics.registry.get_sample_value("hearth_fallbacks_total", label) == 2
