"""The body of POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue, SkipValidation, model_validator

from hearth.api import unread_fields
from hearth.api.body import MAX_INT, Body, Strict, Text
from hearth.api.dialect import AnswerSpec, Dialect, ToolUse
from hearth.api.json_body import SMALL_BYTES, TooManyValues, count_values
from hearth.api.unread_fields import UnsupportedField
from hearth.control.requests.generation import ChatPrompt
from hearth.core.errors import BadPrompt, BadSampling
from hearth.core.types import GuideSpec
from hearth.text.chat_template import Json, Message
from hearth.text.reasoning import SWITCHES, ReasoningMarks, ReasoningUse, marks_of, switches_in
from hearth.text.tokenizer import Tokenizer
from hearth.text.tool_calls import OPEN, Tool, ToolFormat, call_grammar, tool_format

#: Variables that the service itself passes to a template.
_RESERVED = frozenset(
    ["self", "messages", "tools", "add_generation_prompt", "continue_final_message", "limit_s"]
)
#: Parsed JSON needs no validation, for which pydantic would call Python per value.
ParsedJson = SkipValidation[JsonValue]
MAX_MESSAGES = 16_384
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def _text_only(part: object) -> object:
    if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind != "text":
        raise ValueError(f"only parts of type `text` are supported, given: {kind!r:.80}; send text")
    return part


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class CalledFunction(Strict):
    name: Text
    arguments: Text = Field(description="A JSON object, as text.")


class CalledTool(Strict):
    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class MessageBody(Strict):
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Text
        | Annotated[
            list[Annotated[TextPart, BeforeValidator(_text_only)]], Field(fail_fast=True, max_length=1024)
        ]
        | None
    ) = None
    name: Text | None = None
    tool_calls: Annotated[list[CalledTool], Field(fail_fast=True, max_length=128)] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  #: the newer name of the same

    @model_validator(mode="after")
    def _has_content(self) -> MessageBody:
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.thought)):
            raise ValueError(
                f"`content` of a message of role `{self.role}` must be text, given: none; "
                "only assistant messages with `tool_calls` or `reasoning` need none"
            )
        return self

    @property
    def thought(self) -> str | None:
        return self.reasoning or self.reasoning_content or None

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    def message(self, index: int) -> Message:
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Json] = {**(self.model_extra or {}), "role": role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [
                _called(call, f"messages[{index}].tool_calls[{number}]")
                for number, call in enumerate(self.tool_calls)
            ]
        optional = {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.role == "assistant":  # templates know either name
            optional |= {"reasoning_content": self.thought, "reasoning": self.thought}
        return message | {name: value for name, value in optional.items() if value is not None}


class FunctionBody(Strict):
    name: FunctionName
    description: Text | None = None
    strict: bool | None = Field(None, description="Enforced if `tool_choice` requires a call.")
    parameters: dict[str, ParsedJson] | None = Field(None, description="A JSON schema.")


class ToolBody(Strict):
    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ThinkingFields(Strict):
    """How a reasoning model thinks. Other models ignore it."""

    enable_thinking: bool | None = Field(
        None, description="Switch thinking on or off, by the chat template if it has a variable for that."
    )
    thinking_token_budget: int | None = Field(
        None, ge=0, le=MAX_INT, description="Tokens of thinking after which the answer is forced to begin."
    )
    include_reasoning: bool | None = Field(None, description="False: return the answer alone.")


class ChatBody(ThinkingFields, Body):
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.CHAT

    messages: list[MessageBody] = Field(
        fail_fast=True, min_length=1, max_length=MAX_MESSAGES, description="The conversation so far."
    )
    logprobs: bool | None = Field(None, description="Return the logprob of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Also return this many of the likeliest tokens."
    )
    tools: Annotated[list[ToolBody], Field(fail_fast=True, max_length=128)] | None = Field(
        None, description="Functions that the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="Allow several calls in one answer.")
    chat_template_kwargs: dict[str, ParsedJson] | None = Field(
        None, description="Additional variables of the chat template."
    )
    reasoning_effort: Text | None = Field(
        None,
        max_length=64,
        description="Passed to the chat template as a variable; `none` switches thinking off.",
    )
    add_generation_prompt: bool | None = Field(
        None, description="False: the prompt ends with the last message, without the header of an answer."
    )
    continue_final_message: bool | None = Field(
        None,
        description="Continue the text of the last message, which must be the assistant's. Implies that "
        "`add_generation_prompt` is false.",
    )

    @property
    def uses_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def answer_spec(self, dialect: Dialect, tokenizer: Tokenizer) -> AnswerSpec:
        """Translate the body. Raises RequestError."""
        self._check()
        tools = _Tools(self, tokenizer) if self.uses_tools else None
        marks = marks_of(tokenizer)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        sampling = self.sampling(logprobs)
        guide = self.guide()
        if tools is not None:
            guide = tools.guide() or guide
        tags = [
            *((OPEN,) if tools is not None and tools.are_tagged else ()),
            *((marks.close,) if marks else ()),
        ]
        if any(tokenizer.is_special(tag) for tag in tags):
            sampling = replace(sampling, skip_special_tokens=False)
        chat = ChatPrompt(
            messages=[message.message(index) for index, message in enumerate(self.messages)],
            tools=None if tools is None else tools.shown(),
            has_turn=self.add_generation_prompt is not False and not self.continue_final_message,
            is_continued=bool(self.continue_final_message),
            extra=self._template_variables(tokenizer.chat_template_text),
        )
        requests = self.requests([chat], sampling, guide)
        if marks is not None:
            use = self._reasoning_use(marks, tokenizer.chat_template_text)
            requests = [replace(request, reasoning=use) for request in requests]
        return AnswerSpec(
            dialect=dialect,
            requests=requests,
            num_answers=self.num_answers,
            is_stream=bool(self.stream),
            tool_use=None if tools is None else tools.use(),
            ignored_fields=self.ignored_fields,
        )

    def _ignored_fields(self) -> Iterator[str]:
        if self.tool_choice in (None, "auto") and any(tool.function.strict for tool in self.tools or ()):
            yield "tools.function.strict"
        yield from super()._ignored_fields()

    def _template_variables(self, template: str | None) -> dict[str, Json]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        thinks = self._thinks
        switches = {} if thinks is None else dict.fromkeys(switches_in(template), thinks)
        return {**switches, **(self.chat_template_kwargs or {}), **effort}

    @property
    def _thinks(self) -> bool | None:
        """None: as the template has it."""
        if self.enable_thinking is None and self.reasoning_effort == "none":
            return False
        return self.enable_thinking

    def _reasoning_use(self, marks: ReasoningMarks, template: str | None) -> ReasoningUse:
        last, switches = self.messages[-1], switches_in(template)
        given = self.chat_template_kwargs or {}
        is_off = self._thinks is False or any(given.get(switch) is False for switch in SWITCHES)
        return ReasoningUse(
            marks,
            begun=last.text if self.continue_final_message else "",
            # A template without a switch lets every answer begin with thinking.
            budget_tokens=0 if is_off and not switches else self.thinking_token_budget,
            is_shown=self.include_reasoning is not False,
        )

    def _check(self) -> None:
        self._count_arguments()
        self._check_continued()
        if self.top_logprobs is not None and not self.logprobs:
            raise BadSampling("`top_logprobs` needs `logprobs` to be true; set it, or leave both out")
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise BadSampling("`tool_choice` needs `tools`, given: none; send tools, or leave it out")
        named = (self.chat_template_kwargs or {}).get("reasoning_effort", self.reasoning_effort)
        if self.reasoning_effort not in (None, named):
            raise BadPrompt(
                f"`reasoning_effort` is {self.reasoning_effort!r}, but {named!r:.80} in "
                "`chat_template_kwargs`; leave one out"
            )
        if reserved := _RESERVED & set(self.chat_template_kwargs or {}):
            raise BadPrompt(
                f"`chat_template_kwargs` must not set {', '.join(f'`{name}`' for name in sorted(reserved))}, "
                "which the service sets; leave it out"
            )

    def _check_continued(self) -> None:
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise BadPrompt(
                "`continue_final_message` continues the last message, but `add_generation_prompt` begins "
                "another; set one of them to false"
            )
        last = self.messages[-1]
        if last.role != "assistant" or last.tool_calls:
            given = "with `tool_calls`" if last.tool_calls else f"of role `{last.role}`"
            raise BadPrompt(
                f"`continue_final_message` needs a text of the assistant as the last message, given: one "
                f"{given}; end with a message of role `assistant`, or leave it out"
            )

    def _count_arguments(self) -> None:
        """Limit the values in arguments of calls, which are JSON in strings."""
        calls = (call for message in self.messages for call in message.tool_calls or ())
        arguments = b",".join(call.function.arguments.encode() for call in calls)
        if len(arguments) > SMALL_BYTES:
            try:
                count_values(arguments)
            except TooManyValues as error:
                raise BadPrompt(f"`messages`: arguments of `tool_calls`: {error}") from error


class _Tools:
    def __init__(self, body: ChatBody, tokenizer: Tokenizer) -> None:
        self._body = body
        self._tools: Sequence[ToolBody] = body.tools or []
        self._demands_call = body.tool_choice not in (None, "none", "auto")
        self._format = tool_format(tokenizer.chat_template_text)
        if self._format is None and self._demands_call:
            self._format = ToolFormat.JSON  # the grammar enforces it, whatever the template says
        tag = tokenizer.encode(OPEN, add_special_tokens=False)
        self._tags_are_tokens = len(tag) == 1
        self.are_tagged = self._format is ToolFormat.HERMES

    def shown(self) -> list[Json]:
        return [_as_given(tool) | {"function": _as_given(tool.function)} for tool in self._tools]

    def use(self) -> ToolUse | None:
        if self._format is None:
            return None
        max_calls = 1 if self._body.parallel_tool_calls is False else None
        return ToolUse(self._format, frozenset(tool.function.name for tool in self._tools), max_calls)

    def guide(self) -> GuideSpec | None:
        if self._format is None or not self._demands_call:
            return None
        if self._body.guide() is not None:
            raise BadSampling(
                "`tool_choice` requires a call, but another field (`response_format`, `structured_outputs`, "
                "`guided_json` or similar) another format; leave one out"
            )
        choice = self._body.tool_choice
        named = choice.function.name if isinstance(choice, NamedTool) else None
        tools = [
            Tool(tool.function.name, tool.function.parameters)
            for tool in self._tools
            if named in (None, tool.function.name)
        ]
        if not tools:
            raise BadSampling(f"`tool_choice` is `{named}`, which is not among the `tools`; add it there")
        # A model that was not trained on calls would not stop after one.
        wants_several = self._body.parallel_tool_calls
        if wants_several is None:
            wants_several = self._format is not ToolFormat.JSON
        grammar = call_grammar(
            self._format,
            tools,
            may_repeat=wants_several and named is None,
            tags_are_tokens=self._tags_are_tokens,
        )
        return GuideSpec("lark", grammar)


def _as_given(part: Strict) -> dict[str, Json]:
    return {name: value for name, value in part if name in part.model_fields_set}


def _called(call: CalledTool, where: str) -> dict[str, Json]:
    written = call.function.arguments
    try:
        arguments: Json = json.loads(written) if written.strip() else {}
    except (ValueError, RecursionError) as error:
        raise BadPrompt(f"`{where}.function.arguments` is not valid JSON: {error}; send an object") from error
    if not isinstance(arguments, dict):
        raise BadPrompt(f"`{where}.function.arguments` must be a JSON object, given: {written!r:.80}")
    return {
        "id": call.id,
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }
