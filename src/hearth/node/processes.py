"""Starts and ends processes of this machine, and says why they ended."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import msgspec

from hearth.core.beacon import StepSigns
from hearth.core.errors import ConfigError, ServiceError, error_of
from hearth.core.messages import ProcessAnswer, WorkerFarewell
from hearth.policy.fleet.liveness import max_silence_s
from hearth.system.crash import end_process

#: A process that lived for less is restarted after a delay, which doubles with each of them in a row.
SHORT_LIFE_S = 30.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
#: Time for a process to end by itself before it is killed.
GOODBYE_S = 5.0
#: The longest farewell that is read, and the longest reason that is told, in characters.
MAX_FAREWELL_BYTES, MAX_REASON = 64 << 10, 500

#: Where a process writes its standard error; None: where this process does.
ErrorFile = IO[bytes] | int | None


@dataclass(frozen=True, slots=True)
class Vigilance:
    start_s: float  #: until it is ready
    heartbeat_s: float  #: between two pings
    max_missed: int

    @property
    def usual_s(self) -> float:
        return self.max_missed * self.heartbeat_s

    def limit_s(self, signs: StepSigns) -> float:
        return self.usual_s if signs.model is None else max_silence_s(self.usual_s, signs.longest_s)


@dataclass(frozen=True, slots=True)
class WorkerEnding:
    reason: str
    is_final: bool = False  #: a setting is wrong: the next worker would end in the same way


def ending_of(code: int, farewell: bytes, killed_for: str | None) -> WorkerEnding:
    if killed_for is not None:
        return WorkerEnding(killed_for)
    try:
        said = msgspec.json.decode(farewell, type=WorkerFarewell)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return WorkerEnding(_by_signal(-code) if code < 0 else f"exit code {code}, the log says more")
    reason = " ".join(said.reason.split())
    if len(reason) > MAX_REASON:
        reason = f"{reason[:MAX_REASON]} ..."
    return WorkerEnding(reason, is_final=said.error == ConfigError.label)


def _by_signal(number: int) -> str:
    name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
    return f"{name}, from outside Hearth or because memory was short" if number == signal.SIGKILL else name


def restart_delay_s(num_failures: int) -> float:
    if num_failures <= 0:
        return 0.0
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_failures - 1, 32))


class ChildProcess:
    """A child of this process, however it was started; used like asyncio's `Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        try:
            os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            os.close(self._descriptor)
            raise
        self._loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._descriptor, self._reap)

    async def wait(self) -> int:
        """Return the exit code once the process has ended; negative: the number of the signal."""
        return await asyncio.shield(self._code)

    def kill(self) -> None:
        if not self._code.done():
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        ended = os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED)
        assert ended is not None, "the descriptor is readable when the process has ended"
        os.close(self._descriptor)
        self._code.set_result(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)


class ForkedWorker(ChildProcess):
    """A worker that a template has forked and this process has adopted. Owns its pipes."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        super().__init__(pid)
        self.stdin, self._said = stdin, stdout
        self.stdout = asyncio.StreamReader()  #: has all of its output, once it has ended

    def _reap(self) -> None:
        os.set_blocking(self._said.fileno(), False)  # a process that it started may hold the other end
        self.stdout.feed_data(self._said.read(MAX_FAREWELL_BYTES) or b"")
        self.stdout.feed_eof()
        self._said.close()
        self.stdin.close()
        super()._reap()


WorkerProcess = Process | ForkedWorker


async def spawn(module: str, setup: msgspec.Struct, errors: ErrorFile, *descriptors: int) -> Process:
    """Start a Python process, which inherits the descriptors and reads its setup from standard input."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # import no modules from the working directory
        "-m",
        module,
        stdin=PIPE,
        stdout=PIPE,
        stderr=errors,
        pass_fds=descriptors,
        # Ctrl-C is for this process alone. In a session of its own, the niceness of the keeper's threads
        # would not count beside workers: Linux may schedule each session as one (`sched_autogroup_enabled`).
        preexec_fn=os.setpgrp,  # uvloop has no `process_group`
    )
    assert process.stdin is not None, "asked for a pipe"
    process.stdin.write(msgspec.json.encode(setup) + b"\n")
    with suppress(ConnectionError):  # it died at once: `wait` tells
        await process.stdin.drain()
    return process


async def answer_of(process: Process, what: str, start_s: float, remedy: str) -> ProcessAnswer:
    """Wait until a process is ready, and end one that will not be. Raises HearthError.

    `what`: the process, for people. `remedy`: if it takes longer than `start_s`.
    """
    assert process.stdout is not None, "asked for a pipe"
    try:
        line = await asyncio.wait_for(process.stdout.readline(), start_s)
    except TimeoutError:
        kill(process)
        late = f"{what} was not ready within {start_s:g} s"
        raise ServiceError(f"{late}; {remedy}, or raise `service.start_s`") from None
    if not line:
        raise ServiceError(f"{what} died at once; the log says more")
    answer = msgspec.json.decode(line, type=ProcessAnswer)
    if answer.error is not None:
        await end(process)
        raise error_of(answer.error, answer.reason)
    return answer


def kill(process: WorkerProcess) -> None:
    with suppress(ProcessLookupError):
        process.kill()


async def end(process: WorkerProcess) -> None:
    """Close the standard input of a process, which tells it to end; kill it if it does not."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), GOODBYE_S)
    except TimeoutError:
        kill(process)
        await process.wait()


async def farewell_of(process: WorkerProcess) -> bytes:
    assert process.stdout is not None, "asked for a pipe"
    try:  # a process that it started may still hold the pipe
        return await asyncio.wait_for(process.stdout.read(MAX_FAREWELL_BYTES), GOODBYE_S)
    except TimeoutError:
        return b""


def run_vital(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """Start a task whose failure ends this process: without it a process would go unwatched."""
    task = asyncio.create_task(work)
    task.add_done_callback(_end_if_failed)
    return task


def _end_if_failed(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        end_process("supervisor", error)
