"""The body of POST /api/chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from hearth.api import unread_fields
from hearth.api.body import Strict, Text
from hearth.api.ollama.body import DEFAULT_SAMPLING, OllamaBody
from hearth.api.openai.chat import (
    MAX_MESSAGES,
    CalledFunction,
    CalledTool,
    ChatBody,
    MessageBody,
    ParsedJson,
    ToolBody,
)
from hearth.api.unread_fields import UnsupportedField
from hearth.core.errors import BadPrompt


class InnerChatBody(ChatBody):
    """A chat with Ollama's defaults."""

    default_sampling: ClassVar[Mapping[str, float]] = DEFAULT_SAMPLING


class OllamaFunction(Strict):
    name: Text
    arguments: dict[str, ParsedJson] = Field(description="A JSON object.")


class OllamaCall(Strict):
    id: Text | None = None
    function: OllamaFunction


class OllamaMessage(Strict):
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.OLLAMA_MESSAGE

    role: Literal["system", "user", "assistant", "tool"]
    content: Text | None = None
    thinking: Text | None = Field(None, description="What the assistant thought before.")
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True, max_length=128)] | None = None
    tool_name: Text | None = Field(None, description="The tool whose result this is.")
    tool_call_id: Text | None = None

    def message(self, index: int) -> MessageBody:
        calls = [
            _call(call, f"messages[{index}].tool_calls[{number}]")
            for number, call in enumerate(self.tool_calls or ())
        ]
        return MessageBody(
            role=self.role,
            content=self.content or "",
            tool_calls=calls or None,
            name=self.tool_name,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.thinking,
        )


class OllamaChatBody(OllamaBody):
    """Without messages, it loads or unloads the model."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[ToolBody], Field(fail_fast=True, max_length=128)] | None = Field(
        None, description="What the model may call."
    )

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def chat_body(self) -> ChatBody:
        """Translate the body; continues a last message of the assistant. Raises RequestError."""
        messages = [message.message(index) for index, message in enumerate(self.messages or ())]
        is_begun = messages[-1].role == "assistant" and not messages[-1].tool_calls
        fields = {
            "messages": messages,
            "tools": self.tools,
            "continue_final_message": is_begun or None,
            **self.thinking_fields(),
        }
        return InnerChatBody.model_validate(self.inner_fields() | fields)


def _call(call: OllamaCall, where: str) -> CalledTool:
    try:
        arguments = json.dumps(call.function.arguments)
    except RecursionError as error:
        raise BadPrompt(f"`{where}.function.arguments` is nested too deep; send a flatter object") from error
    return CalledTool(id=call.id, function=CalledFunction(name=call.function.name, arguments=arguments))
