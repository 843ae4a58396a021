"""Notes of what the threads of a process do, kept in memory. Imports nothing that a gateway has not."""

from __future__ import annotations

import gc
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_LONG_GARBAGE_S = 0.0003


@dataclass(frozen=True, slots=True)
class Noted:
    """Something that a thread did."""

    thread: str
    what: str
    begin_s: float
    end_s: float


class Ring:
    """The last things that threads did. Mutable; any thread writes."""

    def __init__(self, max_events: int = 1 << 15) -> None:
        #: What `Noted` is made of. To append is one step of the interpreter, and costs who is watched little.
        self._events: deque[tuple[str, str, float, float]] = deque(maxlen=max_events)

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        begin_s = time.perf_counter()
        try:
            yield
        finally:
            self._events.append((threading.current_thread().name, what, begin_s, time.perf_counter()))

    def trace(self, owner: object, name: str, what: str) -> None:
        """Have all calls of a function noted from now on."""
        called: Callable[..., Any] = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            with self.span(what):
                return called(*arguments, **named)

        setattr(owner, name, noted)

    def trace_slices(self, owner: object, name: str, what: str) -> None:
        """Have every piece of a coroutine noted that keeps its event loop, from one wait to the next."""
        called: Callable[..., Coroutine[Any, Any, Any]] = getattr(owner, name)

        @types.coroutine
        def sliced(work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
            resume, given = work.send, None
            while True:
                begin_s = time.perf_counter()
                try:
                    awaited = resume(given)
                except StopIteration as end:
                    return end.value
                finally:
                    self._events.append((threading.current_thread().name, what, begin_s, time.perf_counter()))
                try:
                    resume, given = work.send, (yield awaited)
                except BaseException as error:  # it is called off, and may have a last word
                    resume, given = work.throw, error

        async def noted(*arguments: Any, **named: Any) -> Any:
            return await sliced(called(*arguments, **named))

        setattr(owner, name, noted)

    def trace_garbage(self) -> None:
        """Have all collections of garbage noted that take a while, by the thread that they keep."""
        begun_s = [0.0]

        def noted(phase: str, about: dict[str, int]) -> None:
            now_s = time.perf_counter()
            if phase == "start":
                begun_s[0] = now_s
            elif now_s - begun_s[0] > _LONG_GARBAGE_S:
                what = f"garbage {about['generation']}"
                self._events.append((threading.current_thread().name, what, begun_s[0], now_s))

        gc.callbacks.append(noted)

    def all(self) -> list[Noted]:
        return [Noted(*one) for one in list(self._events)]

    def during(self, begin_s: float, end_s: float) -> list[Noted]:
        return [one for one in self.all() if one.begin_s < end_s and one.end_s > begin_s]
