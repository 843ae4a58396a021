from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from hearth.text.chat_template import Json
from hearth.text.tool_calls import Tool, ToolCall, ToolFormat, ToolParser, call_grammar, tool_format
from tests.text.conftest import byte_level

NAMES = frozenset(["weather", "add"])
WEATHER = '{"name": "weather", "arguments": {"city": "Paris"}}'
BARE = '{"name": "weather", "parameters": {"city": "Paris"}}'
PARIS = ToolCall("weather", '{"city": "Paris"}')


def parsed(format: ToolFormat, pieces: Sequence[str], max_calls: int | None = None) -> list[str | ToolCall]:
    """Return all parts, with neighbouring text put together."""
    parser = ToolParser(format, NAMES, max_calls)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
    together: list[str | ToolCall] = []
    for part in parts:
        if isinstance(part, str) and together and isinstance(together[-1], str):
            together[-1] += part
        else:
            together.append(part)
    return together


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{%- if tools %}<tools>... <tool_call>\n{...}</tool_call>", ToolFormat.HERMES),
        ("{%- if tools %}<tool_call>\n<function=example>", None),
        ("{% if tools %}{% if builtin_tools %}{{ '<|python_tag|>' }}", ToolFormat.LLAMA3),
        ('{% if tools %}Respond with {"name": function name, "parameters": dictionary}', ToolFormat.LLAMA3),
        ("{% if tools %}[AVAILABLE_TOOLS]", None),
        ("{{ messages }}", ToolFormat.JSON),
        (None, None),
    ],
)
def test_the_format_is_read_from_the_template(template: str | None, format: ToolFormat | None) -> None:
    assert tool_format(template) is format


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"<tool_call>\n{WEATHER}\n</tool_call>", [PARIS]),
        (f"I look.\n\n<tool_call>{WEATHER}</tool_call>\n", ["I look.", PARIS]),
        (f"<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{WEATHER}</tool_call>", [PARIS, PARIS]),
        (f"<tool_call>{WEATHER}</tool_call> Done. ", [PARIS, " Done."]),
        (f"<tool_call>\n{WEATHER}", [PARIS]),
        ('<tool_call>{"name": "add"}</tool_call>', [ToolCall("add", "{}")]),
        (
            '<tool_call>{"name": "add", "arguments": {"x": "\\"</tool_call>"}}</tool_call>',
            [ToolCall("add", '{"x": "\\"</tool_call>"}')],
        ),
        (
            '<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>',
            [ToolCall("add", '{"x": 1}')],
        ),
        ('<tool_call>{"name": "ad</tool_call> so', ['<tool_call>{"name": "ad</tool_call> so']),
    ],
)
def test_tagged_calls_are_taken_out_of_the_text(text: str, parts: list[str | ToolCall]) -> None:
    assert parsed(ToolFormat.HERMES, [text]) == parts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  plain text \n",
        "a < b, <tool and <tool_cal",
        " <tool_call>no JSON</tool_call> \n",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": ["weather"]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "none"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"half": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"no number": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"too large": 1e999}}</tool_call>',
        '<tool_call>{"name": "weather", "argum',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_is_no_tagged_call_comes_out_as_it_went_in(text: str) -> None:
    assert "".join(str(part) for part in parsed(ToolFormat.HERMES, [text])) == text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (BARE, [PARIS]),
        (f"\n<|python_tag|>{BARE}\n", [PARIS]),
        (f"{BARE}; {BARE}", [PARIS, PARIS]),
        (f"{BARE} and so on", [PARIS, " and so on"]),
        ('{"type": "function", "name": "add", "parameters": {}}', [ToolCall("add", "{}")]),
    ],
)
def test_bare_calls_are_taken_from_the_start_of_the_text(text: str, parts: list[str | ToolCall]) -> None:
    assert parsed(ToolFormat.LLAMA3, [text]) == parts


@pytest.mark.parametrize(
    "text",
    ["", " \n", "Hello {", f"Hello {BARE}", '{"answer": 1}', '{"name": "x"}', '{"name": "weather", ', "<|py"],
)
def test_what_is_no_bare_call_comes_out_as_it_went_in(text: str) -> None:
    assert "".join(str(part) for part in parsed(ToolFormat.LLAMA3, [text])) == text


def test_text_that_cannot_be_a_call_is_not_held_back() -> None:
    hermes = ToolParser(ToolFormat.HERMES, NAMES)
    llama = ToolParser(ToolFormat.LLAMA3, NAMES)

    assert [hermes.push("a "), hermes.push("b <to"), hermes.push("p>")] == [["a"], [" b"], [" <top>"]]
    assert [llama.push('{"an'), llama.push('swer": 1')] == [['{"an'], ['swer": 1']]


def test_calls_beyond_the_limit_are_left_out() -> None:
    text = f"<tool_call>{WEATHER}</tool_call>" * 3

    assert parsed(ToolFormat.HERMES, [text], max_calls=1) == [PARIS]


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool", "_call>", "<", "\n", " ", "text", ";", "<|python_tag|>"),
    *(WEATHER, BARE, '{"name": "no"}', "{", "}", '"name"', '{"type": ', "é", '"', "\\"),
]


