"""Loads a placed model: transfers its missing bytes, and assembles its engine meanwhile. Places nothing.

    pages of weights   | mapped ahead of the copies
    bytes                | transferred
    workspace, tables      | mapped | engine assembled, tables filled, graphs restored | first step

All of it happens on threads of their own, while the step thread makes tokens of other models.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from hearth.core.errors import ModelError
from hearth.core.messages import HostModel, StartRequest
from hearth.engine.assemble import Memory, assemble
from hearth.engine.engine import Engine, StepMarks
from hearth.engine.graph_capture import GraphCapture
from hearth.engine.layer_runner import LayerRunner
from hearth.engine.step_shape import StepShape
from hearth.memory.pool import Space
from hearth.models.layout import ByteRange
from hearth.models.weights import bind
from hearth.store.transfer.destination import PageMapping
from hearth.store.transfer.lease import Lease, await_keeper
from hearth.store.transfer.lease_client import LeaseClient, OpenedModel
from hearth.store.transfer.record import LoadRecord
from hearth.worker.failure import start_thread
from hearth.worker.hosting_spec import HostingSpec
from hearth.worker.model_snapshots import SnapshotLook
from hearth.worker.runtime import HostingResources
from hearth.worker.stage_member import StageMember, StageNews
from hearth.worker.weights_transfer import (
    LoadNews,
    ModelBroken,
    WeightsLoaded,
    WeightsTransfer,
    missing_chunks,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFound:
    spec: HostingSpec
    opened: OpenedModel


@dataclass(frozen=True, slots=True)
class EngineReady:
    engine: Engine
    is_whole: bool  #: no bytes are missing
    look: SnapshotLook | None = None  #: for its snapshot; None: the engine is not new, or none are used


@dataclass(frozen=True, slots=True)
class HostPrefetched:
    is_in_host: bool


@dataclass(frozen=True, slots=True)
class FrontLoaded:
    """The transfer of a model's first missing bytes, ahead of its turn, is over."""

    record: LoadRecord | None  #: None: it failed, or the bytes were not in host memory any more


@dataclass(frozen=True, slots=True)
class FirstRequests:
    """Requests that wait for a model being loaded, as far as their first steps can be foreseen."""

    num_requests: int = 0
    num_tokens: int = 0  #: of their prompts
    num_decoding: int = 0  #: of them, those that are not over with their first token

    def with_one(self, request: StartRequest) -> FirstRequests:
        """Return these and `request`, unless it has an adapter or is pooled."""
        return self._changed(request, 1)

    def without_one(self, request: StartRequest) -> FirstRequests:
        return self._changed(request, -1)

    def _changed(self, request: StartRequest, by: int) -> FirstRequests:
        if request.adapter is not None or request.pooling is not None:
            return self
        max_tokens, num_output = request.sampling.max_tokens, len(request.output)
        is_decoding = max_tokens is None or max_tokens - num_output > 1
        return FirstRequests(
            self.num_requests + by,
            self.num_tokens + by * (len(request.prompt) + num_output),
            self.num_decoding + by * is_decoding,
        )


@dataclass(frozen=True, slots=True)
class SnapshotDiscarded:
    """State restored from a model's snapshot computes something else than an ordinary start."""

    reason: str


@dataclass(frozen=True, slots=True)
class FirstStepsUncaptured:
    """The first steps of waiting requests were not captured, and are launched kernel by kernel."""


HostingNews = (
    ModelFound
    | EngineReady
    | LoadNews
    | HostPrefetched
    | FrontLoaded
    | SnapshotDiscarded
    | FirstStepsUncaptured
    | StageNews
)


