"""What workers say, understood away from the event loop: frames to facts, tokens to text. It decides nothing.

One thread does it for all workers, so that everything stays in the order in which it was said, the end of a
connection included.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from hearth import wire
from hearth.control.active_request import ActiveRequest
from hearth.control.ask import Piece
from hearth.control.crash import end_process, frames_of
from hearth.control.link import WorkerLink
from hearth.errors import ServiceError
from hearth.messages import Fact, StepDone

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodedToken:
    """A piece of an answer."""

    live: ActiveRequest
    piece: Piece


@dataclass(frozen=True, slots=True)
class DecodedFact:
    link: WorkerLink
    num_bytes: int
    fact: Fact | None  #: None: nothing follows, the connection has ended
    said: list[DecodedToken] = field(default_factory=list)
    broken: list[ActiveRequest] = field(default_factory=list)  #: whose tokens cannot be turned into text


class FactDecoder:
    """Mutable; `heard` and `left` are called on the event loop, and so is what it calls back."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runs: Mapping[int, ActiveRequest],
        tell: Callable[[DecodedFact], None],
    ) -> None:
        """`runs`: the requests that are on workers; it is only read here, one operation at a time."""
        self._loop, self._runs, self._tell = loop, runs, tell
        self._inbox: SimpleQueue[tuple[WorkerLink, bytes | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hearth-text", daemon=True)
        self._thread.start()

    def heard(self, link: WorkerLink, body: bytes) -> None:
        self._inbox.put((link, body))

    def left(self, link: WorkerLink) -> None:
        self._inbox.put((link, None))

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (item := self._inbox.get()) is not None:
                heard = self._understand(*item)
                if heard is not None:
                    self._on_loop(partial(self._tell, heard))
        except BaseException as error:
            end_process("fact_decoder", error)

    def _understand(self, link: WorkerLink, body: bytes | None) -> DecodedFact | None:
        if body is None:
            return DecodedFact(link, 0, None)
        try:
            fact = wire.fact_of(body)
            heard = DecodedFact(link, len(body), fact)
            if isinstance(fact, StepDone):
                self._spell(fact, heard)
        except (ServiceError, ValueError, LookupError) as error:  # or rows that do not match
            log.error("worker_not_understood worker=%s reason=%s", link.worker, error)
            self._on_loop(link.abort)  # which ends the worker, and so is told to all
            return None
        return heard

    def _spell(self, step: StepDone, heard: DecodedFact) -> None:
        for index, (run, token) in enumerate(zip(step.runs, step.tokens, strict=True)):
            live = self._runs.get(run)
            if live is None or live.is_complete:
                continue  # it was cancelled, or a stop string ended it
            live.emitted.append(token)
            logprobs = None if step.logprobs is None else step.logprobs[index]
            try:
                spelled = live.transcript.push(token, step.finished.get(run))
            except BaseException as error:  # a panic of the tokenizers package is no Exception
                log.error(
                    "text_broken request=%s model=%s error=%s\n%s",
                    *(live.request_id, live.model, type(error).__name__, frames_of(error)),
                )
                live.is_complete = True
                heard.broken.append(live)
                continue
            live.is_complete = spelled.finish_reason is not None
            heard.said.append(DecodedToken(live, Piece(spelled.text, token, logprobs, spelled.finish_reason)))

    def _on_loop(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(call)
