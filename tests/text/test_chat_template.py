from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Protocol

import pytest
from transformers import PreTrainedTokenizerFast

from hearth.core.errors import BadPrompt, BadTokenizer
from hearth.text import render_pool
from hearth.text.chat_template import ChatTemplate, Json, Message

#: For templates that something else than time is to stop, however busy the machine is.
AMPLE_S = 60.0

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
    """The little that these tests use of transformers."""

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


@pytest.mark.parametrize("name", ["chatml", "llama3"])
@pytest.mark.parametrize("begun", ["The answer is", "The answer is ", "", "a CONTINUE_FINAL_MESSAGE_HERE b"])
def test_a_last_message_is_continued_as_transformers_does(peer: Peer, name: str, begun: str) -> None:
    """One of the templates strips what it writes."""
    messages: list[Message] = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": begun},
    ]

    text = template(TEMPLATES[name]).render(messages, None, False, continue_final_message=True)

    assert text == peer.apply_chat_template(
        messages,
        chat_template=TEMPLATES[name],
        continue_final_message=True,
        add_generation_prompt=False,
        tokenize=False,
    )


def test_a_message_that_the_template_does_not_write_cannot_be_continued() -> None:
    with pytest.raises(BadPrompt, match="does not write all of its text"):
        template("{{ messages[0].content[:3] }}").render(PLAIN[:1], continue_final_message=True)
    with pytest.raises(BadPrompt, match="its `content` must be text, given: None"):
        template("x").render([{"role": "assistant", "content": None}], continue_final_message=True)


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
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "RecursionError"),
        ("{% if a %}" * 99 + "{% endif %}" * 99, "too many statically nested blocks|IndentationError"),
    ],
)
def test_a_template_that_does_not_compile_is_the_models_fault(source: str, cause: str) -> None:
    with pytest.raises(BadTokenizer, match=f"`default` in the test does not compile: .*{cause}"):
        template(source).check()


def test_a_template_that_does_not_compile_is_refused_when_it_renders_too() -> None:
    with pytest.raises(BadTokenizer, match="`default` in the test does not compile: line 1"):
        template("{% if %}").render(PLAIN)


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


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(BadTokenizer, match="the test leaves its sandbox"):
        template(source).render(PLAIN)


def test_what_a_template_says_as_it_refuses_is_cut() -> None:
    with pytest.raises(BadPrompt) as refused:
        template("{{ raise_exception('x' * 99999) }}").render(PLAIN)

    assert len(str(refused.value)) < 1100


def test_a_chat_without_messages_is_refused() -> None:
    with pytest.raises(BadPrompt, match="at least 1 message, given: 0"):
        template(CHATML).render([])


def test_a_message_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(BadPrompt, match=r"message 1 must be a mapping .* given: 'hello'"):
        template(CHATML).render([PLAIN[0], "hello"])  # type: ignore[list-item] # as an untyped caller might


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(9) %}{{ m(n - 1) if n }}{% endfor %}{% endmacro %}{{ m(30) }}",
        "{{ 9 ** 99999999 }}",
        "{% set x = 'a' * 200000 %}{{ x.strip('b' * 200000 ~ 'a') }}" * 99,
    ],
)
def test_a_template_that_takes_too_long_is_stopped(source: str) -> None:
    chat = template(source)
    with pytest.raises(BadTokenizer, match=r"the test was stopped: it takes longer than the limit: 0.2 s"):
        chat.render(PLAIN, limit_s=0.2)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**10 }}",
        "{{ [1] * 10**9 }}",
        "{% set n = namespace(x='a' * 10**8) %}{% for i in [1] * 9 %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ '%9999999999d' % 1 }}",
    ],
)
def test_a_template_that_needs_too_much_memory_is_stopped(source: str) -> None:
    with pytest.raises(BadTokenizer, match=r"the test was stopped: it needs more memory than .*: 1024 MiB"):
        template(source).render(PLAIN, limit_s=AMPLE_S)


def test_a_template_that_makes_too_much_text_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_pool, "MAX_REPLY_BYTES", 1 << 20)

    with pytest.raises(BadTokenizer, match="it makes more text than the limit: 1 MiB"):
        template("{{ 'x' * 2**20 }}").render(PLAIN, limit_s=AMPLE_S)


