"""A worker's part in a pipeline: members find each other, and later ones run what the first one sends.

    first  -- steps -->  second  -- steps -->  ...  last
      ^------------------ results ------------------'

Each member connects to the next one, and the last to the first (`stage_connections.py`). On one machine
hidden states stay in memory that both map.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from hearth.core.errors import DeviceError, HearthError, StageLost
from hearth.core.messages import HostModel
from hearth.core.types import Member, Pipeline, Transport, node_of, transport_between
from hearth.engine.assemble import ModelSpec
from hearth.engine.engine import Engine, StepOutcome, StepOutputs
from hearth.engine.pending_step import StepInFlight
from hearth.engine.pipeline import BlockMap, LaterStage
from hearth.engine.stage_messages import (
    MemberAnswer,
    MemberMessage,
    OrderedMessage,
    StageResult,
    StageStep,
    StageWork,
)
from hearth.memory import shared_device_memory
from hearth.memory.shared_device_memory import DeviceMapping
from hearth.policy.memory.stage_kv import FirstKv, LaterKv
from hearth.system.spin import Spin, native_spin
from hearth.worker.stage_connections import Arrival, SharedMemory, StageConnections, StageHello
from hearth.worker.stage_link import (
    FrameSender,
    HiddenPlaces,
    StageInlet,
    StageLinks,
    StageOutlet,
    result_frame,
)

#: Steps of the last stage whose results have not been fetched from the device: it has host memory for two.
_MAX_UNFETCHED = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageArrived:
    """A message of the member before that has its place among the steps.

    A step comes twice: announced, and with its hidden states, which stay until it has ended.
    """

    message: StageWork | OrderedMessage
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ResultArrived:
    """A step has passed through all stages, or none will any more."""


@dataclass(frozen=True, slots=True)
class MemberTold:
    """Another member has told something about KV, or about the adapter of a request."""

    message: MemberMessage


StageNews = StageArrived | ResultArrived | MemberTold


class ResultSender:
    """Sends the results of the last stage as its steps end, and what else it tells the first."""

    def __init__(self, connection: socket.socket, pipeline: str) -> None:
        self._unfetched = threading.Semaphore(_MAX_UNFETCHED)
        self._sender = FrameSender(connection, pipeline, self._unfetched.release)
        self._connection, self.close = connection, self._sender.close

    def make_room(self) -> None:
        """Wait until another step may be launched. Raises StageLost if the first stage is gone."""
        self._unfetched.acquire()
        try:
            self._sender.check()
        except StageLost:
            self._unfetched.release()  # for the next call
            raise

    def send(self, step: StageStep, pending: StepInFlight) -> None:
        """Raises StageLost if the first stage is gone."""
        if pending.is_computed:
            self._sender.send(self._fetch(step, pending))
        else:
            self._sender.send_later(lambda: self._connection.sendall(self._fetch(step, pending)))

    def tell(self, answer: MemberAnswer) -> None:
        """Raises StageLost if the first stage is gone."""
        self._sender.send(result_frame(answer))

    def _fetch(self, step: StageStep, pending: StepInFlight) -> bytes:
        result = pending.wait()
        self._unfetched.release()
        return result_frame(StageResult(step.pipeline, step.plan.step_id, result, step.stage_s))


class _PinnedMemory:
    """Memory of other processes that a device may copy from and to."""

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self._memory, self._device = memory, device
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call] # untyped
        with torch.cuda.device(device):
            error = self._runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(error) != 0:
            raise DeviceError(f"{memory.nbytes} bytes for hidden states cannot be pinned: {error}")

    def free(self) -> None:
        with torch.cuda.device(self._device):
            self._runtime.cudaHostUnregister(self._memory.data_ptr())


Link = TypeVar("Link", StageOutlet, StageInlet, StageLinks, ResultSender)


class StageMember:
    """This worker in one pipeline.

    A thread of the load calls `connect`, the step thread all else. A reader closes what leads onward when the
    member before is gone.
    """

    def __init__(
        self, order: HostModel, connections: StageConnections, post: Callable[[StageNews], None]
    ) -> None:
        """`post` is called by other threads."""
        assert order.pipeline is not None, f"no pipeline: {order}"
        self._pipeline: Pipeline = order.pipeline
        self._number, self._connections, self._post = order.member, connections, post
        #: Of all members, in which this one counts its own. Written by the `Reclaimer`.
        self.kv: FirstKv | LaterKv = (FirstKv if self.is_first else LaterKv)(self._pipeline.num_blocks)
        self._closing: list[Callable[[], None]] = []
        self._lock = threading.Lock()  #: guards the two around it, which closing and connecting change
        self._is_closed = False
        #: To be freed. Written by the load, and by the step thread after it.
        self._memory: list[_PinnedMemory | DeviceMapping] = []
        self.spin: Spin | None = None  #: before threads sleep that wait for other members
        self.lacks_device_memory = False  #: hidden states take host memory instead
        self._outlet: StageOutlet | None = None
        self._inlet: StageInlet | None = None
        self._results: ResultSender | None = None
        self._links: StageLinks | None = None
        self._stage: LaterStage | None = None
        self._arrived: deque[StageWork | OrderedMessage] = deque()
        self._hidden: deque[torch.Tensor] = deque()  #: of the oldest steps among these
        self._is_prepared = False  #: the oldest message, which is a step

    @property
    def pipeline(self) -> str:
        return self._pipeline.name

    @property
    def is_first(self) -> bool:
        return self._number == 0

    @property
    def is_started(self) -> bool:
        return self._stage is not None

    @property
    def has_work(self) -> bool:
        """True if a later member can run its oldest message, or prepare it."""
        return self.is_started and bool(self._arrived) and (bool(self._hidden) or not self._is_prepared)

    @property
    def is_step_prepared(self) -> bool:
        """True if the oldest message is a step that was prepared, and its hidden states have come."""
        return self._is_prepared and bool(self._hidden)

    @property
    def num_dropped(self) -> int:
        """Frames of another pipeline, and repeated ones, which were dropped."""
        return sum(one.num_dropped for one in (self._inlet, self._links) if one is not None)

    def connect(self, spec: ModelSpec, device: torch.device) -> StageLinks | None:
        """Connect to the other members. Returns the later stages, for the engine of the first.

        Raises StageLost if a member is not reached, or this one is closed.
        """
        if device.type == "cuda":  # on a CPU, stages need the cores
            self.spin = native_spin()
        try:
            return self._connect(spec, device)
        except BaseException:
            self.free()
            raise

    def _connect(self, spec: ModelSpec, device: torch.device) -> StageLinks | None:
        members = self._pipeline.members
        if not self.is_first and self._number + 1 == len(members):
            connection = self._connections.connect(members[0].worker, self._hello(has_steps=False))
            self._results = self._close_later(ResultSender(connection, self._pipeline.name))
        else:
            self._outlet = self._close_later(self._connect_next(members[self._number + 1], spec, device))
        if self.is_first:
            arrival = self._arrival(has_steps=False, sender=members[-1])
            assert self._outlet is not None, "the first stage is not the last"
            self._links = self._close_later(
                StageLinks(
                    self._pipeline.name,
                    devices_of(members),
                    self._outlet,
                    arrival.connection,
                    # Not `self`: a cycle keeps memory.
                    arrived=partial(self._post, ResultArrived()),
                    told=partial(_post_told, self._post),
                    spin=self.spin,
                )
            )
            return self._links
        arrival = self._arrival(has_steps=True, sender=members[self._number - 1])
        places = self._places(arrival.shared, spec, device)
        self._inlet = StageInlet(arrival.connection, places, self._pipeline.name, self.spin)
        threading.Thread(target=self._read, args=(self._inlet,), name="hearth-stage", daemon=True).start()
        self._close_later(self._inlet)
        return None

    def start(self, engine: Engine) -> None:
        """Let a later member run messages, with the blocks that its engine has."""
        self._engine = engine
        self._stage = LaterStage(engine.runner, self._outlet, BlockMap(engine.batcher.blocks))

    def remove_blocks(self, extent: range) -> None:
        """Stop using blocks of a later member, which has enough others."""
        assert self._stage is not None, f"blocks of a member without an engine: {self._pipeline}"
        self._stage.remove_blocks(extent)

    def own_blocks(self, blocks: Sequence[int]) -> Sequence[int]:
        """Return the blocks of this member, by those of the first."""
        return blocks if self._stage is None else self._stage.own_blocks(blocks)

    def take(self, news: StageArrived) -> None:
        if news.hidden is None:
            self._arrived.append(news.message)
        else:
            self._hidden.append(news.hidden)

    def step(self) -> StepOutcome:
        """Run the oldest message; prepare it if it is a step without its hidden states."""
        stage, message = self._stage, self._arrived[0]
        assert stage is not None, f"messages for a member without an engine: {self._pipeline}"
        if isinstance(message, StageStep) and not self._hidden:
            self._engine.note_done()  # while there is time
            stage.prepare(message)
            self._is_prepared = True
        else:
            self._arrived.popleft()
            self._is_prepared = False
            self._run(stage, message)
        return StepOutcome(StepOutputs(), (), (), has_run=True)

    def _run(self, stage: LaterStage, message: StageWork | OrderedMessage) -> None:
        results = self._results
        if isinstance(message, OrderedMessage):  # no step before it is left
            self._post(MemberTold(message))
        elif not isinstance(message, StageStep):
            stage.take(message, None)
        else:
            if results is not None:
                results.make_room()
            with self._engine.marked(message.plan.request_ids):
                pending = stage.take(message, self._hidden.popleft())
            if results is not None and pending is not None:
                results.send(stage.timed(message), pending)

    def tell(self, message: MemberMessage) -> None:
        """Tell the next member something about KV or an adapter; the last one answers the first.

        Raises StageLost if another member is gone.
        """
        self.check()
        if self._outlet is not None:
            self._outlet.send(message)
        elif self._results is not None and isinstance(message, MemberAnswer):
            self._results.tell(message)

    def check(self) -> None:
        """Raise StageLost if the first member can get no more results."""
        if self._links is not None:
            self._links.check()

    def close(self) -> None:
        """Cut off the other members. Closing again is harmless."""
        with self._lock:
            self._is_closed = True
            closing, self._closing = self._closing, []
        for close in closing:
            close()
        self._connections.forget(self._pipeline.name)
        if closing:
            self._connections.num_dropped += self.num_dropped
        self._arrived.clear()
        self._hidden.clear()
        if self._stage is not None:
            self._stage.close()

    def free(self) -> None:
        """Give back memory that no step uses any more."""
        while self._memory:
            self._memory.pop().free()

    def _hello(self, *, has_steps: bool, is_on_device: bool = False) -> StageHello:
        return StageHello(self._pipeline.name, has_steps, is_on_device)

    def _arrival(self, *, has_steps: bool, sender: Member) -> Arrival:
        hello = self._hello(has_steps=has_steps)
        arrival = self._connections.claim(hello, sender.worker, lambda: self._is_closed)
        if arrival is None:
            raise self._dissolved()
        return arrival

    def _connect_next(self, following: Member, spec: ModelSpec, device: torch.device) -> StageOutlet:
        own = self._pipeline.members[self._number]
        transport = transport_between(own.worker, own.gpu, following.worker, following.gpu)
        shared = None if transport is Transport.TLS else self._share(transport, spec, device)
        try:
            hello = self._hello(has_steps=True, is_on_device=shared is not None and shared.is_on_device)
            descriptor = None if shared is None else shared.descriptor
            connection = self._connections.connect(following.worker, hello, descriptor)
        except StageLost:
            if shared is not None:
                os.close(shared.descriptor)
            raise
        return StageOutlet(connection, self._places(shared, spec, device), self._pipeline.name)

    def _share(self, transport: Transport, spec: ModelSpec, device: torch.device) -> SharedMemory:
        """Return memory for hidden states: on the device if it is wanted there and has room."""
        num_bytes = self._places_bytes(spec)
        if transport is Transport.DEVICE:
            try:
                return SharedMemory(shared_device_memory.create(device, num_bytes), is_on_device=True)
            except DeviceError as error:
                log.warning("fallback stage_memory=host pipeline=%s reason=%s", self._pipeline.name, error)
                self.lacks_device_memory = True
        shared = SharedMemory(os.memfd_create("hearth-hidden"), is_on_device=False)
        os.ftruncate(shared.descriptor, num_bytes)
        return shared

    @property
    def _num_places(self) -> int:
        """As many as steps can be in flight: one for each stage, and one more while hops take long."""
        return len(self._pipeline.members) + 1

    def _places_bytes(self, spec: ModelSpec) -> int:
        return HiddenPlaces.num_bytes(self._num_places, spec.limits.max_batch_tokens, _like(spec))

    def _places(self, shared: SharedMemory | None, spec: ModelSpec, device: torch.device) -> HiddenPlaces:
        """Return the memory for hidden states, and close its descriptor. Raises StageLost, DeviceError."""
        num_bytes = self._places_bytes(spec)
        if shared is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        else:
            try:
                memory = self._map(shared, num_bytes, device)
            finally:
                os.close(shared.descriptor)
        return HiddenPlaces.over(memory, self._num_places, _like(spec), is_shared=shared is not None)

    def _map(self, shared: SharedMemory, num_bytes: int, device: torch.device) -> torch.Tensor:
        if shared.is_on_device:
            mapping = DeviceMapping(device, num_bytes, shared.descriptor)
            self._memory.append(mapping)
            return mapping.content
        shared_bytes = os.fstat(shared.descriptor).st_size
        if shared_bytes != num_bytes:  # it would be killed for touching what is not there
            raise StageLost(
                f"another stage of pipeline {self._pipeline.name} shares {shared_bytes} bytes, "
                f"not {num_bytes}: its limits of steps differ"
            )
        memory = torch.frombuffer(mmap.mmap(shared.descriptor, num_bytes), dtype=torch.uint8)
        if device.type == "cuda":
            self._memory.append(_PinnedMemory(memory, device))
        return memory

    def _close_later(self, one: Link) -> Link:
        with self._lock:
            if not self._is_closed:
                self._closing.append(one.close)
                return one
        one.close()
        raise self._dissolved()

    def _dissolved(self) -> StageLost:
        return StageLost(f"pipeline {self._pipeline.name} was dissolved")

    def _read(self, inlet: StageInlet) -> None:
        try:
            while (received := inlet.receive()) is not None:
                message, hidden = received
                if isinstance(message, StageWork | OrderedMessage):
                    self._post(StageArrived(message, hidden))
                else:
                    self._post(MemberTold(message))
        except (OSError, ValueError, HearthError) as error:  # ValueError: it was closed here
            if not self._is_closed:
                log.warning("stage_cut_off pipeline=%s reason=%s", self._pipeline.name, error)
        finally:
            inlet.end()
            for way in (self._outlet, self._results):  # each member cuts off the next, so the first notices
                if way is not None:
                    way.close()


def _post_told(post: Callable[[StageNews], None], answer: MemberAnswer) -> None:
    post(MemberTold(answer))


def devices_of(members: Sequence[Member]) -> list[int]:
    """Return a number for the device of each member. Workers on CPUs have cores of their own."""
    names = [one.worker if one.gpu is None else f"{node_of(one.worker)} {one.gpu}" for one in members]
    return [names.index(name) for name in names]


def _like(spec: ModelSpec) -> torch.Tensor:
    return torch.empty(0, spec.arch.hidden_size, dtype=spec.dtype)