@given(
    st.sampled_from(ToolFormat),
    st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_the_outcome_does_not_depend_on_the_pieces(format: ToolFormat, text: str, cuts: list[int]) -> None:
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(ends)]

    assert parsed(format, pieces) == parsed(format, [text]) == parsed(format, list(text))


#: So many that all would take an hour if each piece had those before it read again.
MANY = 100_000


@pytest.mark.parametrize("piece", ["<p>", "}{", "> \\\\\\n"])
@pytest.mark.parametrize(
    ("format", "begin", "end"),
    [
        (ToolFormat.HERMES, '<tool_call>{"name": "add", "arguments": {"x": "', '"}}</tool_call>'),
        (ToolFormat.LLAMA3, '{"name": "add", "parameters": {"x": "', '"}}'),
    ],
)
def test_a_piece_of_a_call_costs_the_same_however_long_the_call_is(
    format: ToolFormat, begin: str, end: str, piece: str
) -> None:
    written = parsed(format, [begin, *[piece] * MANY, end])

    assert written == [ToolCall("add", json.dumps({"x": json.loads(f'"{piece}"') * MANY}))]


@pytest.mark.parametrize("format", ToolFormat)
def test_white_space_costs_the_same_however_much_there_is(format: ToolFormat) -> None:
    pieces = [" " * 64] * MANY

    assert parsed(format, pieces) == ["".join(pieces)]


def test_many_calls_that_a_broken_string_hides_are_each_read_once() -> None:
    text = '<tool_call>"</tool_call>' + '<tool_call>\\"</tool_call>' * (MANY // 4)

    assert parsed(ToolFormat.HERMES, [text]) == [text]


def test_a_call_behind_one_whose_string_never_ends_is_found() -> None:
    broken = '<tool_call>{"name": "ad</tool_call>'

    assert parsed(ToolFormat.HERMES, [f"{broken}<tool_call>{WEATHER}</tool_call>"]) == [broken, PARIS]


@given(st.sampled_from(ToolFormat), st.text(), st.integers(0, 50))
def test_text_without_calls_passes_unchanged(format: ToolFormat, text: str, cut: int) -> None:
    assert "".join(str(part) for part in parsed(format, [text[:cut], text[cut:]])) == text


TOOLS = [
    Tool(
        "weather",
        {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"City": {"type": "string", "enum": ["Paris", "Rome"]}},
        },
    ),
    Tool("add", None),
]


