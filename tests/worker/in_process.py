"""A worker's step loop on a thread of the test, over tiers of the test, with a pool of its choice."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue, SimpleQueue
from typing import TypeVar

import torch

from hearth.config import EngineConfig
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.memory.vmm import MappedPool
from hearth.messages import (
    AdapterLoaded,
    AdapterOrder,
    CancelRequest,
    DropModel,
    Fact,
    ForgetAdapter,
    GuideOrder,
    HoldModel,
    HostingFailed,
    ModelLoaded,
    ModelTurn,
    Ping,
    Pong,
    RetireModel,
    RunFailed,
    Sampling,
    Shutdown,
    StartRequest,
    StepDone,
)
from hearth.policy.turns.turn_policy import TurnRules
from hearth.sizes import StepLimits
from hearth.store.borrower import Borrower
from hearth.store.lender import Lender
from hearth.store.loader import Loader
from hearth.store.tiers import Tiers
from hearth.types import AdapterId, Hold, ModelId, TokenLogprobs
from hearth.worker.model_kernels import ModelKernels
from hearth.worker.model_marks import WorkerMarks
from hearth.worker.model_snapshots import ModelSnapshots
from hearth.worker.runtime import HostingResources
from hearth.worker.worker_loop import DeviceLost, Inbox, WorkerLoop
from tests.store.stored import PATIENCE_S
from tests.worker.harness import CONFIG, folder, host_order, limits_of

F = TypeVar("F", bound=Fact)
NewPool = Callable[[EvictionTermsOf], Pool]


@dataclass(slots=True)
class Answer:
    """Mutable; written by the gateway."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    is_ended: bool = False
    num_admissions: int = 0


@dataclass(slots=True)
class LoopGateway:
    """The gateway's side. Mutable: facts are taken from it, and the worker's end is noted."""

    inbox: Inbox
    facts: Queue[Fact]
    limits: StepLimits  #: of all models
    device_lost: Future[DeviceLost] = field(default_factory=Future)
    answers: dict[int, Answer] = field(default_factory=dict)
    loads: list[ModelLoaded] = field(default_factory=list)
    adapter_loads: list[AdapterLoaded] = field(default_factory=list)
    turns: list[ModelTurn] = field(default_factory=list)
    #: With the number of their stay; those that were retired or dropped in their turn included.
    in_turn: dict[ModelId, int] = field(default_factory=dict)
    pool: Pool | None = None  #: for looking on, while the worker rests
    _runs: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def hear(self) -> Fact:
        fact = self.facts.get(timeout=PATIENCE_S)
        if isinstance(fact, ModelTurn):
            was_in_turn = self.in_turn.get(fact.model) == fact.hosting
            assert was_in_turn == (fact.ended is not None), f"{fact} {self.in_turn}"
            self.turns.append(fact)
            if fact.ended is None:
                self.in_turn[fact.model] = fact.hosting
            else:
                del self.in_turn[fact.model]
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
        elif isinstance(fact, ModelLoaded):
            self.loads.append(fact)
        elif isinstance(fact, AdapterLoaded):
            self.adapter_loads.append(fact)
        return fact

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
        sampling: Sampling,
        guide: GuideOrder | None = None,
        adapter: AdapterOrder | None = None,
    ) -> int:
        run = next(self._runs)
        self.answers[run] = Answer()
        self.inbox.put(
            StartRequest(run, ModelId(name), tuple(prompt), (), sampling, b"", guide, adapter=adapter)
        )
        return run

    def cancel(self, run: int) -> None:
        self.inbox.put(CancelRequest(run))

    def until_ended(self, *runs: int) -> list[Answer]:
        while not all(self.answers[run].is_ended for run in runs):
            fact = self.hear()
            assert not isinstance(fact, HostingFailed | RunFailed), f"{fact}"
        return [self.answers[run] for run in runs]

    def ask(self, name: str, prompt: Sequence[int], sampling: Sampling) -> Answer:
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
) -> Iterator[LoopGateway]:
    """With `max_facts`, the worker waits when so many lie there untaken."""
    with (
        folder() as place,
        closing(Lender(tiers, place / "s")),
        working_beside(
            *(place / "s", new_pool, device, config, max_facts, turns, kernels, marks, snapshots)
        ) as gateway,
    ):
        yield gateway


@contextmanager
def working_beside(
    lender: Path,
    new_pool: NewPool,
    device: torch.device | None = None,
    config: EngineConfig = CONFIG,
    max_facts: int = 0,
    turns: TurnRules | None = None,
    kernels: ModelKernels | None = None,
    marks: WorkerMarks | None = None,
    snapshots: ModelSnapshots | None = None,
) -> Iterator[LoopGateway]:
    """A worker that borrows from whoever lends at a socket, otherwise as `working_in_process`."""
    device = device or torch.device("cpu")
    with closing(Borrower(lender, is_pinned=device.type == "cuda")) as borrower:
        gateway = LoopGateway(SimpleQueue(), Queue(max_facts), limits_of(config))

        def kept_pool(eviction_terms: EvictionTermsOf) -> Pool:
            gateway.pool = new_pool(eviction_terms)
            return gateway.pool

        resources = HostingResources(
            *(device, config, kept_pool, borrower, Loader(device), turns, kernels),
            marks=marks or WorkerMarks(),
            snapshots=snapshots,
        )
        worker = WorkerLoop(resources, gateway.inbox, gateway.facts.put)

        def run() -> None:
            try:
                worker.run()
            except DeviceLost as error:
                gateway.device_lost.set_result(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield gateway
        finally:
            gateway.inbox.put(Shutdown())
            while thread.is_alive():  # it may wait for somebody to take its facts
                while not gateway.facts.empty():
                    gateway.facts.get()
                thread.join(0.01)
            if isinstance(gateway.pool, MappedPool):
                del worker, resources  # nobody has a tensor of it any more
                gateway.pool.close()
