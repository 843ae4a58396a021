"""The last reports of the workers' pools, for views and metrics."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from hearth.control.observe.pool_views import pool_parts
from hearth.control.observe.views import PoolView
from hearth.core.messages import Ping, Pong
from hearth.core.types import WorkerId
from hearth.node.link import FrameLink
from hearth.node.supervisor import seat_of

#: Pings from this number on ask for a view; the supervisor counts its own from 1.
FIRST_LOOK = 1 << 32
#: Every kind of part with the states that it can have.
PARTS = (
    ("weights", "active"),
    ("weights", "retained"),
    ("kv", "active"),
    ("kv", "retained"),
    ("kv", "spare"),
    ("tables", "active"),
    ("adapters", "active"),
    ("adapters", "retained"),
    ("workspace", "active"),
    ("lost", "spare"),
    ("free", "spare"),
)


@dataclass(frozen=True, slots=True)
class _Report:
    pong: Pong
    received_s: float


class PoolReports:
    """The last report of each worker. Mutable; used on the event loop alone."""

    def __init__(self) -> None:
        self._links: dict[WorkerId, FrameLink] = {}
        self._reports: dict[WorkerId, _Report] = {}
        self._numbers = itertools.count(FIRST_LOOK)
        #: Done when a worker has answered the ping of that number, or is gone.
        self._looks: dict[tuple[WorkerId, int], asyncio.Future[None]] = {}
        #: The counts of lost workers: counters never decrease.
        self._past_moved_bytes = 0
        self._past_adapter_evictions = 0
        self._past_fallbacks: Counter[str] = Counter()

    @property
    def pongs(self) -> Mapping[WorkerId, Pong]:
        return {worker: report.pong for worker, report in self._reports.items()}

    def joined(self, worker: WorkerId, link: FrameLink) -> None:
        self._links[worker] = link

    def received(self, worker: WorkerId, pong: Pong, now_s: float) -> None:
        self._reports[worker] = _Report(pong, now_s)
        self._wake((worker, pong.number))

    def lost(self, worker: WorkerId) -> None:
        self._links.pop(worker, None)
        report = self._reports.pop(worker, None)
        if report is not None:
            self._past_moved_bytes += report.pong.moved_bytes
            self._past_adapter_evictions += report.pong.num_adapter_evictions
            self._past_fallbacks.update(report.pong.fallbacks)
        for look in [look for look in self._looks if look[0] == worker]:
            self._wake(look)

    async def refresh(self, patience_s: float) -> None:
        """Have workers report their pools after all orders so far, or as many as do in time."""
        number = next(self._numbers)
        looks = {(worker, number): asyncio.get_running_loop().create_future() for worker in self._links}
        self._looks.update(looks)
        for link in self._links.values():
            link.send(Ping(number))
        try:
            if looks:
                await asyncio.wait(looks.values(), timeout=patience_s)
        finally:
            for look in looks:
                self._wake(look)

    def view(self, worker: WorkerId, now_s: float) -> PoolView | None:
        report = self._reports.get(worker)
        if report is None:
            return None
        pong = report.pong
        return PoolView(
            now_s - report.received_s,
            pool_parts(pong),
            pong.moved_bytes,
            pong.fallbacks,
            torch_limit_bytes=pong.torch_limit_bytes,
            is_torch_limit_measured=pong.is_torch_limit_measured,
        )

    def collect(self) -> Iterator[Metric]:
        taken = GaugeMetricFamily(
            "hearth_pool_bytes", "Device memory, by what it holds.", labels=["worker", "kind", "state"]
        )
        for worker, report in self._reports.items():
            sums = dict.fromkeys(PARTS, 0)
            for part in pool_parts(report.pong):
                sums[part.kind, part.state] += part.num_bytes
            seat = seat_of(worker)  # successors share it, so that labels do not grow
            for (kind, state), num_bytes in sums.items():
                taken.add_metric([seat, kind, state], num_bytes)
        yield taken
        pongs = self.pongs.values()
        moved_bytes = self._past_moved_bytes + sum(pong.moved_bytes for pong in pongs)
        yield CounterMetricFamily(
            "hearth_pool_moved_bytes", "Bytes of weights moved to make room.", value=moved_bytes
        )
        num_evictions = self._past_adapter_evictions + sum(pong.num_adapter_evictions for pong in pongs)
        yield CounterMetricFamily(
            "hearth_adapter_evictions", "Adapters that were evicted.", value=num_evictions
        )
        fallbacks = CounterMetricFamily(
            "hearth_pool_fallbacks",
            "Fallbacks of pools and kernels.",
            labels=["name"],
        )
        counted = Counter(self._past_fallbacks)
        for pong in pongs:
            counted.update(pong.fallbacks)
        yield CounterMetricFamily(
            "hearth_kernels_compiled_while_serving",
            "Kernels that were compiled when a step asked for them, while all models of the worker waited.",
            value=counted.pop("kernels_compiled_while_serving", 0),
        )
        for name, count in sorted(counted.items()):
            fallbacks.add_metric([name], count)
        yield fallbacks

    def _wake(self, look: tuple[WorkerId, int]) -> None:
        future = self._looks.pop(look, None)
        if future is not None and not future.done():
            future.set_result(None)
