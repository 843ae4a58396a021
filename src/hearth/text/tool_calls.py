"""Tool calls as models write them: formats, a streaming parser and grammars.

Three formats are known; others pass through as text:

    Hermes, Qwen   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text around them
    Llama 3        {"name": ..., "parameters": {...}} from the first character on, `;` between several
    JSON           {"name": ..., "arguments": {...}} from the first character on, a line for each

JSON is for models whose template does not support tools (`template_tools.py`), and for unknown formats if a
request requires a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

from hearth.core.errors import BadGuide
from hearth.text.chat_template import Json
from hearth.text.grammar import allowed_escapes
from hearth.text.reasoning import overlap
from hearth.text.template_tools import TemplateTools


class ToolFormat(StrEnum):
    HERMES = "hermes"
    LLAMA3 = "llama3"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  #: a JSON object


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Json] | None  #: a JSON schema


OPEN, CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class _BareStep:
    words: tuple[str, ...]  #: alternatives
    is_optional: bool = False


#: The beginning of a bare call, with white space before each step.
_BARE_BEGIN = (
    _BareStep((";",), is_optional=True),
    _BareStep((_PYTHON_TAG,), is_optional=True),
    _BareStep(("{",)),
    _BareStep(('"name"', '"type"')),
)
_SPACE = re.compile(r"\s*")
#: Marks inside a JSON string; a backslash includes the escaped character.
_STRING_MARK = re.compile(r'"|\\.?', re.DOTALL)
#: Marks outside strings.
_TAGGED_MARK, _BARE_MARK, _CLOSE_MARK = re.compile(f'"|{CLOSE}'), re.compile('["{}]'), re.compile(CLOSE)


def tool_format(template_text: str | None) -> ToolFormat | None:
    """Return the format of calls that a template asks for; None: unknown."""
    match template_text:
        case None:
            return None
        case text if not TemplateTools.of(text).has_tools:
            return ToolFormat.JSON
        # `<function=` marks calls in XML, which use the same tags.
        case text if OPEN in text and "<function=" not in text:
            return ToolFormat.HERMES
        case text if _PYTHON_TAG in text or '{"name": function name, "parameters"' in text:
            return ToolFormat.LLAMA3
        case _:
            return None


def call_grammar(
    format: ToolFormat, tools: Sequence[Tool], *, may_repeat: bool, tags_are_tokens: bool
) -> str:
    """Return llguidance's Lark of calls. `tags_are_tokens`: `<tool_call>` is one token. Raises BadGuide."""
    key = "parameters" if format is ToolFormat.LLAMA3 else "arguments"
    try:
        calls = " | ".join(_call_rule(tool, key) for tool in tools)
    except RecursionError:
        raise BadGuide("the `parameters` of a tool are nested too deeply; flatten them") from None
    call = f"call: {calls}\n"
    if format is not ToolFormat.HERMES:
        several = ' ("\\n" call)*' if may_repeat and format is ToolFormat.JSON else ""
        return f"start: call{several}\n{call}"
    again = ' ("\\n" tagged)*' if may_repeat else ""
    begin, end = (OPEN, CLOSE) if tags_are_tokens else (f'"{OPEN}"', f'"{CLOSE}"')
    return f'start: tagged{again}\ntagged: {begin} "\\n" call "\\n" {end}\n{call}'


#: Without this a small model may write white space until the context is full.
_SPACING: Mapping[str, Json] = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}


def _call_rule(tool: Tool, key: str) -> str:
    """Return the rule of one tool. Its schema stays a document of its own, for its references."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    text = json.dumps(parameters)
    # Parts of `allOf` stay open: each would forbid the properties of the others.
    schema = parameters if "allOf" in text else _closed(parameters)
    assert isinstance(schema, Mapping), f"parameters of `{tool.name}`: {schema!r:.80}"
    given = parameters.get("x-guidance")
    options = {**given, **_SPACING} if isinstance(given, Mapping) else dict(_SPACING)
    options["json_allowed_escapes"] = allowed_escapes(text)
    before = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{key}": '
    return f'{json.dumps(before)} %json {json.dumps({**schema, "x-guidance": options})} "}}"'


#: Keywords whose value is data, and those whose value maps names to schemas.
_DATA = frozenset(["const", "enum", "default", "examples"])
_SCHEMAS_BY_NAME = frozenset(["properties", "patternProperties", "dependentSchemas", "$defs", "definitions"])


def _closed(node: Json) -> Json:
    """Forbid unnamed properties unless the schema allows them: small models would invent more and more."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    result: dict[str, Json] = {}
    for keyword, value in node.items():
        if keyword in _DATA:
            result[keyword] = value
        elif keyword in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            result[keyword] = {name: _closed(schema) for name, schema in value.items()}
        else:
            result[keyword] = _closed(value)
    if _is_silent_object(node):
        result["additionalProperties"] = False
    return result


#: Keywords that may allow unnamed properties.
_OPENING = frozenset(
    [
        "$ref",
        "additionalProperties",
        "anyOf",
        "dependentSchemas",
        "if",
        "minProperties",
        "oneOf",
        "patternProperties",
        "propertyNames",
        "unevaluatedProperties",
    ]
)


def _is_silent_object(node: Mapping[str, Json]) -> bool:
    named, required = node.get("properties"), node.get("required", [])
    if node.get("type") != "object" or not isinstance(named, Mapping) or not isinstance(required, list):
        return False
    return not _OPENING & node.keys() and all(name in named for name in required)


