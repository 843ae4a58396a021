"""The thread that steps an engine, and the queues to and from it. Turns no token into text.

The thread owns the engine. Callers post commands, and read the outputs of their requests from their own
queue. When idle it sleeps on its inbox. Every added request ends exactly once: by an output with a finish
reason, by `RequestFailed`, by `Failed`, or by its cancellation.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from hearth.core.errors import EngineFailed, HearthError, LoadCancelled
from hearth.core.types import RequestId
from hearth.engine.engine import Engine, StepOutputs
from hearth.policy.batch.plan import EngineRequest, RequestFailed

#: An idle engine finishes its books this long after its outputs are sent.
_READERS_S = 0.001

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: RequestId
    cause: BaseException


class Outbox(SimpleQueue[StepOutputs | RequestFailed | Failed]):
    """Receives the outputs of one or more requests, in step order, one message per step."""


@dataclass(frozen=True, slots=True)
class _Add:
    requests: Sequence[EngineRequest]
    outbox: Outbox


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: RequestId


@dataclass(frozen=True, slots=True)
class _Change:
    change: Callable[[Engine], None]
    done: Future[None]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Command = _Add | _Cancel | _Change | _Stop


class StepLoop:
    """An engine on its own thread. Any thread may call `add`, `cancel` and `close`."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        """Run `build` on the step thread, which then owns the engine; its exceptions are raised here."""
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._outboxes: dict[RequestId, Outbox] = {}
        #: Orders `add` and `close`: no command is posted behind the stop.
        self._gate = threading.Lock()
        self._is_closed = False
        built: Future[Engine] = Future()
        self._thread = threading.Thread(
            target=self._build_and_run, args=(build, built), name="hearth-step", daemon=True
        )
        self._thread.start()
        self.engine = built.result()

    def add(self, requests: Sequence[EngineRequest], outbox: Outbox) -> None:
        """Start requests together: no step has only some of them.

        If the engine failed or was closed, each gets a `Failed`.
        """
        with self._gate:
            if not self._is_closed:
                self._inbox.put(_Add(requests, outbox))
                return
        _refuse(requests, outbox, _closed())

    def cancel(self, request_id: RequestId) -> None:
        """End a request. Outputs already in its outbox stay, and no terminal one follows."""
        self._inbox.put(_Cancel(request_id))

    def change(self, change: Callable[[Engine], None]) -> None:
        """Run `change` on the step thread, between steps. Its exceptions are raised here."""
        done: Future[None] = Future()
        with self._gate:
            if self._is_closed:
                raise _closed()
            self._inbox.put(_Change(change, done))
        done.result()

    def close(self) -> None:
        """Stop after the current step and wait for the thread. Live requests fail."""
        with self._gate:
            if not self._is_closed:
                self._is_closed = True
                self._inbox.put(_Stop())
        if (
            threading.current_thread() is not self._thread
        ):  # the garbage collector may call this on the step thread
            self._thread.join()

    def _build_and_run(self, build: Callable[[], Engine], built: Future[Engine]) -> None:
        try:
            engine = build()
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(engine)
        self._run(engine)

    def _run(self, engine: Engine) -> None:
        engine.settles_later = True
        try:
            while self._take_commands(engine):
                outcome = engine.step()
                self._deliver(outcome.outputs)
                for failure in outcome.failures:
                    self._outboxes.pop(failure.request_id).put(failure)
        except Exception as error:
            if not isinstance(error, LoadCancelled):  # closed during a load
                is_ours = isinstance(error, HearthError)  # its message suffices
                num_live = len(self._outboxes)
                log.error("engine_failed requests=%d reason=%s", num_live, error, exc_info=not is_ours)
            self._fail_all(error)
            self._refuse_commands(error)
            return
        self._fail_all(_closed())
        engine.close()

    def _take_commands(self, engine: Engine) -> bool:
        while not engine.has_work or not self._inbox.empty():
            match self._next_command(engine):
                case _Add(requests, outbox):
                    self._outboxes.update((request.request_id, outbox) for request in requests)
                    for request in requests:
                        engine.add(request)
                case _Cancel(request_id):
                    self._outboxes.pop(request_id, None)
                    engine.cancel(request_id)
                case _Change(change, done):
                    try:
                        change(engine)
                    except Exception as error:
                        done.set_exception(error)
                    else:
                        done.set_result(None)
                case _Stop():
                    return False
        return True

    def _next_command(self, engine: Engine) -> _Command:
        if not engine.batcher.is_settled:
            # Readers of the last outputs get the interpreter first, while this thread waits.
            with suppress(Empty):
                return self._inbox.get(timeout=_READERS_S)
            engine.settle()
        return self._inbox.get()

    def _deliver(self, outputs: StepOutputs) -> None:
        rows_by_outbox: defaultdict[Outbox, list[int]] = defaultdict(list)
        for row, request_id in enumerate(outputs.request_ids):
            rows_by_outbox[self._outboxes[request_id]].append(row)
        for request_id in outputs.finished:
            del self._outboxes[request_id]
        for outbox, rows in rows_by_outbox.items():
            outbox.put(outputs if len(rows) == len(outputs) else outputs.only(rows))

    def _fail_all(self, cause: BaseException) -> None:
        while self._outboxes:
            request_id, outbox = self._outboxes.popitem()
            outbox.put(Failed(request_id, cause))

    def _refuse_commands(self, cause: BaseException) -> None:
        while not isinstance(command := self._inbox.get(), _Stop):
            if isinstance(command, _Add):
                _refuse(command.requests, command.outbox, cause)
            elif isinstance(command, _Change):
                command.done.set_exception(cause)


def _refuse(requests: Sequence[EngineRequest], outbox: Outbox, cause: BaseException) -> None:
    for request in requests:
        outbox.put(Failed(request.request_id, cause))


def _closed() -> EngineFailed:
    return EngineFailed("it was closed; load the model again")
