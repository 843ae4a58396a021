"""Keeps keeper and gateway informed of each other: demand goes out, residency and host memory come back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from hearth.control.deploy.catalog import Catalog
from hearth.control.driver import Driver
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.views import HostMemoryView
from hearth.core.errors import HearthError
from hearth.core.node_messages import HeldChunks
from hearth.core.types import LOCAL, Digest, NodeId, Rung, name_of, node_of
from hearth.node.local_node import REPORT_SHARE
from hearth.policy.fleet import events
from hearth.policy.fleet.events import Action, Event
from hearth.store.format.manifest import CHUNK_BYTES
from hearth.store.keeper_client import KeeperClient

#: The least time between two reports of demand, which the keeper estimates over minutes.
INTERVAL_S = 5.0

log = logging.getLogger(__name__)


class KeeperReports:
    """Mutable; used on the event loop alone. A keeper that does not answer is asked again later."""

    def __init__(
        self,
        keeper: KeeperClient,
        catalog: Catalog,
        driver: Driver,
        metrics: Metrics,
        interval_s: float = INTERVAL_S,
    ) -> None:
        #: Passes the demand on to the keepers of other nodes.
        self.tell_nodes: Callable[[Mapping[Digest, int]], None] = lambda num_by_model: None
        #: Has another node bring a model into its host memory.
        self.prefetch_on: Callable[[NodeId, Digest, float], None] = lambda node, model, weight: None
        self._keeper, self._catalog, self._driver, self._interval_s = keeper, catalog, driver, interval_s
        self.host_memory: HostMemoryView | None = None  #: as reported last; None: no keeper answers
        self._count_not_kept = metrics.fallbacks.labels("chunks_not_kept").inc
        self._num_not_kept: dict[str, int] = {}  #: as reported last, by the name of the node
        self._unreported: Counter[Digest] = Counter()  #: requests by the digest of their model
        self._has_requests = asyncio.Event()
        self._is_residency_stale = asyncio.Event()
        self._tasks = {
            asyncio.create_task(self._report_demand()),
            asyncio.create_task(self._report_residency()),
        }

    def request_came(self, digest: str) -> None:
        """Count a request for a model: the keeper prices its chunks in host memory by demand."""
        self._unreported[Digest(digest)] += 1
        self._has_requests.set()

    def observe(self, event: Event, actions: Sequence[Action]) -> None:
        """Update residency after loads and evictions: a load also brings bytes to host memory."""
        if isinstance(event, events.ModelReady) or any(isinstance(one, events.Evict) for one in actions):
            self._is_residency_stale.set()
        for one in actions:
            if isinstance(one, events.Prewarm) and one.to_host and not one.is_advice:
                task = asyncio.create_task(self._prefetch(one))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def node_reported(self, node: NodeId, models: Sequence[HeldChunks]) -> None:
        """Tell the brain what a node has of models."""
        held_by_digest = {held.model: held for held in models}
        for entry in self._catalog.entries():
            if (held := held_by_digest.get(Digest(entry.deployed.digest))) is not None:
                profile = entry.profile
                bytes_by_rung = {
                    rung: min(profile.num_bytes, int.from_bytes(mask).bit_count() * CHUNK_BYTES)
                    for rung, mask in ((Rung.HOST, held.host), (Rung.DISK, held.disk))
                }
                now_s = self._driver.now_s
                self._driver.post(events.ResidencyReported(now_s, profile.model, bytes_by_rung, node))

    def chunks_not_kept(self, node: NodeId, num_chunks: int) -> None:
        """Note how many chunks the keeper of a node could not keep on disk since it started."""
        before = self._num_not_kept.get(name_of(node), 0)
        self._count_not_kept(num_chunks - before if num_chunks >= before else num_chunks)
        self._num_not_kept[name_of(node)] = num_chunks

    @property
    def note(self) -> str | None:
        told = ", ".join(f"{num} on node `{name}`" for name, num in self._num_not_kept.items() if num)
        if not told:
            return None
        return (
            f"chunks that could not be kept on disk: {told}; they are fetched again for each load; free disk "
            "space or raise `store.disk_bytes` there, the log says more (`chunks_not_kept`)"
        )

    async def refresh_host_memory(self, patience_s: float) -> None:
        """Update `host_memory`; a keeper that is only slow keeps its last report."""
        try:
            async with asyncio.timeout(patience_s):
                report = await self._keeper.report()
        except TimeoutError:
            log.debug("host_memory_late patience_s=%g", patience_s)
        except (HearthError, OSError) as error:
            log.debug("host_memory_unknown reason=%s", error)
            self.host_memory = None
        else:
            self.host_memory = HostMemoryView(report.used_bytes, report.capacity_bytes)
            self.chunks_not_kept(LOCAL, report.num_not_kept)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _prefetch(self, order: events.Prewarm) -> None:
        try:
            entry, node = self._catalog.find(order.model), node_of(order.worker)
            weight = entry.config.latency_weight
            if node == LOCAL:
                await self._keeper.prefetch(entry.deployed.where, weight)
                self._is_residency_stale.set()
            else:
                self.prefetch_on(node, Digest(entry.deployed.digest), weight)
        except (HearthError, OSError) as error:
            log.warning("model_not_prefetched model=%s reason=%s", order.model, error)

    async def _report_demand(self) -> None:
        is_failing = False  # one log line for a run of failures
        while True:
            await self._has_requests.wait()
            self._has_requests.clear()
            reported, self._unreported = self._unreported, Counter()
            try:
                await self._keeper.count_requests(reported)
                self.tell_nodes(reported)
                is_failing = False
            except (HearthError, OSError) as error:
                self._unreported.update(reported)
                if not is_failing:
                    log.warning("request_counts_not_sent reason=%s", error)
                is_failing = True
            except Exception:  # the task's top: the keeper then prices by loads alone
                log.exception("request_counts_broke")
            await asyncio.sleep(self._interval_s)

    async def _report_residency(self) -> None:
        while True:
            await self._is_residency_stale.wait()
            self._is_residency_stale.clear()
            began_s = time.monotonic()
            try:
                report = await self._keeper.report()
            except (HearthError, OSError) as error:
                log.warning("residency_unknown reason=%s", error)
                continue
            self.node_reported(LOCAL, report.models)
            await asyncio.sleep((time.monotonic() - began_s) / REPORT_SHARE)  # many models have many chunks
