"""Reports of pools: who waits for them, and how Prometheus sees them."""

from __future__ import annotations

import asyncio

from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest

from hearth.control.observe.pool_reports import PARTS, PoolReports
from hearth.core.messages import ModelUse, Order, Ping, Pong
from hearth.core.types import Hold, ModelId, WorkerId
from tests.control.gateway_rig import RecordingLink

W0 = WorkerId("w0")
LONG_S = 60.0


def pong(moved: int = 0, fallbacks: dict[str, int] | None = None, budget: int = 1000) -> Pong:
    use = ModelUse(ModelId("a"), Hold.RETAINED, True, 100, 100, 0, 0)
    return Pong(1, budget, budget - 150, 50, 0, moved, fallbacks or {}, (use,))


def metrics_of(pools: PoolReports) -> list[str]:
    registry = CollectorRegistry()
    registry.register(pools)
    return generate_latest(registry).decode().splitlines()


def test_every_part_of_a_pool_is_a_gauge_also_where_it_is_empty() -> None:
    pools = PoolReports()
    pools.received(W0, pong(), 1.0)
    lines = [line for line in metrics_of(pools) if line.startswith("hearth_pool_bytes{")]
    assert len(lines) == len(PARTS)
    assert 'hearth_pool_bytes{kind="weights",state="retained",worker="w0"} 100.0' in lines
    assert 'hearth_pool_bytes{kind="kv",state="active",worker="w0"} 0.0' in lines
    assert 'hearth_pool_bytes{kind="free",state="spare",worker="w0"} 850.0' in lines
    assert sum(float(line.split()[-1]) for line in lines) == 1000


def test_a_successor_has_the_label_of_its_predecessor() -> None:
    pools = PoolReports()
    pools.received(W0, pong(), 1.0)
    pools.lost(W0)
    pools.received(WorkerId("w0.1"), pong(budget=2000), 2.0)
    assert 'hearth_pool_bytes{kind="free",state="spare",worker="w0"} 1850.0' in metrics_of(pools)


def test_counters_never_go_back_when_a_worker_is_replaced() -> None:
    pools = PoolReports()
    pools.received(W0, pong(moved=70, fallbacks={"address": 2}), 1.0)
    pools.received(W0, pong(moved=80, fallbacks={"address": 3}), 2.0)
    pools.lost(W0)
    pools.received(WorkerId("w0.1"), pong(moved=5, fallbacks={"address": 1, "other": 1}), 3.0)
    lines = metrics_of(pools)
    assert "hearth_pool_moved_bytes_total 85.0" in lines
    assert 'hearth_pool_fallbacks_total{name="address"} 4.0' in lines
    assert 'hearth_pool_fallbacks_total{name="other"} 1.0' in lines


def test_kernels_that_were_compiled_while_serving_have_a_counter_of_their_own() -> None:
    pools = PoolReports()
    assert "hearth_kernels_compiled_while_serving_total 0.0" in metrics_of(pools)
    pools.received(W0, pong(fallbacks={"kernels_compiled_while_serving": 2}), 1.0)
    pools.lost(W0)
    pools.received(WorkerId("w0.1"), pong(fallbacks={"kernels_compiled_while_serving": 1}), 2.0)
    lines = metrics_of(pools)
    assert "hearth_kernels_compiled_while_serving_total 3.0" in lines
    assert not any("hearth_pool_fallbacks_total{" in line for line in lines)


def test_a_view_says_how_old_it_is() -> None:
    pools = PoolReports()
    assert pools.view(W0, 1.0) is None
    pools.received(W0, pong(fallbacks={"address": 1}), 1.0)
    view = pools.view(W0, 4.0)
    assert view is not None
    assert (view.age_s, view.fallbacks) == (3.0, {"address": 1})


def joined(pools: PoolReports, worker: WorkerId) -> RecordingLink:
    link = RecordingLink()
    pools.joined(worker, link)  # type: ignore[arg-type] # as much of a link as is needed
    return link


def answer(pools: PoolReports, worker: WorkerId, ping: Order) -> None:
    assert isinstance(ping, Ping)
    pools.received(worker, structs.replace(pong(), number=ping.number), 1.0)


def test_whoever_looks_waits_for_the_answer_to_its_own_ping() -> None:
    async def scene() -> None:
        pools = PoolReports()
        link = joined(pools, W0)
        first, second = (asyncio.create_task(pools.refresh(LONG_S)) for _ in range(2))
        await asyncio.sleep(0)
        answer(pools, W0, link.orders[0])
        await first
        assert not second.done()
        answer(pools, W0, link.orders[1])
        await second

    asyncio.run(scene())


def test_whoever_looks_waits_for_no_longer_than_its_patience() -> None:
    async def scene() -> None:
        pools = PoolReports()
        joined(pools, W0)
        await pools.refresh(0.0)
        assert pools.view(W0, 1.0) is None

    asyncio.run(scene())


def test_whoever_looks_does_not_wait_for_a_worker_that_is_gone() -> None:
    async def scene() -> None:
        pools, other = PoolReports(), WorkerId("w1")
        joined(pools, W0)
        link = joined(pools, other)
        looking = asyncio.create_task(pools.refresh(LONG_S))
        await asyncio.sleep(0)
        pools.lost(W0)
        await asyncio.sleep(0)
        assert not looking.done()
        answer(pools, other, link.orders[0])
        await looking

    asyncio.run(scene())
