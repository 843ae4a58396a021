"""The gateway's side of a worker, with plain sockets, and the processes themselves. Asserts little."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from hearth.core import wire
from hearth.core.config import EngineConfig
from hearth.core.messages import (
    VERSION,
    AdapterOrder,
    Challenge,
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
    StartRequest,
    StepDone,
    WorkerHello,
    WorkerSetup,
)
from hearth.core.sizes import StepLimits
from hearth.core.types import (
    FinishReason,
    GuideSpec,
    ModelId,
    Pace,
    Pooling,
    PromptReading,
    SamplingParams,
    WorkerId,
)
from hearth.store.format.manifest import read_manifest

F = TypeVar("F", bound=Fact)

#: How long a test waits for a process before it says that none will answer.
PATIENCE_S = 120.0
CONFIG = EngineConfig(max_batch_tokens=64, max_seqs=8, max_step=-1, block_tokens=4, kv_bytes=1 << 20)
SECRET = b"a secret of tests"
KV_BYTES = 1 << 20
BUDGET_BYTES = 64 << 20


@dataclass(slots=True)
class Run:
    """What came of a request. Mutable; written by the `Gateway` that sent it."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failed: RunFailed | None = None
    reading: PromptReading | None = None
    num_admissions: int = 0
    num_cached_tokens: int = 0  #: found when it was last admitted


class Gateway:
    """One worker's connection. Mutable: it keeps what it heard."""

    def __init__(self, connection: socket.socket, secret: bytes = SECRET, version: int = VERSION) -> None:
        connection.settimeout(PATIENCE_S)
        self.connection = connection
        self.facts: list[Fact] = []
        self.runs: dict[int, Run] = {}
        self._incoming = connection.makefile("rb")
        self._numbers = iter(range(1_000_000))
        self._held: list[Order] | None = None  #: orders that will be sent together
        nonce = wire.new_nonce()
        connection.sendall(wire.frame(Challenge(version, nonce)))
        self.hello: WorkerHello | None = None
        if (body := self._body()) is not None:
            hello = wire.fact_of(body)
            assert isinstance(hello, WorkerHello), f"{hello=}"
            self.hello = hello
            self.send(wire.check_hello(hello, secret, nonce))

    def send(self, *orders: Order) -> None:
        if self._held is None:
            self.connection.sendall(b"".join(map(wire.frame, orders)))
        else:
            self._held += orders

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Send all orders of the context in one piece: on a busy machine the worker could otherwise have done
        the first before the last is sent.
        """
        self._held = held = list[Order]()
        yield
        self._held = None
        self.send(*held)

    def start(
        self,
        model: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        output: Sequence[int] = (),
        guide: GuideSpec | None = None,
        salt: bytes = b"",
        pace: Pace | None = None,
        pooling: Pooling | None = None,
        adapter: AdapterOrder | None = None,
    ) -> int:
        run = next(self._numbers)
        self.runs[run] = Run()
        self.send(
            StartRequest(
                run,
                ModelId(model),
                tuple(prompt),
                tuple(output),
                sampling,
                salt,
                guide,
                pace or Pace(),
                pooling=pooling,
                adapter=adapter,
            )
        )
        return run

    def hear(self) -> Fact | None:
        """The next fact, noted; None when the worker has closed the connection."""
        body = self._body()
        if body is None:
            return None
        fact = wire.fact_of(body)
        self.facts.append(fact)
        if isinstance(fact, StepDone):
            for run, token in zip(fact.runs, fact.tokens, strict=True):
                self.runs[run].tokens.append(token)
            for run, reading in fact.readings.items():
                assert self.runs[run].reading is None, f"{run=} was read twice"
                self.runs[run].reading = reading
            for run, reason in fact.finished.items():
                assert self.runs[run].finish_reason is None, f"{run=} ended twice"
                self.runs[run].finish_reason = reason
            for one in fact.admitted:
                self.runs[one.run].num_admissions += 1
                self.runs[one.run].num_cached_tokens = one.num_cached_tokens
        if isinstance(fact, RunFailed):
            self.runs[fact.run].failed = fact
        return fact

    def until(self, is_it: Callable[[Fact], bool]) -> Fact:
        while (fact := self.hear()) is not None:
            if is_it(fact):
                return fact
        raise AssertionError(f"the worker is gone; it said {self.facts[-5:]}")

    def until_kind(self, kind: type[F]) -> F:
        fact = self.until(lambda fact: isinstance(fact, kind))
        assert isinstance(fact, kind)
        return fact

    def until_ended(self, *runs: int) -> list[Run]:
        def is_open(run: int) -> bool:
            return self.runs[run].finish_reason is None and self.runs[run].failed is None

        while any(is_open(run) for run in runs):
            assert self.hear() is not None, f"the worker is gone; it said {self.facts[-5:]}"
        return [self.runs[run] for run in runs]

    def ping(self) -> Pong:
        """What the worker says of itself, after everything that was ordered before."""
        self.send(Ping(number := next(self._numbers)))
        fact = self.until(lambda fact: isinstance(fact, Pong) and fact.number == number)
        assert isinstance(fact, Pong)
        return fact

    def host(self, name: str, where: Path | str, **changes: object) -> ModelLoaded | HostingFailed:
        self.send(host_order(name, where, **changes))
        fact = self.until(lambda fact: isinstance(fact, ModelLoaded | HostingFailed) and fact.model == name)
        assert isinstance(fact, ModelLoaded | HostingFailed)
        return fact

    def drop(self, *names: str) -> None:
        self.send(*(DropModel(ModelId(name)) for name in names))

    def close(self) -> None:
        self._incoming.close()
        self.connection.close()

    def _body(self) -> bytes | None:
        header = self._incoming.read(wire.HEADER.size)
        return self._incoming.read(wire.length_of(header)) if len(header) == wire.HEADER.size else None


_hostings = itertools.count(1)


def host_order(name: str, where: Path | str, **changes: object) -> HostModel:
    manifest = None if "://" in str(where) else read_manifest(Path(where))
    order = HostModel(
        model=ModelId(name),
        hosting=next(_hostings),
        where=str(where),
        digest="" if manifest is None else manifest.digest,
        weight=1.0,
        max_context=64 if manifest is None else min(64, manifest.arch.max_positions),
        limits=limits_of(CONFIG),
        kv_floor_bytes=KV_BYTES,
        max_kv_bytes=KV_BYTES,
        eos_ids=(),
    )
    return msgspec.structs.replace(order, **changes)


def limits_of(config: EngineConfig) -> StepLimits:
    """The limits of a configuration that leaves none open."""
    assert config.max_batch_tokens is not None
    assert config.max_seqs is not None
    return StepLimits(config.max_batch_tokens, config.max_seqs, config.block_tokens)


def greedy(max_tokens: int, **changes: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0, **changes)  # type: ignore[arg-type] # names of fields


@contextmanager
def process(
    module: str, setup: msgspec.Struct, descriptors: tuple[int, ...] = (), log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """One of Hearth's processes, ended as its parent would: by the end of its standard input.

    What it logs goes to the end of a file, or where the test's own errors go.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    command = [sys.executable, "-m", module]
    with (
        nullcontext() if log is None else log.open("ab") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            pass_fds=descriptors,
        ) as started,
    ):
        assert started.stdin is not None
        started.stdin.write(msgspec.json.encode(setup) + b"\n")
        started.stdin.flush()
        try:
            yield started
        finally:
            started.stdin.close()
            try:
                started.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                started.kill()
                raise


