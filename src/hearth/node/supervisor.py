"""Keeps the processes of this machine alive: the keeper of the store and the workers. Decides no placement.

Workers are forked from a template (`worker_template.py`), or spawned where there is none.

A worker is pinged at every heartbeat, and its step thread, which alone speaks, answers between two steps; in
a step, which may be long, its beacon shows how that advances (`core/beacon.py`). One that does neither for
`max_missed` heartbeats, or longer where its steps were slow before (`policy/fleet/liveness.py`), hangs, and
is killed; one that had no core to run on is only slow. One that dies, for whatever reason, is replaced: at
once, or after a growing delay if that comes soon again. A process that had a device takes seconds to be gone,
and its connection ends first: its successor starts beside it, and takes the memory when it is gone. One that
says at its first start that its settings are wrong is not replaced: no restart would help. Why workers are
not up can be asked for, and once none of them comes up whoever waits for one is told. The processes end with
this one, however it ends: their standard input closes, and the kernel kills what does not heed that.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

import msgspec

from hearth.core.beacon import Beacon, StepSigns, new_beacon_file
from hearth.core.errors import ConfigError, HearthError, NoWorkers, ServiceError, error_of
from hearth.core.messages import KeeperSetup, Ping, Shutdown, WorkerHello, WorkerSetup
from hearth.core.types import WorkerId
from hearth.node.keeper_process import hang_of
from hearth.node.processes import MAX_FAREWELL_BYTES, WorkerEnding, ending_of
from hearth.node.worker_link import WorkerLink
from hearth.node.worker_template import ForkedWorker, WorkerTemplate
from hearth.policy.fleet.liveness import Silence, max_silence_s
from hearth.system.cpus import queued_s
from hearth.system.crash import end_process

#: A process that was never ready, or one after the other that lived for less, is started again only after a
#: delay, which doubles up to the longest.
SHORT_LIFE_S = 30.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
#: Processes of a kind that end before they are ready, in a row, until none of them is expected to come up.
MAX_FAILED_STARTS = 3
#: Time for a process to end by itself before it is killed.
GOODBYE_S = 5.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Vigilance:
    """The silences after which a worker is killed."""

    start_s: float  #: for a worker to say hello
    heartbeat_s: float  #: between two pings
    max_missed: int

    @property
    def usual_s(self) -> float:
        """How long a worker may be silent that makes no step."""
        return self.max_missed * self.heartbeat_s

    def limit_s(self, signs: StepSigns) -> float:
        """Return how long a worker with such signs may be silent."""
        return self.usual_s if signs.model is None else max_silence_s(self.usual_s, signs.longest_s)


@dataclass(frozen=True, slots=True, eq=False)
class Departure:
    """The end of a worker's process. It may take a while, and until then the process has its memory."""

    worker: WorkerId
    process: Process | ForkedWorker
    lived_s: float
    killed_for: str | None  #: as of a seat
    next_try_s: float  #: from when it was known to the start of the next process


@dataclass(frozen=True, slots=True, eq=False)
class Leaver:
    """A process that is on its way out while its successor starts."""

    process: Process | ForkedWorker
    seen_off: asyncio.Task[None]  #: done when the process is gone


@dataclass(slots=True, eq=False)
class WorkerSeat:
    """The place of a worker, taken by one process after the other. Mutable; written by the supervisor."""

    index: int
    worker: WorkerId
    process: Process | ForkedWorker | None = None
    link: WorkerLink | None = None
    hello: WorkerHello | None = None
    beacon: Beacon = field(default_factory=Beacon)  #: of the process
    num_restarts: int = 0
    greeted: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)  #: its connection has ended, and so will it
    leaver: Leaver | None = None  #: the process before, if the present one was started beside it
    was_ever_ready: bool = False
    budget_bytes: int | None = None  #: of the first process that was ready; None: there was none
    num_failed_starts: int = 0  #: in a row, without one that was ready
    killed_for: str | None = None  #: why the present process was killed here; None: it was not
    ending: WorkerEnding | None = None  #: of the process before; None: there was none, or this one is ready
    next_try_s: float = 0.0  #: when the next process is started, on the clock of `time.monotonic`

    @property
    def state(self) -> str:
        """The state that `WorkerView` has."""
        if self.hello is not None:
            return "ready"
        return "failing" if self.num_failed_starts else "starting"

    @property
    def predecessor(self) -> int | None:
        """The process before, if that is not gone yet."""
        leaver = self.leaver
        return None if leaver is None or leaver.seen_off.done() else leaver.process.pid

    def trouble(self, now_s: float) -> str | None:
        """Say why nobody is ready here; None: somebody is, or starts and is the first."""
        if self.link is not None or self.ending is None:
            return None
        times = {0: "", 1: " once"}.get(self.num_failed_starts, f" {self.num_failed_starts} times")
        when = f"in {max(0.0, self.next_try_s - now_s):.0f} s" if self.process is None else "under way"
        before = " before it was ready" if self.num_failed_starts else ""
        return f"worker {self.index} ended{times}{before}: {self.ending.reason}; next try {when}"


