"""Forks workers from a template process, and keeps that process alive.

A worker's imports take seconds, and the template (`worker/template.py`) has done them: a dead worker is
replaced in the time of a fork. The template receives a worker's descriptors over a socket, forks it and
detaches it; this process adopts it as a child. So a worker ends with this process, whatever happens to the
template.

The first template may be older than the service (`template_process.py`). A template that dies is replaced.
Without one, workers are spawned, which is logged, counted and noted.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO

import msgspec

from hearth.core.messages import FORK_WORKER, LOG_HERE, TEMPLATE_BEACON, TemplateAnswer, WorkerSetup
from hearth.node import processes
from hearth.node.processes import ChildProcess, ForkedWorker, ending_of
from hearth.node.template_process import TemplateProcess, start_template

#: Failed starts in a row after which no other template is tried.
MAX_FAILURES = 3
#: Time for a template to fork a worker before it counts as hung.
FORK_S = 5.0
#: Time for a template that has closed its socket to exit.
ENDING_S = 5.0
_ANSWER_BYTES = 4096
_PR_SET_CHILD_SUBREAPER = 36

log = logging.getLogger(__name__)
_LIBC = ctypes.CDLL(None, use_errno=True)


class UnfitTemplate(Exception):
    """A template says that no worker can be forked from it, and why."""


class WorkerTemplate:
    """The template of all workers of a service. Mutable; used on the event loop alone."""

    def __init__(
        self,
        errors: IO[bytes] | int | None,
        start_s: float,
        on_fallback: Callable[[], None],
        first: TemplateProcess | None = None,
    ) -> None:
        """`errors`: the file that it and its workers log to; None: where this process does.

        `start_s`: for it to be ready. `on_fallback` is called for every worker that it cannot fork. `first`:
        a process that was started before; this template owns it.
        """
        self._errors = 2 if errors is None else errors if isinstance(errors, int) else errors.fileno()
        self._start_s, self._on_fallback, self._first = start_s, on_fallback, first
        self._process: ChildProcess | None = None
        self._socket: socket.socket | None = None  #: of one that is ready
        self._is_settled = asyncio.Event()  #: one is ready, or none is to be waited for
        self._one_at_a_time = asyncio.Lock()
        self._num_unanswered = 0  #: orders to the present one to fork
        self._trouble: str | None = None  #: of the last one; None: it is ready, or is the first
        self._killed_for: str | None = None  #: why the present one was killed here
        self._told: str | None = None  #: the trouble that was logged last
        self._was_ready = False  #: the present one, or the last

    @property
    def pid(self) -> int | None:
        return None if self._socket is None or self._process is None else self._process.pid

    @property
    def note(self) -> str | None:
        if self._trouble is None:
            return None
        return f"workers take seconds to start, because there is no template process: {self._trouble}"

    async def keep(self) -> None:
        """Keep a template alive until none can be had or the task is cancelled, with which it ends."""
        num_failures = num_short_lives = 0  # in a row, of templates that were never ready, and of any
        while num_failures < MAX_FAILURES:
            began_s = time.monotonic()
            self._is_settled.clear()
            self._was_ready = False
            try:
                self._trouble = await self._run_one()
            except UnfitTemplate as error:  # and so would be the next one
                self._trouble, num_failures = str(error), MAX_FAILURES
            finally:
                self._is_settled.set()
            log.warning("template_ended reason=`%s`", self._trouble.replace("`", ""))
            num_failures = 0 if self._was_ready else num_failures + 1
            # What ended one, like a lack of memory, may end the next.
            is_short = time.monotonic() - began_s < processes.SHORT_LIFE_S
            num_short_lives = num_short_lives + 1 if is_short else 0
            await asyncio.sleep(processes.restart_delay_s(num_short_lives))

    async def fork(self, setup: WorkerSetup, beacon: int) -> ForkedWorker | None:
        """Start a worker with a setup and the descriptor of its beacon; None: it has to be spawned."""
        async with self._one_at_a_time:
            await self._is_settled.wait()
            if self._socket is not None:
                try:
                    worker = await self._fork(self._socket, beacon)
                    _send_setup(worker, setup)
                    return worker
                except UnfitTemplate as error:
                    self._kill(str(error))
                except OSError as error:
                    self._kill(f"it cannot fork: {error}")
        if self._trouble != self._told:
            self._told = self._trouble
            log.warning("fallback workers=spawned reason=`%s`", (self._trouble or "").replace("`", ""))
        self._on_fallback()
        return None

    async def _run_one(self) -> str:
        self._killed_for, self._num_unanswered = None, 0
        first, self._first = self._first, None
        try:
            started = first or start_template(self._errors)
        except OSError as error:
            return f"it cannot be started: {error}"
        with started.socket as ours:
            try:
                self._process = ChildProcess(started.pid)
            except OSError as error:  # it has ended, and the kernel reaps what this process does not wait for
                return f"it is not there any more: {error}"
            if first is not None:
                with suppress(OSError):  # it has ended, which is seen below
                    socket.send_fds(ours, [LOG_HERE], [self._errors])
            try:
                answer = await _answer(ours, self._start_s)
                if answer.obstacle is not None:
                    raise UnfitTemplate(answer.obstacle)
                self._socket, self._trouble, self._was_ready = ours, None, True
                self._is_settled.set()
                log.info("template_ready pid=%d import_s=%.3f", self._process.pid, answer.import_s)
                await self._process.wait()
            except TimeoutError:
                return f"it was not ready within {self._start_s:g} s (`service.start_s`)"
            except ConnectionError:  # it ended before it was ready
                # To kill one that has just ended loses its exit code.
                with suppress(TimeoutError):
                    async with asyncio.timeout(ENDING_S):
                        await self._process.wait()
            finally:
                self._socket = None
                self._process.kill()
                code = await self._process.wait()
            return self._killed_for or ending_of(code, b"", None).reason

    async def _fork(self, template: socket.socket, beacon: int) -> ForkedWorker:
        """Fork a worker, which waits for its setup. Raises UnfitTemplate, OSError."""
        their_stdin, stdin = _pipe()
        stdout, their_stdout = _pipe()
        try:
            with their_stdin, their_stdout, _adopting():
                descriptors = [their_stdin.fileno(), their_stdout.fileno(), self._errors, beacon]
                socket.send_fds(template, [FORK_WORKER], descriptors)
                self._num_unanswered += 1
                while self._num_unanswered:  # earlier ones are those of tasks that were cancelled
                    answer = await _answer(template, FORK_S)
                    self._num_unanswered -= 1
            if answer.obstacle is not None:
                raise UnfitTemplate(answer.obstacle)
            return ForkedWorker(answer.pid, stdin, stdout)
        except BaseException:  # also where this task is cancelled: a worker ends with its standard input
            stdin.close()
            stdout.close()
            raise

    def _kill(self, reason: str) -> None:
        assert self._process is not None, "it was asked for a worker"
        self._socket, self._trouble, self._killed_for = None, reason, reason
        self._process.kill()


def _send_setup(worker: ForkedWorker, setup: WorkerSetup) -> None:
    setup = msgspec.structs.replace(setup, beacon=TEMPLATE_BEACON)
    with suppress(BrokenPipeError):  # it died at once: `wait` tells
        worker.stdin.write(msgspec.json.encode(setup) + b"\n")
    log.info("worker_forked worker=%s pid=%d", setup.worker, worker.pid)


async def _answer(template: socket.socket, patience_s: float) -> TemplateAnswer:
    try:
        async with asyncio.timeout(patience_s):
            answer = await asyncio.get_running_loop().sock_recv(template, _ANSWER_BYTES)
    except TimeoutError:
        raise TimeoutError(f"it did not answer within {patience_s:g} s") from None
    if not answer:
        raise ConnectionError("it has ended")
    return msgspec.json.decode(answer, type=TemplateAnswer)


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return os.fdopen(reader, "rb", buffering=0), os.fdopen(writer, "wb", buffering=0)


@contextmanager
def _adopting() -> Iterator[None]:
    """Adopt descendants whose parents end meanwhile; not longer, or all would have to be reaped."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
