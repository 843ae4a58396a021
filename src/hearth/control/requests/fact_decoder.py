"""Decodes what workers send, off the event loop: frames to facts, tokens to text. Decides nothing.

One thread serves all workers. What one worker sends stays in order, the end of its connection included.
Workers take turns, a frame each, so that one worker's backlog does not delay the others.

A step brings a token for each request, and is delivered when the slowest text is made. So a request whose
text was slow before is left out of its step and queued (`late_text.py`): one of the queued tokens is decoded
after each frame, more while no frame is there. A step waits for at most one such token.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from time import thread_time

from hearth.control.requests.active_request import ActiveRequest
from hearth.control.requests.generation import TokenDelta
from hearth.control.requests.late_text import LateText, TokenRow
from hearth.core import wire
from hearth.core.errors import ServiceError
from hearth.core.messages import Fact, HostingFailed, RunFailed, StepDone
from hearth.node.link import FrameLink
from hearth.system.crash import end_process, frames_of

#: A request is late if its tokens take longer on average, of this thread's time; most take a hundredth.
MAX_TEXT_S = 0.5e-3
#: Weight of the last token in that average.
NEWEST_SHARE = 0.125

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodedToken:
    request: ActiveRequest
    delta: TokenDelta
    is_run_over: bool  #: the worker ended the run; False: a stop string ended it here


@dataclass(frozen=True, slots=True)
class DecodedTexts:
    tokens: list[DecodedToken] = field(default_factory=list)
    ended: list[ActiveRequest] = field(default_factory=list)  #: those of no tokens that are complete
    broken: list[ActiveRequest] = field(default_factory=list)  #: whose tokens cannot be turned into text


@dataclass(frozen=True, slots=True)
class DecodedFact:
    link: FrameLink
    num_bytes: int
    fact: Fact | None  #: None: nothing follows, the connection has ended
    texts: DecodedTexts = field(default_factory=DecodedTexts)


@dataclass(frozen=True, slots=True)
class DecodedLate:
    link: FrameLink
    texts: DecodedTexts


class FactDecoder:
    """Mutable; `decode`, `left` and `deliver` are called on the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        runs: Mapping[int, ActiveRequest],
        deliver: Callable[[DecodedFact | DecodedLate], None],
        clock_s: Callable[[], float] = thread_time,
    ) -> None:
        """`runs`: requests by run, only read here. `clock_s` returns how long this thread has worked."""
        self._loop, self._runs, self._deliver, self._clock_s = loop, runs, deliver, clock_s
        self._inbox: SimpleQueue[tuple[FrameLink, bytes | None] | None] = SimpleQueue()
        #: Undecoded frames by link; the next link comes first. The thread's own.
        self._frames: dict[FrameLink, deque[bytes | None]] = {}
        self._late = LateText()  #: the thread's own
        self._is_closed = False  #: read and written on the event loop
        self._thread = threading.Thread(target=self._run, name="hearth-text", daemon=True)
        self._thread.start()

    def decode(self, link: FrameLink, body: bytes) -> None:
        self._inbox.put((link, body))

    def left(self, link: FrameLink) -> None:
        """Deliver the end of a connection after all its facts."""
        self._inbox.put((link, None))

    def close(self) -> None:
        """Stop. Nothing is delivered any more, not even what the loop was already handed."""
        self._is_closed = True
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._collect():
                if self._frames:
                    self._decode_next()
                self._make_late_text()
        except BaseException as error:
            end_process("fact_decoder", error)

    def _collect(self) -> bool:
        """Take what has come; wait if there is nothing to do. Returns False once the inbox is closed."""
        while not self._inbox.empty() or not (self._frames or self._late):
            if (item := self._inbox.get()) is None:
                return False
            link, body = item
            self._frames.setdefault(link, deque()).append(body)
        return True

    def _decode_next(self) -> None:
        link = next(iter(self._frames))
        bodies = self._frames.pop(link)
        decoded = self._decoded(link, bodies.popleft())
        if bodies:
            self._frames[link] = bodies
        if decoded is not None:
            self._on_loop(partial(self._deliver, decoded))

    def _decoded(self, link: FrameLink, body: bytes | None) -> DecodedFact | None:
        if body is None:
            self._late.drop(link)
            return DecodedFact(link, 0, None)
        try:
            fact = wire.fact_of(body)
            decoded = DecodedFact(link, len(body), fact)
            if isinstance(fact, StepDone):
                self._add_texts(link, fact, decoded.texts)
            elif isinstance(fact, HostingFailed):
                self._late.drop(link, fact.model)
            elif isinstance(fact, RunFailed) and self._is_its_own(link, fact.run):
                self._late.drop_run(fact.run)
        except (ServiceError, ValueError, LookupError) as error:  # or rows of different lengths
            log.error("worker_not_understood worker=%s reason=%s", link.worker, error)
            self._on_loop(link.abort)  # which ends the worker
            return None
        return decoded

    def _is_its_own(self, link: FrameLink, run: int) -> bool:
        """Return False for a run of another worker: a node must not write into answers of others."""
        request = self._runs.get(run)
        return request is None or request.worker == link.worker

    def _add_texts(self, link: FrameLink, step: StepDone, texts: DecodedTexts) -> None:
        logprobs = [None] * len(step.runs) if step.logprobs is None else step.logprobs
        # Check all rows before the first text: an emitted token must be delivered.
        rows = list(zip(step.runs, step.tokens, logprobs, strict=True))
        for run, token, own_logprobs in rows:
            request = self._runs.get(run)
            if request is None or request.is_complete or not self._is_its_own(link, run):
                continue  # cancelled, ended by a stop string, or of another worker
            if request.end_without_tokens is not None:
                request.is_complete = True
                texts.ended.append(request)
                continue
            row = TokenRow(request, run, token, own_logprobs, step.finished.get(run))
            if request.text_s > MAX_TEXT_S or self._late.has(run):
                self._late.add(link, row)
            else:
                self._add_text(row, texts)

    def _make_late_text(self) -> None:
        late = self._late.next()
        if late is not None and not late.row.request.is_complete:
            texts = DecodedTexts()
            self._add_text(late.row, texts)
            self._on_loop(partial(self._deliver, DecodedLate(late.link, texts)))

    def _add_text(self, row: TokenRow, texts: DecodedTexts) -> None:
        with row.request.handover:
            if row.request.run == row.run:  # else another worker makes this token again
                self._add_token(row, texts)

    def _add_token(self, row: TokenRow, texts: DecodedTexts) -> None:
        request = row.request
        request.emitted.append(row.token)
        began_s = self._clock_s()
        try:
            text = request.transcript.push(row.token, row.finish_reason)
        except BaseException as error:  # a panic of the tokenizers package is no Exception
            log.error(
                "text_broken request=%s model=%s error=%s\n%s",
                request.request_id,
                request.model,
                type(error).__name__,
                frames_of(error),
            )
            request.is_complete = True
            texts.broken.append(request)
            return
        request.text_s += NEWEST_SHARE * (self._clock_s() - began_s - request.text_s)
        if text.finish_reason is not None:  # never reset: the loop may have set it
            request.is_complete = True
        delta = TokenDelta(text.text, row.token, row.logprobs, text.finish_reason, text.offset, text.stop)
        texts.tokens.append(DecodedToken(request, delta, row.finish_reason is not None))

    def _on_loop(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._call, call)

    def _call(self, call: Callable[[], None]) -> None:
        if not self._is_closed:
            call()
