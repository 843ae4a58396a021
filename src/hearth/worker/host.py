"""One model on a worker, from the order to host it to the last byte given back. Steps no engine by itself.

    opening     a thread of its own has the keeper look it up, takes its memory and puts its engine together:
                the step thread has tokens of other models to make meanwhile
    arriving    its bytes are on their way
    near        the last of them should be there soon: a step follows them layer by layer, and holds up the
                step thread for some milliseconds, so it is made only while no other model has one to make
    loaded

Requests are taken from the beginning and wait, in their order, for their first step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hearth.config import EngineConfig
from hearth.engine.assemble import Memory, ModelSpec, assemble, workspace_bytes
from hearth.engine.engine import Engine
from hearth.errors import LenderGone, ModelError
from hearth.memory.pool import Need, Pool
from hearth.messages import HostModel, ModelLoaded, RungBytes, StartRequest
from hearth.models.layout import DTYPES
from hearth.models.weights import bind, contiguous_slots
from hearth.store.borrower import BorrowedModel, Borrower
from hearth.store.loader import Loader
from hearth.store.manifest import Manifest
from hearth.store.widen import served_layout
from hearth.worker.arrival import Arrival, ArrivalNews, Broken, Loaded
from hearth.worker.failure import failure_of

TOKENIZER = "tokenizer.json"
#: How long a keeper that is not there is waited for, and how long between two looks.
LENDER_PATIENCE_S, LENDER_DELAY_S = 15.0, 0.25


@dataclass(frozen=True, slots=True)
class Opened:
    """Its engine is there."""


HostNews = Opened | ArrivalNews


@dataclass(frozen=True, slots=True)
class Workshop:
    """What all models of a worker are hosted with."""

    device: torch.device
    config: EngineConfig
    pool: Pool
    borrower: Borrower
    loader: Loader


class Host:
    """Mutable; the step thread alone calls it. `post` is called by other threads."""

    def __init__(self, order: HostModel, workshop: Workshop, post: Callable[[HostNews], None]) -> None:
        self.order = order
        self.engine: Engine | None = None  #: None: it is being opened
        self.is_near = self.is_loaded = False
        #: Came while it was being opened; empty from then on.
        self.waiting: list[StartRequest] = []
        self._workshop, self._post = workshop, post
        #: Keeps building and dropping apart; guards the fields below, of which the opening thread writes all
        #: but the first.
        self._lock = threading.Lock()
        self._is_dropped = False
        self._built: Engine | None = None
        self._arrival: Arrival | None = None
        self._has_memory = False
        self._open_s = self._assemble_s = 0.0
        threading.Thread(target=self._open, name="hearth-open", daemon=True).start()

    @property
    def has_work(self) -> bool:
        return self.engine is not None and self.engine.has_work

    def opened(self) -> list[StartRequest]:
        """What has waited for the engine, which is there now."""
        with self._lock:
            self.engine = self._built
        waiting, self.waiting = self.waiting, []
        return waiting

    def loaded(self, news: Loaded) -> ModelLoaded:
        record = news.record
        total_s = record.total_s + (news.widen_s or 0.0)
        self.is_loaded = True
        return ModelLoaded(
            model=self.order.model,
            hosting=self.order.hosting,
            rungs=tuple(RungBytes(rung, use.num_bytes, use.seconds) for rung, use in record.rungs.items()),
            shared_bytes=record.shared_bytes,
            open_s=self._open_s,
            assemble_s=self._assemble_s,
            first_layer_s=record.first_layer_s if news.widen_s is None else total_s,
            total_s=total_s,
            is_widened=news.widen_s is not None,
        )

    def drop(self) -> None:
        """Call off what is under way and give back all memory. Whatever it posts after this is stale."""
        with self._lock:
            self._is_dropped = True
            if self._arrival is not None:
                self._arrival.cancel()
            if self._built is not None:
                self._built.close()
            self.engine = self._built = self._arrival = None
            if self._has_memory:
                self._workshop.pool.give_back(self.order.model)

    def _open(self) -> None:
        order, shop, began_s = self.order, self._workshop, time.perf_counter()
        try:
            if shop.device.type == "cuda":
                torch.cuda.set_device(shop.device)  # which every thread has to say for itself
            model = self._borrow()
            if model.manifest.digest != order.digest:
                raise ModelError(
                    f"`{order.model}` was changed since it was deployed (manifest {model.manifest.digest}, "
                    f"deployed {order.digest}); deploy it again"
                )
            with self._lock:
                if self._is_dropped:
                    return
                self._open_s = time.perf_counter() - began_s
                self._build(model)
        except Exception as error:  # the thread's top: whoever owns the model is told
            self._post(Broken(failure_of(error)))
        else:
            self._post(Opened())

    def _borrow(self) -> BorrowedModel:
        """A keeper that died is started anew within seconds."""
        order, give_up_s = self.order, time.monotonic() + LENDER_PATIENCE_S
        while True:
            try:
                return self._workshop.borrower.open(order.where, order.weight)
            except LenderGone:
                if time.monotonic() > give_up_s or self._is_dropped:
                    raise
                time.sleep(LENDER_DELAY_S)

    def _build(self, model: BorrowedModel) -> None:
        """Take memory, put the engine together and have the weights loaded."""
        began_s = time.perf_counter()
        shop, order, manifest = self._workshop, self.order, model.manifest
        dtype = "float32" if shop.device.type == "cpu" else manifest.dtype
        layout = served_layout(manifest, dtype)
        spec = ModelSpec(
            arch=manifest.arch,
            dtype=DTYPES[dtype],
            max_context=_context(order, manifest),
            eos_ids=frozenset(order.eos_ids),
            tokenizer_json=_tokenizer(model),
        )
        need = Need(layout.num_bytes, workspace_bytes(spec, shop.config, shop.device), order.kv_bytes)
        space = shop.pool.take(order.model, need)
        self._has_memory = True
        weights = bind(spec.arch, layout, contiguous_slots(layout, space.weights))
        engine = assemble(spec, weights, shop.config, shop.device, Memory(space.workspace, space.kv))
        self._assemble_s = time.perf_counter() - began_s
        # Only now: whatever else goes to the device would have to queue behind the weights.
        self._arrival = Arrival(model, space.weights, layout, shop.borrower, shop.loader, self._post)
        if (gate := self._arrival.gate()) is not None:
            engine.runner.follow(gate)
        self._built = engine


def _context(order: HostModel, manifest: Manifest) -> int:
    most = manifest.arch.max_positions
    if not 1 < order.max_context <= most:
        raise ModelError(
            f"the context of `{order.model}` must be from 2 to what it was made for, {most}; "
            f"given: {order.max_context}"
        )
    return order.max_context


def _tokenizer(model: BorrowedModel) -> Path | None:
    path = Path(model.opened.directory) / TOKENIZER
    return path if path.is_file() else None
