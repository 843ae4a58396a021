from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from hearth.core.errors import BadGuide
from hearth.core.types import GuideSpec
from hearth.text.grammar import check_guide, choice_grammar, grammar_of, parser_limits
from tests.text.conftest import byte_level


def matcher(spec: GuideSpec) -> LLMatcher:
    backend = byte_level()
    tokenizer = LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size(), eos_token=2)
    return LLMatcher(tokenizer, grammar_of(spec), log_level=0, limits=parser_limits())


def accepts(spec: GuideSpec, text: str) -> bool:
    """True if `text` is a whole output of the guide."""
    check_guide(spec)
    following = matcher(spec)
    tokens = byte_level().encode(text).ids
    return all(following.consume_token(token) for token in tokens) and following.is_accepting()


def test_an_expression_matches_the_whole_output() -> None:
    date = GuideSpec("regex", r"\d{4}-\d{2}")

    assert [accepts(date, text) for text in ("2024-05", "2024-5", "on 2024-05", "2024-051")] == [
        *(True, False, False, False)
    ]


def test_an_output_is_one_of_its_choices_whatever_is_in_them() -> None:
    texts = ["yes", 'a "quoted" \\ text', "é 😀 日本\n\t\u0001/", "yesterday"]
    choice = GuideSpec("lark", choice_grammar(texts))

    assert [accepts(choice, text) for text in texts] == [True] * 4
    assert [accepts(choice, text) for text in ("yest", "no", "yesyes")] == [False] * 3


@pytest.mark.parametrize(
    "text",
    [
        'start: "sum " DIGITS\nDIGITS: /[0-9]+/',
        'root ::= "sum " digits\ndigits ::= [0-9]+',
    ],
)
def test_a_grammar_is_lark_or_gbnf(text: str) -> None:
    guide = GuideSpec("grammar", text)

    assert [accepts(guide, text) for text in ("sum 42", "sum ", "42")] == [True, False, False]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            GuideSpec("regex", "(a"),
            "the regular expression cannot guide an output: unclosed group; correct it",
        ),
        (
            GuideSpec("regex", "(" * 5000),
            "the regular expression cannot guide an output: .{1,200}; correct it",
        ),
        (
            GuideSpec("regex", r"(?=a)b"),
            "look-around, including look-ahead and look-behind, is not supported",
        ),
        (
            GuideSpec("grammar", "start: nobody"),
            'the grammar cannot guide an output: .*unknown name: "nobody"',
        ),
        (GuideSpec("grammar", f"root ::= {'(' * 5000}"), "the grammar cannot guide an output: "),
        (GuideSpec("grammar", 'root ::= "a'), "the grammar cannot guide an output: "),
    ],
)
def test_what_cannot_be_followed_is_refused_in_few_words(spec: GuideSpec, message: str) -> None:
    with pytest.raises(BadGuide, match=message) as caught:
        check_guide(spec)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "spec",
    [
        GuideSpec("regex", "(a{400}){400}"),
        GuideSpec("json_schema", '{"type": "string", "pattern": "^(a{400}){400}$"}'),
    ],
)
def test_an_expression_of_very_many_states_is_given_up_before_it_is_built(spec: GuideSpec) -> None:
    """Nobody else's step may wait for it; by llguidance's own limits it is followed for a second."""
    following = matcher(spec)
    for token in byte_level().encode('"' * (spec.kind == "json_schema") + "aa").ids:
        following.consume_token(token)
        following.compute_bitmask()

    assert following.is_error()
    assert "too many expressions" in following.get_error()


def test_a_key_in_escapes_does_not_stand_for_another_property() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "é": {"type": "integer"}}}
    guide = GuideSpec("json_schema", json.dumps(schema))

    wrong = ['{"\\u0061": "x"}', '{"\\u00e9": "x"}', '{"a": "x"}']
    assert [accepts(guide, text) for text in wrong] == [False] * 3
    assert accepts(guide, '{"a": 1, "é": 2, "b\\n\\"": "x"}')


@pytest.mark.parametrize("text", ["a\u001bb", "a\x7fb"])
def test_a_schema_may_demand_control_characters(text: str) -> None:
    guide = GuideSpec("json_schema", json.dumps({"const": text}))

    assert accepts(guide, json.dumps(text).replace("\x7f", "\\u007f"))
