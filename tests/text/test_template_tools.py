from __future__ import annotations

import json

import pytest

from hearth.core.errors import BadPrompt
from hearth.text.chat_template import ChatTemplate, Json, Message
from hearth.text.template_tools import TemplateTools

#: As in Gemma, Llama 2 and Mistral: no role but two, and those take turns.
STRICT = """\
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {{- '<' + message.role + '>' + message.content }}
{%- endfor %}"""
WEATHER: Json = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
QUESTION: Message = {"role": "user", "content": "Rain?"}


def call(call_id: str, city: str) -> Json:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": city}},
    }


CONVERSATION: list[Message] = [
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [call("c1", "Rome"), call("c2", "Öland")]},
    {"role": "tool", "tool_call_id": "c1", "content": "dry"},
    {"role": "tool", "tool_call_id": "c2", "content": "wet"},
    {"role": "user", "content": "And Paris?"},
]


def rendered(source: str, messages: list[Message], tools: list[Json] | None = None) -> str:
    template = ChatTemplate({"default": source}, {}, "a test")
    return template.render(template.in_words(messages, tools), tools)


def test_calls_and_results_are_text_for_a_template_that_knows_neither() -> None:
    assert rendered(STRICT, CONVERSATION) == (
        "<user>Rain?"
        '<assistant>{"name": "weather", "arguments": {"city": "Rome"}}\n'
        '{"name": "weather", "arguments": {"city": "Öland"}}'
        "<user>Result of weather:\ndry\n\nResult of weather:\nwet\n\nAnd Paris?"
    )


def test_tools_stand_before_the_first_words_of_the_user() -> None:
    text = rendered(STRICT, [QUESTION], [WEATHER])

    assert text.startswith("<user>You may call these functions")
    assert '\n{"name": "weather", "parameters": {"type": "object"}}\n' in text
    assert text.endswith("\n\nRain?")


def test_tools_stand_behind_the_words_of_the_system() -> None:
    any_role = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    text = rendered(any_role, [{"role": "system", "content": "Be brief."}, QUESTION], [WEATHER])

    assert text.startswith("<system>Be brief.\n\nYou may call these functions")
    assert text.endswith("<user>Rain?")


def test_a_template_that_knows_tools_gets_what_was_sent() -> None:
    knowing = TemplateTools.of("{% if tools %}{{ m.tool_calls }}{% if m.role == 'tool' %}")

    assert knowing.in_words(CONVERSATION, [WEATHER]) is CONVERSATION


def test_a_conversation_without_calls_is_handed_on_as_it_is() -> None:
    messages: list[Message] = [QUESTION, {"role": "assistant", "content": "No."}, QUESTION]

    assert TemplateTools.of(STRICT).in_words(messages, None) is messages


def test_only_what_a_template_lacks_becomes_text() -> None:
    lists_tools = TemplateTools.of("{% if tools %}{% if m['role'] == 'tool' %}")
    writes_calls = TemplateTools.of("{{ m.role }}{{ m.tool_calls }}")

    messages = lists_tools.in_words(CONVERSATION, [WEATHER])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert "tool_calls" not in messages[1]
    assert writes_calls.in_words(CONVERSATION, None) is CONVERSATION


def test_arguments_may_be_text_and_a_result_an_object() -> None:
    written: Json = {"function": {"name": "add", "arguments": json.dumps({"a": 1})}}
    text = rendered(
        STRICT,
        [
            QUESTION,
            {"role": "assistant", "content": "I add.", "tool_calls": [written]},
            {"role": "tool", "content": {"sum": 2}},
        ],
    )

    assert text.endswith(
        '<assistant>I add.\n{"name": "add", "arguments": {"a": 1}}<user>Result of add:\n{"sum": 2}'
    )


@pytest.mark.parametrize("broken", ["text", {"name": "add"}, {"function": {"name": "add", "arguments": "{"}}])
def test_a_call_that_is_none_is_refused(broken: Json) -> None:
    with pytest.raises(BadPrompt, match="cannot be written as text"):
        rendered(STRICT, [QUESTION, {"role": "assistant", "content": "", "tool_calls": [broken]}])
