"""A worker's step loop on a thread of the test, over tiers of the test, with a pool of its choice."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import TypeVar

import torch

from hearth.core.config import EngineConfig
from hearth.core.messages import (
    AdapterLoaded,
    AdapterOrder,
    CancelRequest,
    DropModel,
    Fact,
    ForgetAdapter,
    HoldModel,
    HostingFailed,
    KvMove,
    KvMoved,
    ModelLoaded,
    ModelPressure,
    ModelTurn,
    Ping,
    Pong,
    RetireModel,
    RunFailed,
    Shutdown,
    StartRequest,
    StepDone,
)
from hearth.core.sizes import StepLimits
from hearth.core.types import AdapterId, GuideSpec, Hold, ModelId, SamplingParams, TokenLogprobs
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.memory.vmm import MappedPool
from hearth.policy.turns.turn_policy import TurnRules
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.lease_client import LeaseClient
from hearth.store.transfer.lease_server import LeaseServer
from hearth.store.transfer.transfer import Loader
from hearth.system.spin import SpinningQueue
from hearth.worker.model_kernels import ModelKernels
from hearth.worker.model_marks import WorkerMarks
from hearth.worker.model_snapshots import ModelSnapshots
from hearth.worker.runtime import HostingResources
from hearth.worker.stage_connections import StageConnections
from hearth.worker.worker_loop import DeviceLost, Inbox, WorkerLoop
from tests.store.stored import PATIENCE_S
from tests.worker.harness import CONFIG, folder, host_order, limits_of

F = TypeVar("F", bound=Fact)
NewPool = Callable[[EvictionTermsOf], Pool]
#: Between two looks whether a worker that says nothing still runs.
LOOK_S = 1.0


@dataclass(slots=True)
class Answer:
    """Mutable; written by the gateway."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    is_ended: bool = False
    num_admissions: int = 0
    num_cached_tokens: int = 0  #: when it was admitted last