def accepts(grammar: str, text: str, *, tags_are_tokens: bool) -> bool:
    """True if `text` is a whole sentence of the grammar, in tokens."""
    backend = byte_level()
    if tags_are_tokens:
        backend.add_tokens([AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    tokenizer = LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size(), eos_token=2)
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    return all(matcher.consume_token(token) for token in backend.encode(text).ids) and matcher.is_accepting()


@pytest.mark.parametrize("tags_are_tokens", [False, True])
def test_the_grammar_of_tagged_calls_lets_through_what_the_parser_reads(tags_are_tokens: bool) -> None:
    once = call_grammar(ToolFormat.HERMES, TOOLS, may_repeat=False, tags_are_tokens=tags_are_tokens)
    often = call_grammar(ToolFormat.HERMES, TOOLS, may_repeat=True, tags_are_tokens=tags_are_tokens)
    call = f"<tool_call>\n{WEATHER}\n</tool_call>"
    wrong = call.replace("Paris", "London")

    def verdicts(grammar: str) -> list[bool]:
        texts = [call, f"{call}\n{call}", wrong, "Hello"]
        return [accepts(grammar, text, tags_are_tokens=tags_are_tokens) for text in texts]

    assert verdicts(once) == [True, False, False, False]
    assert verdicts(often) == [True, True, False, False]
    assert parsed(ToolFormat.HERMES, [f"{call}\n{call}"]) == [PARIS, PARIS]


def test_the_grammar_of_bare_calls_lets_through_what_the_parser_reads() -> None:
    grammar = call_grammar(ToolFormat.LLAMA3, TOOLS, may_repeat=True, tags_are_tokens=False)
    add = json.dumps({"name": "add", "parameters": {}})

    texts = [BARE, add, BARE.replace("weather", "storm"), BARE.replace('"name"', '\n"name"')]
    assert [accepts(grammar, text, tags_are_tokens=False) for text in texts] == [True, True, False, False]


def test_the_grammar_of_plain_calls_lets_through_what_the_parser_reads() -> None:
    once = call_grammar(ToolFormat.JSON, TOOLS, may_repeat=False, tags_are_tokens=False)
    often = call_grammar(ToolFormat.JSON, TOOLS, may_repeat=True, tags_are_tokens=False)
    texts = [WEATHER, f"{WEATHER}\n{WEATHER}", WEATHER.replace("Paris", "London"), "Hello"]

    assert [accepts(once, text, tags_are_tokens=False) for text in texts] == [True, False, False, False]
    assert [accepts(often, text, tags_are_tokens=False) for text in texts] == [True, True, False, False]
    assert parsed(ToolFormat.JSON, [f"{WEATHER}\n{WEATHER}"]) == [PARIS, PARIS]


def test_a_call_has_no_arguments_but_those_that_are_named_unless_the_schema_says_so() -> None:
    def allows_more(parameters: dict[str, Json]) -> bool:
        grammar = call_grammar(
            ToolFormat.JSON, [Tool("add", parameters)], may_repeat=False, tags_are_tokens=False
        )
        assert accepts(grammar, '{"name": "add", "arguments": {"a": 1}}', tags_are_tokens=False)
        return accepts(grammar, '{"name": "add", "arguments": {"a": 1, "b": 2}}', tags_are_tokens=False)

    a: dict[str, Json] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    b: dict[str, Json] = {"type": "object", "properties": {"b": {"type": "integer"}}}
    assert not allows_more(a)
    assert allows_more(a | {"additionalProperties": True})
    assert allows_more({"type": "object"})
    assert allows_more({"allOf": [a, b]})
    with_required = a | {"required": ["a", "b"]}
    grammar = call_grammar(
        ToolFormat.JSON, [Tool("add", with_required)], may_repeat=False, tags_are_tokens=False
    )
    assert accepts(grammar, '{"name": "add", "arguments": {"a": 1, "b": 2}}', tags_are_tokens=False)


@pytest.mark.parametrize(
    "value",
    [
        {"$ref": "#/a", "type": "object", "properties": {}},
        {"const": {"$ref": "#/b"}, "enum": [{"type": "object", "properties": {"$ref": "#/c"}}]},
    ],
)
@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_data_in_the_parameters_of_a_tool_is_kept_as_it_is(keyword: str, value: Json) -> None:
    schema: Json = {keyword: [value] if keyword == "enum" else value, "default": value, "examples": [value]}
    parameters: dict[str, Json] = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    grammar = call_grammar(
        ToolFormat.JSON, [Tool("put", parameters)], may_repeat=False, tags_are_tokens=False
    )

    call = json.dumps({"name": "put", "arguments": {"a": value}})
    assert accepts(grammar, call, tags_are_tokens=False)


def test_parameters_may_be_named_like_keywords() -> None:
    nested: Json = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    names = ["$ref", "const", "enum", "default", "properties"]
    parameters: dict[str, Json] = {
        "type": "object",
        "properties": dict.fromkeys(names, nested),
        "required": list[Json](names),
    }
    grammar = call_grammar(
        ToolFormat.JSON, [Tool("put", parameters)], may_repeat=False, tags_are_tokens=False
    )

    def call(value: Json) -> str:
        return json.dumps({"name": "put", "arguments": dict.fromkeys(names, value)})

    assert accepts(grammar, call({"a": 1}), tags_are_tokens=False)
    assert not accepts(grammar, call({"a": 1, "b": 2}), tags_are_tokens=False), "nested objects are closed"


@pytest.mark.parametrize(
    "references",
    [
        {"$id": "https://example.com/city", "$ref": "#/$defs/City"},
        {"$id": "https://example.com/city", "$ref": "https://example.com/city#/$defs/City"},
        {"$ref": "#city"},
        {"$id": "https://example.com/city", "$ref": "#city"},
    ],
)
def test_references_in_the_parameters_of_a_tool_are_those_of_a_document(references: dict[str, str]) -> None:
    parameters: dict[str, Json] = {
        "type": "object",
        "properties": {"city": {"$ref": references["$ref"]}},
        "required": ["city"],
        "$defs": {"City": {"$anchor": "city", "enum": ["Paris", "Rome"]}},
        **{name: value for name, value in references.items() if name == "$id"},
    }
    # Two tools of one `$id`, as of two versions of one schema, do not meet.
    tools = [
        Tool("other", {"$id": "https://example.com/city", "type": "object"}),
        Tool("weather", parameters),
    ]
    grammar = call_grammar(ToolFormat.JSON, tools, may_repeat=False, tags_are_tokens=False)

    texts = [WEATHER, WEATHER.replace("Paris", "London")]
    assert [accepts(grammar, text, tags_are_tokens=False) for text in texts] == [True, False]


def test_a_key_of_a_call_in_escapes_does_not_stand_for_another_argument() -> None:
    parameters: dict[str, Json] = {"properties": {"a": {"type": "integer"}}, "additionalProperties": True}
    grammar = call_grammar(
        ToolFormat.JSON, [Tool("add", parameters)], may_repeat=False, tags_are_tokens=False
    )

    texts = [f'{{"name": "add", "arguments": {{{key}: "x"}}}}' for key in ('"b"', '"\\u0061"')]
    assert [accepts(grammar, text, tags_are_tokens=False) for text in texts] == [True, False]


def test_the_parameters_of_a_tool_may_set_options_of_llguidance() -> None:
    either: Json = {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]}
    parameters: dict[str, Json] = {
        "type": "object",
        "properties": {"a": either},
        "x-guidance": {"coerce_one_of": True},
    }
    grammar = call_grammar(
        ToolFormat.JSON, [Tool("add", parameters)], may_repeat=False, tags_are_tokens=False
    )

    assert accepts(grammar, '{"name": "add", "arguments": {"a": "x"}}', tags_are_tokens=False)
