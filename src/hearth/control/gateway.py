"""The service as the API sees it: requests are taken, models come and go, everything can be looked at.

Speaks no HTTP, and all decisions about where things run are the brain's.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from hearth.control.deploy.catalog import Catalog, CatalogEntry
from hearth.control.deploy.deploy import DeployOrder, DeployProgress
from hearth.control.deploy.deployments import Deployments
from hearth.control.driver import Driver
from hearth.control.keeper_reports import KeeperReports
from hearth.control.keys.key_admission import KeyAdmission, KeyAdmissions
from hearth.control.keys.keys import ApiKeys
from hearth.control.observe.exchange_record import ExchangeRecord, current_exchange
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.observer import Observer
from hearth.control.observe.pool_reports import PoolReports
from hearth.control.observe.pool_views import resident_views
from hearth.control.observe.timeline import Timeline
from hearth.control.observe.views import (
    Explanation,
    Health,
    ModelView,
    ProcessView,
    ResidentView,
    SnapshotView,
    UnloadView,
    WorkerView,
)
from hearth.control.requests.active_request import ActiveRequest
from hearth.control.requests.caller import Caller, GroupId
from hearth.control.requests.correlation import UNNAMED, Correlation
from hearth.control.requests.generation import AnswerStream, ChatPrompt, GenerationRequest
from hearth.control.requests.prepared_request import PreparedRequest
from hearth.control.requests.request_checks import (
    check_prompt,
    check_reading,
    check_tokens,
    check_vocabulary,
    max_chars,
)
from hearth.control.requests.request_pace import pace_of
from hearth.control.requests.tokenization import PromptEncoder
from hearth.control.snapshots import Snapshots
from hearth.core.config import ServiceConfig
from hearth.core.errors import ConfigError, HearthError, RequestError, ServiceError, ShuttingDown
from hearth.core.messages import SnapshotProgress
from hearth.core.types import ModelId, RateStatus, RequestId, Rung, SamplingParams, SnapshotPhase
from hearth.core.version import hearth_version
from hearth.node.supervisor import Supervisor
from hearth.policy.fleet import events
from hearth.store.keeper_client import UPSTREAM_CACHE_S
from hearth.system.garbage import LATE_COLLECTIONS
from hearth.text.tokenizer import Tokenizer
from hearth.text.transcript import Transcript

#: Time for workers to report their memory when somebody looks; else their last report is shown.
LOOK_S = 0.5
SALT_BYTES = 32


class Gateway:
    """The one object that the API calls. Mutable; used on the event loop alone."""

    def __init__(
        self,
        config: ServiceConfig,
        deployments: Deployments,
        catalog: Catalog,
        encoder: PromptEncoder,
        driver: Driver,
        observer: Observer,
        pools: PoolReports,
        snapshots: Snapshots,
        supervisor: Supervisor,
        metrics: Metrics,
        keeper: KeeperReports,
        keys: ApiKeys,
        admissions: KeyAdmissions,
        kind: str,
        notes: Callable[[], tuple[str, ...]] = tuple,
        exchange_sinks: Sequence[Callable[[ExchangeRecord], None]] = (),
    ) -> None:
        """`notes` returns what the service has to do without, and why.

        `exchange_sinks` are handed every HTTP exchange that has ended, one after the other.
        """
        self._notes = notes
        self._exchange_sinks = exchange_sinks
        self._config, self._deployments, self._catalog = config, deployments, catalog
        self._encoder, self._driver, self._observer = encoder, driver, observer
        self._pools, self._snapshots = pools, snapshots
        self._supervisor, self._kind = supervisor, kind
        self._is_draining = False
        self._keeper = keeper
        self._metrics = metrics
        self._ignored_fields = metrics.ignored_fields
        self._connections_closed = metrics.connections_closed
        self.keys, self._admissions = keys, admissions
        self.admin_token = secrets.token_urlsafe(32)
        #: The salts of groups follow from it. Kept nowhere else: cached prefixes end with the service, too.
        self._salt_secret = secrets.token_bytes(SALT_BYTES)
        self.instance_id = secrets.token_hex(16)
        self._watch(metrics)

    # Requests.

    def admit(self, caller: Caller) -> KeyAdmission:
        """Let a caller ask, as a context: all that is submitted in it is one request of the caller's key.

        Raises:
            RateLimited: the key has had what it may have for now.
        """
        return self._admissions.admit(caller)

    def rate_status(self, caller: Caller) -> RateStatus | None:
        """Return what is left of the limits of a caller's key; None: it has none."""
        return self._admissions.status(caller)

    async def prepare(self, wanted: GenerationRequest, admission: KeyAdmission) -> PreparedRequest:
        """Tokenise a request of a caller who was let in, check it and charge for it.

        Several that belong together are all prepared before the first is started: if a limit refuses one,
        nothing was computed for the others.

        Raises:
            HearthError: the request is wrong, or cannot be taken.
        """
        self._refuse_when_closed()
        caller = admission.caller
        arrived_s, arrived_at_s = self._driver.now_s, time.time()
        entry = self._find(wanted.model, caller)
        check_tokens(entry, wanted.sampling)
        pace = pace_of(entry, wanted, caller)
        tokenizer = await self._tokenizer(entry)
        prompt = await self._encode(entry, wanted.prompt, wanted.sampling.max_tokens, wanted.follows)
        check_reading(prompt, wanted.sampling)
        if wanted.guide is not None:
            await self._encoder.check_guide(wanted.guide)
        self._refuse_when_closed()  # again, and what follows: much may have happened since
        entry = self._current(entry, prompt, wanted, caller)
        max_tokens, left = wanted.sampling.max_tokens, entry.max_context - len(prompt)
        max_tokens = left if max_tokens is None else min(max_tokens, left)
        admission.charge(len(prompt) if wanted.counts_prompt else 0, max_tokens)
        return PreparedRequest(
            *(wanted, admission, entry, tokenizer, prompt, pace, arrived_s, arrived_at_s),
        )

    def start(self, prepared: PreparedRequest, correlation: Correlation = UNNAMED) -> AnswerStream:
        """Start a request; its answer arrives in the stream.

        Raises:
            HearthError: it cannot be taken. Nothing was started then.
        """
        wanted, prompt, pace = prepared.wanted, prepared.prompt, prepared.pace
        tokenizer, caller, arrived_s = prepared.tokenizer, prepared.admission.caller, prepared.arrived_s
        self._refuse_when_closed()  # again: others may have been prepared since
        entry = self._current(prepared.entry, prompt, wanted, caller)
        request_id = RequestId(secrets.token_hex(12))
        model, adapter = ModelId(entry.deployed.name), entry.adapter_order
        stream = AnswerStream(
            request_id, ModelId(entry.name), tokenizer, len(prompt), lambda: self._driver.cancel(request_id)
        )
        stream.is_batch, stream.prompt = pace.is_batch, prompt
        timeline = Timeline(
            *(request_id, model, arrived_s, prepared.arrived_at_s, len(prompt), caller.group, pace),
            correlation,
            pooling=wanted.pooling,
            adapter=None if adapter is None else adapter.name,
        )
        seed = secrets.randbits(63) if wanted.sampling.seed is None else wanted.sampling.seed
        active = ActiveRequest(
            request_id=request_id,
            model=model,
            digest=entry.deployed.digest,
            prompt=prompt,
            sampling=wanted.sampling.resolved(wanted.sampling.stop_ids, seed),
            salt=self._salt_of(caller.group),
            guide=wanted.guide,
            stream=stream,
            transcript=Transcript(tokenizer, wanted.sampling, prompt),
            pace=pace,
            arrived_s=arrived_s,
            pooling=wanted.pooling,
            adapter=adapter,
            adapter_bytes=0 if entry.adapter is None else entry.adapter.num_bytes,
        )
        if (exchange := current_exchange()) is not None:
            exchange.started(timeline, counts_prompt=wanted.counts_prompt)
        self._observer.begin(timeline)
        self._driver.start(active, wanted.sampling.max_tokens, wanted.keep_alive_s)
        if stream.error is not None:
            raise stream.error
        self._keeper.request_came(entry.deployed.digest)
        if adapter is not None:
            self._keeper.request_came(adapter.adapter)
        prepared.admission.follow(stream, counts_prompt=wanted.counts_prompt)
        return stream

    def count_ignored_fields(self, labels: Sequence[str]) -> None:
        """Count fields of a request that nothing reads, by labels of a closed set."""
        for label in labels:
            self._ignored_fields.labels(label).inc()

    def exchange_ended(self, record: ExchangeRecord) -> None:
        """Write down an HTTP exchange of which nothing more will be sent, and how its requests ended."""
        self._driver.book_finished()
        for sink in self._exchange_sinks:
            sink(record)

    def count_closed_connection(self) -> None:
        """Count a connection that gave way because too many were open."""
        self._connections_closed.inc()

    async def tokenizer(self, name: str, caller: Caller) -> Tokenizer:
        return await self._tokenizer(self._find(name, caller))

    async def encode(
        self, name: str, prompt: str | list[int] | ChatPrompt, caller: Caller, max_tokens: int | None = None
    ) -> list[int]:
        """Return the tokens of a prompt that so many are to follow.

        Raises:
            HearthError: the model cannot take it.
        """
        entry = self._find(name, caller)
        return list(await self._encode(entry, prompt, max_tokens))

    async def tokenize(
        self, name: str, prompt: str | ChatPrompt, caller: Caller, add_special_tokens: bool | None
    ) -> list[int]:
        """Return the tokens of a text or of a conversation, however many they are.

        None: special tokens are added as in a prompt. Raises as `encode` does.
        """
        entry = self._find(name, caller)
        tokenizer = await self._tokenizer(entry)
        return list(await self._encoder.encode(tokenizer, prompt, max_chars(entry), add_special_tokens))

    async def detokenize(self, name: str, tokens: list[int], caller: Caller) -> str:
        """Return the text of tokens, special ones included. Raises BadPrompt: one is not the model's."""
        entry = self._find(name, caller)
        check_vocabulary(entry, tokens)
        return await self._encoder.decode(await self._tokenizer(entry), tokens)

    # Models. For a caller those are there that the caller's key may use.

    def models(self, caller: Caller) -> list[ModelView]:
        """Return the models, then the adapters."""
        allowed = caller.terms.models
        entries = [*self._deployments.entries(allowed), *self._deployments.adapters(allowed)]
        return [self._catalog.view(entry) for entry in entries]

    def model(self, name: str, caller: Caller) -> ModelView:
        return self._catalog.view(self._find(name, caller))

    def may_use(self, model: str, caller: Caller) -> bool:
        """True if nothing keeps a caller's key from a model, which may not be deployed any more."""
        allowed = caller.terms.models
        return allowed is None or model in {*allowed, *(view.name for view in self.models(caller))}

    async def show(self, name: str, caller: Caller, *, look: bool) -> ModelView:
        """Return a model with what is known of its upstream, which is asked first if `look`.

        An admin sees what is there now, others what was there a moment ago.
        """
        entry = self._find(name, caller)
        max_age_s = 0.0 if caller.has_role("admin") else UPSTREAM_CACHE_S
        deployed = entry.adapter or entry.deployed
        upstream = await self._deployments.upstream(deployed, look=look, max_age_s=max_age_s)
        return replace(self._catalog.view(entry), upstream=upstream)

    async def deploy(
        self,
        source: str,
        name: str | None,
        dtype: str,
        quant: str,
        overwrite: bool,
        base: str | None = None,
        *,
        is_adapter: bool = False,
    ) -> AsyncGenerator[dict[str, object], None]:
        """Yield progress as it is made; the last event holds the model. Leaving early calls it off.

        `base`: of what is an adapter, where its config does not say it. `is_adapter`: a model is refused.
        """
        order = DeployOrder(source, name, dtype, quant, self._kind, overwrite, base, is_adapter)
        async with aclosing(self._deployments.deploy(order)) as progress:
            async for event in progress:
                if isinstance(event, DeployProgress):
                    yield {"event": "progress", **event.as_json()}
                else:
                    yield {"event": "done", "model": event}

    async def make_snapshot(self, name: str, caller: Caller) -> AsyncGenerator[dict[str, object], None]:
        """Have a snapshot of a model made now; yields progress, and last what was made.

        The model is asked for one token first, so that it is there. Leaving early stops nothing.

        Raises:
            HearthError: it cannot be loaded, or the snapshot cannot be made.
        """
        model = ModelId(self._find(name, caller).deployed.name)
        self._snapshots.check_kept()
        yield _snapshot_progress(SnapshotPhase.LOADING)
        wanted = GenerationRequest(name, [0], SamplingParams(temperature=0.0, max_tokens=1))
        with self.admit(caller) as admission:
            stream = self.start(await self.prepare(wanted, admission))
            try:
                await stream.rest()
            finally:
                stream.close()
        yield _snapshot_progress(SnapshotPhase.WAITING)
        # Together with the order, between which nothing else may happen.
        stay = self._driver.ready_stay(model)
        if stay is None:
            raise ServiceError(f"`{model}` left device memory at once, as others need the room; try again")
        async with aclosing(self._snapshots.make(stay.worker, model, stay.hosting)) as facts:
            async for fact in facts:
                if isinstance(fact, SnapshotProgress):
                    yield _snapshot_progress(SnapshotPhase.MEASURING, fact.num_done, fact.num_steps)
                else:
                    view = SnapshotView(str(model), fact.num_bytes, fact.unbooked_bytes, fact.seconds)
                    yield {"event": "done", "snapshot": view}

    async def remove(self, name: str, *, with_adapters: bool = False) -> None:
        await self._deployments.remove(name, with_adapters=with_adapters)

    async def unload(self, name: str, free: bool) -> UnloadView:
        """Have a model stay only until its room is needed, or, with `free`, leave when it is idle."""
        await self._pools.refresh(LOOK_S)  # first: while it takes its time, the model may be removed
        entry = self._deployments.find(name)
        if entry.adapter is not None:
            raise RequestError(
                f"`{name}` is an adapter of `{entry.deployed.name}` and gives way by itself before any model "
                "does; stop its base, or remove the adapter"
            )
        model = ModelId(entry.deployed.name)
        there = [one for one in self.ps().models if one.model == model]
        known = self._driver.fleet.models[model]
        view = UnloadView(
            unloaded=name,
            free=free,
            was_loaded=known.is_resident,
            num_requests=known.num_requests,
            device_bytes=sum(one.num_bytes - one.shared_bytes for one in there),
            host_bytes=(known.bytes_by_rung or {}).get(Rung.HOST, 0),
        )
        self._driver.post(events.ModelStopped(self._driver.now_s, model, free))
        return view

    # Views.

    async def look(self) -> ProcessView:
        """Return the same as `ps`, after workers and keeper have reported their memory anew."""
        await self._pools.refresh(LOOK_S)
        await self._keeper.refresh_host_memory(LOOK_S)
        return self.ps()

    async def measure(self) -> bytes:
        """Return the metrics, after the keeper has reported its memory anew; workers do at each heartbeat."""
        await self._keeper.refresh_host_memory(LOOK_S)
        return await self._metrics.text()

    def ps(self) -> ProcessView:
        fleet, now_s = self._driver.fleet, self._driver.now_s
        residents = resident_views(fleet.residents(now_s), self._pools.pongs, now_s)
        workers = tuple(self._worker_views(residents, now_s))
        queues = fleet.queues
        num_awaiting = queues.num_awaiting_turn
        num_waiting, num_running = queues.num_waiting + num_awaiting, queues.num_running - num_awaiting
        return ProcessView(
            workers, residents, num_waiting, num_running, self._keeper.host_memory, self._notes()
        )

    def explain(self, request_id: str, caller: Caller) -> Explanation | None:
        """Return what happened to a request; None if it is none of the last ones, or not for the caller."""
        found = self._observer.explain(request_id, self._driver.now_s, caller)
        if found is None or caller.terms.models is None or caller.has_role("monitor"):
            return found
        if not self.may_use(found.model, caller):  # one that another key of the group may use
            return None
        # Obstacles name the models that are in the way.
        return replace(found, options=tuple(one for one in found.options if one.obstacle is None))

    def health(self) -> Health:
        workers = self._supervisor.workers()
        num_ready = sum(worker.state == "ready" for worker in workers)
        if self._is_draining:
            status = "draining"
        elif num_ready:
            status = "ok"
        else:
            status = "starting" if self._supervisor.outage() is None else "failing"
        reason = self._supervisor.trouble()
        return Health(status, len(workers), num_ready, hearth_version(), self.instance_id, reason)

    # The end of the service.

    async def drain(self) -> None:
        """Take no new request and wait until all have ended."""
        self._is_draining = True
        await self._driver.requests.wait_empty()

    async def refused(self) -> ConfigError:
        """Return what a worker says of settings with which none can start, once one does."""
        return await asyncio.shield(self._supervisor.refusal)

    def end_all(self, error: HearthError | None = None) -> None:
        """End all requests that still run, with this error or that of a service which ends."""
        self._is_draining = True
        self._driver.fail_all(
            error
            or ShuttingDown(f"the service was shut down and waited {self._config.drain_s:g} s; ask again")
        )

    def _watch(self, metrics: Metrics) -> None:
        fleet, pools, watch = self._driver.fleet, self._pools, metrics.watch
        watch(
            "hearth_requests_running",
            "Requests on workers whose models have had a turn.",
            lambda: fleet.queues.num_running - fleet.queues.num_awaiting_turn,
        )
        watch(
            "hearth_requests_waiting",
            "Requests that wait for a slot, for room or for the first turn of their model.",
            lambda: fleet.queues.num_waiting + fleet.queues.num_awaiting_turn,
        )
        watch(
            "hearth_workers_ready", "Workers that can take requests.", lambda: self.health().num_ready_workers
        )
        watch("hearth_models_resident", "Models on workers.", lambda: sum(1 for _ in fleet.replicas()))
        metrics.registry.register(pools)
        watch(
            "hearth_device_used_bytes",
            "Device memory that models take, by the pools' own books.",
            lambda: sum(pong.budget_bytes - pong.free_bytes for pong in pools.pongs.values()),
        )
        watch(
            "hearth_device_budget_bytes",
            "Device memory for models.",
            lambda: sum(worker.budget_bytes for worker in self.ps().workers),
        )
        watch(
            "hearth_host_used_bytes",
            "Host memory that holds chunks of models.",
            lambda: 0 if self._keeper.host_memory is None else self._keeper.host_memory.used_bytes,
        )
        watch(
            "hearth_host_budget_bytes",
            "Host memory for chunks of models.",
            lambda: 0 if self._keeper.host_memory is None else self._keeper.host_memory.budget_bytes,
        )
        watch(
            "hearth_kv_blocks_used",
            "Blocks of KV that hold tokens of running requests.",
            lambda: sum(use.kv_used_blocks for pong in pools.pongs.values() for use in pong.models),
        )
        watch(
            "hearth_kv_blocks",
            "Blocks of KV that there are.",
            lambda: sum(use.kv_blocks for pong in pools.pongs.values() for use in pong.models),
        )
        watch(
            "hearth_adapters_resident",
            "Adapters that have device memory.",
            lambda: sum(use.num_bytes > 0 for pong in pools.pongs.values() for use in pong.adapters),
        )
        watch(
            "hearth_adapter_requests_waiting",
            "Requests on workers that wait for their adapter.",
            lambda: sum(use.num_waiting for pong in pools.pongs.values() for use in pong.adapters),
        )
        watch(
            "hearth_service_notes",
            "Things that the service has to do without now; `hearth doctor` names them.",
            lambda: len(self._notes()),
        )
        watch(
            "hearth_gateway_longest_collection_seconds",
            "The longest collection of garbage in the gateway that could not wait until it was idle.",
            lambda: LATE_COLLECTIONS.longest_s,
        )
        watch("hearth_gateway_tasks", "Tasks of the gateway's event loop.", lambda: len(asyncio.all_tasks()))

    def _find(self, name: str, caller: Caller) -> CatalogEntry:
        """Return the model that a name or an alias means for a caller, and note that it was asked for.

        Raises:
            UnknownModel: there is none, or the caller's key may not use it.
        """
        entry = self._deployments.find(name, caller.terms.models)
        if (exchange := current_exchange()) is not None:
            exchange.model = entry.name
        return entry

    def _salt_of(self, group: GroupId) -> bytes:
        """Return what sets a group's cached prefixes apart, on every worker; nobody outside can guess it."""
        return hashlib.blake2b(group.encode(), key=self._salt_secret, digest_size=SALT_BYTES).digest()

    def _refuse_when_closed(self) -> None:
        """Refuse requests that nobody will serve: the service ends, or none of its workers comes up."""
        if self._is_draining:
            raise ShuttingDown("the service is shutting down and takes no new requests; ask another one")
        if (outage := self._supervisor.outage()) is not None:
            raise outage

    def _current(
        self, entry: CatalogEntry, prompt: tuple[int, ...], wanted: GenerationRequest, caller: Caller
    ) -> CatalogEntry:
        """Return what has the name of an entry now: tokens are the base's, whichever adapter that is.

        Refuses tokens that are another model's now, or too many for a context that has become shorter.
        """
        name = entry.name
        current = self._deployments.find(name, caller.terms.models)
        if current.deployed.digest != entry.deployed.digest:
            raise ServiceError(f"`{name}` was replaced while the request was prepared; ask again")
        check_prompt(current, prompt, wanted.sampling.max_tokens)
        return current

    async def _encode(
        self,
        entry: CatalogEntry,
        prompt: str | list[int] | ChatPrompt,
        max_tokens: int | None,
        follows: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        tokenizer = await self._tokenizer(entry)
        add_special_tokens = False if follows else None  # what a text begins with stands there already
        tokens = follows + await self._encoder.encode(tokenizer, prompt, max_chars(entry), add_special_tokens)
        check_prompt(entry, tokens, max_tokens)
        return tokens

    async def _tokenizer(self, entry: CatalogEntry) -> Tokenizer:
        return await self._encoder.tokenizer(entry.deployed.digest, Path(entry.deployed.directory))

    def _worker_views(self, residents: tuple[ResidentView, ...], now_s: float) -> list[WorkerView]:
        views = []
        for status in self._supervisor.workers():
            hello, pool = status.hello, self._pools.view(status.worker, now_s)
            if pool is None:
                known = self._driver.fleet.workers.get(status.worker)
                used = 0 if known is None else known.promises.budget_bytes - known.promises.free_bytes
            else:
                used = sum(part.num_bytes for part in pool.parts if part.kind != "free")
            views.append(
                WorkerView(
                    worker=status.worker,
                    pid=status.pid,
                    kind=self._kind if hello is None else hello.kind,
                    device="" if hello is None else hello.device,
                    state=status.state,
                    budget_bytes=0 if hello is None else hello.budget_bytes,
                    used_bytes=used,
                    num_restarts=status.num_restarts,
                    pool=pool,
                    reason=status.reason,
                )
            )
        return views


def _snapshot_progress(phase: SnapshotPhase, num_done: int = 0, num_steps: int = 0) -> dict[str, object]:
    return {"event": "progress", "phase": phase, "num_done": num_done, "num_steps": num_steps}
