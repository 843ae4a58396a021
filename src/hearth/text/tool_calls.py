"""Tool calls as models write them: which format a template speaks, calls out of a stream, calls by grammar.

Does not know the API's objects and calls no tool. Two formats are known, the others pass through as text:

    Hermes, Qwen   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text around them
    Llama 3        {"name": ..., "parameters": {...}} from the first character on, `;` between several
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

from hearth.text.chat_template import Json


class ToolFormat(StrEnum):
    """The ways in which models write calls."""

    HERMES = "hermes"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as a model wrote it."""

    name: str
    arguments: str  #: a JSON object


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that may be called."""

    name: str
    parameters: Mapping[str, Json] | None  #: a JSON schema


OPEN, CLOSE = "<tool_call>", "</tool_call>"
#: A string of JSON, which may not have ended yet.
_STRING_OR_CLOSE = re.compile(rf'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|(?P<close>{CLOSE})', re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


def tool_format(template_text: str | None) -> ToolFormat | None:
    """Return the format of calls that a template tells a model to write; None: none that is known here."""
    match template_text:
        case None:
            return None
        # The second mark is that of calls in XML, which use the same tags.
        case text if OPEN in text and "<function=" not in text:
            return ToolFormat.HERMES
        case text if _PYTHON_TAG in text or '{"name": function name, "parameters"' in text:
            return ToolFormat.LLAMA3
        case _:
            return None


def call_grammar(
    format: ToolFormat, tools: Sequence[Tool], *, may_repeat: bool, tags_are_tokens: bool
) -> str:
    """Return a grammar, in llguidance's dialect of Lark, of nothing but calls of these tools.

    `tags_are_tokens`: the vocabulary has one for `<tool_call>`; then a grammar must name it as a token.
    """
    key = "arguments" if format is ToolFormat.HERMES else "parameters"
    call = f"call: %json {json.dumps(_call_schema(tools, key))}\n"
    if format is ToolFormat.LLAMA3:
        return f"start: call\n{call}"
    again = ' ("\\n" tagged)*' if may_repeat else ""
    begin, end = (OPEN, CLOSE) if tags_are_tokens else (f'"{OPEN}"', f'"{CLOSE}"')
    return f'start: tagged{again}\ntagged: {begin} "\\n" call "\\n" {end}\n{call}'


def _call_schema(tools: Sequence[Tool], key: str) -> Json:
    calls: list[Json] = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: {"$ref": f"#/$defs/{tool.name}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schemas = {tool.name: _moved(tool.parameters, f"#/$defs/{tool.name}") for tool in tools}
    # Without this a small model may write white space until the context is full.
    spacing: Json = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
    return {"x-guidance": spacing, "anyOf": calls, "$defs": schemas}


def _moved(parameters: Mapping[str, Json] | None, root: str) -> Json:
    """Return a tool's schema for a place inside another, with its references moved to `root`."""

    def moved(node: Json) -> Json:
        if isinstance(node, Mapping):
            return {
                name: root + value[1:]
                if name == "$ref" and isinstance(value, str) and value.startswith("#")
                else moved(value)
                for name, value in node.items()
            }
        if isinstance(node, list):
            return [moved(item) for item in node]
        return node

    return moved(parameters or {"type": "object", "properties": {}})


