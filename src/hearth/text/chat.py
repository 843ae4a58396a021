"""Chat templates: messages and tools in, the prompt's text out, rendered in jinja2's sandbox.

Does not turn text into tokens and does not read files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn, TypeAlias

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hearth.errors import BadPrompt, BadTokenizer

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Message: TypeAlias = Mapping[str, Json]

DEFAULT = "default"
TOOL_USE = "tool_use"  #: where a model names several templates, this one answers requests with tools

#: What Python raises when a template meets a value of another kind than it expects.
_MISFITS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """A model's compiled chat templates. Immutable; rendering leaves no trace in it."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], origin: str) -> None:
        """`sources` by name; `special_tokens` by role (`bos_token`, ...); `origin` is named in errors."""
        if DEFAULT not in sources:
            raise BadTokenizer(
                f"no chat template named `{DEFAULT}` in {origin}, found: {sorted(sources)}; name one so"
            )
        self._origin = origin
        self._special_tokens = dict(special_tokens)
        self._templates = {name: _compile(source, name, origin) for name, source in sources.items()}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        **extra: Json,
    ) -> str:
        """`extra` reaches the template under its own names. Raises `BadPrompt` for what it refuses."""
        _check_messages(messages)
        name = TOOL_USE if tools is not None and TOOL_USE in self._templates else DEFAULT
        try:
            return self._templates[name].render(
                messages=messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                **{"documents": None, **self._special_tokens, **extra},
            )
        except _Refused as refusal:
            raise BadPrompt(f"the chat template refuses these messages: {refusal.message}") from refusal
        except SecurityError as breach:
            raise BadTokenizer(
                f"the chat template in {self._origin} leaves its sandbox: {breach.message}; use another"
            ) from breach
        except _MISFITS as misfit:
            raise BadPrompt(
                f"the chat template cannot render these messages: {type(misfit).__name__}: {misfit}; "
                "check the roles, the content and the tool calls of each message"
            ) from misfit


class _Refused(TemplateError):
    """The template called `raise_exception`."""


class _GenerationBlock(Extension):
    """Accepts `{% generation %}`, which marks the assistant's words for training, and renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _compile(source: str, name: str, origin: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise BadTokenizer(
            f"chat template `{name}` in {origin} does not compile: line {error.lineno}: {error.message}; "
            "fix the template or remove it"
        ) from error


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise BadPrompt("a chat needs at least 1 message, given: 0")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise BadPrompt(
                f"message {index} must be a mapping with `role` and `content`, given: {message!r:.80}"
            )


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes HTML, which models have not seen in training."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
