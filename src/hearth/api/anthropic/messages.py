"""The bodies of POST /v1/messages and `count_tokens`, translated to chat.

Only text is supported: images, documents and tools that run at Anthropic are refused. `cache_control` is
accepted and has no effect, since prefixes are always cached.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from hearth.api import unread_fields
from hearth.api.body import (
    MAX_INT,
    JsonSchema,
    MaxTokens,
    ModelName,
    ResponseFormat,
    StopList,
    Strict,
    Temperature,
    Text,
    TopK,
    TopP,
)
from hearth.api.openai.chat import (
    MAX_MESSAGES,
    CalledFunction,
    CalledTool,
    ChatBody,
    FunctionBody,
    FunctionName,
    MessageBody,
    NamedFunction,
    NamedTool,
    ParsedJson,
    ToolBody,
)
from hearth.api.unread_fields import UnsupportedField
from hearth.core.errors import BadPrompt, BadSampling

MAX_BLOCKS = MAX_TOOLS = 128
_BLOCK_TYPES = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _known_block(block: object) -> object:
    if isinstance(block, dict) and isinstance(kind := block.get("type"), str) and kind not in _BLOCK_TYPES:
        raise ValueError(
            f"only blocks of type `text`, `tool_use` and `tool_result` are supported, given: {kind!r:.80}; "
            "send text"
        )
    return block


def _own_tool(tool: object) -> object:
    if isinstance(tool, dict) and isinstance(kind := tool.get("type"), str) and kind != "custom":
        raise ValueError(
            f"only tools of type `custom`, which the client runs, can be called, given: {kind!r:.80}; leave "
            "it out"
        )
    return tool


class TextBlock(Strict):
    type: Literal["text"]
    text: Text


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, ParsedJson]


class ToolResultBlock(Strict):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: (
        Text
        | Annotated[
            list[Annotated[TextBlock, BeforeValidator(_known_block)]],
            Field(fail_fast=True, max_length=MAX_BLOCKS),
        ]
        | None
    ) = None
    is_error: bool | None = Field(None, description="The tool failed; the model sees that.")

    @property
    def as_text(self) -> str:
        text = _text(self.content or "")
        return f"Error: {text}" if self.is_error else text


class ThinkingBlock(Strict):
    """Redacted thinking is of another model, encrypted, and is dropped."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: Text = ""
    signature: Text | None = Field(None, description="Accepted and not checked.")
    data: Text | None = None


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock,
    Field(discriminator="type"),
    BeforeValidator(_known_block),
]
TextBlocks = Annotated[
    list[Annotated[TextBlock, BeforeValidator(_known_block)]], Field(fail_fast=True, max_length=MAX_BLOCKS)
]


class ConversationMessage(Strict):
    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Block], Field(fail_fast=True, max_length=MAX_BLOCKS)]

    def messages(self, index: int, name_by_id: dict[str, str]) -> Iterator[MessageBody]:
        """Yield tool results as messages of their own. Adds tools used here to `name_by_id`."""
        if isinstance(self.content, str):
            yield MessageBody(role=self.role, content=self.content)
            return
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[CalledTool] = []
        has_results = False
        for number, block in enumerate(self.content):
            match block:
                case TextBlock():
                    texts.append(block.text)
                case ToolUseBlock():
                    self._refuse_unless("assistant", block.type, index, number)
                    name_by_id[block.id] = block.name
                    calls.append(_call(block, f"messages[{index}].content[{number}]"))
                case ToolResultBlock():
                    self._refuse_unless("user", block.type, index, number)
                    has_results = True
                    if texts:
                        yield MessageBody(role=self.role, content="\n".join(texts))
                        texts = []
                    yield MessageBody(
                        role="tool",
                        content=block.as_text,
                        tool_call_id=block.tool_use_id,
                        name=name_by_id.get(block.tool_use_id),
                    )
                case ThinkingBlock():
                    thoughts += [block.thinking] if block.thinking else []
        if texts or not has_results:
            yield MessageBody(
                role=self.role,
                content="\n".join(texts),
                tool_calls=calls or None,
                reasoning_content="\n".join(thoughts) or None,
            )

    @property
    def has_redacted_thinking(self) -> bool:
        return any(isinstance(one, ThinkingBlock) and one.type != "thinking" for one in self.content)

    @property
    def has_tool_use(self) -> bool:
        return self._has(ToolUseBlock)

    def _has(self, kind: type[Strict]) -> bool:
        return not isinstance(self.content, str) and any(isinstance(block, kind) for block in self.content)

    def _refuse_unless(self, role: str, kind: str, index: int, number: int) -> None:
        if self.role != role:
            raise BadPrompt(
                f"`messages[{index}].content[{number}]` is of type `{kind}`, which only a message of role "
                f"`{role}` may have, given: `{self.role}`"
            )


