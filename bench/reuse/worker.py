"""A worker's step loop on a thread of this process, over a keeper: the part `switch` gives it orders.

Measures nothing itself; facts come with the time at which they were told.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue, SimpleQueue

import msgspec
import torch

from bench.reuse.setting import Setting
from hearth.core.config import EngineConfig, StoreConfig
from hearth.core.messages import (
    DropModel,
    Fact,
    HostingFailed,
    HostModel,
    KeeperSetup,
    ModelLoaded,
    Order,
    Ping,
    Pong,
    RunFailed,
    Shutdown,
    StartRequest,
    StepDone,
)
from hearth.core.types import ModelId, SamplingParams
from hearth.memory.pool import EvictionTermsOf, Pool
from hearth.policy.turns.turn_policy import TurnRules
from hearth.store.tiers.segment import Segment
from hearth.store.tiers.tiers import Tiers
from hearth.store.transfer.lease_client import LeaseClient
from hearth.store.transfer.lease_server import LeaseServer
from hearth.store.transfer.transfer import Loader
from hearth.worker.runtime import HostingResources
from hearth.worker.worker_loop import Inbox, WorkerLoop

#: A step loop that says nothing for so long is taken to hang.
PATIENCE_S = 120.0
#: As a worker's process has it: see `hearth/worker/__main__.py`.
SWITCH_S = 0.0005


@dataclass(frozen=True, slots=True)
class TimedFact:
    """A fact of the worker, with its time."""

    at_s: float  #: when it was told
    fact: Fact

    def has_token_of(self, run: int) -> bool:
        return isinstance(self.fact, StepDone) and run in self.fact.runs


@dataclass(slots=True)
class WorkerClient:
    """The gateway's side of a step loop in this process. Mutable: facts are taken from it."""

    inbox: Inbox
    facts: Queue[TimedFact | None]  #: None: there will be no more
    orders: Mapping[ModelId, HostModel]  #: of all models that it may host
    segment: Segment  #: of host memory
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def host(self, model: ModelId) -> None:
        self.inbox.put(msgspec.structs.replace(self.orders[model], hosting=next(self._numbers)))

    def send(self, *orders: Order) -> None:
        for order in orders:
            self.inbox.put(order)

    def until(self, *kinds: type[Fact]) -> TimedFact:
        while True:
            heard = self.facts.get(timeout=PATIENCE_S)
            if heard is None:
                raise RuntimeError("the step loop has ended; what broke it was printed above")
            if isinstance(heard.fact, HostingFailed | RunFailed):
                raise RuntimeError(f"the worker says: {heard.fact.reason}")
            if isinstance(heard.fact, kinds):
                return heard

    def load(self, model: ModelId) -> None:
        self.host(model)
        self.until(ModelLoaded)

    def rest(self) -> Pong:
        """Wait until everything that was ordered is done; return what the worker has then."""
        self.send(Ping(next(self._numbers)))
        pong = self.until(Pong).fact
        assert isinstance(pong, Pong)
        return pong

    def ask(self, model: ModelId, prompt: Sequence[int]) -> int:
        """Ask a model for one token."""
        run = next(self._numbers)
        sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=1, ignore_eos=True)
        self.send(StartRequest(run, model, tuple(prompt), (), sampling, salt=b""))
        return run

    def first_token(self, run: int) -> float:
        """Wait for the first token of a run and return when it came."""
        while True:
            heard = self.until(StepDone)
            if heard.has_token_of(run):
                return heard.at_s


@contextmanager
def working(
    setting: Setting,
    place: Path,
    orders: Mapping[ModelId, HostModel],
    budget_bytes: int,
    turns: TurnRules | None = None,
    *,
    is_mapped: bool = False,
) -> Iterator[WorkerClient]:
    """Start a worker that can host these models; its files go to `place`.

    `turns`: None if none are taken. `is_mapped`: its memory is pages on any device, as what comes ahead of
    turns needs.
    """
    with (
        keeping(setting.device, setting.scale.host_bytes, place) as socket,
        setting.worker_pool(budget_bytes, is_mapped=is_mapped) as new_pool,
        working_over(socket, setting.device, setting.scale.engine, new_pool, orders, turns) as worker,
    ):
        yield worker


@contextmanager
def working_over(
    socket: Path,
    device: torch.device,
    engine: EngineConfig,
    new_pool: Callable[[EvictionTermsOf], Pool],
    orders: Mapping[ModelId, HostModel],
    turns: TurnRules | None = None,
) -> Iterator[WorkerClient]:
    """Start a worker that borrows from whoever lends at a socket."""
    inbox: Inbox = SimpleQueue()
    facts: Queue[TimedFact | None] = Queue()
    interval_s = sys.getswitchinterval()
    with closing(LeaseClient(socket)) as lease_client:
        resources = HostingResources(device, engine, new_pool, lease_client, Loader(device), turns)
        loop = WorkerLoop(resources, inbox, lambda fact: facts.put(TimedFact(time.perf_counter(), fact)))
        thread = threading.Thread(target=_run, args=(loop, facts), name="hearth-steps", daemon=True)
        sys.setswitchinterval(SWITCH_S)
        thread.start()
        worker = WorkerClient(inbox, facts, orders, lease_client.segment)
        try:
            yield worker
            worker.send(*(DropModel(model) for model in orders))
            worker.rest()
        finally:
            sys.setswitchinterval(interval_s)
            inbox.put(Shutdown())
            thread.join(PATIENCE_S)


def _run(loop: WorkerLoop, facts: Queue[TimedFact | None]) -> None:
    try:
        loop.run()
    finally:
        facts.put(None)


@contextmanager
def keeping(device: torch.device, host_bytes: int, place: Path) -> Iterator[Path]:
    """Lend chunks at a socket: by a process of its own, or in this one where that does not matter."""
    socket = place / "keeper.sock"
    config = StoreConfig(path=str(place / "store"), host_bytes=host_bytes)
    if device.type != "cuda":
        with closing(Tiers(config, is_pinned=False)) as tiers, closing(LeaseServer(tiers, socket)):
            yield socket
        return
    with own_keeper(host_bytes, place) as socket:
        yield socket


@contextmanager
def own_keeper(host_bytes: int, place: Path) -> Iterator[Path]:
    """Lend chunks at a socket by a process that keeps them, as beside a CUDA device."""
    socket = place / "keeper.sock"
    setup = KeeperSetup(str(socket), "cuda", str(place / "store"), None, host_bytes, "warning")
    command = [sys.executable, "-m", "hearth.store.keeper"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        keeper.stdin.write(msgspec.json.encode(setup) + b"\n")
        keeper.stdin.flush()
        assert b"ready" in keeper.stdout.readline(), "the keeper does not start"
        try:
            yield socket
        finally:
            keeper.stdin.close()
            keeper.wait(PATIENCE_S)
