"""The gateway looks for garbage a while after the last exchange, unless requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from hearth.control.idle_collection import IdleCollection
from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.system import garbage
from hearth.system.garbage import collect_when_idle
from tests.system.test_garbage import grow, lost_cycle

QUIET_S = 0.05


@pytest.fixture(autouse=True)
def collected_when_idle(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage, "QUIET_S", QUIET_S)
    with collect_when_idle():
        garbage.collect()
        yield


@pytest.mark.parametrize(("is_idle", "num_young"), [(True, 1_000), (False, 1_000), (True, 0)])
def test_garbage_is_looked_for_when_no_request_runs_and_something_has_grown(
    is_idle: bool, num_young: int
) -> None:
    async def scene() -> None:
        idle = IdleCollection(lambda: is_idle)
        lost, _live = lost_cycle(), grow(num_young)
        idle.exchange_ended(ExchangeRecord())
        await asyncio.sleep(3 * QUIET_S)
        assert (lost() is None) == (is_idle and num_young > 0)

    asyncio.run(scene())


def test_whoever_comes_one_after_the_other_is_not_met() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        idle, lost, _live = IdleCollection(lambda: True), lost_cycle(), grow(1_000)
        longest_s = ended_s = 0.0
        for _ in range(10):
            idle.exchange_ended(ExchangeRecord())
            ended_s = loop.time()
            await asyncio.sleep(QUIET_S / 5)
            longest_s = max(longest_s, loop.time() - ended_s)
        assert lost() is not None or longest_s >= QUIET_S  # on a machine that was asleep meanwhile
        await asyncio.sleep(3 * QUIET_S)
        assert lost() is None

    asyncio.run(scene())


def test_nothing_is_looked_for_behind_the_end() -> None:
    async def scene() -> None:
        idle, lost, _live = IdleCollection(lambda: True), lost_cycle(), grow(1_000)
        idle.exchange_ended(ExchangeRecord())
        idle.close()
        await asyncio.sleep(3 * QUIET_S)
        assert lost() is not None

    asyncio.run(scene())
