"""The service as the API sees it. Speaks no HTTP, and all decisions about where things run are the brain's.

The gateway itself takes requests. Its parts answer the rest: `prompts` tokenises, `deployments` knows the
models, `views` shows the state of the service, `live` its changes, `admissions` and `keys` know the callers.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace

from hearth.control.deploy.catalog import CatalogEntry
from hearth.control.deploy.deploy import DeployOrder, DeployProgress
from hearth.control.deploy.deployments import Deployments
from hearth.control.deploy.preset import Preset
from hearth.control.driver import Driver
from hearth.control.keeper_reports import KeeperReports
from hearth.control.keys.key_admission import KeyAdmission, KeyAdmissions
from hearth.control.keys.keys import ApiKeys
from hearth.control.nodes import Nodes
from hearth.control.observe.exchange_record import ExchangeRecord, current_exchange
from hearth.control.observe.live_feed import LiveFeed
from hearth.control.observe.metrics import Metrics
from hearth.control.observe.observer import Observer
from hearth.control.observe.service_views import ServiceViews
from hearth.control.observe.timeline import Timeline
from hearth.control.observe.views import ModelView, SnapshotView, UnloadView
from hearth.control.requests.active_request import ActiveRequest
from hearth.control.requests.caller import Caller
from hearth.control.requests.correlation import UNNAMED, Correlation
from hearth.control.requests.generation import AnswerStream, GenerationRequest
from hearth.control.requests.prompts import Prompts
from hearth.control.requests.request_checks import check_prompt, check_reading, check_tokens
from hearth.control.requests.request_pace import pace_of
from hearth.control.snapshots import Snapshots
from hearth.core.errors import ConfigError, HearthError, RequestError, ServiceError, ShuttingDown
from hearth.core.messages import SnapshotMade, SnapshotProgress
from hearth.core.types import LOCAL, ModelId, Pace, RequestId, Rung, SamplingParams, SnapshotPhase
from hearth.policy.fleet import events
from hearth.text.tokenizer import Tokenizer
from hearth.text.transcript import Transcript

SALT_BYTES = 32


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    wanted: GenerationRequest
    admission: KeyAdmission
    entry: CatalogEntry
    tokenizer: Tokenizer
    prompt: tuple[int, ...]
    pace: Pace
    arrived_s: float  #: on the clock of the event loop
    arrived_at_s: float  #: since the epoch


class Gateway:
    """The one object that the API calls. Mutable; used on the event loop alone."""

    def __init__(
        self,
        deployments: Deployments,
        prompts: Prompts,
        views: ServiceViews,
        keys: ApiKeys,
        admissions: KeyAdmissions,
        driver: Driver,
        observer: Observer,
        snapshots: Snapshots,
        nodes: Nodes,
        keeper: KeeperReports,
        metrics: Metrics,
        live: LiveFeed,
        drain_s: float,
        exchange_sinks: Sequence[Callable[[ExchangeRecord], None]] = (),
    ) -> None:
        self.deployments, self.prompts, self.views = deployments, prompts, views
        self.keys, self.admissions, self.live = keys, admissions, live
        self.admin_token = secrets.token_urlsafe(32)
        self._driver, self._observer, self._snapshots = driver, observer, snapshots
        self._nodes, self._keeper, self._metrics = nodes, keeper, metrics
        self._drain_s, self._exchange_sinks = drain_s, exchange_sinks
        #: Groups get their salts from it. Not stored: cached prefixes end with the service, too.
        self._salt_secret = secrets.token_bytes(SALT_BYTES)

    # Requests.

    async def prepare(self, wanted: GenerationRequest, admission: KeyAdmission) -> PreparedRequest:
        """Tokenise, check and charge an admitted request.

        Requests that belong together are all prepared before the first is started: if a limit refuses one,
        nothing was computed for the others. Raises HearthError: the request is wrong, or cannot be taken.
        """
        self._refuse_when_closed()
        caller = admission.caller
        arrived_s, arrived_at_s = self._driver.now_s, time.time()
        entry = self.deployments.find_for(wanted.model, caller)
        check_tokens(entry, wanted.sampling)
        pace = pace_of(entry, wanted, caller)
        tokenizer = await self.prompts.tokenizer_of(entry)
        max_tokens = wanted.sampling.max_tokens
        prompt = await self.prompts.encode_for(entry, wanted.prompt, max_tokens, wanted.follows)
        check_reading(prompt, wanted.sampling)
        if wanted.guide is not None:
            await self.prompts.check_guide(wanted.guide)
        wanted = replace(wanted, guide=wanted.full_guide(tokenizer, prompt))
        self._refuse_when_closed()  # again, as is the next: much may have happened since
        entry = self._current(entry, prompt, wanted, caller)
        left = entry.max_context - len(prompt)
        admission.charge(
            len(prompt) if wanted.counts_prompt else 0, left if max_tokens is None else min(max_tokens, left)
        )
        return PreparedRequest(
            wanted=wanted,
            admission=admission,
            entry=entry,
            tokenizer=tokenizer,
            prompt=prompt,
            pace=pace,
            arrived_s=arrived_s,
            arrived_at_s=arrived_at_s,
        )

    def start(self, prepared: PreparedRequest, correlation: Correlation = UNNAMED) -> AnswerStream:
        """Start a request; its answer arrives in the stream. Raises HearthError; nothing was started then."""
        wanted, prompt, caller = prepared.wanted, prepared.prompt, prepared.admission.caller
        self._refuse_when_closed()  # again: others may have been prepared since
        entry = self._current(prepared.entry, prompt, wanted, caller)
        request_id = RequestId(secrets.token_hex(12))
        model, adapter = ModelId(entry.deployed.name), entry.adapter_order
        stream = AnswerStream(
            request_id=request_id,
            model=ModelId(entry.name),
            tokenizer=prepared.tokenizer,
            num_prompt_tokens=len(prompt),
            cancel=lambda: self._driver.cancel(request_id),
        )
        stream.is_batch, stream.prompt = prepared.pace.is_batch, prompt
        timeline = Timeline(
            request_id=request_id,
            model=model,
            arrived_s=prepared.arrived_s,
            arrived_at_s=prepared.arrived_at_s,
            num_prompt_tokens=len(prompt),
            group=caller.group,
            pace=prepared.pace,
            correlation=correlation,
            pooling=wanted.pooling,
            adapter=None if adapter is None else adapter.name,
        )
        seed = secrets.randbits(63) if wanted.sampling.seed is None else wanted.sampling.seed
        group = caller.group.encode()
        salt = hashlib.blake2b(group, key=self._salt_secret, digest_size=SALT_BYTES).digest()
        active = ActiveRequest(
            request_id=request_id,
            model=model,
            digest=entry.deployed.digest,
            prompt=prompt,
            # The transcript cuts at stop strings; workers see no text.
            sampling=wanted.sampling.resolved(stop=(), stop_token_ids=wanted.sampling.stop_ids, seed=seed),
            salt=salt,
            guide=wanted.guide,
            stream=stream,
            transcript=Transcript(prepared.tokenizer, wanted.sampling, prompt),
            pace=prepared.pace,
            arrived_s=prepared.arrived_s,
            pooling=wanted.pooling,
            adapter=adapter,
            adapter_bytes=0 if entry.adapter is None else entry.adapter.num_bytes,
            key=None if caller.key_id is None else caller.name,
        )
        if (exchange := current_exchange()) is not None:
            exchange.started(timeline, counts_prompt=wanted.counts_prompt)
        self._observer.begin(timeline)
        self._driver.start(active, wanted.keep_alive_s)
        if stream.error is not None:
            raise stream.error
        self._keeper.request_came(entry.deployed.digest)
        if adapter is not None:
            self._keeper.request_came(adapter.adapter)
        prepared.admission.follow(stream, counts_prompt=wanted.counts_prompt)
        return stream

    # What the API reports.

    def count_ignored_fields(self, labels: Sequence[str]) -> None:
        for label in labels:
            self._metrics.ignored_fields.labels(label).inc()

    def count_closed_connection(self) -> None:
        self._metrics.connections_closed.inc()

    def exchange_ended(self, record: ExchangeRecord) -> None:
        self._driver.book_finished()
        for sink in self._exchange_sinks:
            sink(record)

    # Changes to models.

    async def deploy(self, order: DeployOrder) -> AsyncGenerator[dict[str, object], None]:
        """Yield progress, and last the model. Closing the generator cancels."""
        async with aclosing(self.deployments.deploy(order)) as progress:
            async for event in progress:
                if isinstance(event, DeployProgress):
                    yield {"event": "progress", **asdict(event)}
                else:
                    yield {"event": "done", "model": event}

    async def put_preset(self, name: str, base: str, preset: Preset) -> ModelView:
        """Make or replace a preset of a model, an adapter or a preset. Raises HearthError."""
        await asyncio.to_thread(preset.check)
        return self.deployments.put_preset(name, base, preset)

    async def make_snapshot(self, name: str, caller: Caller) -> AsyncGenerator[dict[str, object], None]:
        """Load the model by a request; yield progress, and last the result. Raises HearthError."""
        model = ModelId(self.deployments.find_for(name, caller).deployed.name)
        self._snapshots.check_kept()
        yield _snapshot_progress(SnapshotPhase.LOADING)
        wanted = GenerationRequest(name, [0], SamplingParams(temperature=0.0, max_tokens=1))
        with self.admissions.admit(caller) as admission:
            stream = self.start(await self.prepare(wanted, admission))
            try:
                await stream.rest()
            finally:
                stream.close()
        yield _snapshot_progress(SnapshotPhase.WAITING)
        stays = self._driver.ready_stays(model)
        made = list[SnapshotMade]()
        for stay in stays:
            # No `await` between this and the order: the model must not leave meanwhile.
            if stay not in self._driver.ready_stays(model):
                break
            async with aclosing(self._snapshots.make(stay.worker, model, stay.hosting)) as facts:
                async for fact in facts:
                    if isinstance(fact, SnapshotProgress):
                        yield _snapshot_progress(SnapshotPhase.MEASURING, fact.num_done, fact.num_steps)
                    else:
                        made.append(fact)
        if not stays or len(made) < len(stays):
            raise ServiceError(f"`{model}` left device memory, as others need the room; try again")
        view = SnapshotView(
            str(model),
            sum(one.num_bytes for one in made),
            max(one.unbooked_bytes for one in made),
            sum(one.seconds for one in made),
        )
        yield {"event": "done", "snapshot": view}

    async def unload(self, name: str, free: bool) -> UnloadView:
        """Keep a model only until its memory is needed, or, with `free`, free it when it is idle."""
        residents = (await self.views.fresh_ps()).models  # first: the model may be removed meanwhile
        entry = self.deployments.find(name)
        if entry.adapter is not None:
            raise RequestError(
                f"`{name}` is an adapter of `{entry.deployed.name}` and is evicted before any model; stop "
                "its base, or remove the adapter"
            )
        model = ModelId(entry.deployed.name)
        there = [one for one in residents if one.model == model]
        known = self._driver.fleet.models[model]
        view = UnloadView(
            unloaded=name,
            free=free,
            was_loaded=known.is_resident,
            num_requests=known.num_requests,
            device_bytes=sum(one.num_bytes - one.shared_bytes for one in there),
            host_bytes=(known.bytes_by_rung(LOCAL) or {}).get(Rung.HOST, 0),
        )
        self._driver.post(events.ModelStopped(self._driver.now_s, model, free))
        return view

    # The end of the service.

    async def drain(self) -> None:
        self._driver.requests.is_draining = True
        await self._driver.requests.wait_empty()

    async def refused(self) -> ConfigError:
        return await asyncio.shield(self._nodes.local.supervisor.refusal)

    def end_all(self, error: HearthError | None = None) -> None:
        self._driver.requests.is_draining = True
        self._driver.fail_all(
            error or ShuttingDown(f"the service was shut down and waited {self._drain_s:g} s; ask again")
        )

    def _refuse_when_closed(self) -> None:
        if self._driver.requests.is_draining:
            raise ShuttingDown("the service is shutting down and takes no new requests; ask another one")
        if (outage := self._nodes.outage()) is not None:
            raise outage

    def _current(
        self, entry: CatalogEntry, prompt: tuple[int, ...], wanted: GenerationRequest, caller: Caller
    ) -> CatalogEntry:
        """Look an entry up again by its name. Raises HearthError if the model has changed."""
        name = entry.name
        current = self.deployments.find(name, caller.terms.models)
        if current.deployed.digest != entry.deployed.digest:
            raise ServiceError(f"`{name}` was replaced while the request was prepared; ask again")
        check_prompt(current, prompt, wanted.sampling.max_tokens)
        return current


def _snapshot_progress(phase: SnapshotPhase, num_done: int = 0, num_steps: int = 0) -> dict[str, object]:
    return {"event": "progress", "phase": phase, "num_done": num_done, "num_steps": num_steps}
