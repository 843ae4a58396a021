"""Turns schemas, grammars and expressions into what llguidance takes, and checks them. Guides no output."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hearth.core.errors import BadGuide
from hearth.core.types import GuideSpec

if TYPE_CHECKING:
    from llguidance import LLParserLimits

#: The space between the parts of a JSON value: at most one. A model that may write more can do so for ever.
_WHITESPACE = "[ ]?"
_ANY_OBJECT = '{"type": "object"}'
#: Control characters in the text of a JSON schema that only `\\uXXXX` can write.
_CONTROL = re.compile(r"\\u00[01]|\\u007f|\x7f", re.IGNORECASE)
#: The most that llguidance may make of the expressions of a guide, in its own unit. By its default, which is
#: ten times as much, `(a{1000}){1000}` held up a worker's steps for seconds. 5,000 words take more than half.
_LEXER_FUEL = 100_000
#: The most characters of llguidance's reason that a client is told: it may quote all that was sent.
_MAX_REASON_CHARS = 300
_NAMES = {"lark": "the grammar", "grammar": "the grammar", "regex": "the regular expression"}


def grammar_of(spec: GuideSpec) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    assert spec.kind != "any", "it has no grammar"
    try:
        match spec.kind:
            case "lark":
                return LLMatcher.grammar_from_lark(spec.text)
            case "grammar":
                return LLMatcher.grammar_from_lark(any_to_lark(spec.text))
            case "regex":
                return LLMatcher.grammar_from_regex(spec.text)
        schema = _ANY_OBJECT if spec.kind == "json_object" else spec.text
        return LLMatcher.grammar_from_json_schema(
            schema,
            overrides={
                "whitespace_flexible": True,
                "whitespace_pattern": _WHITESPACE,
                "json_allowed_escapes": allowed_escapes(schema),
            },
        )
    except Exception as error:  # the reader of GBNF has no class of its own for all that it finds
        raise refusal(spec, f"{error}") from error


def allowed_escapes(schema: str) -> str:
    """Without `u`: llguidance takes the key `"\\u0061"` for a property other than `a`, of any value."""
    return 'nrbtf\\"u' if _CONTROL.search(schema) else 'nrbtf\\"'


def choice_grammar(choices: Sequence[str]) -> str:
    return f"start: {' | '.join(map(json.dumps, choices))}"


def guides_of(
    *,
    schema: Mapping[str, object] | str | None,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: str | None,
    is_object: bool | None = False,
) -> dict[str, GuideSpec]:
    """Return a guide for each constraint that is given, by vLLM's names."""
    guides = {}
    if schema is not None:
        guides["json"] = GuideSpec("json_schema", schema_text(schema))
    if regex is not None:
        guides["regex"] = GuideSpec("regex", regex)
    if choice is not None:
        guides["choice"] = GuideSpec("lark", choice_grammar(choice))
    if grammar is not None:
        guides["grammar"] = GuideSpec("grammar", grammar)
    if is_object:
        guides["json_object"] = GuideSpec("json_object")
    return guides


def schema_text(schema: Mapping[str, object] | str) -> str:
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema)
    except RecursionError:
        raise BadGuide("the JSON schema is nested too deeply; flatten it") from None


def check_guide(spec: GuideSpec) -> None:
    from llguidance import LLMatcher

    if problem := LLMatcher.validate_grammar(grammar_of(spec), limits=parser_limits()):
        raise refusal(spec, problem)


def parser_limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=_LEXER_FUEL)


def refusal(spec: GuideSpec, reason: str) -> BadGuide:
    what = _NAMES.get(spec.kind, "the JSON schema")
    first = reason.partition("<state>")[0].strip()  # behind it follows a dump for llguidance's authors
    if spec.kind == "regex" and (named := re.search("error: (.+)", first)):
        first = named[1]  # before it stands the expression, twice
    return BadGuide(
        f"{what} cannot guide an output: {first:.{_MAX_REASON_CHARS}}; correct it, or leave it out"
    )
