"""Formats an answer as a message of Anthropic's API."""

from __future__ import annotations

import secrets

import msgspec

from hearth.api.dialect import TokenUsage
from hearth.control.requests.generation import AnswerStream, TokenDelta
from hearth.core.types import FinishReason
from hearth.text.tool_calls import ToolCall

MESSAGE_PREFIX = "msg_"
#: Of thinking, without which some clients drop it. Nothing is signed, and none is checked.
SIGNATURE = "unsigned"


def message_object(stream: AnswerStream, usage: TokenUsage) -> dict[str, object]:
    return {
        "id": MESSAGE_PREFIX + stream.request_id,
        "type": "message",
        "role": "assistant",
        "model": stream.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_object(usage),
    }


def thinking_block(text: str, *, is_whole: bool = True) -> dict[str, object]:
    return {"type": "thinking", "thinking": text, "signature": SIGNATURE if is_whole else ""}


def tool_use_block(call: ToolCall, *, is_whole: bool) -> dict[str, object]:
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": call.name,
        "input": msgspec.Raw(call.arguments.encode()) if is_whole else {},
    }


def stop_fields(last: TokenDelta, *, has_calls: bool) -> dict[str, object]:
    reason = "end_turn"
    if last.stop is not None:
        reason = "stop_sequence"
    elif last.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif has_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": last.stop}


def usage_object(usage: TokenUsage) -> dict[str, object]:
    """Format token counts; cached tokens are not part of `input_tokens`."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
    }