class ToolDefinition(Strict):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, ParsedJson] = Field(description="A JSON schema.")
    strict: bool | None = Field(None, description="Enforced if `tool_choice` requires a call.")

    def tool(self) -> ToolBody:
        # What is not given is not shown to the model, not even as null.
        described = {} if self.description is None else {"description": self.description}
        function = {"name": self.name, **described, "parameters": self.input_schema}
        return ToolBody(type="function", function=FunctionBody.model_validate(function))


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = Field(None, description="The tool to call, if the type is `tool`.")
    disable_parallel_tool_use: bool | None = Field(None, description="At most one call per answer.")

    def choice(self) -> Literal["auto", "required", "none"] | NamedTool:
        match self.type:
            case "tool" if self.name is None:
                raise BadSampling("`tool_choice` of type `tool` needs the `name` of one, given: none")
            case "tool":
                return NamedTool(type="function", function=NamedFunction(name=self.name or ""))
            case "any":
                return "required"
            case "auto" | "none" as same:
                return same


class JsonOutput(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, object] = Field(alias="schema", description="The JSON schema of the output.")


class OutputConfig(Strict):
    format: JsonOutput | None = None
    effort: Text | None = Field(
        None, max_length=64, description="The variable `reasoning_effort` of the chat template."
    )


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(
        None, ge=0, le=MAX_INT, description="Tokens of thinking after which the answer is forced to begin."
    )
    display: Text | None = Field(None, description="`omitted`: the answer has no thinking blocks.")

    def fields(self) -> dict[str, object]:
        return {
            "enable_thinking": self.type != "disabled",
            "thinking_token_budget": self.budget_tokens,
            "include_reasoning": self.display != "omitted",
        }


class ConversationBody(Strict):
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.MESSAGES

    model: ModelName = Field(description="Name or alias of a deployed model.")
    messages: Annotated[
        list[ConversationMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    system: Text | TextBlocks | None = Field(None, description="System prompt.")
    tools: (
        Annotated[
            list[Annotated[ToolDefinition, BeforeValidator(_own_tool)]],
            Field(fail_fast=True, max_length=MAX_TOOLS),
        ]
        | None
    ) = Field(None, description="Tools that the model may call.")
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = Field(None, description="The format of the output.")
    thinking: Thinking | None = Field(
        None, description="Whether a reasoning model thinks; default: as its chat template has it."
    )

    def chat_body(self) -> ChatBody:
        return ChatBody.model_validate(self._fields())

    def _fields(self) -> dict[str, object]:
        messages = self._messages()
        if len(messages) > MAX_MESSAGES:
            raise BadPrompt(
                f"`messages` and the results of tools in them must be at most {MAX_MESSAGES}, given: "
                f"{len(messages)}; leave out the oldest"
            )
        choice = self.tool_choice
        return {
            "model": self.model,
            "messages": messages,
            "continue_final_message": self._is_begun or None,
            "tools": None if self.tools is None else [tool.tool() for tool in self.tools],
            "tool_choice": None if choice is None else choice.choice(),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            **self._output_fields(),
            **({} if self.thinking is None else self.thinking.fields()),
        }

    @property
    def _is_begun(self) -> bool:
        return self.messages[-1].role == "assistant"

    def _messages(self) -> list[MessageBody]:
        if self._is_begun and self.messages[-1].has_tool_use:
            raise BadPrompt(
                f"`messages[{len(self.messages) - 1}]` uses tools without results; end with blocks of type "
                "`tool_result`"
            )
        system = [] if not self.system else [MessageBody(role="system", content=_text(self.system))]
        name_by_id: dict[str, str] = {}
        own = (
            one for index, message in enumerate(self.messages) for one in message.messages(index, name_by_id)
        )
        return [*system, *own]

    def _output_fields(self) -> dict[str, object]:
        config = self.output_config
        if config is None:
            return {}
        fields: dict[str, object] = {"reasoning_effort": config.effort}
        if config.format is not None:
            fields["response_format"] = ResponseFormat(
                type="json_schema", json_schema=JsonSchema.model_validate({"schema": config.format.schema_})
            )
        return fields

    def _ignored_fields(self) -> Iterator[str]:
        if any(message.has_redacted_thinking for message in self.messages):
            yield "messages.content.redacted_thinking"
        is_demanded = self.tool_choice is not None and self.tool_choice.type in ("any", "tool")
        if not is_demanded and any(tool.strict for tool in self.tools or ()):
            yield "tools.strict"
        yield from super()._ignored_fields()
        if self.output_config is not None:
            yield from self.output_config.ignored("output_config.")


class RequestMetadata(Strict):
    user_id: Text | None = None


class MessagesBody(ConversationBody):
    max_tokens: MaxTokens = Field(description="Maximum tokens to generate.")
    stream: bool | None = Field(None, description="Stream the answer as server-sent events.")
    temperature: Temperature | None = Field(None, description="0: greedy.")
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: StopList | None = Field(None, description="Texts that end the answer.")
    metadata: RequestMetadata | None = Field(None, description="Accepted and not used.")
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="Accepted and not used.")
    cache_control: dict[str, ParsedJson] | None = Field(
        None, description="Ignored: prefixes are always cached."
    )

    def _fields(self) -> dict[str, object]:
        if not all(self.stop_sequences or ()):
            raise BadSampling("`stop_sequences` contains an empty text; remove it")
        return super()._fields() | {
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
        }


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _call(block: ToolUseBlock, where: str) -> CalledTool:
    try:
        arguments = json.dumps(block.input)
    except RecursionError as error:
        raise BadPrompt(f"`{where}.input` is nested too deeply; flatten it") from error
    return CalledTool(id=block.id, function=CalledFunction(name=block.name, arguments=arguments))
