"""Tool calls as models write them: which format a template speaks, calls out of a stream, calls by grammar.

Does not know the API's objects and calls no tool. Three formats are known, others pass through as text:

    Hermes, Qwen   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number, text around them
    Llama 3        {"name": ..., "parameters": {...}} from the first character on, `;` between several
    JSON           {"name": ..., "arguments": {...}} from the first character on, a line for each

The last one is what models are asked for whose template says nothing of tools (`template_tools.py`), and what
those are held to whose own format is not known, where a request demands a call.
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
from hearth.text.template_tools import TemplateTools


class ToolFormat(StrEnum):
    """The ways in which models write calls."""

    HERMES = "hermes"
    LLAMA3 = "llama3"
    JSON = "json"


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
_PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True, slots=True)
class _BareStep:
    """One step of the beginning of a bare call."""

    words: tuple[str, ...]  #: one of them stands here
    is_optional: bool = False


#: What a bare call begins with, white space before each: here it shows whether a text is one.
_BARE_BEGIN = (
    *(_BareStep((";",), is_optional=True), _BareStep((_PYTHON_TAG,), is_optional=True)),
    *(_BareStep(("{",)), _BareStep(('"name"', '"type"'))),
)
_SPACE = re.compile(r"\s*")
#: What matters in a string of JSON, a backslash with the character that it escapes.
_STRING_MARK = re.compile(r'"|\\.?', re.DOTALL)
#: What matters outside of strings.
_TAGGED_MARK, _BARE_MARK, _CLOSE_MARK = re.compile(f'"|{CLOSE}'), re.compile('["{}]'), re.compile(CLOSE)


def tool_format(template_text: str | None) -> ToolFormat | None:
    """Return the format of calls that a model is told to write; None: its template tells another one."""
    match template_text:
        case None:
            return None
        case text if not TemplateTools.of(text).has_tools:
            return ToolFormat.JSON
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

    Raises:
        BadGuide: the parameters of a tool are nested too deep.
    """
    key = "parameters" if format is ToolFormat.LLAMA3 else "arguments"
    try:
        calls = " | ".join(_call_rule(tool, key) for tool in tools)
    except RecursionError:
        raise BadGuide(
            "the `parameters` of a tool are nested too deep to guide a call; flatten them"
        ) from None
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
    """Return a rule of the calls of one tool. Its schema is a document of its own, as references need it."""
    parameters = tool.parameters or {"type": "object", "properties": {}}
    text = json.dumps(parameters)
    # What `allOf` puts together stays open, since each part would forbid the properties of the others.
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
    """Return a schema whose objects have only the properties that are named, unless they say otherwise.

    Otherwise a small model invents more and more properties.
    """
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


#: Keywords by which an object has, or may have, more properties than those that are named.
_OPENING = frozenset(
    [
        *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
        *("anyOf", "oneOf", "if", "$ref", "dependentSchemas", "minProperties"),
    ]
)


def _is_silent_object(node: Mapping[str, Json]) -> bool:
    named, required = node.get("properties"), node.get("required", [])
    if node.get("type") != "object" or not isinstance(named, Mapping) or not isinstance(required, list):
        return False
    return not _OPENING & node.keys() and all(name in named for name in required)


class ToolParser:
    """Takes an answer apart as it comes: text, and calls of known tools. Mutable; one per answer.

    What may be the beginning of a call is held back; what turns out to be none comes out as text. The outcome
    does not depend on how the text was cut into pieces, and no piece makes those before it be read again.
    """

    def __init__(self, format: ToolFormat, names: AbstractSet[str], max_calls: int | None = None) -> None:
        """Look for calls of the tools `names`; those beyond `max_calls` are left out."""
        self._is_tagged = format is ToolFormat.HERMES
        self._names = names
        self._max_calls = max_calls
        self._num_calls = 0
        #: The end of the text so far, in pieces: white space, then perhaps the beginning of a call.
        self._held: list[str] = []
        self._unread = ""  #: what comes after it and cannot be told yet: part of a tag or key, or a backslash
        self._end: _CallEnd | None = None  #: of the call whose beginning is held; None: none is held
        self._marks = _TAGGED_MARK if self._is_tagged else _BARE_MARK
        self._bare_step = 1  #: the next of `_BARE_BEGIN`; a separator comes only after a call
        self._is_text = False  #: no bare call can follow any more

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
        """Return what was held back, at the end of the answer."""
        parts: list[str | ToolCall] = []
        while self._is_tagged and self._end is not None:
            # If there is an end, a string that never ended hides it: from here on, no string hides one.
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
        """Read on behind the next tag that opens a call. Returns, as the next two do, how far that is."""
        start = text.find(OPEN, at)
        end = start if start >= 0 else len(text) - _overlap(text, OPEN)
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
        """Read one more step of the beginning of a bare call, or all as text where that is none."""
        if self._is_text:
            parts.append(text[at:])
            return len(text)
        start = _SPACE.match(text, at).end()  # type: ignore[union-attr] # it matches no space, too
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
        """Read on to the end of the call whose beginning is held."""
        num_read = end.read(text, at)
        self._held.append(text[at:num_read])
        if end.is_reached:
            self._add_call(self._take_held(), parts)
            return num_read
        self._unread = text[num_read:]
        return len(text)

    def _add_call(self, written: str, parts: list[str | ToolCall]) -> None:
        """Add the call that was `written`, with what led to it; where that is no call, it is text."""
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
        if isinstance(arguments, str):  # some models write the object as text, as the API has it
            arguments = _decoded(arguments)
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            text.encode()
        except (ValueError, RecursionError):  # NaN, which JSON has not, or half a character: no text holds it
            return None
        return ToolCall(name, text)


class _CallEnd:
    """Finds the end of a call, of which the first brace or tag was read. Mutable.

    The end is the tag that closes the call or, without one, its last brace; none counts in a string of JSON.
    """

    def __init__(self, marks: re.Pattern[str], close: str = "") -> None:
        """Look for `marks` outside strings; `close` is the one that is a tag."""
        self._marks, self._close = marks, close
        self._is_in_string = False
        self._num_open = 1  #: braces that have not been closed
        self.is_reached = False

    def read(self, text: str, at: int) -> int:
        """Return where the call ends or, until then, how far the text can be read without what follows."""
        while not self.is_reached:
            mark = (_STRING_MARK if self._is_in_string else self._marks).search(text, at)
            if mark is None:
                return len(text) - (0 if self._is_in_string else _overlap(text, self._close))
            at = mark.end()
            match mark[0]:
                case '"':
                    self._is_in_string = not self._is_in_string
                case "\\":
                    return mark.start()  # the character that it escapes is still to come
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


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` with which `tag` begins, short of all of it."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