class ModelLoad:
    """A load under way. The step thread calls it and takes its news; other threads `post` them."""

    def __init__(
        self,
        opened: OpenedModel,
        spec: HostingSpec,
        space: Space,
        resources: HostingResources,
        prepare: Callable[[ByteRange], None],
        prepare_rest: Callable[[], None],
        post: Callable[[HostingNews], None],
        *,
        marks: StepMarks,
        began_s: float,
        open_s: float,
        engine: Engine | None = None,
        is_beside: bool = False,
        member: StageMember | None = None,
    ) -> None:
        """Start to transfer missing bytes, and to assemble the engine, unless the model has one.

        `prepare` maps a part of the weights, `prepare_rest` the rest of the space. Opening the model took
        `open_s`. `marks` follows the engine's steps. `is_beside`: other models step meanwhile.
        `member`: of a pipeline that runs the model.
        """
        self._spec, self._space, self._resources, self._marks = spec, space, resources, marks
        self._prepare_rest, self._is_beside, self._member = prepare_rest, is_beside, member
        #: Their first steps are captured beside the load. Written by the step thread.
        self.first = FirstRequests()
        self._request_by_run: dict[int, StartRequest] = {}  #: those that `first` counts
        self._opened, self._post, self.began_s, self.open_s = opened, post, began_s, open_s
        gap_bytes = sum(gap.part.end - gap.part.begin for gap in space.gaps)
        #: Stored bytes that are on the device: the model's own, or those of a model like it.
        self.reused_bytes = max(0, spec.tensor_bytes - gap_bytes)
        #: News that the step thread has taken so far.
        self.is_engine_ready = False
        self.is_almost_loaded = False
        self.weights: WeightsLoaded | None = None
        #: When the transfer began, if there is one, and when the engine was there: by `time.perf_counter`.
        self.transfer_began_s = self.ready_s = 0.0
        self.kernels_s = 0.0  #: for bringing kernels to the device
        #: Keeps building and cancelling apart; guards the fields below.
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._engine: Engine | None = None
        self._transfer: WeightsTransfer | None = None
        self._mapping: PageMapping | None = None
        self._new_mapping = partial(PageMapping, prepare, space.parts, resources.loader.threads)
        start_thread(
            resources.loader.threads,
            lambda: self._prepare(engine),
            lambda failure: post(ModelBroken(failure)),
        )

    @property
    def can_follow(self) -> bool:
        return self.is_almost_loaded and self.is_engine_ready

    def expect(self, request: StartRequest) -> None:
        self._request_by_run[request.run] = request
        self.first = self.first.with_one(request)

    def forget(self, run: int) -> None:
        if (request := self._request_by_run.pop(run, None)) is not None:
            self.first = self.first.without_one(request)

    def cancel(self) -> Engine | None:
        """Cancel the load, if it is not over, and wait until no thread touches the memory.

        Returns the engine if there is one. Posted news are stale from here on.
        """
        with self._lock:
            self._is_cancelled = True
            if self._mapping is not None:
                self._mapping.stop()
            if self._transfer is not None:
                self._transfer.cancel()
            if self._engine is not None:
                self._engine.runner.layers.follow(None)
            return self._engine

    def _prepare(self, engine: Engine | None) -> None:
        with (
            self._resources.lease_client.segment.loading()
        ):  # what it takes on the device must not have to wait
            self._run(engine)

    def _run(self, engine: Engine | None) -> None:
        space = self._space
        if space.gaps:
            self._start_transfer()
        elif space.parts:
            self._start_mapping()
        look, is_new = None, engine is None
        if engine is None and not self._is_cancelled:
            engine = self._assemble()
            # Beside the transfer: kernels on their way to the device wait for queued chunks, some ms each.
            # Only this model's first step waits for them. A model with an engine has its kernels.
            self._have_kernels()
            if not self._is_cancelled:
                look = self._look(engine)  # behind the kernels, of which restored graphs are made
        with self._lock:
            if self._is_cancelled or engine is None:
                if is_new and engine is not None:
                    engine.runner.close()  # its graphs may be being restored
                return
            self._engine = engine  # first: `cancel` closes it, whatever breaks below
            if is_new:
                engine.runner.fill_tables()  # under the lock: it touches the space
            self.ready_s = time.perf_counter()
            if self._transfer is not None and (gate := self._transfer.gate()) is not None:
                engine.runner.layers.follow(gate)
        if not space.gaps and self._mapping is not None:
            self._mapping.wait()  # the bytes are there, and have only to be mapped
        self._post(EngineReady(engine, is_whole=not space.gaps, look=look))
        if is_new and self._member is None:
            self._capture_first(engine.runner.layers)

    def _capture_first(self, runner: LayerRunner) -> None:
        """Capture the first steps of waiting requests: uncaptured ones take the step thread some 15 ms each.

        Unless other models step, the first one follows the transfer layer by layer, and is never captured.
        """
        if self._mapping is None:
            return
        launches, captured = self._resources.marks.launches, set[StepShape]()
        try:
            self._mapping.wait()  # kernels check that there is memory
            while (shape := self._next_shape(runner, captured)) is not None:
                runner.capture_substitutes(shape, GraphCapture, launches.give_way, launches.get_behind)
                captured.add(shape)
        except Exception:  # the steps run without
            if not self._is_cancelled:  # else the memory is gone
                log.exception("first_steps_not_captured")
                self._post(FirstStepsUncaptured())

    def _next_shape(self, runner: LayerRunner, captured: Collection[StepShape]) -> StepShape | None:
        """Return the next step to capture; None: there is none, or it would be captured too late."""
        is_followed = self.is_almost_loaded and not self._is_beside
        if self._is_cancelled or is_followed or self.weights is not None:
            return None
        first = self.first
        shapes = runner.sizes.first_shapes(first.num_requests, first.num_tokens, first.num_decoding)
        wanted = (one for one in shapes if self._is_beside or not one.has_prompts)
        return next((one for one in wanted if one not in captured), None)

    def _start_transfer(self) -> None:
        """Lease the missing chunks and start their transfer, unless the load was cancelled.

        From here on, any other copy to the device waits for as many chunks as are queued at a time.
        """
        opened, space, resources = self._opened, self._space, self._resources
        lease = Lease(resources.lease_client, opened, missing_chunks(opened.manifest, space.gaps))
        transfer = WeightsTransfer(
            lease, opened.manifest, space, self._spec.layout, self._new_mapping, resources.loader, self._post
        )
        with self._lock:
            if self._is_cancelled:
                return
            self._transfer = transfer
        self.transfer_began_s = time.perf_counter()
        transfer.start()
        self._mapping = transfer.mapping

    def _start_mapping(self) -> None:
        with self._lock:
            if not self._is_cancelled:
                self._mapping = self._new_mapping()

    def _assemble(self) -> Engine:
        """Return the engine. Not under the lock: it takes long, and touches none of the space."""
        spec, space, resources = self._spec, self._space, self._resources
        self._prepare_rest()
        weights = bind(spec.model.arch, spec.layout, space.places, spec.model.layers)
        memory = Memory(space.workspace, space.tables, space.kv, space.sink, spec.floor_blocks)
        later = None if self._member is None else self._member.connect(spec.model, resources.device)
        return assemble(spec.model, weights, resources.config, resources.device, memory, self._marks, later)

    def _have_kernels(self) -> None:
        if (kernels := self._resources.kernels) is not None:
            began_s = time.perf_counter()
            kernels.compile(self._spec.manifest, self._spec.model.limits)
            self.kernels_s = time.perf_counter() - began_s

    def _look(self, engine: Engine) -> SnapshotLook | None:
        snapshots = self._resources.snapshots
        if snapshots is None:
            return None
        post = self._post
        return snapshots.look(
            self._spec, self._space, engine, discarded=lambda reason: post(SnapshotDiscarded(reason))
        )


def open_model(lease_client: LeaseClient, order: HostModel, is_given_up: Callable[[], bool]) -> OpenedModel:
    """Have the keeper open a model. Raises KeeperGone, and ModelError if it changed since its deployment."""
    model = await_keeper(lambda: lease_client.open(order.where, order.weight), is_given_up)
    if model.manifest.digest != order.digest:
        raise ModelError(
            f"`{order.model}` was changed since it was deployed (manifest {model.manifest.digest}, "
            f"deployed {order.digest}); deploy it again"
        )
    return model
