"""One model on a worker, from the order to host it to the last byte given back. Steps no engine by itself.

    finding     a thread of its own has the keeper look it up
    settling    its place is taken, and the rest is left to a thread again: its engine is put together, if it
                has none yet, and what is missing of its bytes is loaded, while the step thread makes tokens
                of other models. Once the last bytes should be there soon it is near: a step may follow them
                layer by layer, which holds up the step thread for some milliseconds, so it is made only
                while no other model has one to make
    loaded      all of it is there. While it has no requests others may take from its tail; then it settles
                again for the next one
    retired     it is promised nothing; where addresses last, its engine waits here for the model to come back

Requests are taken from the beginning and wait, in their order, for their first step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hearth.config import EngineConfig
from hearth.engine.assemble import Memory, assemble
from hearth.engine.engine import Engine
from hearth.errors import LenderGone, ModelError
from hearth.memory.pool import EvictionTermsOf, Pool, Space
from hearth.messages import HostModel, ModelLoaded, RungBytes, StartRequest
from hearth.models.weights import TensorPlace, bind
from hearth.store.borrower import BorrowedModel, Borrower
from hearth.store.loader import Loader
from hearth.store.record import LoadRecord
from hearth.types import Hold, ModelId
from hearth.worker.failure import failure_of
from hearth.worker.hosting_spec import HostingSpec, hosting_spec
from hearth.worker.map_ahead import MapAhead
from hearth.worker.watched_load import Broken, Destination, Loaded, LoadNews, WatchedLoad

#: How long a keeper that is not there is waited for, and how long between two looks.
LENDER_PATIENCE_S, LENDER_DELAY_S = 15.0, 0.25
#: What is told of a model of which nothing was missing.
_NO_LOAD = Loaded(LoadRecord("", 0, {}, 0.0, 0.0, 0.0, 0.0, 0.0, 0), None)


@dataclass(frozen=True, slots=True)
class Found:
    """What it is, and what it takes, is known."""

    plan: HostingSpec
    model: BorrowedModel


@dataclass(frozen=True, slots=True)
class Opened:
    """Its engine is there, and follows the bytes that are missing."""

    is_whole: bool  #: and so are all of its bytes


HostingNews = Found | Opened | LoadNews


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all models of a worker are hosted with."""

    device: torch.device
    config: EngineConfig
    new_pool: Callable[[EvictionTermsOf], Pool]
    borrower: Borrower
    loader: Loader