class ToolParser:
    """Splits a streamed answer into text and calls of known tools. Mutable; one per answer.

    The possible beginning of a call is held back until it is a call, or text. The result does not depend on
    how the text is split into pieces, and no text is read twice.
    """

    def __init__(self, format: ToolFormat, names: AbstractSet[str], max_calls: int | None = None) -> None:
        """Find calls of the tools `names`; calls beyond `max_calls` are dropped."""
        self._is_tagged = format is ToolFormat.HERMES
        self._names = names
        self._max_calls = max_calls
        self._num_calls = 0
        #: the end of the text so far: white space, then perhaps the beginning of a call
        self._held: list[str] = []
        self._unread = ""  #: after it: part of a tag or key, or a backslash
        self._end: _CallEnd | None = None  #: of the held call, if any
        self._marks = _TAGGED_MARK if self._is_tagged else _BARE_MARK
        self._bare_step = 1  #: the next of `_BARE_BEGIN`; a separator comes only after a call
        self._is_text = False  #: no bare call can follow

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> list[str | ToolCall]:
        parts: list[str | ToolCall] = []
        text, self._unread = self._unread + text, ""
        at = 0
        while at < len(text):
            if self._end is not None:
                at = self._read_call(self._end, text, at, parts)
            elif self._is_tagged:
                at = self._read_to_tag(text, at, parts)
            else:
                at = self._read_bare_begin(text, at, parts)
        return parts

    def flush(self) -> list[str | ToolCall]:
        parts: list[str | ToolCall] = []
        while self._is_tagged and self._end is not None:
            # An unterminated string may hide the closing tag: ignore strings from here on.
            self._marks = _CLOSE_MARK
            held = self._take_held()
            close = held.find(CLOSE)
            end = len(held) if close < 0 else close + len(CLOSE)
            self._add_call(held[:end], parts)
            parts += self.push(held[end:])
        rest = self._take_held()
        if rest and not (self.has_calls and not rest.strip().strip(";")):
            parts.append(rest)
        return parts

    def _read_to_tag(self, text: str, at: int, parts: list[str | ToolCall]) -> int:
        """Read up to and including the next opening tag. Returns the new position, as the next two do."""
        start = text.find(OPEN, at)
        end = start if start >= 0 else len(text) - overlap(text, OPEN)
        if shown := text[at:end].rstrip():
            parts.append(self._take_held() + shown)
        self._held.append(text[at + len(shown) : end])
        if start < 0:
            self._unread = text[end:]
            return len(text)
        self._held.append(OPEN)
        self._end = _CallEnd(self._marks, CLOSE)
        return start + len(OPEN)

    def _read_bare_begin(self, text: str, at: int, parts: list[str | ToolCall]) -> int:
        """Read one step of the beginning of a bare call, or everything as text."""
        if self._is_text:
            parts.append(text[at:])
            return len(text)
        start = _SPACE.match(text, at).end()  # type: ignore[union-attr] # it matches the empty string, too
        self._held.append(text[at:start])
        step = _BARE_BEGIN[self._bare_step]
        word = next((word for word in step.words if text.startswith(word, start)), "")
        if not word and any(word.startswith(text[start : start + len(word)]) for word in step.words):
            self._unread = text[start:]
            return len(text)
        if not word and not step.is_optional:
            self._is_text = True
            parts.append(self._take_held() + text[start:])
            return len(text)
        self._held.append(word)
        self._bare_step += 1
        if self._bare_step == len(_BARE_BEGIN):
            self._end = _CallEnd(self._marks)
        return start + len(word)

    def _read_call(self, end: _CallEnd, text: str, at: int, parts: list[str | ToolCall]) -> int:
        num_read = end.read(text, at)
        self._held.append(text[at:num_read])
        if end.is_reached:
            self._add_call(self._take_held(), parts)
            return num_read
        self._unread = text[num_read:]
        return len(text)

    def _add_call(self, written: str, parts: list[str | ToolCall]) -> None:
        self._end, self._bare_step = None, 0
        if self._is_tagged:
            inside = written[written.index(OPEN) + len(OPEN) :].removesuffix(CLOSE)
        else:
            inside = written[written.index("{") :]
        call = self._call(_decoded(inside))
        if call is None:
            self._is_text = not self._is_tagged
            parts.append(written)
            return
        self._num_calls += 1
        if self._max_calls is None or self._num_calls <= self._max_calls:
            parts.append(call)

    def _take_held(self) -> str:
        held, self._held, self._unread = "".join(self._held) + self._unread, [], ""
        return held

    def _call(self, written: Json) -> ToolCall | None:
        if not isinstance(written, dict):
            return None
        name, arguments = written.get("name"), written.get("arguments", written.get("parameters", {}))
        if isinstance(arguments, str):  # some models write the object as text, as in the API
            arguments = _decoded(arguments)
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (ValueError, RecursionError):  # NaN, or lone surrogates
            return None
        return ToolCall(name, text)


class _CallEnd:
    """Finds the end of a call after its first brace or tag: the closing tag, or the last brace. Mutable."""

    def __init__(self, marks: re.Pattern[str], close: str = "") -> None:
        self._marks, self._close = marks, close
        self._is_in_string = False
        self._num_open = 1  #: braces that have not been closed
        self.is_reached = False

    def read(self, text: str, at: int) -> int:
        """Return where the call ends, or how far the text can be read without its continuation."""
        while not self.is_reached:
            mark = (_STRING_MARK if self._is_in_string else self._marks).search(text, at)
            if mark is None:
                return len(text) - (0 if self._is_in_string else overlap(text, self._close))
            at = mark.end()
            match mark[0]:
                case '"':
                    self._is_in_string = not self._is_in_string
                case "\\":
                    return mark.start()  # the escaped character is not here yet
                case "{":
                    self._num_open += 1
                case "}":
                    self._num_open -= 1
                    self.is_reached = self._num_open == 0
                case self._close:
                    self.is_reached = True
        return at


def _decoded(text: str) -> Json:
    try:
        value: Json = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value
