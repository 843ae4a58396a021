"""Renders chat templates: messages and tools in, the prompt's text out, in a sandbox with limits.

Does not turn text into tokens and does not read files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn, TypeAlias

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser

from hearth.errors import BadPrompt, BadTokenizer
from hearth.model_files import MAX_TEMPLATE_BYTES, brief
from hearth.text.template_filters import MAX_WIDTH
from hearth.text.template_meter import METER, Meter, OverLimit, joined, walked
from hearth.text.template_sandbox import MeteredEnvironment

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Message: TypeAlias = Mapping[str, Json]

DEFAULT = "default"
TOOL_USE = "tool_use"  #: where a model names several templates, this one answers requests with tools
#: The longest that a rendering may take, where nobody says otherwise.
RENDER_S = 2.0

#: The longest that a template may take to be compiled.
COMPILE_S = 10.0

#: The errors that Python raises when a template meets a value of another kind than it expects.
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
        """Compile `sources`, by name. `special_tokens`: by role (`bos_token`, ...); errors name `origin`."""
        if DEFAULT not in sources:
            raise BadTokenizer(
                f"no chat template named `{DEFAULT}` in {origin}, found: {brief(sorted(sources))}; "
                "name one so"
            )
        self._origin = origin
        self.text = "\n".join(sources.values())  #: of all templates, as they are written
        self._special_tokens = dict(special_tokens)
        self._templates = {name: _compile(source, name, origin) for name, source in sources.items()}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        *,
        limit_s: float = RENDER_S,
        **extra: Json,
    ) -> str:
        """Return the text of a prompt. `extra` reaches the template under its own names.

        Raises:
            BadPrompt: the template refuses these messages, or cannot render them.
            BadTokenizer: the template leaves its sandbox, takes longer than `limit_s`, or makes too much.
        """
        _check_messages(messages)
        name = TOOL_USE if tools is not None and TOOL_USE in self._templates else DEFAULT
        variables = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "documents": None,
            **self._special_tokens,
            **extra,
        }
        token = METER.set(Meter(limit_s))
        try:
            return joined(self._templates[name].generate(variables))
        except _Refused as refusal:
            raise BadPrompt(f"the chat template refuses these messages: {refusal.message}") from refusal
        except OverLimit as excess:
            raise BadTokenizer(
                f"the chat template in {self._origin} was stopped: {excess.message}; "
                "send fewer messages, or use another template"
            ) from excess
        except SecurityError as breach:
            raise BadTokenizer(
                f"the chat template in {self._origin} leaves its sandbox: {breach.message}; use another"
            ) from breach
        except _MISFITS as misfit:
            raise BadPrompt(
                f"the chat template cannot render these messages: {type(misfit).__name__}: {misfit}; "
                "check the roles, the content and the tool calls of each message"
            ) from misfit
        finally:
            METER.reset(token)


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
    if len(source) > MAX_TEMPLATE_BYTES:
        raise BadTokenizer(
            f"chat template `{name:.80}` in {origin} is too large, limit: {MAX_TEMPLATE_BYTES} characters, "
            f"given: {len(source)}"
        )
    environment = MeteredEnvironment([_GenerationBlock, loopcontrols])
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    token = METER.set(Meter(COMPILE_S))
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise BadTokenizer(
            f"chat template `{name}` in {origin} does not compile: line {error.lineno}: {error.message}; "
            "fix the template or remove it"
        ) from error
    # What jinja2 made of it may be nested too deep for Python, or have too many blocks in each other.
    except (OverLimit, RecursionError, MemoryError, SyntaxError, ValueError) as error:
        raise BadTokenizer(
            f"chat template `{name}` in {origin} does not compile: {type(error).__name__}: {error!s:.200}; "
            "fix the template or remove it"
        ) from error
    finally:
        METER.reset(token)


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise BadPrompt("a chat needs at least 1 message, given: 0")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise BadPrompt(
                f"message {index} must be a mapping with `role` and `content`, given: {message!r:.80}"
            )


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(walked(message))[:MAX_WIDTH])


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:MAX_WIDTH])
