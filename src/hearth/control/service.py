"""The service of one machine put together: brain, keeper, workers, gateway. Speaks no HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hearth.control.datadir import DataDir
from hearth.control.deploy.catalog import Catalog
from hearth.control.deploy.declared import DeclaredModels
from hearth.control.deploy.deploy import clear_snapshots, collect, collect_snapshots
from hearth.control.deploy.deployments import Deployments
from hearth.control.deploy.registry import LOOP_WAIT_S, Registry
from hearth.control.driver import Driver
from hearth.control.forecasts import Forecasts
from hearth.control.gateway import Gateway
from hearth.control.idle_collection import IdleCollection
from hearth.control.journal import Journal
from hearth.control.keeper_reports import KeeperReports
from hearth.control.keys.key_admission import KeyAdmissions
from hearth.control.keys.key_usage import KeyUsage
from hearth.control.keys.keys import ApiKeys, is_loopback
from hearth.control.link_receiver import LinkReceiver
from hearth.control.nodes import Nodes
from hearth.control.observe.access_log import LINE_FORMATS, AccessLog
from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.control.observe.history import History
from hearth.control.observe.live_feed import LiveFeed
from hearth.control.observe.log_rotation import LogRotation
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.observer import Observer
from hearth.control.observe.pool_reports import PoolReports
from hearth.control.observe.service_views import ServiceViews
from hearth.control.observe.tracing import Tracing, tracing_of
from hearth.control.ray_process import RayProcess
from hearth.control.request_history import RequestHistory
from hearth.control.requests.fact_decoder import FactDecoder
from hearth.control.requests.prompts import Prompts
from hearth.control.requests.tokenization import PromptEncoder
from hearth.control.snapshots import Snapshots
from hearth.core.config import ClusterConfig, HearthConfig, ServiceConfig
from hearth.core.errors import ConfigError, SnapshotError
from hearth.core.types import LOCAL, Pace, Transport, pool_of
from hearth.node.devices import Devices
from hearth.node.local_node import LocalNode, socket_directory
from hearth.node.process_log import ProcessLog, logs_to_stderr
from hearth.node.template_process import TemplateProcess
from hearth.node.worker_template import WorkerTemplate
from hearth.policy.fleet.events import BrainConfig, Prewarming, Scaling, WhileLoading
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.routing import explain_unplaced
from hearth.snapshot.directory import SnapshotDirectory

if TYPE_CHECKING:
    from hearth.node.credentials import Authority

log = logging.getLogger(__name__)


@asynccontextmanager
async def running(
    config: HearthConfig, data_dir: DataDir, devices: Devices, first_template: TemplateProcess | None = None
) -> AsyncIterator[Gateway]:
    """Run a service: yields a gateway whose workers are starting. Everything ends with the context.

    `first_template`: a template process that was started before; the service owns it from here. Raises
    HearthError: something that the configuration asks for cannot be had.
    """
    service = config.service
    metrics = Metrics(service.device_hour_price)
    tracing = tracing_of(os.environ, metrics)
    brain = BrainConfig(
        max_queue=service.max_queue,
        patience_s=service.patience_s,
        takes_turns=service.turns,
        scaling=_scaling_of(config.cluster),
        while_loading=_while_loading_of(service.staged_start_gain),
        first_token_s=service.first_token_target if service.pack_replicas else None,
        prewarming=None if service.prewarm == "off" else Prewarming(is_advice=service.prewarm == "advise"),
    )
    async with AsyncExitStack() as stack:
        if isinstance(tracing, Tracing):
            stack.push_async_callback(tracing.close)
        registry = Registry(data_dir, LOOP_WAIT_S)
        stack.callback(registry.close)
        collect(data_dir, registry)
        collect_snapshots(data_dir, registry, config.store.snapshot_bytes)
        catalog = Catalog(
            registry,
            config.models,
            config.engine,
            service.keep_alive,
            pool_of(devices.kind, config.cluster.values_by_label) if devices.num_workers else None,
            budget_bytes=service.memory_bytes,
            pace=Pace(service.first_token_target, service.pace, service.max_pause),
            takes_turns=service.turns,
        )
        catalog.check_settings()
        journal = Journal(data_dir.journal_path, brain, service.journal_bytes)
        stack.callback(journal.close)
        observer = Observer(
            metrics,
            takes_turns=service.turns,
            between_nodes=Transport.TLS if config.cluster.encrypt_weights else Transport.TCP,
        )
        pools = PoolReports()
        obstacle = _snapshots_obstacle(config, data_dir)
        if obstacle is not None:
            log.warning("fallback snapshots=off reason=`%s`", obstacle.replace("`", ""))
            metrics.fallbacks.labels("snapshots").inc()
        snapshots = Snapshots(
            metrics,
            obstacle,
            catalog.bases,
            partial(clear_snapshots, data_dir),
            is_off=not config.store.snapshot_bytes,
        )
        driver = Driver(
            Fleet(brain),
            journal,
            observer,
            pools,
            snapshots,
            catalog.host_order,
            catalog.prepare_orders,
            device_share=lambda worker: nodes.device_share(worker),
        )
        stack.callback(driver.close)
        decoder = FactDecoder(asyncio.get_running_loop(), driver.requests.by_run, driver.receive)
        stack.callback(decoder.close)
        encoder = PromptEncoder(service.template_s)
        stack.callback(encoder.close)
        receiver = LinkReceiver(catalog, driver, decoder, lambda node: nodes.labels_of(node))
        process_log = ProcessLog(
            data_dir.log_path, to_stderr=logs_to_stderr(), is_json=config.log.format == "json"
        )
        stack.callback(process_log.close)
        stack.push_async_callback(LogRotation(data_dir.log_path).close)
        idle = IdleCollection(lambda: not driver.requests.by_id)
        stack.callback(idle.close)
        exchange_sinks: list[Callable[[ExchangeRecord], None]] = [metrics.count_response, idle.exchange_ended]
        if isinstance(tracing, Tracing):
            exchange_sinks.append(tracing.trace)  # before the access log, which names the trace
        access_log = None
        if service.access_log != "off":
            line_format = LINE_FORMATS[service.access_log]
            access_log = AccessLog(data_dir.access_log_path, line_format, metrics)
            stack.callback(access_log.close)
            stack.push_async_callback(LogRotation(data_dir.access_log_path).close)
            exchange_sinks.append(access_log.write)
        count_spawned = metrics.fallbacks.labels("template").inc
        template = WorkerTemplate(process_log.fd, service.start_s, count_spawned, first_template)
        cluster_path = data_dir.path / "cluster"
        ray_process = None
        if config.cluster.manager is not None:
            ray_process = RayProcess(
                config, cluster_path, process_log.fd, uses_own_node=not devices.num_workers
            )
            stack.push_async_callback(ray_process.close)
            await ray_process.connect()  # makes the authority
        authority = _authority_in(cluster_path)
        if authority is None and not devices.num_workers:
            raise ConfigError(
                "`service.workers` is 0, which only the head of a cluster can have: its nodes have the "
                "workers; make this machine a head with `hearth cluster init`, or leave the setting out"
            )

        def fail_if_out() -> None:
            if (outage := nodes.outage()) is not None:
                driver.fail_all(outage)
            for node in nodes.failing():
                driver.expect_workers(node, 0)

        sockets = stack.enter_context(socket_directory(data_dir.path))
        local = LocalNode(
            config,
            devices,
            data_dir.path,
            sockets,
            process_log.fd,
            receiver,
            fail_if_out,
            template,
            credentials=None if authority is None else cluster_path,
        )
        nodes = Nodes(local, can_grow=_scaling_of(config.cluster) is not None)
        stack.push_async_callback(local.close)
        # Only while workers import their modules: later it would delay the tokenizers of requests.
        pinned_first = sorted(catalog.entries(), key=lambda entry: not entry.profile.is_pinned)
        reading = asyncio.create_task(
            encoder.read_ahead((entry.deployed for entry in pinned_first), lambda: not driver.fleet.workers)
        )
        stack.callback(reading.cancel)
        await local.start()
        local.start_workers(LOCAL)
        driver.expect_workers(LOCAL, devices.num_workers)
        if not local.supervisor.keeper.reads_natively:
            metrics.fallbacks.labels("interpreted_reads").inc()
        reports = KeeperReports(local.keeper, catalog, driver, metrics)
        deployments = Deployments(registry, catalog, driver, local.keeper, data_dir, process_log.fd)
        cluster = None
        if authority is not None:
            from hearth.control.cluster import Cluster  # with the packages that only a cluster needs
            from hearth.control.multicasts import Multicasts

            cluster = Cluster(
                authority,
                nodes,
                driver,
                receiver,
                config,
                sockets,
                deployments.places,
                Multicasts(catalog.manifest_of),
                reports,
                metrics,
            )
            reports.tell_nodes, reports.prefetch_on = cluster.count_requests, cluster.prefetch
            deployments.tell_nodes = cluster.models_changed
            stack.push_async_callback(cluster.close)
            await cluster.start(cluster_path)
            if ray_process is not None:
                ray_process.start()
                driver.add_sink(cluster.observe)
                driver.add_sink(ray_process.observe)
        stack.push_async_callback(reports.close)
        driver.add_sink(reports.observe)
        declared = DeclaredModels(deployments, config.models)
        deploying = asyncio.create_task(declared.deploy())
        stack.push_async_callback(_cancelled, deploying)
        keys = keys_of(service, data_dir)
        usage = KeyUsage(data_dir.usage_path, keys.ids, metrics)
        stack.push_async_callback(usage.close)
        requests = RequestHistory(data_dir.request_history_path, metrics)
        stack.push_async_callback(requests.write)
        driver.add_sink(requests.observe)
        forecasts = None
        if brain.prewarming is not None:
            forecasts = Forecasts(requests, driver, config.log.level, service.start_s, process_log.fd)
            driver.add_sink(forecasts.observe)
            stack.push_async_callback(_cancelled, asyncio.create_task(forecasts.run()))
        on_long_step = (lambda: None) if forecasts is None else forecasts.update
        recording = asyncio.create_task(requests.run(on_long_step))
        stack.push_async_callback(_cancelled, recording)
        noting = [
            one
            for one in (
                usage,
                requests,
                forecasts,
                journal,
                process_log,
                access_log,
                tracing,
                template,
                reports,
                declared,
            )
            if one is not None
        ]
        views = ServiceViews(
            deployments=deployments,
            driver=driver,
            observer=observer,
            pools=pools,
            keeper=reports,
            nodes=nodes,
            cluster=cluster,
            forecasts=forecasts,
            metrics=metrics,
            kind=devices.kind,
            notes=lambda: (
                *(one.note for one in noting if one.note is not None),
                *snapshots.notes,
                *explain_unplaced(driver.fleet),
                *(() if cluster is None else cluster.notes()),
            ),
        )
        history = History(metrics.models.by_name, service.device_hour_price, views.ps)
        live = LiveFeed(views, observer.recent, pools, history, metrics, keys.is_current)
        stack.push_async_callback(live.close)
        driver.add_sink(history.observe)
        driver.add_sink(live.observe)
        sampling = asyncio.create_task(history.run(live.sampled))
        stack.push_async_callback(_cancelled, sampling)
        yield Gateway(
            deployments=deployments,
            prompts=Prompts(deployments, encoder),
            views=views,
            keys=keys,
            admissions=KeyAdmissions(usage, metrics, lambda: driver.now_s),
            driver=driver,
            observer=observer,
            snapshots=snapshots,
            nodes=nodes,
            keeper=reports,
            metrics=metrics,
            live=live,
            drain_s=service.drain_s,
            exchange_sinks=exchange_sinks,
        )
        observer.close()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _while_loading_of(gain_s: float | None) -> WhileLoading | None:
    return None if gain_s is None else WhileLoading(min_gain_s=gain_s)


def _scaling_of(cluster: ClusterConfig) -> Scaling | None:
    if cluster.manager is None or cluster.min_nodes is None:
        return None
    return Scaling(cluster.scale_out_after_s, cluster.scale_in_after_s, cluster.min_nodes)


def _authority_in(path: Path) -> Authority | None:
    if not (path / "ca.key").exists():
        return None
    from hearth.node.credentials import Authority  # loads packages that only a cluster needs

    return Authority.open(path)


def _snapshots_obstacle(config: HearthConfig, data_dir: DataDir) -> str | None:
    if config.store.snapshot_bytes:
        try:
            SnapshotDirectory.open(data_dir.snapshots_path, config.store.snapshot_bytes)
        except SnapshotError as error:
            return str(error)
    return None


def keys_of(service: ServiceConfig, data_dir: DataDir) -> ApiKeys:
    """There may be none if only this machine reaches the port. Raises ConfigError if keys are needed."""
    path = data_dir.keys_path if service.api_keys_file is None else Path(service.api_keys_file).expanduser()
    keys = ApiKeys.load(path)
    if not keys.are_required and not is_loopback(service.host):
        raise ConfigError(
            f"`service.host` is {service.host}, which other machines can reach, but `{path}` holds no API "
            f"key; make one with `hearth keys add NAME --api-keys-file {path}`, or listen on 127.0.0.1"
        )
    if not keys.are_required and service.api_keys_file is not None:
        raise ConfigError(
            f"`service.api_keys_file` is given, but `{path}` holds no API key; make one with "
            f"`hearth keys add NAME --api-keys-file {path}`, or leave the setting out"
        )
    return keys