def keeper_setup(
    folder: Path, host_bytes: int = 32 << 20, kind: Literal["cpu", "cuda"] = "cpu"
) -> KeeperSetup:
    """`kind` as the worker's: a keeper for CPUs gives back pages that a GPU would go on reading."""
    path = str(folder / "store")
    return KeeperSetup(str(folder / "keeper.sock"), kind, path, None, host_bytes, "warning")


@contextmanager
def keeping(setup: KeeperSetup) -> Iterator[subprocess.Popen[bytes]]:
    with process("hearth.store.keeper", setup) as keeper:
        assert keeper.stdout is not None
        assert json.loads(keeper.stdout.readline())["error"] is None
        yield keeper


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hearth-") as name:  # a socket's name must be short
        yield Path(name)


@dataclass(frozen=True, slots=True)
class Rig:
    worker: subprocess.Popen[bytes]
    gateway: Gateway


@contextmanager
def working(
    keeper_socket: str,
    beacon: int | None = None,
    others: tuple[int, ...] = (),
    log: Path | None = None,
    **changes: object,
) -> Iterator[Rig]:
    """A worker that has said hello, with the descriptor of a beacon; `others` are left open beside it.

    `log` is as in `process`.
    """
    with folder() as stages, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        # Little room, so that a worker whose gateway does not read has to wait.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        setup = WorkerSetup(
            worker=WorkerId("w0"),
            host="127.0.0.1",
            port=listener.getsockname()[1],
            secret=SECRET.hex(),
            kind="cpu",
            device_index=0,
            num_sharing=1,
            budget_bytes=BUDGET_BYTES,
            keeper_socket=keeper_socket,
            kernels_path="",
            engine=CONFIG.plain(),
            num_threads=1,
            log_level="warning",
            stages_path=str(stages),
            beacon=beacon,
        )
        descriptors = others if beacon is None else (*others, beacon)
        with process("hearth.worker", msgspec.structs.replace(setup, **changes), descriptors, log) as worker:
            connection, _ = listener.accept()
            gateway = Gateway(connection)
            try:
                yield Rig(worker, gateway)
            finally:
                gateway.close()
