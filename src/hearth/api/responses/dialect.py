"""OpenAI's responses as a dialect; `events.py` formats their streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from hearth.api.answer import SSE_TYPE, WAITING
from hearth.api.dialect import AnswerEvents, AnswerSpec, Choice, TokenUsage
from hearth.api.responses.events import ResponseEvents, ResponseState
from hearth.control.requests.generation import AnswerStream

ID_PREFIX = "resp_"


@dataclass(frozen=True, slots=True)
class ResponseDialect:
    echo: Mapping[str, object]  #: fields repeated from the request
    created_at_s: float
    #: stores a response by id, model and JSON; returns False if it is too large; None: do not store
    keep: Callable[[str, str, bytes], bool] | None = None

    stream_type = SSE_TYPE
    waiting = WAITING

    def whole(self, spec: AnswerSpec, choices: Sequence[Choice], usage: TokenUsage) -> object:
        (choice,) = choices
        events = ResponseEvents(self, spec, choice.stream)
        events.write(0, choice.deltas)
        return events.end(usage)

    def events(self, spec: AnswerSpec, streams: Sequence[AnswerStream]) -> AnswerEvents:
        (stream,) = streams
        return ResponseEvents(self, spec, stream)

    def response(self, stream: AnswerStream, state: ResponseState) -> dict[str, object]:
        return {
            "id": ID_PREFIX + stream.request_id,
            "object": "response",
            "created_at": int(self.created_at_s),
            "completed_at": int(time.time()) if state.status == "completed" else None,
            "status": state.status,
            "background": False,
            "error": state.error,
            "incomplete_details": {"reason": "max_output_tokens"} if state.status == "incomplete" else None,
            "model": stream.model,
            "output": state.output,
            "service_tier": "flex" if stream.is_batch else "default",
            "store": self.keep is not None and state.status != "failed",
            "usage": None if state.usage is None else _usage(state.usage),
            **self.echo,
        }

    def ended(self, stream: AnswerStream, state: ResponseState) -> dict[str, object]:
        response = self.response(stream, state)
        if self.keep is not None:
            spelt = msgspec.json.encode(response)
            response["store"] = self.keep(ID_PREFIX + stream.request_id, stream.model, spelt)
        return response


def _usage(usage: TokenUsage) -> dict[str, object]:
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
    }
