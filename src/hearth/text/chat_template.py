"""A model's chat templates. They are not trusted and run in processes of their own (`render_pool.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, assert_never

from hearth.core.errors import BadPrompt, BadTokenizer
from hearth.core.model_files import MAX_TEMPLATE_BYTES, brief
from hearth.text.render_pool import POOL
from hearth.text.template_tools import TemplateTools

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
Message: TypeAlias = Mapping[str, Json]

DEFAULT = "default"
TOOL_USE = "tool_use"  #: for requests with tools, if a model has several templates
RENDER_S = 2.0  #: default time limit of a render, which compiles a template that is new to its process
COMPILE_S = 10.0  #: time limit of the check when a model is deployed

#: Appended to a message that is continued, to find its end in the prompt. If the template strips the space,
#: it would have stripped that of the message, too.
_FINAL_MARK = "CONTINUE_FINAL_MESSAGE_HERE "


class ChatTemplate:
    """Immutable."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], origin: str) -> None:
        """`special_tokens`: by role (`bos_token`, ...). Compiles nothing. Raises BadTokenizer."""
        if DEFAULT not in sources:
            raise BadTokenizer(
                f"no chat template named `{DEFAULT}` in {origin}, found: {brief(sorted(sources))}; "
                "give one that name"
            )
        for name, source in sources.items():
            if len(source) > MAX_TEMPLATE_BYTES:
                raise BadTokenizer(
                    f"chat template `{name:.80}` in {origin} is too large, limit: {MAX_TEMPLATE_BYTES} "
                    f"characters, given: {len(source)}"
                )
        self._origin = origin
        # Lone surrogates, which JSON can hold, are no text.
        self._sources = {name: text.encode(errors="replace").decode() for name, text in sources.items()}
        self.text = "\n".join(sources.values())  #: the source of all templates
        self._special_tokens = dict(special_tokens)
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
            BadTokenizer: the template does not compile, is unsafe, or exceeds `limit_s` or a limit of memory.
        """
        _check_messages(messages)
        if continue_final_message:
            messages = [*messages[:-1], _marked(messages[-1])]
        variables = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "documents": None,
            **self._special_tokens,
            **extra,
        }
        text = self._run(self._name(tools), variables, limit_s)
        return _up_to_mark(text) if continue_final_message else text

    def check(self) -> None:
        for name in self._sources:
            self._run(name, None, COMPILE_S)

    def _run(self, name: str, variables: Mapping[str, Json] | None, limit_s: float) -> str:
        try:
            outcome, text = POOL.render(self._sources[name], variables, limit_s)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadPrompt(
                f"messages, tools and template variables must be JSON: {error}; "
                "send whole characters, no lone surrogates"
            ) from error
        match outcome:
            case "text":
                return text
            case "refused":
                raise BadPrompt(f"the chat template refuses these messages: {text}")
            case "unfit":
                raise BadPrompt(
                    f"the chat template cannot render these messages: {text}; "
                    "check the roles, the content and the tool calls of each message"
                )
            case "unsafe":
                raise BadTokenizer(
                    f"the chat template in {self._origin} leaves its sandbox: {text}; use another"
                )
            case "stopped":
                raise BadTokenizer(
                    f"the chat template in {self._origin} was stopped: {text}; "
                    "send fewer messages, or use another template"
                )
            case "broken":
                raise BadTokenizer(
                    f"chat template `{name}` in {self._origin} does not compile: {text}; "
                    "fix the template or remove it"
                )
        assert_never(outcome)

    def in_words(self, messages: Sequence[Message], tools: Sequence[Json] | None) -> Sequence[Message]:
        """Rewrite what the template does not support of tools as text. Raises BadPrompt."""
        _check_messages(messages)
        try:
            return self._tools[self._name(tools)].in_words(messages, tools)
        except (LookupError, TypeError, ValueError, RecursionError) as misfit:
            raise BadPrompt(
                f"a tool or a tool call cannot be written as text: {type(misfit).__name__}: {misfit}; "
                "send them in the format of OpenAI's API"
            ) from misfit

    def _name(self, tools: Sequence[Json] | None) -> str:
        return TOOL_USE if tools is not None and TOOL_USE in self._sources else DEFAULT


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
        raise BadPrompt(f"to continue the last message, its `content` must be text, given: {content!r:.80}")
    return {**message, "content": content + _FINAL_MARK}


def _up_to_mark(text: str) -> str:
    """Cut a prompt at the mark after the last message; the template may have stripped its space."""
    end = text.rfind(_FINAL_MARK.strip())
    if end < 0:
        raise BadPrompt(
            "the last message cannot be continued: the chat template does not write all of its text; "
            "end with a user message"
        )
    return text[:end] if text.startswith(_FINAL_MARK, end) else text[:end].rstrip()
