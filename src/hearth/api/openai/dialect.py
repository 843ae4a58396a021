"""Chat and plain completions of OpenAI's API as dialects. Their streams are in `sse.py`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from hearth.api.answer import SSE_TYPE, WAITING
from hearth.api.dialect import AnswerEvents, AnswerSpec, Choice, TokenUsage
from hearth.api.openai.answer_format import CHAT, AnswerFormat, call_id, finish_reason, usage_object
from hearth.api.openai.sse import CompletionEvents
from hearth.control.generation import AnswerStream
from hearth.text.tool_calls import ToolCall


@dataclass(frozen=True, slots=True)
class CompletionDialect:
    """Spells answers as OpenAI's completions are, of chat or plain, by their format."""

    format: AnswerFormat
    fingerprint: str
    includes_usage: bool  #: in a stream; a whole answer always does
    has_service_tier: bool  #: the client has named one, and is told which it got

    stream_type = SSE_TYPE
    waiting = WAITING

    def whole(self, spec: AnswerSpec, choices: Sequence[Choice], usage: TokenUsage) -> object:
        return {
            **self._identity(self.format.whole, choices[0].stream),
            "choices": [self._choice(spec, index, choice) for index, choice in enumerate(choices)],
            "usage": usage_object(usage),
        }

    def events(self, spec: AnswerSpec, streams: Sequence[AnswerStream]) -> AnswerEvents:
        head = b"data: " + msgspec.json.encode(self._identity(self.format.chunk, streams[0]))[:-1]
        return CompletionEvents(self.format, head, spec, streams, self.includes_usage)

    def _identity(self, kind: str, stream: AnswerStream) -> dict[str, object]:
        """Return the fields that an answer and its chunks begin with; `stream`: of the first choice."""
        tier = {"service_tier": "flex" if stream.is_batch else "default"} if self.has_service_tier else {}
        return {
            "id": self.format.id_prefix + stream.request_id,
            "object": kind,
            "created": int(time.time()),
            "model": stream.model,
            "system_fingerprint": self.fingerprint,
            **tier,
        }

    def _choice(self, spec: AnswerSpec, index: int, choice: Choice) -> dict[str, object]:
        text, calls, echo = choice.text, choice.calls, choice.echo
        logprobs = None
        if spec.has_logprobs:
            logprobs = self.format.logprobs(choice.stream.tokenizer, choice.deltas, len(echo))
        content: dict[str, object] = {"text": echo + text}
        if self.format is CHAT:
            message = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
            content = {
                "message": message | ({"tool_calls": [_call(call) for call in calls]} if calls else {})
            }
        reason = finish_reason(choice.finish_reason, has_calls=bool(calls))
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}


def _call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(), "type": "function", "function": function}
