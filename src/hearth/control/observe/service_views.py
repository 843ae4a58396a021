"""The service as users see it: processes, memory, health, metrics, explanations. Changes nothing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from hearth.control.deploy.deployments import Deployments
from hearth.control.driver import Driver
from hearth.control.keeper_reports import KeeperReports
from hearth.control.nodes import Nodes
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.observer import Observer
from hearth.control.observe.pool_reports import PoolReports
from hearth.control.observe.pool_views import resident_views
from hearth.control.observe.timeline import Timeline
from hearth.control.observe.views import Explanation, ForecastView, Health, NodeView, ProcessView, WorkerView
from hearth.control.requests.caller import Caller
from hearth.core.errors import RequestError
from hearth.core.types import LOCAL, ModelId, Rung, node_of
from hearth.core.version import hearth_version
from hearth.policy.fleet.residents import list_residents
from hearth.system.garbage import LATE_COLLECTIONS

if TYPE_CHECKING:
    from hearth.control.cluster import Cluster
    from hearth.control.forecasts import Forecasts

#: Time for workers and keeper to report their memory; else their last report is shown.
LOOK_S = 0.5


class ServiceViews:
    """Used on the event loop alone."""

    def __init__(
        self,
        deployments: Deployments,
        driver: Driver,
        observer: Observer,
        pools: PoolReports,
        keeper: KeeperReports,
        nodes: Nodes,
        metrics: Metrics,
        kind: str,
        notes: Callable[[], tuple[str, ...]] = tuple,
        cluster: Cluster | None = None,
        forecasts: Forecasts | None = None,
    ) -> None:
        self._deployments, self._driver, self._observer = deployments, driver, observer
        self._pools, self._keeper, self._nodes = pools, keeper, nodes
        self._metrics, self._kind, self._notes = metrics, kind, notes
        self._forecasts = forecasts  #: None: they are off
        self.cluster = cluster  #: None: the service runs on one machine
        self.instance_id = secrets.token_hex(16)
        self._add_gauges()

    async def fresh_ps(self) -> ProcessView:
        """Return `ps` after workers and keeper have reported their memory."""
        await self._pools.refresh(LOOK_S)
        await self._keeper.refresh_host_memory(LOOK_S)
        return self.ps()

    async def fresh_metrics(self) -> bytes:
        """Return the metrics after the keeper has reported its memory; workers do at each heartbeat."""
        await self._keeper.refresh_host_memory(LOOK_S)
        return await self._metrics.text()

    def ps(self) -> ProcessView:
        fleet, now_s = self._driver.fleet, self._driver.now_s
        queues = fleet.queues
        num_awaiting = queues.num_awaiting_turn
        return ProcessView(
            workers=tuple(self._worker_views(now_s)),
            models=resident_views(list_residents(fleet, now_s), self._pools.pongs, now_s),
            num_waiting=queues.num_waiting + num_awaiting,
            num_running=queues.num_running - num_awaiting,
            host=self._keeper.host_memory,
            notes=self._notes(),
        )

    async def fresh_nodes(self) -> tuple[NodeView, ...]:
        """Return the machines of the cluster, after the keeper of this one has reported its memory."""
        await self._keeper.refresh_host_memory(LOOK_S)
        return self.nodes()

    def nodes(self) -> tuple[NodeView, ...]:
        host, workers = self._keeper.host_memory, self._nodes.local.workers()
        is_draining = LOCAL in self._driver.fleet.draining
        local = NodeView(
            name=LOCAL,
            node=LOCAL,
            state="draining" if is_draining else "up",
            host="",
            devices=self._nodes.local.devices.names(),
            num_ready_workers=sum(one.state == "ready" for one in workers),
            budget_bytes=sum(one.hello.budget_bytes for one in workers if one.hello is not None),
            host_used_bytes=0 if host is None else host.used_bytes,
            host_bytes=0 if host is None else host.budget_bytes,
            links=() if self.cluster is None else self.cluster.links_to(LOCAL),
            labels=self._nodes.local.labels,
            reason=self._nodes.local.trouble(),
        )
        return (local, *(() if self.cluster is None else self.cluster.views()))

    def host_bytes(self) -> dict[str, int]:
        """Return how much of each model is in host memory of this machine, if any is."""
        by_model = {
            name: known.bytes_by_rung(LOCAL) or {} for name, known in self._driver.fleet.models.items()
        }
        return {name: found[Rung.HOST] for name, found in by_model.items() if found.get(Rung.HOST)}

    def explain(self, request_id: str, caller: Caller) -> Explanation | None:
        """Return None if there is no such request, or the caller may not see it."""
        found = self._observer.explain(request_id, self._driver.now_s, self.visible_to(caller))
        if found is None or caller.terms.models is None or caller.has_role("monitor"):
            return found
        return replace(  # obstacles and details name the models that are in the way
            found,
            options=tuple(one for one in found.options if one.obstacle is None),
            spans=tuple(replace(one, detail="") for one in found.spans),
            marks=tuple(replace(one, detail="") for one in found.marks),
        )

    def forecast(self, name: str, caller: Caller) -> ForecastView:
        """Raises UnknownModel, and RequestError if the service makes no forecasts."""
        model = ModelId(self._deployments.find_for(name, caller).deployed.name)
        if self._forecasts is None:
            raise RequestError(
                "this service makes no forecasts; restart it with `--set service.prewarm=advise`, or `on`"
            )
        return self._forecasts.view(model)

    def visible_to(self, caller: Caller) -> Callable[[Timeline], bool]:
        """Return what tells whether a caller may see a request, as of now."""
        if caller.has_role("monitor"):
            return lambda _: True
        if caller.terms.models is None:
            return lambda timeline: caller.can_see(timeline.group)
        views = self._deployments.models(caller)
        bases = {view.base for view in views if view.preset is not None}
        known = {*caller.terms.models, *(view.name for view in views), *bases}
        return lambda one: caller.can_see(one.group) and (one.adapter or one.model) in known

    def health(self) -> Health:
        workers = self._nodes.workers()
        num_ready = sum(worker.state == "ready" for worker in workers)
        if self._driver.requests.is_draining:
            status = "draining"
        elif num_ready or self._driver.fleet.config.scaling is not None:
            status = "ok"  # a request brings the first machine
        else:
            status = "starting" if self._nodes.outage() is None else "failing"
        reason = self._nodes.trouble()
        return Health(status, len(workers), num_ready, hearth_version(), self.instance_id, reason)

    def _worker_views(self, now_s: float) -> list[WorkerView]:
        views = []
        for status in self._nodes.workers():
            hello, pool = status.hello, self._pools.view(status.worker, now_s)
            if pool is None:
                known = self._driver.fleet.workers.get(status.worker)
                used_bytes = 0 if known is None else known.promises.budget_bytes - known.promises.free_bytes
            else:
                used_bytes = sum(part.num_bytes for part in pool.parts if part.kind != "free")
            views.append(
                WorkerView(
                    worker=status.worker,
                    pid=status.pid,
                    kind=self._kind if hello is None else hello.kind,
                    device="" if hello is None else hello.device,
                    state=status.state,
                    budget_bytes=0 if hello is None else hello.budget_bytes,
                    used_bytes=used_bytes,
                    num_restarts=status.num_restarts,
                    pool=pool,
                    reason=status.reason,
                    node=node_of(status.worker),
                )
            )
        return views

    def _add_gauges(self) -> None:
        fleet, pools, watch = self._driver.fleet, self._pools, self._metrics.watch
        watch(
            "hearth_requests_running",
            "Requests on workers whose models have had a turn.",
            lambda: fleet.queues.num_running - fleet.queues.num_awaiting_turn,
        )
        watch(
            "hearth_requests_waiting",
            "Requests waiting for a slot, for memory or for the first turn of their model.",
            lambda: fleet.queues.num_waiting + fleet.queues.num_awaiting_turn,
        )
        watch(
            "hearth_workers_ready", "Workers that accept requests.", lambda: self.health().num_ready_workers
        )
        watch("hearth_models_resident", "Models on workers.", lambda: sum(1 for _ in fleet.replicas()))
        self._metrics.registry.register(pools)
        watch(
            "hearth_device_used_bytes",
            "Device memory in use, as the pools report it.",
            lambda: sum(pong.budget_bytes - pong.free_bytes for pong in pools.pongs.values()),
        )
        watch(
            "hearth_device_budget_bytes",
            "Device memory available to models.",
            lambda: sum(worker.budget_bytes for worker in self.ps().workers),
        )
        watch(
            "hearth_host_used_bytes",
            "Host memory in use for chunks of models.",
            lambda: 0 if (host := self._keeper.host_memory) is None else host.used_bytes,
        )
        watch(
            "hearth_host_budget_bytes",
            "Host memory available for chunks of models.",
            lambda: 0 if (host := self._keeper.host_memory) is None else host.budget_bytes,
        )
        watch(
            "hearth_kv_blocks_used",
            "KV blocks of running requests.",
            lambda: sum(use.kv_used_blocks for pong in pools.pongs.values() for use in pong.models),
        )
        watch(
            "hearth_kv_blocks",
            "KV blocks of all models.",
            lambda: sum(use.kv_blocks for pong in pools.pongs.values() for use in pong.models),
        )
        watch(
            "hearth_adapters_resident",
            "Adapters in device memory.",
            lambda: sum(use.num_bytes > 0 for pong in pools.pongs.values() for use in pong.adapters),
        )
        watch(
            "hearth_adapter_requests_waiting",
            "Requests on workers waiting for their adapter.",
            lambda: sum(use.num_waiting for pong in pools.pongs.values() for use in pong.adapters),
        )
        watch(
            "hearth_forecast_process_up",
            "1 while the process that forecasts requests runs.",
            lambda: self._forecasts is not None and self._forecasts.is_running,
        )
        watch(
            "hearth_service_notes",
            "Missing features and faults that `hearth doctor` lists.",
            lambda: len(self._notes()),
        )
        watch(
            "hearth_gateway_longest_collection_seconds",
            "The longest garbage collection in the gateway while it was not idle.",
            lambda: LATE_COLLECTIONS.longest_s,
        )
        watch("hearth_gateway_tasks", "Tasks of the gateway's event loop.", lambda: len(asyncio.all_tasks()))
