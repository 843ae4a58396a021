"""Formats an answer of /v1/responses as server-sent events.

A hot path like `openai/sse.py`: everything but the text and number of an event becomes bytes once. An answer
is a sequence of items: one of reasoning, a message for text, and one item per call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import msgspec

from hearth.api.dialect import AnswerSpec, ChoiceReader, TokenUsage
from hearth.api.errors import fault_of
from hearth.api.openai.answer_format import call_id
from hearth.api.openai.logprobs import token_logprobs
from hearth.api.openai.sse import MAX_EVENTS
from hearth.control.requests.generation import AnswerStream, TokenDelta
from hearth.core.errors import HearthError
from hearth.core.types import FinishReason
from hearth.text.reasoning import Thought
from hearth.text.tool_calls import ToolCall

Status = Literal["in_progress", "completed", "incomplete", "failed"]
encode = msgspec.json.Encoder().encode

#: Between the text and the number of a text event, and after the number.
_BEFORE_NUMBER, _END = b',"logprobs":[],"sequence_number":', b"}\n\n"


@dataclass(frozen=True, slots=True)
class ResponseState:
    status: Status
    output: Sequence[object] = ()
    usage: TokenUsage | None = None  #: None: still running
    error: object = None


class ResponseSpelling(Protocol):
    def response(self, stream: AnswerStream, state: ResponseState) -> dict[str, object]: ...

    def ended(self, stream: AnswerStream, state: ResponseState) -> dict[str, object]: ...


@dataclass(slots=True)
class _OpenItem:
    """A message, or reasoning, whose text is being written."""

    is_reasoning: bool
    before_text: bytes  #: the beginning of a text event
    texts: list[str] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)


class ResponseEvents:
    """Mutable; one per answer."""

    def __init__(self, spelling: ResponseSpelling, spec: AnswerSpec, stream: AnswerStream) -> None:
        self._spelling = spelling
        self._stream = stream
        self._has_logprobs = spec.has_logprobs
        self._is_plain = not spec.is_split and not spec.has_logprobs
        self._reader = ChoiceReader(spec, stream)
        self._num_events = 0
        self._finish_reason: FinishReason | None = None
        self._output: list[object] = []  #: complete items
        self._open: _OpenItem | None = None
        #: tokens since the last event; the next text has their logprobs, reasoning and calls have none
        self._unsent: list[TokenDelta] = []

    def first(self, echoes: Sequence[str]) -> bytes:
        response = encode(self._spelling.response(self._stream, ResponseState("in_progress")))
        begin = b'"response":' + response
        return self._event("response.created", begin) + self._event("response.in_progress", begin)

    def write(self, index: int, deltas: Sequence[TokenDelta]) -> bytes:
        self._finish_reason = deltas[-1].finish_reason
        if not self._is_plain:
            return self._write_more(deltas)
        events: list[bytes] = []
        message = self._open
        if len(deltas) > MAX_EVENTS:
            deltas = [replace(deltas[-1], text="".join([delta.text for delta in deltas]))]
        for delta in deltas:
            if text := delta.text:
                if message is None:
                    message = self._begin(events)
                number = self._num_events
                self._num_events = number + 1
                message.texts.append(text)
                events += (message.before_text, encode(text), _BEFORE_NUMBER, encode(number), _END)
        return b"".join(events)

    def last(self, usage: TokenUsage) -> bytes:
        ending = self._end_output()
        response = self._spelling.ended(self._stream, ResponseState(self._status, self._output, usage))
        return ending + self._event(f"response.{self._status}", b'"response":' + encode(response))

    def end(self, usage: TokenUsage) -> dict[str, object]:
        self._end_output()
        return self._spelling.ended(self._stream, ResponseState(self._status, self._output, usage))

    def failed(self, error: HearthError) -> bytes:
        """Return the last events. The error's fields are in the event and in an object inside it."""
        fault = fault_of(error)
        kind = "server_error" if fault.status >= 500 else "invalid_prompt"
        kind = "rate_limit_exceeded" if fault.status == 429 else kind
        told = {"code": fault.code, "message": fault.message, "param": fault.param}
        # Not by msgspec, as in `error_spelling.py`.
        reason = msgspec.Raw(json.dumps({"code": kind, "message": fault.message}).encode())
        inside = json.dumps({**told, "error": {**told, "type": kind}}).encode()[1:-1]
        ending = self._end_item("incomplete")
        state = ResponseState("failed", self._output, error=reason)
        response = encode(self._spelling.response(self._stream, state))
        ending += self._event("response.failed", b'"response":' + response)
        return ending + self._event("error", inside)

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._finish_reason is FinishReason.LENGTH else "completed"

    def _write_more(self, deltas: Sequence[TokenDelta]) -> bytes:
        one_by_one = self._has_logprobs or len(deltas) <= MAX_EVENTS
        events: list[bytes] = []
        for group in [[delta] for delta in deltas] if one_by_one else [deltas]:
            self._unsent += group
            for part in self._reader.read(group):
                tokens, self._unsent = self._unsent, []
                if isinstance(part, ToolCall):
                    events.append(self._call(part))
                elif isinstance(part, Thought):
                    self._add_text(part.text, [], events, is_reasoning=True)
                else:
                    self._add_text(part, tokens, events)
            if self._reader.is_thinking:
                self._unsent = []
        return b"".join(events)

    def _add_text(
        self, text: str, tokens: Sequence[TokenDelta], events: list[bytes], *, is_reasoning: bool = False
    ) -> None:
        item = self._open
        if item is None or item.is_reasoning is not is_reasoning:
            item = self._begin(events, is_reasoning=is_reasoning)
        logprobs = token_logprobs(self._stream.tokenizer, tokens) if self._has_logprobs else []
        item.texts.append(text)
        item.logprobs += logprobs
        told = b"" if is_reasoning else b',"logprobs":' + encode(logprobs)
        events += (item.before_text, encode(text), b'%b,"sequence_number":%d}\n\n' % (told, self._num_events))
        self._num_events += 1

    def _begin(self, events: list[bytes], *, is_reasoning: bool = False) -> _OpenItem:
        events.append(self._end_item("completed"))
        item = self._text_item(is_reasoning, "in_progress", [])
        place, part = self._place(item, 0), _text_part(is_reasoning, "", [])
        events.append(self._item_event("added", item))
        events.append(self._event("response.content_part.added", b'%b"part":%b' % (place, encode(part))))
        kind = f"response.{part['type']}.delta".encode()
        before = b'event: %b\ndata: {"type":"%b",%b"delta":' % (kind, kind, place)
        self._open = _OpenItem(is_reasoning, before)
        return self._open

    def _end_item(self, status: Literal["completed", "incomplete"]) -> bytes:
        if (ended := self._open) is None:
            return b""
        text, self._open = "".join(ended.texts), None
        part = _text_part(ended.is_reasoning, text, ended.logprobs)
        item = self._text_item(ended.is_reasoning, status, [part])
        place = self._place(item, 0)
        told = b"" if ended.is_reasoning else b',"logprobs":' + encode(ended.logprobs)
        events = (
            self._event(f"response.{part['type']}.done", b'%b"text":%b%b' % (place, encode(text), told))
            + self._event("response.content_part.done", b'%b"part":%b' % (place, encode(part)))
            + self._item_event("done", item)
        )
        self._output.append(item)
        return events

    def _call(self, call: ToolCall) -> bytes:
        events = self._end_item("completed")
        index = len(self._output)
        item = {
            "id": f"fc_{self._stream.request_id}_{index}",
            "type": "function_call",
            "status": "completed",
            "call_id": call_id(),
            "name": call.name,
            "arguments": call.arguments,
        }
        place = self._place(item)
        arguments = encode(call.arguments)
        events += self._item_event("added", {**item, "status": "in_progress", "arguments": ""})
        events += self._event("response.function_call_arguments.delta", b'%b"delta":%b' % (place, arguments))
        done = b'%b"name":%b,"arguments":%b' % (place, encode(call.name), arguments)
        events += self._event("response.function_call_arguments.done", done)
        events += self._item_event("done", item)
        self._output.append(item)
        return events

    def _end_output(self) -> bytes:
        events: list[bytes] = []
        if self._open is None and not self._output:
            self._begin(events)
        return b"".join(events) + self._end_item(self._status)

    def _place(self, item: Mapping[str, object], content_index: int | None = None) -> bytes:
        place = b'"item_id":%b,"output_index":%d,' % (encode(item["id"]), len(self._output))
        return place if content_index is None else place + b'"content_index":%d,' % content_index

    def _text_item(self, is_reasoning: bool, status: str, content: Sequence[object]) -> dict[str, object]:
        own: dict[str, object] = {"summary": []} if is_reasoning else {"role": "assistant"}
        return {
            "id": f"{'rs' if is_reasoning else 'msg'}_{self._stream.request_id}_{len(self._output)}",
            "type": "reasoning" if is_reasoning else "message",
            "status": status,
            **own,
            "content": content,
        }

    def _item_event(self, change: Literal["added", "done"], item: object) -> bytes:
        place = b'"output_index":%d,"item":%b' % (len(self._output), encode(item))
        return self._event(f"response.output_item.{change}", place)

    def _event(self, kind: str, inside: bytes) -> bytes:
        number, name = self._num_events, kind.encode()
        self._num_events += 1
        return b'event: %b\ndata: {"type":"%b",%b,"sequence_number":%d}\n\n' % (name, name, inside, number)


def _text_part(is_reasoning: bool, text: str, logprobs: Sequence[object]) -> dict[str, object]:
    if is_reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
