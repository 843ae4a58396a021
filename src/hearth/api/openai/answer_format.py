"""The formats of chat and plain completions in OpenAI's API."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hearth.api.dialect import TokenUsage
from hearth.api.openai.logprobs import chat_logprobs, completion_logprobs
from hearth.control.requests.generation import TokenDelta
from hearth.core.types import FinishReason
from hearth.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    id_prefix: str
    whole: str  #: `object` of a whole answer
    chunk: str  #: `object` of a chunk
    first: bytes | None  #: of the first chunk of a choice; None: no such chunk
    before_text: bytes
    after_text: bytes
    empty: bytes  #: a chunk that adds nothing
    logprobs: Callable[[Tokenizer, Sequence[TokenDelta], int], object]


CHAT = AnswerFormat(
    id_prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    first=b'"delta":{"role":"assistant","content":""}',
    before_text=b'"delta":{"content":',
    after_text=b"}",
    empty=b'"delta":{}',
    logprobs=chat_logprobs,
)
COMPLETION = AnswerFormat(
    id_prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    first=None,
    before_text=b'"text":',
    after_text=b"",
    empty=b'"text":""',
    logprobs=completion_logprobs,
)


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def finish_reason(reason: FinishReason | None, has_calls: bool) -> str | None:
    if reason is FinishReason.STOP and has_calls:
        return "tool_calls"
    return reason


def reasoning_fields(text: str) -> dict[str, str]:
    """Return reasoning as vLLM names it, and as it did before, like DeepSeek."""
    return {"reasoning": text, "reasoning_content": text}


def usage_object(usage: TokenUsage) -> dict[str, object]:
    details = {"completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens}}
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        **(details if usage.num_reasoning_tokens else {}),
    }
