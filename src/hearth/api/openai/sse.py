"""Formats the choices of an answer as server-sent events.

This is the hot path: ten thousand tokens a second, each an event of its own. So constant parts become bytes
once per choice, and only the text of a token is encoded when it arrives.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hearth.api.dialect import AnswerSpec, ChoiceReader, Part, TokenUsage
from hearth.api.error_spelling import spell
from hearth.api.errors import fault_of
from hearth.api.openai.answer_format import (
    AnswerFormat,
    call_id,
    finish_reason,
    reasoning_fields,
    usage_object,
)
from hearth.control.requests.generation import AnswerStream, TokenDelta
from hearth.core.errors import HearthError
from hearth.core.types import FinishReason
from hearth.text.reasoning import Thought

#: More pending tokens are sent as one event.
MAX_EVENTS = 8

encode = msgspec.json.Encoder().encode


class CompletionEvents:
    """Mutable; one per answer."""

    def __init__(
        self,
        format: AnswerFormat,
        head: bytes,
        spec: AnswerSpec,
        streams: Sequence[AnswerStream],
        includes_usage: bool,
    ) -> None:
        self._head = head
        self._includes_usage = includes_usage
        usage = b',"usage":null' if includes_usage else b""
        self._choices = [
            _ChoiceEvents(format, head, index, spec, stream, usage) for index, stream in enumerate(streams)
        ]

    def first(self, echoes: Sequence[str]) -> bytes:
        return b"".join(choice.first(echo) for choice, echo in zip(self._choices, echoes, strict=True))

    def write(self, index: int, deltas: Sequence[TokenDelta]) -> bytes:
        return self._choices[index].write(deltas)

    def last(self, usage: TokenUsage) -> bytes:
        if not self._includes_usage:
            return b"data: [DONE]\n\n"
        counted = encode(usage_object(usage))
        return b'%b,"choices":[],"usage":%b}\n\ndata: [DONE]\n\n' % (self._head, counted)

    def failed(self, error: HearthError) -> bytes:
        return b"data: " + spell(fault_of(error), "/v1") + b"\n\n"


class _ChoiceEvents:
    """Mutable; one per choice."""

    def __init__(
        self,
        format: AnswerFormat,
        head: bytes,
        index: int,
        spec: AnswerSpec,
        stream: AnswerStream,
        usage: bytes,
    ) -> None:
        self._stream = stream
        self._format = format
        self._has_logprobs = spec.has_logprobs
        self._is_split = spec.is_split
        self._reader = ChoiceReader(spec, stream)
        self._begin = b'%b,"choices":[{"index":%d,' % (head, index)
        self._end = b',"logprobs":null,"finish_reason":null}]%b}\n\n' % usage
        self._usage = usage
        self._before = self._begin + format.before_text
        self._after = format.after_text + self._end
        #: tokens since the last event; the next event has their logprobs
        self._unsent: list[TokenDelta] = []
        self._num_echoed = 0  #: characters of the echoed prompt
        self._num_calls = 0

    def first(self, echo: str = "") -> bytes:
        parts = [] if self._format.first is None else [self._begin + self._format.first + self._end]
        if echo:
            self._num_echoed = len(echo)
            parts.append(self._before + encode(echo) + self._after)
        return b"".join(parts)

    def write(self, deltas: Sequence[TokenDelta]) -> bytes:
        if self._is_split or self._has_logprobs:
            return self._write_more(deltas)
        if len(deltas) > MAX_EVENTS:
            text = "".join([delta.text for delta in deltas])
            events = [self._before, encode(text), self._after] if text else []
        else:
            events = []
            for delta in deltas:
                if delta.text:
                    events += (self._before, encode(delta.text), self._after)
        if (reason := deltas[-1].finish_reason) is not None:
            events.append(self._event(self._format.empty, reason))
        return b"".join(events)

    def _write_more(self, deltas: Sequence[TokenDelta]) -> bytes:
        groups = [deltas] if len(deltas) > MAX_EVENTS else [[delta] for delta in deltas]
        return b"".join(event for group in groups for event in self._events(group))

    def _events(self, deltas: Sequence[TokenDelta]) -> list[bytes]:
        self._unsent += deltas
        reason = deltas[-1].finish_reason
        events = [self._event(self._delta_json(part)) for part in self._reader.read(deltas)]
        if reason is not None:
            events.append(self._event(self._format.empty, reason))
        return events

    def _delta_json(self, part: Part) -> bytes:
        if isinstance(part, str):
            return self._format.before_text + encode(part) + self._format.after_text
        if isinstance(part, Thought):
            return b'"delta":' + encode(reasoning_fields(part.text))
        call = {
            "index": self._num_calls,
            "id": call_id(),
            "type": "function",
            "function": {"name": part.name, "arguments": part.arguments},
        }
        self._num_calls += 1
        return b'"delta":{"tool_calls":[%b]}' % encode(call)

    def _event(self, json: bytes, reason: FinishReason | None = None) -> bytes:
        unsent, self._unsent = self._unsent, []
        logprobs = None
        if self._has_logprobs and unsent:
            logprobs = self._format.logprobs(self._stream.tokenizer, unsent, self._num_echoed)
        return b'%b%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            self._begin,
            json,
            encode(logprobs),
            encode(finish_reason(reason, has_calls=self._num_calls > 0)),
            self._usage,
        )