class Supervisor:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        setup_of: Callable[[int, WorkerId], WorkerSetup],
        keeper: KeeperSetup,
        num_workers: int,
        vigilance: Vigilance,
        errors: IO[bytes] | int | None,
        on_outage: Callable[[NoWorkers], None] = lambda error: None,
        template: WorkerTemplate | None = None,
    ) -> None:
        """`errors`: the file that the processes log to. `on_outage` is told when no worker comes up.

        `template`: that workers are forked from, kept alive here; None: each is spawned.
        """
        self._setup_of, self._keeper_setup, self._vigilance = setup_of, keeper, vigilance
        self._errors, self._on_outage, self._template = errors, on_outage, template
        #: Set when a worker has said that its settings are wrong, and what it said.
        self.refused = asyncio.Event()
        self.refusal: ConfigError | None = None
        self._keeper_trouble: str | None = None  #: why there is no keeper; None: there is
        self._num_failed_keepers = 0  #: in a row, as of a seat
        self.seats = [WorkerSeat(index, WorkerId(f"w{index}")) for index in range(num_workers)]
        self._keeper: Process | None = None
        self.reads_natively = True  #: False: the keeper has no C compiler, and its interpreter reads chunks
        self._is_keeper_ready = asyncio.Event()
        self._leaving: set[Process | ForkedWorker] = set()  #: workers that have no seat and are not gone
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all processes; returns when the keeper is ready, and workers may take longer.

        Raises:
            HearthError: the keeper cannot start, for the reason that it gives.
        """
        if self._template is not None:  # first: its imports are what the first workers wait for
            self._tasks.append(_vital(self._template.keep()))
        await self._start_keeper()
        self._tasks += [_vital(self._keep_keeper()), *(_vital(self._keep(seat)) for seat in self.seats)]

    def trouble(self) -> str | None:
        """Say why workers are not up that should be; None: they are, or start for the first time."""
        now_s = time.monotonic()
        told = [trouble for seat in self.seats if (trouble := seat.trouble(now_s)) is not None]
        if self._keeper_trouble is not None:  # without which no worker is started, and no model loaded
            return f"the keeper of the store is not up: {self._keeper_trouble}"
        if not told:
            return None
        return told[0] if len(told) == 1 else f"{told[0]}; {len(told) - 1} more workers ended, too"

    def outage(self) -> NoWorkers | None:
        """Return the error of requests while no worker comes up; None while one is up, or may come up."""
        is_any_ready = any(seat.link is not None for seat in self.seats)
        num_failed = max(min(seat.num_failed_starts for seat in self.seats), self._num_failed_keepers)
        if is_any_ready or num_failed < MAX_FAILED_STARTS:
            return None
        error = NoWorkers(f"no worker is up: {self.trouble()}")
        next_try_s = min(seat.next_try_s for seat in self.seats)
        error.retry_s = max(1.0, next_try_s - time.monotonic())
        return error

    def expects(self, worker: WorkerId) -> bool:
        return any(seat.worker == worker and seat.link is None for seat in self.seats)

    def joined(self, link: WorkerLink, hello: WorkerHello) -> None:
        seat = self._seat(hello.worker)
        assert seat is not None, f"{hello.worker=} was not expected"
        seat.link, seat.hello, link.beacon = link, hello, seat.beacon
        seat.was_ever_ready, seat.num_failed_starts, seat.ending = True, 0, None
        seat.budget_bytes = seat.budget_bytes or hello.budget_bytes
        seat.greeted.set()
        log.info("worker_ready worker=%s pid=%d device=%s", hello.worker, hello.pid, hello.device)

    def left(self, link: WorkerLink) -> None:
        """Kill a worker whose connection has ended: it is of no use without."""
        seat = None if link.worker is None else self._seat(link.worker)
        if seat is not None and seat.process is not None:
            _kill(seat.process)
            seat.left.set()

    async def close(self) -> None:
        for seat in self.seats:
            if seat.link is not None:
                seat.link.send(Shutdown())
        for task in self._tasks:
            task.cancel()
        leavers = [seat.leaver for seat in self.seats if seat.leaver is not None]
        processes = [*(seat.process for seat in self.seats), self._keeper, *self._leaving]
        await asyncio.gather(*(_end(process) for process in processes if process is not None))
        await asyncio.gather(*self._tasks, *(one.seen_off for one in leavers), return_exceptions=True)

    def _seat(self, worker: WorkerId) -> WorkerSeat | None:
        return next((seat for seat in self.seats if seat.worker == worker), None)

    async def _keep(self, seat: WorkerSeat) -> None:
        """Keep a seat taken: start a worker, wait for its end, start the next."""
        num_short_lives = 0  # in a row
        for life in itertools.count():
            if life:
                seat.worker = WorkerId(f"w{seat.index}.{life}")
            seat.link, seat.hello, seat.num_restarts, seat.killed_for = None, None, life, None
            seat.greeted.clear()
            seat.left.clear()
            await self._is_keeper_ready.wait()
            began_s = asyncio.get_running_loop().time()
            try:
                await self._start_worker(seat)
            except OSError as error:  # the machine has no room for a process now
                log.error("worker_not_started worker=%s reason=%s", seat.worker, error)
                num_short_lives += 1
                ending = WorkerEnding(f"it cannot be started: {error}")
                await self._pause(seat, ending, _delay_s(num_short_lives))
                continue
            process = seat.process
            assert process is not None, "it was started"
            watch = _vital(self._watch(seat, process))
            try:
                is_gone = await _is_gone(process, seat.left)
            finally:
                watch.cancel()
            lived_s = asyncio.get_running_loop().time() - began_s
            if seat.link is not None:
                seat.link.abort()
            seat.process = seat.link = seat.hello = None  # or it would still count as ready
            self._leaving.add(process)
            was_ready, leaver = seat.greeted.is_set(), seat.leaver
            if leaver is not None:
                await leaver.seen_off  # before another one leaves
                seat.leaver = None
                if not was_ready:  # perhaps for want of the memory that has only now come free
                    await self._see_off(seat, Departure(seat.worker, process, lived_s, seat.killed_for, 0.0))
                    continue
            num_short_lives = 0 if was_ready and lived_s >= SHORT_LIFE_S else num_short_lives + 1
            # One that was ready may have been killed by chance, and once is forgiven.
            delay_s = _delay_s(num_short_lives - was_ready)
            departure = Departure(seat.worker, process, lived_s, seat.killed_for, delay_s)
            if not is_gone and not delay_s:
                seat.ending = WorkerEnding(seat.killed_for or "it is ending")
                seat.leaver = Leaver(process, _vital(self._see_off(seat, departure)))
                continue
            await self._see_off(seat, departure)
            assert seat.ending is not None, "it is told here"
            if seat.ending.is_final and not seat.was_ever_ready:
                self.refusal = ConfigError(seat.ending.reason)
                self.refused.set()
                return
            await self._pause(seat, seat.ending, delay_s)

    async def _see_off(self, seat: WorkerSeat, departure: Departure) -> None:
        """Wait until the process that a seat had last is gone, and tell of it."""
        code = await departure.process.wait()
        self._leaving.discard(departure.process)
        ending = ending_of(code, await _farewell(departure.process), departure.killed_for)
        if seat.link is None:  # else its successor is ready already
            seat.ending = ending
        log.warning(
            "worker_ended worker=%s code=%d lived_s=%.1f next_try_s=%g reason=`%s`",
            *(departure.worker, code, departure.lived_s, departure.next_try_s),
            ending.reason.replace("`", ""),
        )

    async def _pause(self, seat: WorkerSeat, ending: WorkerEnding, delay_s: float) -> None:
        """Wait before the next process of a seat; who waits for a worker is told if none comes up."""
        seat.ending, seat.next_try_s = ending, time.monotonic() + delay_s
        if not seat.greeted.is_set():
            seat.num_failed_starts += 1
        self._tell_outage()
        await asyncio.sleep(delay_s)

    def _tell_outage(self) -> None:
        if (outage := self.outage()) is not None:
            self._on_outage(outage)

    async def _start_worker(self, seat: WorkerSeat) -> None:
        descriptor = new_beacon_file()
        try:
            seat.beacon = Beacon.at(descriptor)
            setup = msgspec.structs.replace(
                self._setup_of(seat.index, seat.worker),
                beacon=descriptor,
                predecessor=seat.predecessor,
            )
            if setup.budget_bytes is None and not seat.num_failed_starts:
                # The memory of a worker that was killed may not be free yet, and is all to be had again.
                setup = msgspec.structs.replace(setup, budget_bytes=seat.budget_bytes)
            forked = None if self._template is None else await self._template.fork(setup, descriptor)
            seat.process = forked or await self._spawn("hearth.worker", setup, descriptor)
        finally:
            os.close(descriptor)

    async def _watch(self, seat: WorkerSeat, process: Process | ForkedWorker) -> None:
        """Kill a worker that does not come up or hangs."""
        try:
            await asyncio.wait_for(seat.greeted.wait(), self._vigilance.start_s)
        except TimeoutError:
            seat.killed_for = f"it was not ready within {self._vigilance.start_s:g} s (`service.start_s`)"
            log.error("worker_killed worker=%s reason=`%s`", seat.worker, seat.killed_for.replace("`", ""))
            _kill(process)
            return
        if queued_s(process.pid) is None:
            log.info("fallback silence=with_waits_for_cores worker=%s reason=no_schedstat", seat.worker)
        silence = Silence(self._vigilance.heartbeat_s, queued_s(process.pid) or 0.0)
        before, num_received, is_told = seat.beacon.read(), 0, False
        for number in itertools.count(1):
            link = seat.link
            if link is None:
                return
            link.send(Ping(number))
            await asyncio.sleep(self._vigilance.heartbeat_s)
            signs = seat.beacon.read()
            was_heard = link.num_received > num_received or link.is_held_back
            was_heard = was_heard or signs.num_marks != before.num_marks
            silence.beat(queued_s(process.pid) or silence.queued_s, was_heard=was_heard)
            before, num_received = signs, link.num_received
            limit_s = self._vigilance.limit_s(signs)
            told = (seat.worker, signs.model, silence.seconds, limit_s)
            if silence.seconds < self._vigilance.usual_s:
                is_told = False
            elif silence.seconds < limit_s and not is_told:
                is_told = True
                log.warning("worker_slow worker=%s model=%s silent_s=%.1f limit_s=%.1f", *told)
            if silence.seconds >= limit_s:
                log.error("worker_killed worker=%s reason=hangs model=%s silent_s=%.1f limit_s=%.1f", *told)
                link.why_killed = f"did not advance for {silence.seconds:.3g} s, limit: {limit_s:.3g} s,"
                seat.killed_for = f"it hung: it {link.why_killed.rstrip(',')}"
                _kill(process)
                return

    async def _start_keeper(self) -> None:
        self._keeper = await self._spawn("hearth.store.keeper", self._keeper_setup)
        assert self._keeper.stdout is not None, "its first line is the answer"
        try:
            line = await asyncio.wait_for(self._keeper.stdout.readline(), self._vigilance.start_s)
        except TimeoutError:
            _kill(self._keeper)
            limit_s = self._vigilance.start_s
            raise ServiceError(
                f"the keeper of the store was not ready within {limit_s:g} s; see whether its disk answers, "
                "or raise `service.start_s`"
            ) from None
        answer = json.loads(line) if line else {"error": "", "reason": "the keeper of the store died at once"}
        if "error" in answer:
            await _end(self._keeper)
            raise error_of(answer["error"], answer["reason"])
        self.reads_natively = bool(answer["reads_natively"])
        self._keeper_trouble, self._num_failed_keepers = None, 0
        self._is_keeper_ready.set()

    async def _keep_keeper(self) -> None:
        num_short_lives = 0
        while True:
            assert self._keeper is not None, "it was started before"
            began_s = asyncio.get_running_loop().time()
            watch = _vital(self._watch_keeper(self._keeper))
            try:
                code = await self._keeper.wait()
            finally:
                watch.cancel()
            self._is_keeper_ready.clear()
            lived_s = asyncio.get_running_loop().time() - began_s
            num_short_lives = 0 if lived_s >= SHORT_LIFE_S else num_short_lives + 1
            delay_s = _delay_s(num_short_lives)
            if self._keeper_trouble is None:
                self._keeper_trouble = ending_of(code, b"", None).reason
            log.error("keeper_ended code=%d next_try_s=%g reason=`%s`", code, delay_s, self._keeper_trouble)
            await asyncio.sleep(delay_s)
            try:
                await self._start_keeper()
            except (HearthError, OSError, ValueError) as error:  # whatever it is, the next try may do better
                self._keeper_trouble, self._num_failed_keepers = str(error), self._num_failed_keepers + 1
                log.error("keeper_not_started reason=%s", error)
                self._tell_outage()

    async def _watch_keeper(self, keeper: Process) -> None:
        """Kill a keeper that hangs: loads that wait for it go on with the next."""
        hang = await hang_of(keeper, self._vigilance.heartbeat_s, self._vigilance.usual_s)
        log.error("keeper_killed reason=hangs pid=%d said=`%s`", keeper.pid, hang)
        self._keeper_trouble = f"it hung: it {hang}"
        _kill(keeper)

    async def _spawn(self, module: str, setup: WorkerSetup | KeeperSetup, *descriptors: int) -> Process:
        """Start a process, which inherits the descriptors."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module),  # -P: not what lies in the directory it was started in
            stdin=PIPE,
            stdout=PIPE,
            stderr=self._errors,
            pass_fds=descriptors,
            start_new_session=True,  # Ctrl-C is for this process alone; its own would tell by a traceback
        )
        assert process.stdin is not None, "asked for a pipe"
        process.stdin.write(msgspec.json.encode(setup) + b"\n")
        with suppress(ConnectionError):  # it died at once, and whoever waits for it will see
            await process.stdin.drain()
        return process


