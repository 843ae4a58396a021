"""The seat of one worker, taken by one process after the other.

    Waiting  ->  Starting  ->  Running  ->  Killed
       ^            |             |            |
       +------------+-------------+------------+

A running worker is pinged at every heartbeat. Its step thread answers between two steps; during a step, which
may be long, its beacon shows that the step advances (`core/beacon.py`). A worker that does neither for
`max_missed` heartbeats, or longer where its steps were slow before (`policy/fleet/liveness.py`), hangs and is
killed. Waiting for a core does not count.

A process that ends is replaced: at once, or after a delay that grows with every short life. A process with a
device takes seconds to exit after its connection ended. Its successor starts meanwhile, and takes the memory
when it is free.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from hearth.core.beacon import Beacon, new_beacon_file
from hearth.core.errors import ConfigError
from hearth.core.messages import Ping, Shutdown, WorkerHello, WorkerSetup
from hearth.core.node_messages import WorkerStatus
from hearth.core.types import WorkerId
from hearth.node import processes
from hearth.node.link import FrameLink
from hearth.node.processes import Vigilance, WorkerEnding, WorkerProcess
from hearth.policy.fleet.liveness import Silence
from hearth.system.cpus import queued_s

log = logging.getLogger(__name__)

#: Starts a process with a setup and the descriptor of its beacon. Raises OSError.
Launch = Callable[[WorkerSetup, int], Awaitable[WorkerProcess]]


@dataclass(frozen=True, slots=True)
class Waiting:
    next_try_s: float = 0.0  #: on the clock of `time.monotonic`


@dataclass(frozen=True, slots=True, eq=False)
class Starting:
    process: WorkerProcess
    beacon: Beacon


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    process: WorkerProcess
    beacon: Beacon
    link: FrameLink
    hello: WorkerHello


@dataclass(frozen=True, slots=True, eq=False)
class Killed:
    """A process that was stuck: it did not start in time, or hung. It is not gone yet."""

    process: WorkerProcess
    link: FrameLink | None
    reason: str


SeatState = Waiting | Starting | Running | Killed


@dataclass(frozen=True, slots=True, eq=False)
class Departure:
    """A process that has lost its seat. Until it is gone it keeps its memory."""

    worker: WorkerId
    process: WorkerProcess
    lived_s: float
    was_ready: bool
    killed_for: str | None  #: why it was killed here; None: it was not
    is_gone: bool


@dataclass(frozen=True, slots=True, eq=False)
class LeavingProcess:
    """A process that exits while its successor starts."""

    pid: int
    gone: asyncio.Task[None]


class WorkerSeat:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        index: int,
        prefix: str,
        setup_of: Callable[[int, WorkerId], WorkerSetup],
        launch: Launch,
        vigilance: Vigilance,
        is_keeper_ready: asyncio.Event,
        on_failed_start: Callable[[], None],
    ) -> None:
        """`prefix`: of the names of its workers, which differ in a cluster."""
        self.index, self._prefix = index, prefix
        self.worker = WorkerId(f"{prefix}w{index}")
        self.state: SeatState = Waiting()
        self.num_restarts = 0
        self.num_failed_starts = 0  #: in a row, without one that was ready
        self.predecessor: LeavingProcess | None = None
        self._setup_of, self._launch, self._vigilance = setup_of, launch, vigilance
        self._is_keeper_ready, self._on_failed_start = is_keeper_ready, on_failed_start
        self._greeted = asyncio.Event()  #: the present process said hello
        self._left = asyncio.Event()  #: its connection has ended, and so will it
        self._leaving: set[WorkerProcess] = set()  #: without a seat, but not gone
        self._last_ending: WorkerEnding | None = None  #: None: no process ended yet, or one is running
        self._was_ever_ready = False
        self._budget_bytes: int | None = None  #: of the first process that was ready; None: none was

    # What others ask.

    @property
    def is_ready(self) -> bool:
        return isinstance(self.state, Running)

    @property
    def can_join(self) -> bool:
        return isinstance(self.state, Starting)

    @property
    def next_try_s(self) -> float:
        """When the next process is started, on the clock of `time.monotonic`; 0: it is under way."""
        return self.state.next_try_s if isinstance(self.state, Waiting) else 0.0

    def status(self) -> WorkerStatus:
        state = self.state
        return WorkerStatus(
            worker=self.worker,
            state="ready" if self.is_ready else "failing" if self.num_failed_starts else "starting",
            pid=0 if isinstance(state, Waiting) else state.process.pid,
            num_restarts=self.num_restarts,
            hello=state.hello if isinstance(state, Running) else None,
            reason=self.trouble(),
        )

    def trouble(self) -> str | None:
        if self.is_ready or self._last_ending is None:
            return None
        times = {0: "", 1: " once"}.get(self.num_failed_starts, f" {self.num_failed_starts} times")
        before = " before it was ready" if self.num_failed_starts else ""
        when = "under way"
        if isinstance(self.state, Waiting):
            when = f"in {max(0.0, self.next_try_s - time.monotonic()):.0f} s"
        return f"worker {self.index} ended{times}{before}: {self._last_ending.reason}; next try {when}"

    # What its link tells.

    def joined(self, link: FrameLink, hello: WorkerHello) -> None:
        state = self.state
        assert isinstance(state, Starting), f"{hello.worker=} was not expected"
        self.state = Running(state.process, state.beacon, link, hello)
        link.beacon = state.beacon
        self._was_ever_ready, self.num_failed_starts, self._last_ending = True, 0, None
        self._budget_bytes = self._budget_bytes or hello.budget_bytes
        self._greeted.set()
        log.info("worker_ready worker=%s pid=%d device=%s", hello.worker, hello.pid, hello.device)

    def left(self) -> None:
        """Kill the process, whose connection has ended: it is of no use without."""
        if not isinstance(self.state, Waiting):
            processes.kill(self.state.process)
            self._left.set()

    # Its processes.

    async def keep(self) -> ConfigError:
        """Keep the seat taken. Returns only if the first process says that its settings are wrong."""
        num_short_lives = 0  # in a row
        for self.num_restarts in itertools.count():
            if self.num_restarts:
                self.worker = WorkerId(f"{self._prefix}w{self.index}.{self.num_restarts}")
            self._greeted.clear()
            self._left.clear()
            await self._is_keeper_ready.wait()
            try:
                process = await self._start()
            except OSError as error:  # the machine has no room for a process now
                log.error("worker_not_started worker=%s reason=%s", self.worker, error)
                num_short_lives += 1
                ending = WorkerEnding(f"it cannot be started: {error}")
                await self._back_off(ending, processes.restart_delay_s(num_short_lives))
                continue
            departed = await self._live(process)
            if self.predecessor is not None:
                await self.predecessor.gone  # one at a time is on its way out
                self.predecessor = None
                if not departed.was_ready:  # perhaps for want of the memory that has only now come free
                    await self._see_off(departed, 0.0)
                    continue
            is_short = not departed.was_ready or departed.lived_s < processes.SHORT_LIFE_S
            num_short_lives = num_short_lives + 1 if is_short else 0
            # A process that was ready may have been killed by chance, and once is forgiven.
            delay_s = processes.restart_delay_s(num_short_lives - departed.was_ready)
            if not departed.is_gone and not delay_s:
                self._last_ending = WorkerEnding(departed.killed_for or "it is ending")
                gone = processes.run_vital(self._see_off(departed, delay_s))
                self.predecessor = LeavingProcess(process.pid, gone)
                continue
            await self._see_off(departed, delay_s)
            assert self._last_ending is not None, "`_see_off` sets it"
            if self._last_ending.is_final and not self._was_ever_ready:
                return ConfigError(self._last_ending.reason)
            await self._back_off(self._last_ending, delay_s)
        raise AssertionError("lives are not counted to an end")

    def shut_down(self) -> None:
        if isinstance(self.state, Running):
            self.state.link.send(Shutdown())

    async def close(self) -> None:
        """End all processes. Call it when `keep` was cancelled."""
        present = set() if isinstance(self.state, Waiting) else {self.state.process}
        await asyncio.gather(*(processes.end(process) for process in self._leaving | present))
        if self.predecessor is not None:
            await asyncio.gather(self.predecessor.gone, return_exceptions=True)

    async def _start(self) -> WorkerProcess:
        descriptor = new_beacon_file()
        try:
            leaving = self.predecessor
            setup = msgspec.structs.replace(
                self._setup_of(self.index, self.worker),
                beacon=descriptor,
                predecessor=None if leaving is None or leaving.gone.done() else leaving.pid,
            )
            if setup.budget_bytes is None and not self.num_failed_starts:
                # The memory of a worker that was killed may not be free yet, but all of it will be.
                setup = msgspec.structs.replace(setup, budget_bytes=self._budget_bytes)
            process = await self._launch(setup, descriptor)
            self.state = Starting(process, Beacon.at(descriptor))
            return process
        finally:
            os.close(descriptor)

    async def _live(self, process: WorkerProcess) -> Departure:
        """Watch a process until it has ended or its connection has; the seat is free then."""
        began_s = time.monotonic()
        watch = processes.run_vital(self._watch(process))
        try:
            is_gone = await _is_gone(process, self._left)
        finally:
            watch.cancel()
        killed_for = self.state.reason if isinstance(self.state, Killed) else None
        if isinstance(self.state, Running | Killed) and self.state.link is not None:
            self.state.link.abort()
        self.state = Waiting()
        self._leaving.add(process)
        lived_s = time.monotonic() - began_s
        return Departure(self.worker, process, lived_s, self._greeted.is_set(), killed_for, is_gone)

    async def _see_off(self, departed: Departure, next_try_s: float) -> None:
        code = await departed.process.wait()
        self._leaving.discard(departed.process)
        ending = processes.ending_of(code, await processes.farewell_of(departed.process), departed.killed_for)
        if not self.is_ready:  # else its successor is ready already
            self._last_ending = ending
        reason = ending.reason.replace("`", "")
        log.warning(
            "worker_ended worker=%s code=%d lived_s=%.1f next_try_s=%g reason=`%s`",
            departed.worker,
            code,
            departed.lived_s,
            next_try_s,
            reason,
        )

    async def _back_off(self, ending: WorkerEnding, delay_s: float) -> None:
        self._last_ending, self.state = ending, Waiting(time.monotonic() + delay_s)
        if not self._greeted.is_set():
            self.num_failed_starts += 1
        self._on_failed_start()
        await asyncio.sleep(delay_s)

    async def _watch(self, process: WorkerProcess) -> None:
        start_s = self._vigilance.start_s
        try:
            await asyncio.wait_for(self._greeted.wait(), start_s)
        except TimeoutError:
            reason = f"it was not ready within {start_s:g} s (`service.start_s`)"
            log.error("worker_killed worker=%s reason=`%s`", self.worker, reason.replace("`", ""))
            self.state = Killed(process, None, reason)
            processes.kill(process)
            return
        if queued_s(process.pid) is None:
            log.info("fallback silence=with_waits_for_cores worker=%s reason=no_schedstat", self.worker)
        await self._watch_steps(process)

    async def _watch_steps(self, process: WorkerProcess) -> None:
        vigilance, state = self._vigilance, self.state
        if not isinstance(state, Running):
            return
        link, beacon = state.link, state.beacon
        silence = Silence(vigilance.heartbeat_s, queued_s(process.pid) or 0.0)
        num_marks, num_received, is_slow = beacon.read().num_marks, 0, False
        for number in itertools.count(1):
            link.send(Ping(number))
            await asyncio.sleep(vigilance.heartbeat_s)
            signs = beacon.read()
            was_heard = link.num_received > num_received or link.is_held_back or signs.num_marks != num_marks
            silence.beat(queued_s(process.pid) or silence.queued_s, was_heard=was_heard)
            num_marks, num_received = signs.num_marks, link.num_received
            silent_s, limit_s = silence.seconds, vigilance.limit_s(signs)
            told = (self.worker, signs.model, silent_s, limit_s)
            if silent_s >= limit_s:
                log.error("worker_killed worker=%s reason=hangs model=%s silent_s=%.1f limit_s=%.1f", *told)
                what = f"did not advance for {silent_s:.3g} s, limit: {limit_s:.3g} s"
                link.why_killed = f"{what},"
                self.state = Killed(process, link, f"it hung: it {what}")
                processes.kill(process)
                return
            if silent_s >= vigilance.usual_s and not is_slow:
                log.warning("worker_slow worker=%s model=%s silent_s=%.1f limit_s=%.1f", *told)
            is_slow = silent_s >= vigilance.usual_s


async def _is_gone(process: WorkerProcess, left: asyncio.Event) -> bool:
    gone, leaves = asyncio.create_task(process.wait()), asyncio.create_task(left.wait())
    try:
        await asyncio.wait((gone, leaves), return_when=asyncio.FIRST_COMPLETED)
        return gone.done()
    finally:
        gone.cancel()
        leaves.cancel()
