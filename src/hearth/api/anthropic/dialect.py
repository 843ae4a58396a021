"""Anthropic's messages as a dialect. Its events are a hot path like those of `openai/sse.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hearth.api.answer import SSE_TYPE
from hearth.api.anthropic.message_format import (
    SIGNATURE,
    message_object,
    stop_fields,
    thinking_block,
    tool_use_block,
    usage_object,
)
from hearth.api.dialect import AnswerEvents, AnswerSpec, Choice, ChoiceReader, Part, TokenUsage
from hearth.api.error_spelling import spell
from hearth.api.errors import fault_of
from hearth.api.openai.sse import MAX_EVENTS
from hearth.control.requests.generation import AnswerStream, TokenDelta
from hearth.core.errors import HearthError
from hearth.text.reasoning import Thought
from hearth.text.tool_calls import ToolCall

PATH = "/v1/messages"

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class MessageDialect:
    stream_type = SSE_TYPE
    waiting = b'event: ping\ndata: {"type":"ping"}\n\n'

    def whole(self, spec: AnswerSpec, choices: Sequence[Choice], usage: TokenUsage) -> object:
        (choice,) = choices
        thought = [thinking_block(choice.reasoning)] if choice.reasoning else []
        text = [{"type": "text", "text": choice.text}] if choice.text else []
        calls = [tool_use_block(call, is_whole=True) for call in choice.calls]
        return {
            **message_object(choice.stream, usage),
            "content": [*thought, *text, *calls],
            **stop_fields(choice.deltas[-1], has_calls=bool(calls)),
        }

    def events(self, spec: AnswerSpec, streams: Sequence[AnswerStream]) -> AnswerEvents:
        (stream,) = streams
        return MessageEvents(spec, stream)


class MessageEvents:
    """Mutable; one per answer."""

    def __init__(self, spec: AnswerSpec, stream: AnswerStream) -> None:
        self._stream = stream
        self._reader = ChoiceReader(spec, stream)
        self._is_split = spec.is_split
        self._num_blocks = 0  #: including an open one
        self._num_calls = 0
        self._before = b""  #: prefix of a text event of the open block; empty: no block is open
        self._is_thinking = False  #: the open block is of thinking
        self._last: TokenDelta | None = None  #: the token that ended the answer

    def first(self, echoes: Sequence[str]) -> bytes:
        usage = TokenUsage.of([self._stream], 1)
        return _event("message_start", {"message": message_object(self._stream, usage)})

    def write(self, index: int, deltas: Sequence[TokenDelta]) -> bytes:
        if deltas[-1].finish_reason is not None:
            self._last = deltas[-1]
        if self._is_split:
            return b"".join(self._part(part) for part in self._reader.read(deltas))
        if len(deltas) > MAX_EVENTS:
            return self._text("".join([delta.text for delta in deltas]))
        events: list[bytes] = []
        for delta in deltas:
            if delta.text:
                events += (self._before or self._begin(), encode(delta.text), b"}}\n\n")
        return b"".join(events)

    def last(self, usage: TokenUsage) -> bytes:
        assert self._last is not None, "the answer has ended"
        ending = {
            "delta": stop_fields(self._last, has_calls=self._num_calls > 0),
            "usage": usage_object(usage),
        }
        return self._end_block() + _event("message_delta", ending) + _event("message_stop", {})

    def failed(self, error: HearthError) -> bytes:
        return b"event: error\ndata: " + spell(fault_of(error), PATH) + b"\n\n"

    def _part(self, part: Part) -> bytes:
        if isinstance(part, Thought):
            return self._text(part.text, is_thinking=True)
        return self._call(part) if isinstance(part, ToolCall) else self._text(part)

    def _text(self, text: str, *, is_thinking: bool = False) -> bytes:
        if not text:
            return b""
        before = self._before if is_thinking is self._is_thinking else b""
        return b"".join((before or self._begin(is_thinking=is_thinking), encode(text), b"}}\n\n"))

    def _begin(self, *, is_thinking: bool = False) -> bytes:
        ended = self._end_block()
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
        name = b"thinking" if is_thinking else b"text"
        self._is_thinking = is_thinking
        self._before = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b_delta","%b":' % (index, name, name)
        )
        block = thinking_block("", is_whole=False) if is_thinking else {"type": "text", "text": ""}
        return ended + _event("content_block_start", {"index": index, "content_block": block}) + self._before

    def _end_block(self) -> bytes:
        if not self._before:
            return b""
        index, signed = self._num_blocks - 1, b""
        if self._is_thinking:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = _event("content_block_delta", {"index": index, "delta": delta})
        self._before, self._is_thinking = b"", False
        return signed + _event("content_block_stop", {"index": index})

    def _call(self, call: ToolCall) -> bytes:
        ended = self._end_block()
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
        self._num_calls += 1
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return b"".join(
            (
                ended,
                _event(
                    "content_block_start",
                    {"index": index, "content_block": tool_use_block(call, is_whole=False)},
                ),
                _event("content_block_delta", {"index": index, "delta": delta}),
                _event("content_block_stop", {"index": index}),
            )
        )


def _event(kind: str, fields: Mapping[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
