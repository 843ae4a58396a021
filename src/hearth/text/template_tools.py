"""Rewrites tools, calls and results as text for chat templates that would drop or refuse them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hearth.text.chat_template import Json, Message

_TOOLS = re.compile(r"\btools\b")
_TOOL_ROLE = re.compile("""['"]tool['"]""")
_FUNCTIONS = """\
You may call these functions, each described by a JSON object:
{functions}
To call one, answer with nothing but a JSON object: {{"name": <its name>, "arguments": <its arguments>}}"""


@dataclass(frozen=True, slots=True)
class TemplateTools:
    has_tools: bool
    has_calls: bool
    has_results: bool

    @classmethod
    def of(cls, source: str) -> TemplateTools:
        has_calls = "tool_calls" in source
        # A template that supports calls and writes any role supports results, too.
        has_results = has_calls or _TOOL_ROLE.search(source) is not None
        return cls(_TOOLS.search(source) is not None, has_calls, has_results)

    def in_words(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> Sequence[Message]:
        """Raises LookupError, TypeError, ValueError or RecursionError for malformed tools or calls."""
        if not (self.has_calls and self.has_results):
            messages = self._without_calls(messages)
        if tools and not self.has_tools:
            messages = _with_tools(messages, tools)
        return messages

    def _without_calls(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not any("tool_calls" in message or message.get("role") == "tool" for message in messages):
            return messages
        runs: list[list[Message]] = []  #: each becomes one message
        names: dict[Json, Json] = {}  #: of functions, by the id of their call
        follows_result = False
        for message in messages:
            calls = message.get("tool_calls")
            is_result = message.get("role") == "tool" and not self.has_results
            if isinstance(calls, Sequence):
                names |= {_id(call): _function(call)["name"] for call in calls}
                if not self.has_calls:
                    message = _with_calls(message, calls)
            if is_result:
                name = names.get(message.get("tool_call_id"), message.get("name"))
                heading = "Result:" if name is None else f"Result of {name}:"
                message = {"role": "user", "content": f"{heading}\n{_text(message)}"}
            # Many templates require that user and assistant alternate.
            follows_user = bool(runs) and runs[-1][-1].get("role") == message.get("role") == "user"
            if follows_user and (is_result or follows_result):
                runs[-1].append(message)
            else:
                runs.append([message])
            follows_result = is_result
        return [_merged(run) for run in runs]


def _merged(run: Sequence[Message]) -> Message:
    return run[0] if len(run) == 1 else {**run[0], "content": "\n\n".join(map(_text, run))}


def _with_tools(messages: Sequence[Message], tools: Sequence[Json]) -> list[Message]:
    """Put the tools into the first message: not all templates support a system message."""
    listed = _FUNCTIONS.format(functions="\n".join(_json(_function(tool)) for tool in tools))
    first = messages[0]
    if first.get("role") not in ("system", "user"):
        return [{"role": "user", "content": listed}, *messages]
    texts = [_text(first), listed] if first["role"] == "system" else [listed, _text(first)]
    return [{**first, "content": "\n\n".join(texts)}, *messages[1:]]


def _with_calls(message: Message, calls: Sequence[Json]) -> Message:
    texts = [text] if (text := _text(message)) else []
    for function in map(_function, calls):
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        texts.append(_json({"name": function["name"], "arguments": arguments}))
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return others | {"content": "\n".join(texts)}


def _function(part: Json) -> Mapping[str, Json]:
    function = part.get("function") if isinstance(part, Mapping) else None
    if not isinstance(function, Mapping):
        raise TypeError(f"no `function` in: {part!r:.80}")
    return function


def _id(call: Json) -> Json:
    return call.get("id") if isinstance(call, Mapping) else None


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "" if content is None else _json(content)


def _json(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)
