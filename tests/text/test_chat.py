from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

import pytest
from transformers import PreTrainedTokenizerFast

from hearth.errors import BadPrompt, BadTokenizer
from hearth.text.chat import ChatTemplate, Json, Message

CHATML = """\
{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{ '<|im_start|>assistant\\n' }}
{% endif %}
"""
LLAMA3 = """\
{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' \
+ message['content'] | trim + '<|eot_id|>' %}\
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}\
{% endfor %}{% if add_generation_prompt %}\
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
TOOLS = """\
{{- bos_token }}
{%- if tools %}
    {{- '<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n' }}
{%- endif %}
{%- if documents %}{{ documents | tojson(indent=2) }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- set arguments = call.function.arguments | tojson(sort_keys=true) %}
            {{- '<call>' + call.function.name + arguments + '</call>' }}
        {%- endfor %}
    {%- else %}
        {{- '[' ~ message.role ~ '] ' ~ message.content ~ eos_token }}
    {%- endif %}
{%- endfor %}
"""
LOOPS = """\
{%- set ns = namespace(num_users=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {%- if ns.num_users >= 2 -%}{%- break -%}{%- endif -%}
    {%- set ns.num_users = ns.num_users + 1 -%}
    {{ message | tojson }}
    {% generation %}{% set ns.seen = message.role %}{{ message.content[::-1] }}{% endgeneration %}
    {{- mood is defined and mood }}{{ unk_token }}
{% endfor -%}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "tools": TOOLS, "loops": LOOPS}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
PLAIN: list[Message] = [
    {"role": "user", "content": ' <b>What\'s</b> "up" & 你好 🏳️‍🌈?\n'},
    {"role": "assistant", "content": "ça va"},
    {"role": "user", "content": "And\tnow?  "},
]
WITH_SYSTEM: list[Message] = [{"role": "system", "content": "Be kind."}, *PLAIN]
WITH_CALL: list[Message] = [
    *PLAIN,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"unit": "°C", "city": "Zürich <>"}}}],
    },
]
WEATHER: Json = {
    "type": "function",
    "function": {"name": "weather", "description": "Où? <where> & 'when'", "parameters": {"type": "object"}},
}


class Peer(Protocol):
    """What these tests use of transformers."""

    def apply_chat_template(self, conversation: Sequence[Message], **options: object) -> str: ...


@pytest.fixture(scope="module")
def peer(directories: dict[str, Path]) -> Peer:
    path = str(directories["byte_level"] / "tokenizer.json")
    peer: Peer = PreTrainedTokenizerFast(tokenizer_file=path, **SPECIAL_TOKENS)  # type: ignore # is untyped
    return peer


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, SPECIAL_TOKENS, "the test")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", [PLAIN, WITH_SYSTEM, WITH_CALL], ids=["plain", "system", "call"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["no_tools", "tools"])
def test_renders_as_transformers_does(
    peer: Peer,
    name: str,
    messages: list[Message],
    add_generation_prompt: bool,
    tools: list[Json] | None,
) -> None:
    extra: dict[str, Json] = {"mood": "calm", "documents": [{"title": "Ö", "text": "<p>"}]}

    text = template(TEMPLATES[name]).render(messages, tools, add_generation_prompt, **extra)

    assert text == peer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **extra,
    )


def test_json_in_a_prompt_is_not_escaped_for_html() -> None:
    text = template("{{ messages[0].content | tojson }}").render([{"content": "<é> & 'x'"}])

    assert text == "\"<é> & 'x'\""


def test_a_template_can_ask_for_the_date() -> None:
    before = datetime.now().strftime("%d %b %Y")

    text = template("{{ strftime_now('%d %b %Y') }}").render(PLAIN)

    assert text in {before, datetime.now().strftime("%d %b %Y")}


def test_what_a_generation_block_sets_stays_inside_it() -> None:
    source = "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x is defined }}"

    assert template(source).render(PLAIN) == "1False"


def test_requests_with_tools_take_the_template_named_for_them() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "tools"}, {}, "the test")

    assert [chat.render(PLAIN), chat.render(PLAIN, tools=[WEATHER])] == ["plain", "tools"]


def test_several_templates_without_a_default_are_refused() -> None:
    with pytest.raises(BadTokenizer, match=r"no chat template named `default` in the test, found: \['rag'\]"):
        ChatTemplate({"rag": ""}, {}, "the test")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("a\n{% if %}", "line 2: Expected an expression"),
        ("{{ messages | shout }}", "No filter named 'shout'"),
        ("{% generation %}", "Unexpected end of template"),
    ],
)
def test_a_template_that_does_not_compile_is_the_models_fault(source: str, cause: str) -> None:
    with pytest.raises(BadTokenizer, match=f"`default` in the test does not compile: .*{cause}"):
        template(source)


def test_what_a_template_refuses_is_the_requests_fault() -> None:
    with pytest.raises(BadPrompt, match=r"refuses these messages: roles must alternate$"):
        template("{{ raise_exception('roles must alternate') }}").render(PLAIN)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("{{ 'a' + messages[0].content }}", "TypeError: can only concatenate str"),
        ("{{ messages[0].calls[0].name }}", "UndefinedError: .*has no attribute 'calls'"),
        ("{{ messages | sum(attribute='content') }}", "TypeError"),
        ("{{ 1 // (messages | length - 1) }}", "ZeroDivisionError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_messages_that_do_not_fit_the_template_are_the_requests_fault(source: str, cause: str) -> None:
    with pytest.raises(BadPrompt, match=f"cannot render these messages: {cause}"):
        template(source).render([{"role": "user", "content": None}])


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(BadTokenizer, match="the test leaves its sandbox"):
        template(source).render(PLAIN)


def test_a_chat_without_messages_is_refused() -> None:
    with pytest.raises(BadPrompt, match="at least 1 message, given: 0"):
        template(CHATML).render([])


def test_a_message_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(BadPrompt, match=r"message 1 must be a mapping .* given: 'hello'"):
        template(CHATML).render([PLAIN[0], "hello"])  # type: ignore[list-item] # as an untyped caller might
