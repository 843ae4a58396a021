"""Keeps the processes of this machine alive: the keeper of the store and the workers. Decides no placement.

Workers are forked from a template (`worker_template.py`), or spawned where there is none. All processes end
with this one, however it ends: their standard input closes, and the kernel kills those that go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hearth.core.errors import ConfigError, NoWorkers
from hearth.core.messages import KeeperSetup, WorkerHello, WorkerSetup
from hearth.core.node_messages import WorkerStatus
from hearth.core.types import WorkerId, name_of
from hearth.node.keeper_process import KeeperProcess
from hearth.node.link import FrameLink
from hearth.node.processes import ErrorFile, Vigilance, WorkerProcess, run_vital, spawn
from hearth.node.worker_seat import WorkerSeat
from hearth.node.worker_template import WorkerTemplate

#: Failed starts in a row after which no worker, or no keeper, is expected to come up.
MAX_FAILED_STARTS = 3


class Supervisor:
    """Mutable; used on the event loop alone."""

    def __init__(
        self,
        setup_of: Callable[[int, WorkerId], WorkerSetup],
        keeper: KeeperSetup,
        num_workers: int,
        vigilance: Vigilance,
        errors: ErrorFile,
        on_failed_start: Callable[[], None] = lambda: None,
        template: WorkerTemplate | None = None,
    ) -> None:
        """`on_failed_start`: of a worker or the keeper. `template` None: workers are spawned."""
        self._errors, self._on_failed_start, self._template = errors, on_failed_start, template
        self.keeper = KeeperProcess(keeper, vigilance, errors, on_failed_start)
        self._setup_of, self._num_workers, self._vigilance = setup_of, num_workers, vigilance
        self.seats = self._new_seats("")
        #: Done when a worker has said that its settings are wrong: no restart would help.
        self.refusal: asyncio.Future[ConfigError] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []
        self._seat_tasks: list[asyncio.Task[None]] = []

    async def start_keeper(self) -> None:
        """Returns when it is ready. Raises HearthError."""
        if self._template is not None:  # first: the first workers wait for its imports
            self._tasks.append(run_vital(self._template.keep()))
        await self.keeper.start()
        self._tasks.append(run_vital(self.keeper.keep()))

    def start_workers(self, prefix: str) -> None:
        """`prefix`: of their names. Names are not used again: call it with another each time."""
        self.seats = self._new_seats(prefix)
        self._seat_tasks = [run_vital(self._keep(seat)) for seat in self.seats]

    async def stop_workers(self) -> None:
        for seat in self.seats:
            seat.shut_down()
        for task in self._seat_tasks:
            task.cancel()
        await asyncio.gather(*(seat.close() for seat in self.seats))
        await asyncio.gather(*self._seat_tasks, return_exceptions=True)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(self.keeper.close(), self.stop_workers())
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def workers(self) -> list[WorkerStatus]:
        return [seat.status() for seat in self.seats]

    def trouble(self) -> str | None:
        """Say why workers are not up; None: they are, or start for the first time."""
        if self.keeper.trouble is not None:  # without it no worker is started and no model loaded
            return f"the keeper of the store is not up: {self.keeper.trouble}"
        told = [trouble for seat in self.seats if (trouble := seat.trouble()) is not None]
        if not told:
            return None
        return told[0] if len(told) == 1 else f"{told[0]}; {len(told) - 1} more workers ended, too"

    def outage(self) -> NoWorkers | None:
        """Return the error of requests while no worker comes up; None: one is up, or may come up."""
        if not self.seats or any(seat.is_ready for seat in self.seats):
            return None
        num_failed = min(seat.num_failed_starts for seat in self.seats)
        if max(num_failed, self.keeper.num_failed_starts) < MAX_FAILED_STARTS:
            return None
        error = NoWorkers(f"no worker is up: {self.trouble()}")
        error.retry_s = max(1.0, min(seat.next_try_s for seat in self.seats) - time.monotonic())
        return error

    # What links tell.

    def expects(self, worker: WorkerId) -> bool:
        return any(seat.worker == worker and seat.can_join for seat in self.seats)

    def joined(self, link: FrameLink, hello: WorkerHello) -> None:
        next(seat for seat in self.seats if seat.worker == hello.worker).joined(link, hello)

    def left(self, link: FrameLink) -> None:
        for seat in self.seats:
            if seat.worker == link.worker:
                seat.left()

    def _new_seats(self, prefix: str) -> list[WorkerSeat]:
        return [
            WorkerSeat(
                index,
                prefix,
                self._setup_of,
                self._launch,
                self._vigilance,
                self.keeper.is_ready,
                self._on_failed_start,
            )
            for index in range(self._num_workers)
        ]

    async def _keep(self, seat: WorkerSeat) -> None:
        refusal = await seat.keep()
        if not self.refusal.done():
            self.refusal.set_result(refusal)

    async def _launch(self, setup: WorkerSetup, beacon: int) -> WorkerProcess:
        forked = None if self._template is None else await self._template.fork(setup, beacon)
        return forked or await spawn("hearth.worker", setup, self._errors, beacon)


def seat_of(worker: WorkerId) -> str:
    """Return the name of a worker without lives: `gpu-2/w0` for `gpu-2.1/w0.3`."""
    return "/".join(map(name_of, worker.split("/")))
