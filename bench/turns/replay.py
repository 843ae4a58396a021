"""Asks a service the questions of a trace at their times, whatever became of those before. Judges nothing.

The client shares the machine with the service, so it keeps bytes with their times and reads them later.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.service.client import Connection, Reply
from bench.turns.setting import Arm
from bench.turns.workload import Question

_LEAD_S = 0.2  #: before the first question


class Gate:
    """Says which questions may be asked now. Mutable; used on the event loop alone.

    One at a time means one model: the first in line has the device together with those that directly follow
    it for the same model, and whoever is behind waits until all of them have ended.
    """

    def __init__(self, models: Sequence[str], *, one_at_a_time: bool) -> None:
        self._models, self._one_at_a_time = models, one_at_a_time  #: the model of each question
        self._waiting: deque[int] = deque()
        self._running: set[int] = set()

    def arrived(self, number: int) -> list[int]:
        """Note that a question has arrived; return those to be asked now."""
        self._waiting.append(number)
        return self._release()

    def ended(self, number: int) -> list[int]:
        """Note that a question has its answer; return those to be asked now."""
        self._running.discard(number)
        return self._release()

    def _release(self) -> list[int]:
        released: list[int] = []
        while self._waiting and self._may_run(self._waiting[0]):
            released.append(self._waiting.popleft())
            self._running.add(released[-1])
        return released

    def _may_run(self, number: int) -> bool:
        if not self._one_at_a_time or not self._running:
            return True
        return self._models[number] == self._models[next(iter(self._running))]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The replies to all questions, by the clock of `time.perf_counter`."""

    began_s: float  #: when the trace began
    ended_s: float  #: when the last answer was whole, or the rest was cut off
    replies: list[Reply | None]  #: None: it was never asked


@dataclass(slots=True)
class _Asking:
    """The questions on their way. Mutable; used on the event loop alone."""

    port: int
    questions: Sequence[Question]
    gate: Gate
    replies: list[Reply | None]
    open: dict[int, Connection] = field(default_factory=dict)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    is_over: bool = False  #: nothing is asked any more

    def start(self, numbers: list[int]) -> None:
        for number in numbers:
            task = asyncio.get_running_loop().create_task(self._ask(number))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def cut_off(self) -> None:
        """End all connections; what came until then is kept."""
        self.is_over = True
        for connection in self.open.values():
            connection.close()
        if self.tasks:
            await asyncio.wait(self.tasks)

    async def _ask(self, number: int) -> None:
        connection = self.open[number] = await Connection.open(self.port)
        try:
            if not self.is_over:
                self.replies[number] = await connection.ask(self.questions[number].body)
        finally:
            connection.close()
            del self.open[number]
        if not self.is_over:
            self.start(self.gate.ended(number))


async def replay(port: int, questions: Sequence[Question], arm: Arm, cutoff_s: float) -> Replayed:
    """Ask each question at its time; what has no whole answer `cutoff_s` after the last is cut off."""
    gate = Gate([question.model for question in questions], one_at_a_time=arm is Arm.ONE_AT_A_TIME)
    asking = _Asking(port, questions, gate, [None] * len(questions))
    began_s = time.perf_counter() + _LEAD_S
    for number, question in enumerate(questions):
        await asyncio.sleep(max(0.0, began_s + question.arrival_s - time.perf_counter()))
        asking.start(gate.arrived(number))
    until_s = began_s + questions[-1].arrival_s + cutoff_s
    while asking.tasks and time.perf_counter() < until_s:
        wait_s = until_s - time.perf_counter()
        await asyncio.wait(asking.tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    ended_s = time.perf_counter()
    await asking.cut_off()
    return Replayed(began_s, ended_s, asking.replies)
