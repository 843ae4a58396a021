"""The items of a conversation in /v1/responses, and their translation to messages of chat."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, TypeAlias, assert_never

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from hearth.api.body import Strict, Text
from hearth.api.json_body import SMALL_BYTES, TooManyValues, count_values
from hearth.core.errors import BadPrompt

#: Items of a conversation, earlier responses included, and consecutive calls: with instructions, as many
#: messages, and calls per message, as chat allows.
MAX_ITEMS = 16_383
MAX_CALLS = 128

_PARTS = ("input_text", "output_text", "refusal")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _known_part(part: object) -> object:
    if isinstance(part, dict) and isinstance(kind := part.get("type"), str) and kind not in _PARTS:
        raise ValueError(
            f"only parts of text (`input_text`, `output_text`) are supported, given: {kind!r:.80}; send text"
        )
    return part


def _known_item(item: object) -> object:
    if not isinstance(item, dict):
        raise ValueError(f"an item must be an object, given: {type(item).__name__}; send a message")
    if (kind := _kind(item)) not in _ITEMS:
        known = ", ".join(f"`{one}`" for one in _ITEMS)
        given = repr(kind[:80]) if isinstance(kind, str) else type(kind).__name__
        raise ValueError(
            f"only items of the types {known} are supported, given: {given}; send it as a message, or leave "
            "it out"
        )
    return item


def _kind(item: object) -> object:
    assert isinstance(item, dict), f"checked before: {type(item)}"
    kind = item.get("type")
    return "message" if kind is None else kind


class ContentText(Strict):
    type: Literal["input_text", "output_text"]
    text: Text


class ContentRefusal(Strict):
    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


ContentPart = Annotated[
    Annotated[ContentText | ContentRefusal, Field(discriminator="type")], BeforeValidator(_known_part)
]
Content = Text | Annotated[list[ContentPart], Field(fail_fast=True, max_length=1024)]
ItemId = Annotated[Text, Field(max_length=256)]


class MessageItem(Strict):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: ItemId | None = None

    def as_stored(self, item_id: str) -> dict[str, object]:
        return {
            "id": self.id or item_id,
            "type": "message",
            "status": "completed",
            "role": self.role,
            "content": _stored_content(self.content, is_output=self.role == "assistant"),
        }


class FunctionCallItem(Strict):
    type: Literal["function_call"]
    call_id: ItemId
    name: Text
    arguments: Text = Field(description="A JSON object, as text.")
    id: ItemId | None = None

    def as_stored(self, item_id: str) -> dict[str, object]:
        return {
            "id": self.id or item_id,
            "type": "function_call",
            "status": "completed",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


class FunctionOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: ItemId
    output: Content
    id: ItemId | None = None

    def as_stored(self, item_id: str) -> dict[str, object]:
        output = self.output
        return {
            "id": self.id or item_id,
            "type": "function_call_output",
            "status": "completed",
            "call_id": self.call_id,
            "output": output if isinstance(output, str) else _stored_content(output, is_output=False),
        }


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text"]
    text: Text


ReasoningTexts = Annotated[list[ReasoningText], Field(fail_fast=True, max_length=1024)]


class ReasoningItem(Strict):
    """Reasoning before a message or a call of the assistant. What is encrypted is dropped."""

    type: Literal["reasoning"]
    content: ReasoningTexts | None = None
    summary: ReasoningTexts | None = None
    id: ItemId | None = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary or ())

    def as_stored(self, item_id: str) -> dict[str, object]:
        return {
            "id": self.id or item_id,
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": self.text}],
        }


Item: TypeAlias = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
InputItem = Annotated[
    Annotated[
        Annotated[MessageItem, Tag("message")]
        | Annotated[FunctionCallItem, Tag("function_call")]
        | Annotated[FunctionOutputItem, Tag("function_call_output")]
        | Annotated[ReasoningItem, Tag("reasoning")],
        Discriminator(_kind),
    ],
    BeforeValidator(_known_item),
]
_STORED: TypeAdapter[list[Item]] = TypeAdapter(list[InputItem])


def from_stored(items: object) -> list[Item]:
    return _STORED.validate_python(items)


def as_stored(items: Iterable[Item], id_prefix: str) -> list[dict[str, object]]:
    return [item.as_stored(f"{id_prefix}_{index}") for index, item in enumerate(items)]


def messages_of(instructions: str | None, items: Sequence[Item]) -> list[dict[str, object]]:
    """Return the messages of a conversation for chat. Raises BadPrompt.

    Calls are added to the assistant message before them, reasoning to the one after it. Instructions are
    merged with a system message at the beginning: many templates support only one.
    """
    messages: list[dict[str, object]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    reasoning: dict[str, object] = {}
    for item in items:
        match item:
            case MessageItem(role="system" | "developer") if instructions and len(messages) == 1:
                messages[0]["content"] = f"{messages[0]['content']}\n\n{_text(item.content)}"
            case MessageItem():
                messages.append({"role": item.role, "content": _text(item.content)})
                if item.role == "assistant":
                    messages[-1] |= reasoning
            case FunctionCallItem():
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", **reasoning})
                _add_call(messages[-1], item)
            case FunctionOutputItem():
                content = _text(item.output)
                messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
            case ReasoningItem():
                pass
            case _:
                assert_never(item)
        reasoning = {"reasoning_content": item.text} if isinstance(item, ReasoningItem) and item.text else {}
    return messages


def _add_call(message: dict[str, object], item: FunctionCallItem) -> None:
    calls = message.setdefault("tool_calls", [])
    assert isinstance(calls, list), f"{type(calls)=}"
    if len(calls) == MAX_CALLS:
        raise BadPrompt(f"`input` has more than {MAX_CALLS} calls in a row; send their outputs in between")
    function = {"name": item.name, "arguments": item.arguments}
    calls.append({"id": item.call_id, "type": "function", "function": function})


def check_arguments(items: Sequence[Item], earlier: Sequence[Item]) -> None:
    """Raise BadPrompt for arguments that are no JSON objects, or too large with those of `earlier`."""
    called = (item for item in (*earlier, *items) if isinstance(item, FunctionCallItem))
    written = b",".join(call.arguments.encode() for call in called)
    if len(written) > SMALL_BYTES:
        try:
            count_values(written)
        except TooManyValues as error:
            raise BadPrompt(f"`input`: `arguments` of calls: {error}") from error
    for index, call in enumerate(items):
        if not isinstance(call, FunctionCallItem):
            continue
        try:
            is_object = not call.arguments.strip() or isinstance(json.loads(call.arguments), dict)
        except (ValueError, RecursionError) as error:
            raise BadPrompt(
                f"`input[{index}].arguments` is not valid JSON: {error}; send an object"
            ) from error
        if not is_object:
            raise BadPrompt(
                f"`input[{index}].arguments` must be a JSON object, given: {call.arguments!r:.80}; send one"
            )


def _text(content: str | Sequence[ContentText | ContentRefusal]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _stored_content(
    content: str | Sequence[ContentText | ContentRefusal], *, is_output: bool
) -> list[dict[str, object]]:
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    if is_output:
        return [{"type": "output_text", "text": text, "annotations": [], "logprobs": []} for text in texts]
    return [{"type": "input_text", "text": text} for text in texts]
