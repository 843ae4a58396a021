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
class _OpenMessage:
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
        self._message: _OpenMessage | None = None  #: the open item
        self._thoughts: list[str] = []  #: of an open item of reasoning
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
        message = self._message
        if len(deltas) > MAX_EVENTS:
            deltas = [replace(deltas[-1], text="".join([delta.text for delta in deltas]))]
        for delta in deltas:
            if text := delta.text:
                if message is None:
                    message = self._begin_message(events)
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
        ending = self._end_reasoning("incomplete") + self._end_message("incomplete")
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
                    self._add_reasoning(part.text, events)
                else:
                    self._add_text(part, tokens, events)
            if self._reader.is_thinking:
                self._unsent = []
        return b"".join(events)

    def _add_reasoning(self, text: str, events: list[bytes]) -> None:
        item = self._reasoning_item("in_progress", [])
        place = self._place(item, 0)
        if not self._thoughts:
            part = encode({"type": "reasoning_text", "text": ""})
            events.append(self._item_event("added", item))
            events.append(self._event("response.content_part.added", b'%b,"part":%b' % (place, part)))
        self._thoughts.append(text)
        events.append(self._event("response.reasoning_text.delta", b'%b,"delta":%b' % (place, encode(text))))

    def _end_reasoning(self, status: Literal["completed", "incomplete"]) -> bytes:
        if not self._thoughts:
            return b""
        text, self._thoughts = "".join(self._thoughts), []
        part = {"type": "reasoning_text", "text": text}
        item = self._reasoning_item(status, [part])
        place = self._place(item, 0)
        events = (
            self._event("response.reasoning_text.done", b'%b,"text":%b' % (place, encode(text)))
            + self._event("response.content_part.done", b'%b,"part":%b' % (place, encode(part)))
            + self._item_event("done", item)
        )
        self._output.append(item)
        return events

    def _add_text(self, text: str, tokens: Sequence[TokenDelta], events: list[bytes]) -> None:
        message = self._message or self._begin_message(events)
        logprobs = token_logprobs(self._stream.tokenizer, tokens) if self._has_logprobs else []
        message.texts.append(text)
        message.logprobs += logprobs
        end = b',"logprobs":%b,"sequence_number":%d}\n\n' % (encode(logprobs), self._num_events)
        self._num_events += 1
        events += (message.before_text, encode(text), end)

    def _begin_message(self, events: list[bytes]) -> _OpenMessage:
        events.append(self._end_reasoning("completed"))
        item = self._message_item("in_progress", [])
        place = self._place(item, 0) + b","
        part = encode({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        events.append(self._item_event("added", item))
        events.append(self._event("response.content_part.added", b'%b"part":%b' % (place, part)))
        kind = b"response.output_text.delta"
        self._message = _OpenMessage(b'event: %b\ndata: {"type":"%b",%b"delta":' % (kind, kind, place))
        return self._message

    def _end_message(self, status: Literal["completed", "incomplete"]) -> bytes:
        if self._message is None:
            return b""
        text, logprobs = "".join(self._message.texts), self._message.logprobs
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        item = self._message_item(status, [part])
        place = self._place(item, 0) + b","
        done = b'%b"text":%b,"logprobs":%b' % (place, encode(text), encode(logprobs))
        events = (
            self._event("response.output_text.done", done)
            + self._event("response.content_part.done", b'%b"part":%b' % (place, encode(part)))
            + self._item_event("done", item)
        )
        self._output.append(item)
        self._message = None
        return events

    def _call(self, call: ToolCall) -> bytes:
        events = self._end_reasoning("completed") + self._end_message("completed")
        index = len(self._output)
        item = {
            "id": f"fc_{self._stream.request_id}_{index}",
            "type": "function_call",
            "status": "completed",
            "call_id": call_id(),
            "name": call.name,
            "arguments": call.arguments,
        }
        place = self._place(item) + b","
        arguments = encode(call.arguments)
        events += self._item_event("added", {**item, "status": "in_progress", "arguments": ""})
        events += self._event("response.function_call_arguments.delta", b'%b"delta":%b' % (place, arguments))
        done = b'%b"name":%b,"arguments":%b' % (place, encode(call.name), arguments)
        events += self._event("response.function_call_arguments.done", done)
        events += self._item_event("done", item)
        self._output.append(item)
        return events

    def _end_output(self) -> bytes:
        events = [self._end_reasoning(self._status)]
        if self._message is None and not self._output:
            self._begin_message(events)
        return b"".join(events) + self._end_message(self._status)

    def _place(self, item: Mapping[str, object], content_index: int | None = None) -> bytes:
        place = b'"item_id":%b,"output_index":%d' % (encode(item["id"]), len(self._output))
        return place if content_index is None else place + b',"content_index":%d' % content_index

    def _reasoning_item(self, status: str, content: Sequence[object]) -> dict[str, object]:
        return {
            "id": f"rs_{self._stream.request_id}_{len(self._output)}",
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": content,
        }

    def _message_item(self, status: str, content: Sequence[object]) -> dict[str, object]:
        return {
            "id": f"msg_{self._stream.request_id}_{len(self._output)}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _item_event(self, change: Literal["added", "done"], item: object) -> bytes:
        place = b'"output_index":%d,"item":%b' % (len(self._output), encode(item))
        return self._event(f"response.output_item.{change}", place)

    def _event(self, kind: str, inside: bytes) -> bytes:
        number, name = self._num_events, kind.encode()
        self._num_events += 1
        return b'event: %b\ndata: {"type":"%b",%b,"sequence_number":%d}\n\n' % (name, name, inside, number)