def _vital(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Start a task whose failure ends the process: nobody else would look after what it looks after."""
    task = asyncio.create_task(work)
    task.add_done_callback(_end_if_failed)
    return task


def _end_if_failed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        end_process("supervisor", error)


def _delay_s(num_failures: int) -> float:
    """Return how long to wait before the next process, after so many in a row that did not last."""
    if num_failures <= 0:
        return 0.0
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_failures - 1, 32))


async def _is_gone(process: Process | ForkedWorker, left: asyncio.Event) -> bool:
    """Wait until a process has ended, or is said to end; True: it has ended."""
    gone, leaves = asyncio.create_task(process.wait()), asyncio.create_task(left.wait())
    try:
        await asyncio.wait((gone, leaves), return_when=asyncio.FIRST_COMPLETED)
        return gone.done()
    finally:
        gone.cancel()
        leaves.cancel()


async def _farewell(process: Process | ForkedWorker) -> bytes:
    """Return what a process that has ended said on its standard output."""
    assert process.stdout is not None, "asked for a pipe"
    try:  # one that it has started may still hold its standard output
        return await asyncio.wait_for(process.stdout.read(MAX_FAREWELL_BYTES), GOODBYE_S)
    except TimeoutError:
        return b""


def _kill(process: Process | ForkedWorker) -> None:
    with suppress(ProcessLookupError):
        process.kill()


async def _end(process: Process | ForkedWorker) -> None:
    """Close the standard input of a process, which tells it to end; kill it if it does not."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), GOODBYE_S)
    except TimeoutError:
        _kill(process)
        await process.wait()


def seat_index(worker: WorkerId) -> int:
    """Return the seat of a worker or of one of its successors, by its name: `w0`, then `w0.1`."""
    return int(worker.partition(".")[0].removeprefix("w"))
