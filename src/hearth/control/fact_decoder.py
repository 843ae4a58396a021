"""Decodes what workers send away from the event loop: frames to facts, tokens to text. Decides nothing.

One thread does it for all workers. All that one worker sends stays in the order in which it was sent, the end
of its connection included. Workers take turns, a frame each, so that requests on one do not wait for the
backlog of another.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from hearth import wire
from hearth.control.active_request import ActiveRequest
from hearth.control.crash import end_process, frames_of
from hearth.control.generation import TokenDelta
from hearth.control.worker_link import WorkerLink
from hearth.errors import ServiceError
from hearth.messages import Fact, StepDone

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodedToken:
    """A token of a request with the text that it adds."""

    request: ActiveRequest
    delta: TokenDelta


@dataclass(frozen=True, slots=True)
class DecodedFact:
    """A worker's message; of a step, also the tokens with their texts."""

    link: WorkerLink
    num_bytes: int
    fact: Fact | None  #: None: nothing follows, the connection has ended
    tokens: list[DecodedToken] = field(default_factory=list)
    broken: list[ActiveRequest] = field(default_factory=list)  #: whose tokens cannot be turned into text
    ended: list[ActiveRequest] = field(default_factory=list)  #: those of no tokens that are complete


class FactDecoder:
    """Mutable; `decode` and `left` are called on the event loop, and so is `deliver`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runs: Mapping[int, ActiveRequest],
        deliver: Callable[[DecodedFact], None],
    ) -> None:
        """`runs`: the requests that are on workers, by run; only read here, one operation at a time."""
        self._loop, self._runs, self._deliver = loop, runs, deliver
        self._inbox: SimpleQueue[tuple[WorkerLink, bytes | None] | None] = SimpleQueue()
        self._is_closed = False  #: read and written on the event loop
        self._thread = threading.Thread(target=self._run, name="hearth-text", daemon=True)
        self._thread.start()

    def decode(self, link: WorkerLink, body: bytes) -> None:
        """Have a frame decoded and delivered."""
        self._inbox.put((link, body))

    def left(self, link: WorkerLink) -> None:
        """Have the end of a connection delivered after all its facts."""
        self._inbox.put((link, None))

    def close(self) -> None:
        """Stop, and deliver no more, not even what the loop was handed already: who takes it closes next."""
        self._is_closed = True
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            for link, body in self._turns():
                decoded = self._decoded(link, body)
                if decoded is not None:
                    self._on_loop(partial(self._deliver, decoded))
        except BaseException as error:
            end_process("fact_decoder", error)

    def _turns(self) -> Iterator[tuple[WorkerLink, bytes | None]]:
        """Yield the frames of all links, of each the next one in turn, until the inbox is closed."""
        waiting: dict[WorkerLink, deque[bytes | None]] = {}  # whose turn is next comes first
        while True:
            while not waiting or not self._inbox.empty():
                if (item := self._inbox.get()) is None:
                    return
                link, body = item
                waiting.setdefault(link, deque()).append(body)
            link = next(iter(waiting))
            bodies = waiting.pop(link)
            yield link, bodies.popleft()
            if bodies:
                waiting[link] = bodies

    def _decoded(self, link: WorkerLink, body: bytes | None) -> DecodedFact | None:
        if body is None:
            return DecodedFact(link, 0, None)
        try:
            fact = wire.fact_of(body)
            decoded = DecodedFact(link, len(body), fact)
            if isinstance(fact, StepDone):
                self._add_text(fact, decoded)
        except (ServiceError, ValueError, LookupError) as error:  # or rows that do not match
            log.error("worker_not_understood worker=%s reason=%s", link.worker, error)
            self._on_loop(link.abort)  # which ends the worker, and so is told to all
            return None
        return decoded

    def _add_text(self, step: StepDone, decoded: DecodedFact) -> None:
        for index, (run, token) in enumerate(zip(step.runs, step.tokens, strict=True)):
            request = self._runs.get(run)
            if request is None or request.is_complete:
                continue  # it was cancelled, or a stop string ended it
            if request.end_without_tokens is not None:
                request.is_complete = True
                decoded.ended.append(request)
                continue
            request.emitted.append(token)
            logprobs = None if step.logprobs is None else step.logprobs[index]
            try:
                text = request.transcript.push(token, step.finished.get(run))
            except BaseException as error:  # a panic of the tokenizers package is no Exception
                log.error(
                    "text_broken request=%s model=%s error=%s\n%s",
                    *(request.request_id, request.model, type(error).__name__, frames_of(error)),
                )
                request.is_complete = True
                decoded.broken.append(request)
                continue
            request.is_complete = text.finish_reason is not None
            delta = TokenDelta(text.text, token, logprobs, text.finish_reason, text.offset, text.stop)
            decoded.tokens.append(DecodedToken(request, delta))

    def _on_loop(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._call, call)

    def _call(self, call: Callable[[], None]) -> None:
        if not self._is_closed:
            call()