def test_other_templates_render_after_one_was_stopped() -> None:
    with pytest.raises(BadTokenizer, match="was stopped"):
        template("{{ 9 ** 99999999 }}").render(PLAIN, limit_s=0.1)

    assert template("{{ messages | length }}").render(PLAIN) == "3"


def test_text_that_utf8_cannot_hold_is_refused() -> None:
    with pytest.raises(BadPrompt, match=r"must be JSON: .* surrogates not allowed"):
        template(CHATML).render([{"role": "user", "content": "\ud800"}])
    with pytest.raises(BadPrompt, match="cannot render these messages: UnicodeEncodeError"):
        template("{{ '\\ud800' }}").render(PLAIN)
    assert template("a\ud800b").render(PLAIN) == "a?b"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for a, b in {'x': 1}.items() %}{{ a ~ b }}{{ loop.length }}{{ loop.last }}{% endfor %}",
            "x11True",
        ),
        ("{{ ['a', 'b'] | join(', ') }}{{ '-'.join(('c', 'd')) }}", "a, bc-d"),
        ("{{ [{'n': 1}, {'n': 2}] | join('+', attribute='n') }}", "1+2"),
        ("{{ 'a\n\nb' | indent(2) }}|{{ 'a\nb' | indent('> ', first=True) }}", "a\n\n  b|> a\n> b"),
        ("{{ 'aXbX'.replace('X', '-') }}{{ 'aXbX' | replace('X', '', 1) }}", "a-b-abX"),
        ("{{ '%02d' % 7 }}{{ '{:>3}'.format(7) }}{{ '{a}'.format(a=1700000000) }}", "07  71700000000"),
        ("{{ [1] + [2] * 2 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ (1, 2) }}", "[1, 2, 2]31024(1, 2)"),
        ("{% for i in [1, 2, 3] if i > 1 %}{{ loop.index }}:{{ i }} {% else %}none{% endfor %}", "1:2 2:3 "),
        ("{% for x in missing %}{{ x }}{% else %}none{% endfor %}", "none"),
        ("{{ ['b', 'A'] | sort | join }}{{ 'ab' | reverse }}{{ [1, 2] | reverse | list }}", "Abba[2, 1]"),
        ("{{ [1, 1, 2] | unique | list }}{{ [1, 2.5] | sum }}{{ [3, 1] | max }}", "[1, 2]3.53"),
        (
            "{{ [{'n': 1}, {'n': 2}] | sum(attribute='n') }}{{ {'b': 1, 'a': 2} | dictsort }}",
            "3[('a', 2), ('b', 1)]",
        ),
        ("{{ ' a ' | trim }}{{ 'xax' | trim('x') }}{{ '7' | int + '1.5' | float }}", "aa8.5"),
        ("{{ 'ab cd' | title }}{{ 'aB' | capitalize }}{{ 'aB' | upper }}{{ 'aB' | lower }}", "Ab CdAbABab"),
        (
            "{{ 'a b c'.split(' ', 1) }}{{ 'a,b'.split(',') }}{{ ' a b '.split() }}",
            "['a', 'b c']['a', 'b']['a', 'b']",
        ),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "2"),
        ("{{ messages | rejectattr('role', 'in', ['user']) | map(attribute='role') | first }}", "assistant"),
        ("{{ messages[::-1][0].role }}{{ messages[1:] | length }}{{ 'abc'[1:] }}", "user2bc"),
        (
            "{{ {'a': [1, {'b': 2}]} | tojson(indent=2) }}",
            '{\n  "a": [\n    1,\n    {\n      "b": 2\n    }\n  ]\n}',
        ),
        ("{{ {'a': [1]} | tojson(separators=(',', ':')) }}", '{"a":[1]}'),
        ("{{ {'a': 1}.get('b', 2) }}{{ {'a': 1}.keys() | list }}{{ '' is string }}", "2['a']True"),
        ("{{ 1 < 2 <= 2 }}{{ 'a' in 'cat' }}{{ 'a' not in ['b'] }}{{ 1 if 2 != 3 }}", "TrueTrueTrue1"),
    ],
)
def test_templates_mean_what_they_mean_to_transformers(source: str, text: str) -> None:
    assert template(source).render(PLAIN) == text
