"""One choice of an answer as server-sent events. Knows no connection.

This is the hot path: ten thousand tokens a second come through here, each an event of its own. So all that
does not change is turned into bytes once per choice, and only a piece's text is encoded when it comes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec

from hearth.api.answer_spec import Question
from hearth.control.generation import AnswerStream, TokenDelta
from hearth.text.tools import ToolCall
from hearth.types import FinishReason

#: A client that is behind by more gets what waits as one event.
MAX_EVENTS = 8

encode = msgspec.json.Encoder().encode


def identity(question: Question, kind: str, stream: AnswerStream) -> dict[str, object]:
    """What an answer and each of its chunks begin with; `stream` is that of the first choice."""
    return {
        "id": question.form.id_prefix + stream.request_id,
        "object": kind,
        "created": int(time.time()),
        "model": stream.model,
        "system_fingerprint": question.fingerprint,
    }


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class EventWriter:
    """Mutable; one per choice."""

    def __init__(self, question: Question, head: bytes, index: int, stream: AnswerStream) -> None:
        form = question.form
        usage = b',"usage":null' if question.includes_usage else b""
        self._stream = stream
        self._form = form
        self._has_logprobs = question.has_logprobs
        self._parser = None if question.tool_use is None else question.tool_use.parser()
        self._begin = b'%b,"choices":[{"index":%d,' % (head, index)
        self._end = b',"logprobs":null,"finish_reason":null}]%b}\n\n' % usage
        self._usage = usage
        self._before = self._begin + form.before_text
        self._after = form.after_text + self._end
        #: Since the last event, whose logprobs the next one carries.
        self._untold: list[TokenDelta] = []
        self._num_chars = 0  #: of the text before `_untold`
        self._num_calls = 0
        self.num_tokens = 0

    def first(self, echo: str = "") -> bytes:
        parts = [] if self._form.first is None else [self._begin + self._form.first + self._end]
        if echo:
            self._num_chars = len(echo)
            parts.append(self._before + encode(echo) + self._after)
        return b"".join(parts)

    def tell(self, pieces: Sequence[TokenDelta]) -> bytes:
        """The events for these pieces; none for tokens that add no text yet."""
        self.num_tokens += len(pieces)
        if self._parser is not None or self._has_logprobs:
            return self._tell_more(pieces)
        if len(pieces) > MAX_EVENTS:
            text = "".join([piece.text for piece in pieces])
            events = [self._before, encode(text), self._after] if text else []
        else:
            events = []
            for piece in pieces:
                if piece.text:
                    events += (self._before, encode(piece.text), self._after)
        if (reason := pieces[-1].finish_reason) is not None:
            events.append(self._event(self._form.empty, reason))
        return b"".join(events)

    def _tell_more(self, pieces: Sequence[TokenDelta]) -> bytes:
        groups = [pieces] if len(pieces) > MAX_EVENTS else [[piece] for piece in pieces]
        return b"".join(event for group in groups for event in self._events(group))

    def _events(self, pieces: Sequence[TokenDelta]) -> list[bytes]:
        self._untold += pieces
        reason = pieces[-1].finish_reason
        text = "".join([piece.text for piece in pieces])
        parts: list[str | ToolCall] = [text] if text else []
        if self._parser is not None:
            parts = self._parser.push(text) + (self._parser.flush() if reason is not None else [])
        events = [self._event(self._delta(part)) for part in parts]
        if reason is not None:
            events.append(self._event(self._form.empty, reason))
        return events

    def _delta(self, part: str | ToolCall) -> bytes:
        if isinstance(part, str):
            return self._form.before_text + encode(part) + self._form.after_text
        call = {
            "index": self._num_calls,
            "id": call_id(),
            "type": "function",
            "function": {"name": part.name, "arguments": part.arguments},
        }
        self._num_calls += 1
        return b'"delta":{"tool_calls":[%b]}' % encode(call)

    def _event(self, delta: bytes, reason: FinishReason | None = None) -> bytes:
        untold, self._untold = self._untold, []
        logprobs = None
        if self._has_logprobs and untold:
            logprobs = self._form.logprobs(self._stream.tokenizer, untold, self._num_chars)
        self._num_chars += sum(len(piece.text) for piece in untold)
        return b'%b%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            self._begin,
            delta,
            encode(logprobs),
            encode(finish_reason(reason, has_calls=self._num_calls > 0)),
            self._usage,
        )


def finish_reason(reason: FinishReason | None, has_calls: bool) -> str | None:
    if reason is FinishReason.STOP and has_calls:
        return "tool_calls"
    return reason
