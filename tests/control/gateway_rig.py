"""A gateway with everything real but the processes: what is sent to workers is kept. Asserts nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from typing import Literal

from hearth.control.datadir import DataDir
from hearth.control.deploy.catalog import Catalog
from hearth.control.deploy.deploy import clear_snapshots
from hearth.control.deploy.deployments import Deployments
from hearth.control.deploy.registry import Registry
from hearth.control.driver import Driver
from hearth.control.gateway import Gateway
from hearth.control.journal import Journal
from hearth.control.keeper_reports import KeeperReports
from hearth.control.keys.key_admission import KeyAdmissions
from hearth.control.keys.key_usage import KeyUsage
from hearth.control.keys.keys import ApiKeys
from hearth.control.nodes import Nodes
from hearth.control.observe.exchange_record import ExchangeRecord
from hearth.control.observe.history import History
from hearth.control.observe.live_feed import LiveFeed
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.observer import Observer
from hearth.control.observe.pool_reports import PoolReports
from hearth.control.observe.service_views import ServiceViews
from hearth.control.requests.caller import Caller
from hearth.control.requests.correlation import UNNAMED, Correlation
from hearth.control.requests.fact_decoder import DecodedFact, DecodedTexts, DecodedToken
from hearth.control.requests.generation import AnswerStream, ChatPrompt, GenerationRequest, TokenDelta
from hearth.control.requests.prompts import Prompts
from hearth.control.requests.tokenization import PromptEncoder
from hearth.control.snapshots import Snapshots
from hearth.core.beacon import Beacon
from hearth.core.config import HearthConfig, ModelConfig
from hearth.core.messages import VERSION, Fact, Order, StepDone, WorkerEnded, WorkerHello
from hearth.core.types import FinishReason, ModelId, SamplingParams, WorkerId
from hearth.node.devices import Devices
from hearth.node.local_node import LocalNode
from hearth.policy.fleet.events import BrainConfig, ModelDeployed
from hearth.policy.fleet.fleet import Fleet

CONTEXT = 32
WORKER = WorkerId("w0")


class RecordingLink:
    """A worker's link that keeps what is sent."""

    def __init__(self, worker: WorkerId = WORKER) -> None:
        self.worker = worker
        self.orders: list[Order] = []
        self.beacon = Beacon()
        self.why_killed: str | None = None

    def send(self, order: Order) -> None:
        self.orders.append(order)

    def consumed(self, num_bytes: int) -> None:
        pass

    def ending(self) -> WorkerEnded:
        signs = self.beacon.read()
        return WorkerEnded(self.why_killed or "died", signs.model, signs.runs)