class HostedModel:
    """Mutable; the step thread alone calls it. `post` is called by other threads."""

    def __init__(
        self, order: HostModel, workshop: Workshop, pool: Pool, post: Callable[[int, HostingNews], None]
    ) -> None:
        """`post` is told of which stay the news are."""
        self.order = order
        self.hold = Hold.WARM  #: while it has no requests
        self.plan: HostingSpec | None = None  #: None: it is being looked for
        self.engine: Engine | None = None  #: None: it is being put together
        #: From the moment it has its place until its engine and all its bytes are there.
        self.is_settling = False
        self.is_loaded = False
        #: What has come of that: its engine, most of its bytes, all of them.
        self._is_opened = self._is_near = False
        self._arrived: Loaded | None = None
        #: Came while there was no engine; empty from then on.
        self.waiting: list[StartRequest] = []
        self.unchecked: set[int] = set()  #: runs whose grammar is being compiled
        self._workshop, self._pool, self._post = workshop, pool, post
        #: Keeps building and dropping apart; guards the fields below.
        self._lock = threading.Lock()
        self._is_dropped = False
        self._built: Engine | None = None
        self._arrival: WatchedLoad | None = None
        self._groundwork: MapAhead | None = None
        self._borrowed: BorrowedModel | None = None  #: as it was found, until it is settled
        #: As stored, that needed no load when it was settled last: its own, or those of a model like it.
        self.reused_bytes = 0
        self._began_s, self._open_s, self._assemble_s = time.perf_counter(), 0.0, 0.0
        self._start_thread(self._find)

    @property
    def model(self) -> ModelId:
        return self.order.model

    @property
    def has_work(self) -> bool:
        return self.engine is not None and self.engine.has_work

    @property
    def is_near(self) -> bool:
        """A step may follow the bytes: they should be there soon, and the engine knows to wait for them."""
        return self._is_near and self._is_opened

    @property
    def is_busy(self) -> bool:
        """Nothing of it may be taken: it has requests, or memory that is being filled."""
        return self.has_work or bool(self.waiting) or bool(self.unchecked) or self.is_settling

    @property
    def regarded(self) -> Hold:
        return Hold.BUSY if self.is_busy and self.hold is not Hold.PINNED else self.hold

    def is_same(self, order: HostModel) -> bool:
        """Whether an order asks for just what this engine was made for."""
        mine = self.order
        return (mine.digest, mine.max_context, mine.kv_floor_bytes, mine.max_kv_bytes, mine.eos_ids) == (
            *(order.digest, order.max_context, order.kv_floor_bytes, order.max_kv_bytes, order.eos_ids),
        )

    def come_back(self, order: HostModel) -> None:
        """A retired model with its engine is hosted again."""
        self.order, self.hold = order, Hold.WARM

    def found(self, news: Found) -> None:
        self.plan, self._borrowed = news.plan, news.model
        self._open_s = time.perf_counter() - self._began_s

    def settle(self, place: Callable[[ModelId, HostingSpec], Space]) -> ModelLoaded | None:
        """Take a place and have the rest done. Returns the news if there is nothing to be done.

        Raises:
            DeviceError: there is no place for it.
        """
        plan = self.plan
        assert plan is not None, f"`{self.model}` was not found yet"
        assert not self.is_settling, f"`{self.model}` is settled already"
        if self._borrowed is None:
            self._open_s = 0.0
        self._began_s = time.perf_counter()
        space = place(self.model, plan)
        gap_bytes = sum(gap.part.end - gap.part.begin for gap in space.gaps)
        self.reused_bytes = max(0, plan.tensor_bytes - gap_bytes)
        self.is_loaded = self._is_opened = self._is_near = False
        self._arrived = None
        self.is_settling = True
        if self.engine is not None:
            if not self._pool.keeps_addresses:
                self.rebind(space.places)
            if not space.parts:
                return self.opened(Opened(is_whole=True))
        model, self._borrowed = self._borrowed, None
        hosting, pool, name = self.order.hosting, self._pool, self.model
        if space.parts:
            self._groundwork = MapAhead(lambda part: pool.prepare(name, part), space.parts)
        self._start_thread(lambda: self._settle(plan, space, model, hosting))
        return None

    def rebind(self, places: Mapping[str, TensorPlace]) -> None:
        """Its tensors are elsewhere now."""
        assert self.plan is not None, f"`{self.model}` was moved before it was found"
        if self.engine is not None:
            self.engine.runner.rebind(bind(self.plan.spec.arch, self.plan.layout, places))

    def opened(self, news: Opened) -> ModelLoaded | None:
        """The engine is there. Returns the news if all bytes are as well."""
        with self._lock:
            self.engine = self._built
        self._is_opened = True
        if news.is_whole:
            self._assemble_s = time.perf_counter() - self._began_s
            self._arrived = _NO_LOAD
        return self._settled()

    def near(self) -> None:
        """The last bytes should be there soon."""
        self._is_near = True

    def loaded(self, news: Loaded) -> ModelLoaded | None:
        """All bytes are there. Returns the news if the engine is as well."""
        self._arrived = news
        return self._settled()

    def _settled(self) -> ModelLoaded | None:
        """Its bytes may be taken and moved only from here on: there is an engine that can follow them."""
        if not self._is_opened or self._arrived is None:
            return None
        with self._lock:
            self._groundwork = self._arrival = None
        self.is_loaded, self.is_settling = True, False
        self._pool.landed(self.model, is_whole=True)
        if self._workshop.config.graphs == "start" and self.engine is not None:
            self.engine.runner.capture_all()
        record, widen_s = self._arrived.record, self._arrived.widen_s
        total_s = record.total_s + (widen_s or 0.0)
        return ModelLoaded(
            model=self.model,
            hosting=self.order.hosting,
            rungs=tuple(RungBytes(rung, use.num_bytes, use.seconds) for rung, use in record.rungs.items()),
            reused_bytes=self.reused_bytes,
            shared_bytes=record.shared_bytes,
            open_s=self._open_s,
            assemble_s=self._assemble_s,
            first_layer_s=record.first_layer_s if widen_s is None else total_s,
            total_s=total_s,
            is_widened=widen_s is not None,
        )

    def lost(self) -> None:
        """Others took from its tail."""
        self.is_loaded = False

    def call_off(self) -> None:
        """End a load under way, and wait for its threads; unless all of it has come, what it was to fill is
        given back. The stay ends with it, so what is posted after this is stale."""
        with self._lock:
            if self._groundwork is not None:
                self._groundwork.stop()
            if self._arrival is not None:
                self._arrival.cancel()
            self._groundwork = self._arrival = None
            if self._built is not None:
                self._built.runner.follow(None)
            if self.is_settling:
                self._pool.landed(self.model, is_whole=self._arrived is not None)
                self.is_settling = False

    def close(self) -> None:
        """End it for good: nobody computes with its memory any more, which is left to the pool."""
        with self._lock:
            self._is_dropped = True
        self.call_off()
        with self._lock:
            if self._built is not None:
                self._built.close()
            self.engine = self._built = None

    # On threads of their own.

    def _start_thread(self, act: Callable[[], None]) -> None:
        hosting = self.order.hosting

        def run() -> None:
            try:
                if self._workshop.device.type == "cuda":
                    torch.cuda.set_device(self._workshop.device)  # which every thread has to say for itself
                act()
            except Exception as error:  # the thread's top: whoever owns the model is told
                self._post(hosting, Broken(failure_of(error)))

        threading.Thread(target=run, name="hearth-host", daemon=True).start()

    def _find(self) -> None:
        order, shop = self.order, self._workshop
        model = self._borrow(order)
        self._post(order.hosting, Found(hosting_spec(order, model, shop.device, shop.config), model))

    def _settle(self, plan: HostingSpec, space: Space, model: BorrowedModel | None, hosting: int) -> None:
        """Put the engine together, where there is none, and start to load what is missing."""
        if space.gaps and model is None:
            model = self._borrow(self.order)
        shop, engine = self._workshop, self.engine
        if (
            engine is None and not self._is_dropped
        ):  # not under the lock: it takes its time, and touches none of the space
            weights = bind(plan.spec.arch, plan.layout, space.places)
            memory = Memory(space.workspace, space.kv, space.sink, plan.floor_blocks)
            engine = assemble(plan.spec, weights, shop.config, shop.device, memory)
        with self._lock:
            if self._is_dropped or not self.is_settling or self.order.hosting != hosting:
                return
            assert engine is not None, f"`{self.model}` was put together"
            self._built = engine
            self._assemble_s = time.perf_counter() - self._began_s
            if model is not None and space.gaps:
                # Only now: whatever else goes to the device would have to queue behind the weights.
                self._arrival = self._load(plan, space, model, hosting)
                if (gate := self._arrival.gate()) is not None:
                    engine.runner.follow(gate)
            groundwork = None if space.gaps else self._groundwork
        if groundwork is not None:
            groundwork.wait()  # all of it is there, in other hands, and has to be mapped only
        self._post(hosting, Opened(is_whole=not space.gaps))

    def _load(self, plan: HostingSpec, space: Space, model: BorrowedModel, hosting: int) -> WatchedLoad:
        post, shop = self._post, self._workshop
        assert self._groundwork is not None, f"`{self.model}` is loaded nowhere"
        to = Destination(space.gaps, self._groundwork, space.places, plan.layout)
        return WatchedLoad(model, to, shop.borrower, shop.loader, lambda news: post(hosting, news))

    def _borrow(self, order: HostModel) -> BorrowedModel:
        """A keeper that died is started anew within seconds."""
        give_up_s = time.monotonic() + LENDER_PATIENCE_S
        while True:
            try:
                model = self._workshop.borrower.open(order.where, order.weight)
            except LenderGone:
                if time.monotonic() > give_up_s or self._is_dropped:
                    raise
                time.sleep(LENDER_DELAY_S)
            else:
                break
        if model.manifest.digest != order.digest:
            raise ModelError(
                f"`{order.model}` was changed since it was deployed (manifest {model.manifest.digest}, "
                f"deployed {order.digest}); deploy it again"
            )
        return model