class ToolParser:
    """Takes an answer apart as it comes: text, and calls of known tools. Mutable; one per answer.

    What may be the beginning of a call is held back; what turns out to be none comes out as text. The outcome
    does not depend on how the text was cut into pieces.
    """

    def __init__(self, format: ToolFormat, names: AbstractSet[str], max_calls: int | None = None) -> None:
        """Look for calls of the tools `names`; those beyond `max_calls` are left out."""
        self._is_tagged = format is ToolFormat.HERMES
        self._names = names
        self._max_calls = max_calls
        self._num_calls = 0
        #: The end of the text so far: white space, then perhaps the beginning of a call.
        self._held = ""
        self._is_open = False  #: `_held` has the beginning of a call
        self._is_text = False  #: no bare call can follow any more

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> list[str | ToolCall]:
        self._held += text
        if self._is_open and (">" if self._is_tagged else "}") not in text:
            return []  # no call ends here, so there is no need to look
        return self._parts(is_last=False)

    def flush(self) -> list[str | ToolCall]:
        """Return what was held back, at the end of the answer."""
        parts = self._parts(is_last=True)
        rest, self._held = self._held, ""
        if rest and not (self.has_calls and not rest.strip().strip(";")):
            parts.append(rest)
        return parts

    def _parts(self, is_last: bool) -> list[str | ToolCall]:
        parts: list[str | ToolCall] = []
        take = self._take_tagged if self._is_tagged else self._take_bare
        while (part := take(is_last)) is not None:
            if isinstance(part, str):
                parts += [part] if part else []
            else:
                self._num_calls += 1
                if self._max_calls is None or self._num_calls <= self._max_calls:
                    parts.append(part)
        return parts

    def _take_tagged(self, is_last: bool) -> str | ToolCall | None:
        """Return the next part of `_held`; None: all of it waits for more."""
        start = self._held.find(OPEN)
        self._is_open = start >= 0
        if start < 0:
            text = self._held[: len(self._held) - _overlap(self._held, OPEN)].rstrip()
        else:
            text = self._held[:start].rstrip()
        if text:
            return self._cut(len(text))
        if start < 0:
            return None
        end = _close(self._held, start + len(OPEN), is_last)
        if end < 0 and not is_last:
            return None
        inside = self._held[start + len(OPEN) : end if end >= 0 else None]
        size = end + len(CLOSE) if end >= 0 else len(self._held)
        call = self._call(_decoded(inside))
        self._is_open = False
        text = self._cut(size)
        return text if call is None else call

    def _take_bare(self, is_last: bool) -> str | ToolCall | None:
        if self._is_text:
            return self._cut(len(self._held)) if self._held else None
        body = self._held.lstrip()
        if self.has_calls:
            body = body.removeprefix(";").lstrip()
        if _PYTHON_TAG.startswith(body):
            return None
        body = body.removeprefix(_PYTHON_TAG).lstrip()
        call, end = None, 0
        if _may_be_bare_call(body):
            end = _object_end(body)
            self._is_open = end == 0 and body != ""
            if end == 0:
                return None
            call = self._call(_decoded(body[:end]))
        if call is None:
            self._is_text = True
            return self._cut(len(self._held))
        self._cut(len(self._held) - len(body) + end)
        return call

    def _cut(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        return text

    def _call(self, written: Json) -> ToolCall | None:
        if not isinstance(written, dict):
            return None
        name, arguments = written.get("name"), written.get("arguments", written.get("parameters", {}))
        if isinstance(arguments, str):  # some models write the object as text, as the API has it
            arguments = _decoded(arguments)
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:  # half a character, which JSON can spell and no answer can hold
            return None
        return ToolCall(name, text)


def _close(text: str, start: int, is_last: bool) -> int:
    """Return where the tag that closes a call stands, outside any string of JSON; -1: nowhere yet."""
    found = next((match.start() for match in _STRING_OR_CLOSE.finditer(text, start) if match["close"]), -1)
    return text.find(CLOSE, start) if found < 0 and is_last else found


def _may_be_bare_call(body: str) -> bool:
    """True if `body` begins like a call, as far as it goes."""
    head = body[1:].lstrip()
    return not body or (
        body[0] == "{" and any(key.startswith(head) or head.startswith(key) for key in ('"name"', '"type"'))
    )


def _object_end(body: str) -> int:
    """Return the length of the JSON object at the start of `body`; 0: it is not whole, or never will be."""
    if "}" not in body:
        return 0
    try:
        return json.JSONDecoder().raw_decode(body)[1]
    except (ValueError, RecursionError):
        return 0


def _decoded(text: str) -> Json:
    try:
        value: Json = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` with which `tag` begins, short of all of it."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
