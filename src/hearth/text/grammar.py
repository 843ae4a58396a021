"""Turns schemas and grammars into the form that llguidance takes, and checks them. Guides no output."""

from __future__ import annotations

from hearth.errors import BadGuide
from hearth.types import GuideSpec

#: The space between the parts of a JSON value: at most one. A model that may write more can do so for ever.
_WHITESPACE = "[ ]?"
_ANY_OBJECT = '{"type": "object"}'


def grammar_of(spec: GuideSpec) -> str:
    """Return the grammar of a guide. Raises BadGuide for a schema that is none."""
    from llguidance import LLMatcher

    if spec.kind == "lark":
        return LLMatcher.grammar_from_lark(spec.text)
    try:
        return LLMatcher.grammar_from_json_schema(
            _ANY_OBJECT if spec.kind == "json_object" else spec.text,
            overrides={"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE},
        )
    except ValueError as error:
        raise refusal(spec, str(error)) from error


def check_guide(spec: GuideSpec) -> None:
    """Raise BadGuide for a guide that no model could be held to."""
    from llguidance import LLMatcher

    if problem := LLMatcher.validate_grammar(grammar_of(spec)):
        raise refusal(spec, problem)


def refusal(spec: GuideSpec, reason: str) -> BadGuide:
    what = "the grammar" if spec.kind == "lark" else "the JSON schema"
    first = reason.partition("<state>")[0].strip()  # behind it follows a dump for llguidance's authors
    return BadGuide(f"{what} cannot guide an output: {first}; correct it, or leave it out")
