"""Keeps the keeper of the store alive: starts it, asks at every heartbeat whether it lives, replaces it.

The keeper's main thread only answers, so it answers at once however slow disks and object storage are. A
keeper that does not was stopped, or its interpreter hangs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress

from hearth.core.errors import HearthError
from hearth.core.messages import KeeperSetup
from hearth.node import processes
from hearth.node.processes import ErrorFile, Vigilance
from hearth.policy.fleet.liveness import Silence
from hearth.system.cpus import queued_s

log = logging.getLogger(__name__)


class KeeperProcess:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        setup: KeeperSetup,
        vigilance: Vigilance,
        errors: ErrorFile,
        on_failed_start: Callable[[], None],
    ) -> None:
        self.is_ready = asyncio.Event()
        self.trouble: str | None = None  #: why there is no keeper; None: there is
        self.num_failed_starts = 0  #: in a row
        self.num_starts = 0  #: that succeeded; the next process has to be told everything anew
        self.reads_natively = True  #: False: without a C compiler the interpreter reads chunks
        self._setup, self._vigilance, self._errors = setup, vigilance, errors
        self._on_failed_start = on_failed_start
        self._process: Process | None = None

    async def start(self) -> None:
        """Start the keeper and wait until it is ready. Raises HearthError."""
        self._process = await processes.spawn("hearth.store.keeper", self._setup, self._errors)
        answer = await processes.answer_of(
            self._process, "the keeper of the store", self._vigilance.start_s, "check that its disk responds"
        )
        self.reads_natively = answer.reads_natively
        self.trouble, self.num_failed_starts = None, 0
        self.num_starts += 1
        self.is_ready.set()

    async def keep(self) -> None:
        """Replace the keeper whenever it ends. Call it after `start`."""
        num_short_lives = 0
        while True:
            process = self._process
            assert process is not None, "it was started before"
            began_s = time.monotonic()
            watch = processes.run_vital(self._watch(process))
            try:
                code = await process.wait()
            finally:
                watch.cancel()
            self.is_ready.clear()
            is_short = time.monotonic() - began_s < processes.SHORT_LIFE_S
            num_short_lives = num_short_lives + 1 if is_short else 0
            delay_s = processes.restart_delay_s(num_short_lives)
            if self.trouble is None:
                self.trouble = processes.ending_of(code, b"", None).reason
            log.error("keeper_ended code=%d next_try_s=%g reason=`%s`", code, delay_s, self.trouble)
            await asyncio.sleep(delay_s)
            try:
                await self.start()
            except (HearthError, OSError, ValueError) as error:  # the next try may do better
                self.trouble, self.num_failed_starts = str(error), self.num_failed_starts + 1
                log.error("keeper_not_started reason=%s", error)
                self._on_failed_start()

    async def close(self) -> None:
        if self._process is not None:
            await processes.end(self._process)

    async def _watch(self, process: Process) -> None:
        """Kill a keeper that hangs: loads that wait for it continue with the next one."""
        hang = await hang_of(process, self._vigilance.heartbeat_s, self._vigilance.usual_s)
        log.error("keeper_killed reason=hangs pid=%d said=`%s`", process.pid, hang)
        self.trouble = f"it hung: it {hang}"
        processes.kill(process)


async def hang_of(keeper: Process, heartbeat_s: float, max_silence_s: float) -> str:
    assert keeper.stdin is not None, "asked for a pipe"
    assert keeper.stdout is not None, "asked for a pipe"
    silence = Silence(heartbeat_s, queued_s(keeper.pid) or 0.0)
    while True:
        with suppress(ConnectionError, RuntimeError):  # it has just ended, by asyncio and by uvloop
            keeper.stdin.write(b"\n")
        while not await _has_answered(keeper.stdout, heartbeat_s):
            silence.beat(queued_s(keeper.pid) or silence.queued_s, was_heard=False)
            if silence.seconds >= max_silence_s:
                return f"did not answer for {silence.seconds:.3g} s, limit: {max_silence_s:.3g} s"
        silence.beat(queued_s(keeper.pid) or silence.queued_s, was_heard=True)
        await asyncio.sleep(heartbeat_s)


async def _has_answered(answers: asyncio.StreamReader, patience_s: float) -> bool:
    try:
        async with asyncio.timeout(patience_s):
            while not await answers.readline():
                await asyncio.sleep(patience_s)  # it has ended, or is about to
        return True
    except TimeoutError:
        return False
