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

from hearth.core.errors import BadPrompt, BadTokenizer
from hearth.core.model_files import MAX_TEMPLATE_BYTES, brief
from hearth.text.template_filters import MAX_WIDTH
from hearth.text.template_meter import METER, Meter, OverLimit, joined, walked
from hearth.text.template_sandbox import MeteredEnvironment
from hearth.text.template_tools import TemplateTools

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Message: TypeAlias = Mapping[str, Json]

DEFAULT = "default"
TOOL_USE = "tool_use"  #: where a model names several templates, this one answers requests with tools
#: The longest that a rendering may take, where nobody says otherwise.
RENDER_S = 2.0

#: The longest that a template may take to be compiled.
COMPILE_S = 10.0

#: Stands behind the text of a message that is to be continued, to find where that ends in the prompt. Where
#: the template has stripped the space, it would have stripped that of the message, too.
_FINAL_MARK = "CONTINUE_FINAL_MESSAGE_HERE "

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
        self._tools = {name: TemplateTools.of(source) for name, source in sources.items()}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        *,
        continue_final_message: bool = False,
        limit_s: float = RENDER_S,
        **extra: Json,
    ) -> str:
        """Return the text of a prompt. `extra` reaches the template under its own names.

        With `continue_final_message` the prompt ends where the text of the last message does.

        Raises:
            BadPrompt: the template refuses these messages, or cannot render them.
            BadTokenizer: the template leaves its sandbox, takes longer than `limit_s`, or makes too much.
        """
        _check_messages(messages)
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1])]
        name = self._name(tools)
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
            text = joined(self._templates[name].generate(variables))
            return _up_to_mark(text) if continue_final_message else text
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

    def in_words(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> Sequence[Message]:
        """Return the messages with all that the template does not know of tools as text.

        Raises:
            BadPrompt: a tool or a call is not as OpenAI's API has it.
        """
        _check_messages(messages)
        try:
            return self._tools[self._name(tools)].in_words(messages, tools)
        except (LookupError, TypeError, ValueError, RecursionError) as misfit:
            raise BadPrompt(
                f"a tool or a tool call cannot be written as text: {type(misfit).__name__}: {misfit}; "
                "send them as OpenAI's API has them"
            ) from misfit

    def _name(self, tools: Sequence[Json] | None) -> str:
        return TOOL_USE if tools is not None and TOOL_USE in self._templates else DEFAULT


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


def _marked(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        raise BadPrompt(
            f"the last message is to be continued, so its `content` must be text, given: {content!r:.80}"
        )
    return {**message, "content": content + _FINAL_MARK}


def _up_to_mark(text: str) -> str:
    """Return a prompt up to the mark behind the last message; a template may strip what it writes."""
    end = text.rfind(_FINAL_MARK.strip())
    if end < 0:
        raise BadPrompt(
            "the last message is to be continued, but the chat template does not write all of its text; "
            "end with a message of the user"
        )
    return text[:end] if text.startswith(_FINAL_MARK, end) else text[:end].rstrip()


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(walked(message))[:MAX_WIDTH])


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:MAX_WIDTH])