@dataclass(slots=True)
class LoopGateway:
    """The gateway's side. Mutable: facts are taken from it, and the worker's end is noted."""

    inbox: Inbox
    facts: Queue[Fact]
    limits: StepLimits  #: of all models
    thread: threading.Thread = field(default_factory=threading.current_thread)  #: of the worker, once it runs
    device_lost: Future[DeviceLost] = field(default_factory=Future)
    answers: dict[int, Answer] = field(default_factory=dict)
    loads: list[ModelLoaded] = field(default_factory=list)
    adapter_loads: list[AdapterLoaded] = field(default_factory=list)
    kv_moves: dict[int, KvMoved] = field(default_factory=dict)  #: by run
    turns: list[ModelTurn] = field(default_factory=list)
    pressure: list[ModelPressure] = field(default_factory=list)
    #: With the number of their stay; those that were retired or dropped in their turn included.
    in_turn: dict[ModelId, int] = field(default_factory=dict)
    pool: Pool | None = None  #: for looking on, while the worker rests
    #: A worker that goes on telling of steps and never of an end must not be heard for ever.
    deadline_s: float = field(default_factory=lambda: time.monotonic() + 2 * PATIENCE_S)
    _last: deque[Fact] = field(default_factory=lambda: deque(maxlen=8))
    _runs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def hear(self) -> Fact:
        fact = self._next_fact()
        self._last.append(fact)
        if isinstance(fact, ModelTurn):
            was_in_turn = self.in_turn.get(fact.model) == fact.hosting
            assert was_in_turn == (fact.ended is not None), f"{fact} {self.in_turn}"
            self.turns.append(fact)
            if fact.ended is None:
                self.in_turn[fact.model] = fact.hosting
            else:
                del self.in_turn[fact.model]
        elif isinstance(fact, ModelPressure):
            self.pressure.append(fact)
        elif isinstance(fact, HostingFailed):
            self.in_turn.pop(fact.model, None)
        elif isinstance(fact, StepDone):
            assert not self.turns or fact.model in self.in_turn, f"{fact} when it was not its turn"
            logprobs = fact.logprobs or [None] * len(fact.runs)
            for run, token, logprob in zip(fact.runs, fact.tokens, logprobs, strict=True):
                self.answers[run].tokens.append(token)
                self.answers[run].logprobs.append(logprob)
            for run in fact.finished:
                assert not self.answers[run].is_ended, f"{run=} ended twice"
                self.answers[run].is_ended = True
            for one in fact.admitted:
                self.answers[one.run].num_admissions += 1
                self.answers[one.run].num_cached_tokens = one.num_cached_tokens
        elif isinstance(fact, ModelLoaded):
            self.loads.append(fact)
        elif isinstance(fact, AdapterLoaded):
            self.adapter_loads.append(fact)
        elif isinstance(fact, KvMoved):
            self.kv_moves[fact.run] = fact
        return fact

    def _next_fact(self) -> Fact:
        """Return what the worker tells next.

        Raises:
            TimeoutError: the test has waited for so long that it would wait for ever.
            RuntimeError: the worker has ended, and all that it has told was heard.
        """
        while time.monotonic() < self.deadline_s:
            is_running = self.thread.is_alive()  # asked first, lest its last fact be overlooked
            try:
                return self.facts.get(timeout=LOOK_S if is_running else 0)
            except Empty:
                if not is_running:
                    raise RuntimeError(f"the worker has ended; it said {list(self._last)}") from None
        raise TimeoutError(self.told_of_worker())

    def told_of_worker(self) -> str:
        """Return what is known of a worker that does not come to an end."""
        waiting = {run: len(answer.tokens) for run, answer in self.answers.items() if not answer.is_ended}
        frame = sys._current_frames().get(self.thread.ident or 0)
        return (
            f"not done {2 * PATIENCE_S:g} s after the worker's start; tokens of requests that did not end, "
            f"by run: {waiting}; models in turn: {list(self.in_turn)}; last facts: {list(self._last)}; "
            f"the worker stands at:\n{''.join(traceback.format_stack(frame)) if frame else 'its end'}"
        )

    def until(self, kind: type[F]) -> F:
        while not isinstance(fact := self.hear(), kind):
            pass
        return fact

    def ping(self) -> Pong:
        """After everything that was ordered before."""
        self.inbox.put(Ping(0))
        return self.until(Pong)

    def host(self, name: str, where: Path, **changes: object) -> None:
        self.inbox.put(host_order(name, where, **{"limits": self.limits, **changes}))

    def load(self, name: str, where: Path, **changes: object) -> ModelLoaded:
        self.host(name, where, **changes)
        return self.until(ModelLoaded)

    def retire(self, name: str) -> None:
        self.inbox.put(RetireModel(ModelId(name)))

    def drop(self, name: str) -> None:
        self.inbox.put(DropModel(ModelId(name)))

    def forget_adapter(self, adapter: AdapterId) -> None:
        self.inbox.put(ForgetAdapter(adapter))

    def set_hold(self, name: str, hold: Hold) -> None:
        self.inbox.put(HoldModel(ModelId(name), hold))

    def start(
        self,
        name: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        guide: GuideSpec | None = None,
        adapter: AdapterOrder | None = None,
        output: Sequence[int] = (),
        kv: KvMove | None = None,
        salt: bytes = b"",
    ) -> int:
        """`output`: tokens that the request has got before it came here."""
        run = next(self._runs)
        self.answers[run] = Answer()
        self.inbox.put(
            StartRequest(
                run,
                ModelId(name),
                tuple(prompt),
                tuple(output),
                sampling,
                salt,
                guide,
                adapter=adapter,
                kv=kv,
            )
        )
        return run

    def cancel(self, run: int) -> None:
        self.inbox.put(CancelRequest(run))

    def until_ended(self, *runs: int) -> list[Answer]:
        while not all(self.answers[run].is_ended for run in runs):
            fact = self.hear()
            assert not isinstance(fact, HostingFailed | RunFailed), f"{fact}"
        return [self.answers[run] for run in runs]

    def ask(self, name: str, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
        return self.until_ended(self.start(name, prompt, sampling))[0]


@contextmanager
def working_in_process(
    tiers: Tiers,
    new_pool: NewPool,
    device: torch.device | None = None,
    config: EngineConfig = CONFIG,
    max_facts: int = 0,
    turns: TurnRules | None = None,
    kernels: ModelKernels | None = None,
    marks: WorkerMarks | None = None,
    snapshots: ModelSnapshots | None = None,
    connections: StageConnections | None = None,
) -> Iterator[LoopGateway]:
    """With `max_facts`, the worker waits when so many lie there untaken."""
    with (
        folder() as place,
        closing(LeaseServer(tiers, place / "s")),
        working_beside(
            place / "s", new_pool, device, config, max_facts, turns, kernels, marks, snapshots, connections
        ) as gateway,
    ):
        yield gateway


@contextmanager
def working_beside(
    server: Path,
    new_pool: NewPool,
    device: torch.device | None = None,
    config: EngineConfig = CONFIG,
    max_facts: int = 0,
    turns: TurnRules | None = None,
    kernels: ModelKernels | None = None,
    marks: WorkerMarks | None = None,
    snapshots: ModelSnapshots | None = None,
    connections: StageConnections | None = None,
) -> Iterator[LoopGateway]:
    """A worker that borrows from whoever lends at a socket, otherwise as `working_in_process`."""
    device = device or torch.device("cpu")
    with closing(LeaseClient(server, is_pinned=device.type == "cuda")) as lease_client:
        gateway = LoopGateway(SpinningQueue(), Queue(max_facts), limits_of(config))

        def kept_pool(eviction_terms: EvictionTermsOf) -> Pool:
            gateway.pool = new_pool(eviction_terms)
            return gateway.pool

        resources = HostingResources(
            device,
            config,
            kept_pool,
            lease_client,
            Loader(device),
            turns,
            kernels,
            marks=marks or WorkerMarks(),
            snapshots=snapshots,
            connections=connections,
        )
        worker = WorkerLoop(resources, gateway.inbox, gateway.facts.put)

        def run() -> None:
            try:
                worker.run()
            except DeviceLost as error:
                gateway.device_lost.set_result(error)

        # A worker that never ends fails its test, and must not keep the process of the tests from ending.
        thread = gateway.thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield gateway
        finally:
            gateway.inbox.put(Shutdown())
            give_up_s = time.monotonic() + PATIENCE_S
            while thread.is_alive():  # it may wait for somebody to take its facts
                while not gateway.facts.empty():
                    gateway.facts.get()
                thread.join(0.01)
                if time.monotonic() > give_up_s:
                    raise TimeoutError(f"the worker does not end when told to: {gateway.told_of_worker()}")
            if isinstance(gateway.pool, MappedPool):
                del worker, resources  # nobody has a tensor of it any more
                gateway.pool.close()