class GatewayRig:
    """A gateway that offers `tiny`, and its parts."""

    def __init__(self, data_dir: DataDir, *, takes_turns: bool = False) -> None:
        config, brain = HearthConfig(), BrainConfig(takes_turns=takes_turns)
        self.exchange_sinks: list[Callable[[ExchangeRecord], None]] = []
        self.registry = Registry(data_dir)
        self.journal = Journal(data_dir.journal_path, brain, 1 << 30)
        self.encoder = PromptEncoder(2.0)
        configs = {"tiny": ModelConfig(context=CONTEXT, pace=20.0)}
        catalog = self.catalog = Catalog(self.registry, configs, config.engine, config.service.keep_alive)
        metrics, pools = Metrics(device_hour_price=1.0), PoolReports()
        self.metrics = metrics
        observer = self.observer = Observer(metrics, takes_turns=takes_turns)
        snapshots = self.snapshots = Snapshots(
            metrics, bases=catalog.bases, collect=partial(clear_snapshots, data_dir)
        )
        self.driver = Driver(
            Fleet(brain), self.journal, observer, pools, snapshots, catalog.host_order, catalog.prepare_orders
        )
        local = self.local = LocalNode(
            config,
            Devices("cpu", (0,), 1),
            data_dir.path,
            data_dir.run_path,
            None,
            None,  # type: ignore[arg-type] # no worker connects
            self._fail_if_out,
            credentials=data_dir.path / "cluster",
        )
        self.supervisor, keeper = local.supervisor, local.keeper
        nodes = self.nodes = Nodes(local)
        deployments = Deployments(self.registry, catalog, self.driver, keeper, data_dir)
        self.keeper = KeeperReports(keeper, catalog, self.driver, metrics)
        self.usage = KeyUsage(data_dir.usage_path, ApiKeys(data_dir.keys_path).ids, metrics)
        views = ServiceViews(
            deployments, self.driver, observer, pools, self.keeper, nodes, metrics, kind="cpu"
        )
        keys = ApiKeys(data_dir.keys_path)
        history = History(metrics.models.by_name, 2.0, views.ps)
        self.live = LiveFeed(views, observer.recent, pools, history, metrics, keys.is_current)
        for sink in (history.observe, self.live.observe):
            self.driver.add_sink(sink)
        self.gateway = Gateway(
            deployments=deployments,
            prompts=Prompts(deployments, self.encoder),
            views=views,
            keys=keys,
            admissions=KeyAdmissions(self.usage, metrics, lambda: self.driver.now_s),
            driver=self.driver,
            observer=observer,
            snapshots=snapshots,
            nodes=nodes,
            keeper=self.keeper,
            metrics=metrics,
            live=self.live,
            drain_s=config.service.drain_s,
            exchange_sinks=self.exchange_sinks,
        )

    def _fail_if_out(self) -> None:
        if (outage := self.nodes.outage()) is not None:
            self.driver.fail_all(outage)

    async def submit(
        self, wanted: GenerationRequest, caller: Caller, correlation: Correlation = UNNAMED
    ) -> AnswerStream:
        """Submit a request that is let in and never ends, as far as limits are concerned."""
        return self.gateway.start(
            await self.gateway.prepare(wanted, self.gateway.admissions.admit(caller)), correlation
        )

    def join(
        self, budget_bytes: int = 1 << 40, kind: Literal["cpu", "cuda"] = "cpu", worker: WorkerId = WORKER
    ) -> RecordingLink:
        link = RecordingLink(worker)
        hello = WorkerHello(VERSION, worker, b"", b"", 1, kind, "a device", budget_bytes, False)
        for entry in self.catalog.fit(kind, budget_bytes):
            self.driver.post(ModelDeployed(self.driver.now_s, entry.profile))
        self.driver.joined(link, hello, kind)  # type: ignore[arg-type] # as much of a link as is needed
        return link

    def receive(self, link: RecordingLink, fact: Fact | None) -> None:
        """A worker sends a fact, or is gone."""
        self.driver.receive(DecodedFact(link, 0, fact))  # type: ignore[arg-type] # as much of a link as is needed

    def close(self) -> None:
        self.registry.close()
        self.driver.close()
        self.journal.close()
        self.encoder.close()


def with_rig(
    data_dir: DataDir, scene: Callable[[GatewayRig], Awaitable[None]], *, takes_turns: bool = False
) -> None:
    async def run() -> None:
        with closing(GatewayRig(data_dir, takes_turns=takes_turns)) as rig:
            await scene(rig)

    asyncio.run(run())


def ask(prompt: str | list[int] | ChatPrompt = "!!") -> GenerationRequest:
    return GenerationRequest("tiny", prompt, SamplingParams())


def emit(
    rig: GatewayRig, link: RecordingLink, *tokens: int, finished: bool = False, is_sent: bool = True
) -> None:
    """Every run of the worker emits these tokens, as the text thread hands them on.

    `is_sent`: False: the loop has not got around to that, and so the brain does not know who has ended.
    """
    for token in tokens:
        by_run = rig.driver.requests.by_run
        runs = {run: request for run, request in by_run.items() if request.worker == link.worker}
        is_last = finished and token == tokens[-1]
        reasons = dict.fromkeys(runs, FinishReason.STOP) if is_last else {}
        decoded = []
        for run, request in runs.items():
            request.emitted.append(token)
            text = request.transcript.push(token, reasons.get(run))
            delta = TokenDelta(text.text, token, None, text.finish_reason, text.offset)
            decoded.append(DecodedToken(request, delta, is_run_over=run in reasons))
        step = StepDone(ModelId("tiny"), list(runs), [token] * len(runs), reasons)
        rig.driver.receive(DecodedFact(link, 0, step, DecodedTexts(decoded)))  # type: ignore[arg-type] # as much of a link as is needed
    if is_sent:
        rig.driver.book_finished()
