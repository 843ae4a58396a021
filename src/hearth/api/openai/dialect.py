"""Chat and plain completions of OpenAI's API as dialects; `sse.py` formats their streams."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from hearth.api.answer import SSE_TYPE, WAITING
from hearth.api.dialect import AnswerEvents, AnswerSpec, Choice, TokenUsage
from hearth.api.openai.answer_format import (
    CHAT,
    COMPLETION,
    AnswerFormat,
    call_id,
    finish_reason,
    reasoning_fields,
    usage_object,
)
from hearth.api.openai.logprobs import echoed_logprobs, prompt_logprobs
from hearth.api.openai.sse import CompletionEvents
from hearth.control.requests.generation import AnswerStream
from hearth.core.types import PromptLogprobs
from hearth.text.tool_calls import ToolCall


@dataclass(frozen=True, slots=True)
class CompletionDialect:
    format: AnswerFormat
    fingerprint: str
    includes_usage: bool  #: in a stream; whole answers always include it
    has_service_tier: bool  #: the client sent one
    prompt_logprobs: int | None = None  #: as requested

    stream_type = SSE_TYPE
    waiting = WAITING

    def whole(self, spec: AnswerSpec, choices: Sequence[Choice], usage: TokenUsage) -> object:
        told = {"prompt_logprobs": self._prompt_logprobs(choices[0])} if self._tells_prompt(CHAT) else {}
        return {
            **self._identity(self.format.whole, choices[0].stream),
            "choices": [self._choice(spec, index, choice) for index, choice in enumerate(choices)],
            "usage": usage_object(usage),
            **told,
        }

    def events(self, spec: AnswerSpec, streams: Sequence[AnswerStream]) -> AnswerEvents:
        head = b"data: " + msgspec.json.encode(self._identity(self.format.chunk, streams[0]))[:-1]
        return CompletionEvents(self.format, head, spec, streams, self.includes_usage)

    def _identity(self, kind: str, stream: AnswerStream) -> dict[str, object]:
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
        logprobs: object = None
        if spec.has_logprobs and spec.is_echo:
            prompt, sampling = choice.stream.prompt, spec.requests[0].sampling
            logprobs = partial(
                echoed_logprobs,
                choice.stream.tokenizer,
                prompt,
                _scores(choice),
                sampling,
                choice.deltas,
                num_echoed=len(echo),
            )
        elif spec.has_logprobs:
            logprobs = self.format.logprobs(choice.stream.tokenizer, choice.deltas, len(echo))
        content: dict[str, object] = {"text": echo + text}
        if self._tells_prompt(COMPLETION):
            content["prompt_logprobs"] = self._prompt_logprobs(choice)
        if self.format is CHAT:
            is_empty = not text and bool(calls or choice.reasoning)
            message = {"role": "assistant", "content": None if is_empty else text, "refusal": None}
            message |= reasoning_fields(choice.reasoning) if choice.reasoning else {}
            content = {
                "message": message | ({"tool_calls": [_call(call) for call in calls]} if calls else {})
            }
        reason = finish_reason(choice.finish_reason, has_calls=bool(calls))
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _tells_prompt(self, format: AnswerFormat) -> bool:
        """True if `prompt_logprobs` were requested in this format: their place differs, as in vLLM."""
        return self.prompt_logprobs is not None and self.format is format

    def _prompt_logprobs(self, choice: Choice) -> object:
        stream = choice.stream
        return partial(
            prompt_logprobs, stream.tokenizer, stream.prompt, _scores(choice), self.prompt_logprobs or 0
        )


def _scores(choice: Choice) -> PromptLogprobs:
    scores = None if choice.reading is None else choice.reading.logprobs
    assert scores is not None, f"the prompt of {choice.stream.request_id} was not read"
    return scores


def _call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(), "type": "function", "function": function}
