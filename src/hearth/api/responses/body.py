"""The body of POST /v1/responses, translated to chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from hearth.api import unread_fields
from hearth.api.body import MAX_INT, GenerationBody, Strict, Text
from hearth.api.openai.chat import ChatBody, FunctionBody, ParsedJson, ThinkingFields
from hearth.api.responses.items import (
    MAX_ITEMS,
    InputItem,
    Item,
    MessageItem,
    check_arguments,
    messages_of,
)
from hearth.api.unread_fields import UnsupportedField
from hearth.core.errors import BadPrompt, BadSampling

#: The value of `include` that requests logprobs; the others are about tools of OpenAI.
LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16


def _functions_only(tool: object) -> object:
    if isinstance(tool, dict) and isinstance(kind := tool.get("type"), str) and kind != "function":
        raise ValueError(
            f"only tools of type `function` are supported, given: {kind!r:.80}; implement it as a function "
            "of your program, or leave it out"
        )
    return tool


def _few_pairs(metadata: object) -> object:
    """Check the number first: pydantic validates a whole mapping even after a fault."""
    if isinstance(metadata, dict) and len(metadata) > MAX_METADATA:
        raise ValueError(f"at most {MAX_METADATA} pairs can be attached, given: {len(metadata)}; send fewer")
    return metadata


class FunctionTool(FunctionBody):
    type: Literal["function"]


class ChosenFunction(Strict):
    type: Literal["function"]
    name: Text


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    strict: bool | None = Field(None, description="Accepted; the schema is always enforced.")
    schema_: dict[str, ParsedJson] | None = Field(
        None, alias="schema", description="The JSON schema of the output."
    )

    @model_validator(mode="after")
    def _has_schema(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("a format of type `json_schema` needs a `schema`, given: none")
        if self.type != "json_schema" and self.schema_ is not None:
            raise ValueError(f"a format of type `{self.type}` takes no `schema`; use the type `json_schema`")
        return self


_PLAIN = TextFormat.model_construct(type="text")


class TextConfig(Strict):
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.RESPONSE_TEXT

    format: TextFormat | None = None


class Reasoning(Strict):
    effort: Text | None = Field(
        None, max_length=64, description="The variable `reasoning_effort` of the chat template."
    )


class ResponseBody(ThinkingFields, GenerationBody):
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.RESPONSE

    input: Text | Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_ITEMS)] = Field(
        description="A text, or the items of the conversation so far."
    )
    instructions: Text | None = Field(None, description="System prompt; not carried over to later responses.")
    previous_response_id: Text | None = Field(
        None, max_length=256, description="The stored response to continue."
    )
    store: bool | None = Field(
        None, description="Store the response in memory for a while; default: false, unlike OpenAI."
    )
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_INT, description="Maximum tokens to generate; default: all that fit."
    )
    tools: (
        Annotated[
            list[Annotated[FunctionTool, BeforeValidator(_functions_only)]],
            Field(fail_fast=True, max_length=128),
        ]
        | None
    ) = Field(None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls in one answer.")
    text: TextConfig | None = Field(None, description="The format of the output.")
    reasoning: Reasoning | None = None
    include: Annotated[list[Text], Field(fail_fast=True, max_length=64)] | None = Field(
        None, description=f"`{LOGPROBS}`: return the logprob of each token."
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Return this many of the likeliest tokens."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="Accepted; conversations that are too long are refused, never cut."
    )
    metadata: Annotated[
        dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]] | None,
        BeforeValidator(_few_pairs),
    ] = Field(None, description=f"Up to {MAX_METADATA} pairs, returned with the response.")
    chat_template_kwargs: dict[str, ParsedJson] | None = Field(
        None, description="Additional variables of the chat template."
    )

    @property
    def items(self) -> list[Item]:
        if isinstance(self.input, list):
            return list(self.input)
        return [MessageItem(role="user", content=self.input)]

    @property
    def has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    @property
    def format(self) -> TextFormat:
        given = None if self.text is None else self.text.format
        return given or _PLAIN

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    def chat(self, earlier: Sequence[Item]) -> ChatBody:
        """Translate the body. `earlier`: items of the responses that it continues. Raises RequestError."""
        items = self.items
        self._check(items, earlier)
        messages = messages_of(self.instructions, [*earlier, *items])
        if not messages:
            raise BadPrompt("`input` has no message, at least 1 is needed; send a text or an item")
        given = {name: getattr(self, name) for name in self.model_fields_set & _SHARED}
        translated = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.has_logprobs,
            "top_logprobs": self.top_logprobs if self.has_logprobs else None,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _chat_format(self.format),
            "reasoning_effort": self.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return ChatBody.model_validate(given | translated)

    def echo(self) -> dict[str, object]:
        """Return the fields that a response repeats from its request. Raises BadPrompt."""
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.effort, "summary": None},
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": _echoed_format(self.format)},
            "tool_choice": _echoed_choice(self.tool_choice),
            "tools": [_echoed_tool(tool, index) for index, tool in enumerate(self.tools or ())],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": "disabled",
        }

    def _check(self, items: Sequence[Item], earlier: Sequence[Item]) -> None:
        check_arguments(items, earlier)
        if len(earlier) + len(items) > MAX_ITEMS:
            raise BadPrompt(
                f"the conversation has {len(earlier) + len(items)} items, those of earlier responses "
                f"included, limit: {MAX_ITEMS}; begin a new one"
            )
        if self.min_tokens and self.max_output_tokens and self.min_tokens > self.max_output_tokens:
            raise BadSampling(
                f"`min_tokens` must not exceed `max_output_tokens`: {self.min_tokens} > "
                f"{self.max_output_tokens}; raise `max_output_tokens` or lower `min_tokens`"
            )
        if self.tool_choice not in (None, "none", "auto") and self.format.type != "text":
            raise BadSampling(
                "`tool_choice` requires a call, but `text.format` another format; leave one out"
            )
        named = (self.chat_template_kwargs or {}).get("reasoning_effort", self.effort)
        if self.effort not in (None, named):
            raise BadPrompt(
                f"`reasoning.effort` is {self.effort!r} and `reasoning_effort` in `chat_template_kwargs` "
                f"{named!r:.80}; leave one out"
            )

    def _ignored_fields(self) -> Iterator[str]:
        if self.tool_choice in (None, "auto") and any(tool.strict for tool in self.tools or ()):
            yield "tools.strict"
        if self.truncation == "auto":
            yield "truncation"
        yield from super()._ignored_fields()
        if self.reasoning is not None:
            yield from self.reasoning.ignored("reasoning.")
        if self.text is not None:
            yield from self.text.ignored("text.")
            yield from self.format.ignored("text.format.")


#: Fields that a body of chat has, too, by the same names and with the same limits.
_SHARED = frozenset([*GenerationBody.model_fields, *ThinkingFields.model_fields])


def _chat_tool(tool: FunctionTool) -> dict[str, object]:
    given = {name: getattr(tool, name) for name in FunctionBody.model_fields if name in tool.model_fields_set}
    return {"type": "function", "function": given}


def _chat_choice(choice: str | ChosenFunction | None) -> object:
    if not isinstance(choice, ChosenFunction):
        return choice
    return {"type": "function", "function": {"name": choice.name}}


def _chat_format(format: TextFormat) -> dict[str, object] | None:
    if format.type == "text":
        return None
    schema = None if format.schema_ is None else {"schema": format.schema_}
    return {"type": format.type, "json_schema": schema}


def _echoed_format(format: TextFormat) -> dict[str, object]:
    if format.type != "json_schema":
        return {"type": format.type}
    return {
        "type": format.type,
        "name": format.name or "schema",
        "description": format.description,
        "strict": format.strict,
        "schema": _raw(format.schema_, "text.format.schema"),
    }


def _echoed_choice(choice: str | ChosenFunction | None) -> object:
    if not isinstance(choice, ChosenFunction):
        return choice or "auto"
    return {"type": "function", "name": choice.name}


def _echoed_tool(tool: FunctionTool, index: int) -> dict[str, object]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": _raw(tool.parameters, f"tools[{index}].parameters"),
        "strict": tool.strict,
    }


def _raw(value: object, where: str) -> msgspec.Raw:
    """Return what a client has sent as JSON, with escapes: it may hold half characters."""
    try:
        return msgspec.Raw(json.dumps(value, allow_nan=False).encode())
    except (ValueError, RecursionError) as error:
        raise BadPrompt(f"`{where}` must be a JSON schema: {error}; send one") from error
