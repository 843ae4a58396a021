"""One model on a worker, from the order to host it until its last byte is given back. Steps no engine.

It goes through the states of `hosting_state.py`. Where models take turns, a model is loaded whole in its turn
only, and other models may take its memory outside of its turn. Each stay on the worker has a number, its
`hosting`: news of an earlier stay are stale.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from hearth.core.messages import HostModel, ModelLoaded
from hearth.core.types import Hold, ModelId
from hearth.engine.engine import Engine
from hearth.memory.pool import Pool, Space
from hearth.policy.memory.byte_eviction import effective_hold
from hearth.snapshot.memory_profile import MemoryProfile
from hearth.store.format.manifest import TOKENIZER
from hearth.store.transfer.lease_client import OpenedModel
from hearth.store.transfer.record import LoadRecord, rung_bytes
from hearth.worker.failure import start_thread
from hearth.worker.hosting_spec import HostingSpec, hosting_spec
from hearth.worker.hosting_state import (
    Assembling,
    Closed,
    Finding,
    Found,
    HostingState,
    Incomplete,
    Loaded,
    Loading,
    Retired,
    ServedModel,
)
from hearth.worker.model_load import (
    EngineReady,
    HostingNews,
    ModelFound,
    ModelLoad,
    open_model,
)
from hearth.worker.model_snapshots import SnapshotLook
from hearth.worker.pending_requests import PendingRequests
from hearth.worker.prefetch import TurnPrefetch
from hearth.worker.runtime import HostingResources
from hearth.worker.stage_member import StageMember
from hearth.worker.weights_transfer import ModelBroken, WeightsLoaded

#: Tuples for `isinstance`, which is called many times a step.
_WITH_ENGINE = (Loading, Loaded, Incomplete, Retired)
_TAKING = (Loading, Loaded, Incomplete)  #: requests
_UNDER_WAY = (Assembling, Loading)
_NO_LOAD = WeightsLoaded(LoadRecord("", 0, {}, 0.0, 0.0, 0.0, 0.0, 0.0, 0), None)


class HostedModel:
    """The states of one model. Mutable; the step thread alone calls it. `post` is called by other threads."""

    def __init__(
        self,
        order: HostModel,
        resources: HostingResources,
        pool: Pool,
        post: Callable[[int, HostingNews], None],
    ) -> None:
        """`post(hosting, news)`: `hosting` is the number of the stay."""
        self.order = order
        self.hold = Hold.WARM  #: while it has no requests
        self.has_turn = True  #: always, unless models take turns; written by `Turns`
        self.pending = PendingRequests()  #: written by `Runs`, as are the requests of its engine
        self.state: HostingState = Finding(time.perf_counter())
        self.look: SnapshotLook | None = None  #: the result of looking for a snapshot; None: not looked for
        self.memory: MemoryProfile | None = None  #: of its snapshot; None: it has none
        self.first_load: ModelLoaded | None = None  #: None: it was never whole
        self._opened: OpenedModel | None = None  #: the model as it was found
        self.prefetch = TurnPrefetch(order.model, resources, pool)
        self._resources, self._pool, self._post = resources, pool, post
        self.member: StageMember | None = None  #: None: this worker runs all of the model
        if order.pipeline is not None:
            assert resources.connections is not None, f"a worker without sockets for stages: {order}"
            self.member = StageMember(order, resources.connections, lambda news: post(order.hosting, news))
            self.hold = Hold.PINNED  # it takes no turns, and gives way as a whole
        self._is_closed = threading.Event()  #: for the thread that looks the model up

    @property
    def model(self) -> ModelId:
        return self.order.model

    @property
    def served(self) -> ServedModel | None:
        state = self.state
        return state.served if isinstance(state, _WITH_ENGINE) else None

    @property
    def spec(self) -> HostingSpec | None:
        match self.state:
            case Found(spec=spec) | Assembling(spec=spec):
                return spec
        return None if (served := self.served) is None else served.spec

    @property
    def load_under_way(self) -> ModelLoad | None:
        state = self.state
        return state.load if isinstance(state, _UNDER_WAY) else None

    @property
    def is_loading(self) -> bool:
        return isinstance(self.state, _UNDER_WAY) or self.prefetch.copying_bytes > 0

    @property
    def can_copy(self) -> bool:
        """True if the model waits for its turn in host memory, and bytes of it that are not on the device."""
        spec = self.spec
        if spec is None or not self.prefetch.is_in_host or self.is_loading:
            return False
        return self._pool.resident_bytes(self.model) < spec.shape.stored.own_bytes

    @property
    def loaded_bytes(self) -> int:
        """About how many bytes, as stored, are on the device: not those that are on their way."""
        if (load := self.load_under_way) is not None:
            return load.reused_bytes
        return max(0, self._pool.resident_bytes(self.model) - self.prefetch.copying_bytes)

    @property
    def is_loaded(self) -> bool:
        return isinstance(self.state, Loaded)

    @property
    def has_weights(self) -> bool:
        """True if all of its weights have come. Its engine may not be there yet."""
        return self.is_loaded or ((load := self.load_under_way) is not None and load.weights is not None)

    @property
    def later_stage(self) -> StageMember | None:
        """This worker's member of a pipeline, if its steps come from another one; None: they do not."""
        return None if self.member is None or self.member.is_first else self.member

    @property
    def has_work(self) -> bool:
        """True if there is something to compute, now or when a result of other stages has come."""
        if (stage := self.later_stage) is not None:
            return stage.has_work
        return (served := self.served) is not None and served.engine.has_work

    @property
    def is_step_prepared(self) -> bool:
        """True if a step's inputs are on the device, and what it waited for has come from another stage."""
        if not self.is_loaded:
            return False
        if (stage := self.later_stage) is not None:
            return stage.is_step_prepared
        return (served := self.served) is not None and served.engine.is_step_prepared

    @property
    def is_computing(self) -> bool:
        return (served := self.served) is not None and served.engine.is_computing

    @property
    def takes_requests(self) -> bool:
        return isinstance(self.state, _TAKING)

    @property
    def effective_hold(self) -> Hold:
        """How the model is held now. Pending requests count as requests, prefetches not as a load."""
        has_requests = self.has_work or bool(self.pending)
        is_loading, has_turn = self.load_under_way is not None, self.has_turn
        return effective_hold(self.hold, is_loading=is_loading, has_requests=has_requests, has_turn=has_turn)

    def _wrong(self, what: str) -> AssertionError:
        return AssertionError(f"`{self.model}` {what} while it is {type(self.state).__name__}")

    # The way to being loaded.

    def find(self) -> None:
        order, resources, post = self.order, self._resources, self._post
        is_given_up = self._is_closed.is_set

        def look_up() -> None:
            lease_client = resources.lease_client
            opened = open_model(lease_client, order, is_given_up)
            manifest, directory = opened.manifest, Path(opened.directory)
            tokenizer_json = lease_client.descriptions.text_file(manifest, directory, TOKENIZER)
            spec = hosting_spec(order, manifest, tokenizer_json, resources.device)
            post(order.hosting, ModelFound(spec, opened))

        start_thread(
            resources.loader.threads,
            look_up,
            lambda failure: post(order.hosting, ModelBroken(failure)),
        )

    def found(self, news: ModelFound) -> None:
        match self.state:
            case Finding(began_s):
                self._opened = news.opened
                self.state = Found(news.spec, time.perf_counter() - began_s)
            case _:
                raise self._wrong("was found")

    def displaced(self) -> None:
        """Note that the addresses of a retired model went to another: its engine is put together anew."""
        match self.state:
            case Retired(served):
                served.engine.close()
                self.state = Finding(time.perf_counter())
                self.find()

    def load(
        self, place: Callable[[ModelId, HostingSpec], Space], *, is_beside: bool = False
    ) -> ModelLoaded | None:
        """Take the memory for all of the model, and have what is missing done by threads.

        `is_beside`: others step meanwhile, and should not be held up. Returns the news if nothing is missing.
        Raises what `place` does, and has changed nothing then.
        """
        began_s = time.perf_counter()
        match self.state:
            case Found(spec, open_s):
                space = place(self.model, spec)
                load = self._start_load(spec, space, began_s, open_s, is_beside=is_beside)
                self.state = Assembling(spec, load)
                return None
            case Incomplete(served) | Retired(served):
                space = place(self.model, served.spec)
                if isinstance(self.state, Retired):
                    self._pool.prepare_rest(self.model)
                    served.engine.runner.fill_tables()
                if not self._pool.keeps_addresses:
                    served.rebind(space.places, space.workspace)
                if not space.parts:
                    took_s = time.perf_counter() - began_s
                    reused_bytes = served.spec.tensor_bytes
                    return self._complete(served, _NO_LOAD, reused_bytes, place_s=took_s, assemble_s=took_s)
                load = self._start_load(served.spec, space, began_s, open_s=0.0, engine=served.engine)
                self.state = Loading(served, load)
                return None
            case _:
                raise self._wrong("cannot be loaded")

    def _start_load(
        self,
        spec: HostingSpec,
        space: Space,
        began_s: float,
        open_s: float,
        *,
        engine: Engine | None = None,
        is_beside: bool = False,
    ) -> ModelLoad:
        pool, post, name, hosting = self._pool, self._post, self.model, self.order.hosting
        if self._opened is None:
            raise self._wrong("was never found")
        load = ModelLoad(
            self._opened,
            spec,
            space,
            self._resources,
            prepare=lambda part: pool.prepare(name, part),
            prepare_rest=lambda: pool.prepare_rest(name),
            post=lambda news: post(hosting, news),
            marks=self._resources.marks.of(name),
            began_s=began_s,
            open_s=open_s,
            engine=engine,
            is_beside=is_beside,
            member=self.member,
        )
        for request in self.pending.queued:
            load.expect(request)
        return load

    def start_prefetch(self) -> None:
        """Have the model come to host memory, unless it does or all of it is on the device."""
        is_missing = isinstance(self.state, Found | Incomplete | Retired)
        if self._opened is not None and not self.is_loading and is_missing:
            post, hosting = self._post, self.order.hosting
            self.prefetch.begin(self.order, self._opened, lambda news: post(hosting, news))

    def engine_ready(self, news: EngineReady) -> ModelLoaded | None:
        """Note that the engine is there. Returns the news if all bytes are as well."""
        match self.state:
            case Assembling(spec, load):
                news.engine.settles_later = True  # `ModelSteps.settle` finishes its books
                self.state = Loading(ServedModel(spec, news.engine), load)
                self.look, self.first_load = news.look, None
                self.memory = None if news.look is None else news.look.memory
            case Loading(load=load):
                pass
            case _:
                raise self._wrong("got an engine")
        load.is_engine_ready = True
        if news.is_whole:
            load.transfer_began_s = load.ready_s = time.perf_counter()
            load.weights = _NO_LOAD
        return self._complete_if_whole()

    def weights_loaded(self, news: WeightsLoaded) -> ModelLoaded | None:
        """Note that all bytes are there. Returns the news if the engine is as well."""
        if (load := self.load_under_way) is not None:
            load.weights = news
        return self._complete_if_whole()

    def _complete_if_whole(self) -> ModelLoaded | None:
        match self.state:
            case Loading(served, load) if load.is_engine_ready and load.weights is not None:
                return self._complete(
                    served,
                    load.weights,
                    load.reused_bytes,
                    open_s=load.open_s,
                    place_s=load.transfer_began_s - load.began_s,
                    assemble_s=load.ready_s - load.began_s,
                    kernels_s=load.kernels_s,
                )
        return None

    def _complete(
        self,
        served: ServedModel,
        weights: WeightsLoaded,
        reused_bytes: int,
        *,
        place_s: float,
        assemble_s: float,
        open_s: float = 0.0,
        kernels_s: float = 0.0,
    ) -> ModelLoaded:
        """Have all of the model be there: its bytes may be taken and moved only from here on."""
        self.state = Loaded(served)
        self._pool.load_ended(self.model, is_whole=True)
        if self._resources.config.graphs == "start":
            served.engine.runner.capture_all()
        record, widen_s = weights.record, weights.widen_s
        prefetched = self.prefetch.take_records()
        ahead_bytes = sum(one.num_bytes for one in prefetched)
        total_s = record.total_s + (widen_s or 0.0)
        loaded = ModelLoaded(
            model=self.model,
            hosting=self.order.hosting,
            rungs=rung_bytes(*prefetched, record),
            reused_bytes=max(0, reused_bytes - ahead_bytes),
            shared_bytes=record.shared_bytes + sum(one.shared_bytes for one in prefetched),
            open_s=open_s,
            assemble_s=assemble_s,
            first_layer_s=record.first_layer_s if widen_s is None else total_s,
            total_s=total_s,
            is_widened=widen_s is not None,
            ahead_bytes=ahead_bytes,
            place_s=place_s,
            kernels_s=kernels_s,
        )
        self.first_load = self.first_load or loaded
        return loaded

    # The way back.

    def became_incomplete(self) -> None:
        match self.state:
            case Loaded(served):
                self.state = Incomplete(served)

    def stop_loading(self) -> None:
        """End a load under way, and wait for its threads.

        Unless all of it has come, the memory that it was to fill is given back. A model that has no engine
        yet is closed with it. Its stay ends, so what was posted is stale.
        """
        self.prefetch.cancel()
        load = self.load_under_way
        if load is None:
            return
        engine = load.cancel()
        self._pool.load_ended(self.model, is_whole=load.weights is not None)
        match self.state:
            case Loading(served):
                self.state = Incomplete(served)
            case _:
                if engine is not None:
                    engine.close()
                self.state = Closed()

    def settle(self) -> None:
        """Wait until no step touches its memory. Its requests have ended."""
        if self.member is not None:
            self.member.close()
        self.settle_steps()

    def settle_steps(self) -> None:
        """Wait for the steps that were under way when its requests ended, not for other members."""
        if (served := self.served) is None:
            return
        if self.member is None:
            served.engine.flush()
        else:
            served.engine.runner.synchronize()

    def retire(self) -> None:
        match self.state:
            case Loaded(served) | Incomplete(served) | Retired(served):
                self.state = Retired(served)
            case _:
                raise self._wrong("cannot be retired")

    def close(self) -> None:
        """End it for good. No step uses its memory, which is left to the pool."""
        self._is_closed.set()
        if self.member is not None:
            self.member.close()
        self.stop_loading()
        if (served := self.served) is not None:
            served.engine.close()
        if self.member is not None:
            self.member.free()
        self.state = Closed()
