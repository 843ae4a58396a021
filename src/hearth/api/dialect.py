"""The dialect of an API: how it formats an answer, whole or as a stream.

The body of every dialect is translated to a `ChatBody`, `CompletionBody` or `EmbeddingBody`; the dialect then
formats the answer. Everything in between is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from hearth.control.requests.generation import AnswerStream, GenerationRequest, TokenDelta
from hearth.core.errors import HearthError
from hearth.core.types import FinishReason, PromptReading
from hearth.text.tool_calls import ToolCall, ToolFormat, ToolParser


@dataclass(frozen=True, slots=True)
class TokenUsage:
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  #: of the prompts

    @classmethod
    def of(cls, streams: Sequence[AnswerStream], num_answers: int) -> TokenUsage:
        firsts = streams[::num_answers]
        return cls(
            sum(stream.num_prompt_tokens for stream in firsts),
            sum(stream.num_output_tokens for stream in streams),
            sum(stream.num_cached_tokens for stream in firsts),
        )


@dataclass(frozen=True, slots=True)
class Choice:
    stream: AnswerStream
    deltas: Sequence[TokenDelta]
    echo: str  #: the prompt, if `echo` was requested
    text: str  #: without tool calls
    calls: Sequence[ToolCall]
    reading: PromptReading | None = None  #: prompt logprobs or embedding

    @property
    def finish_reason(self) -> FinishReason:
        reason = self.stream.finish_reason
        assert reason is not None, "the choice has ended"
        return reason


class AnswerEvents(Protocol):
    """Formats one answer as a stream. Mutable. Empty bytes are not sent."""

    def first(self, echoes: Sequence[str]) -> bytes:
        """Return the beginning of the stream; `echoes`: the echoed prompt of each choice."""

    def write(self, index: int, deltas: Sequence[TokenDelta]) -> bytes:
        """Return the events for the next tokens of a choice; its last token has a finish reason."""

    def last(self, usage: TokenUsage) -> bytes:
        """Return the end of the stream, after all choices have ended."""

    def failed(self, error: HearthError) -> bytes:
        """Return the end of a stream whose generation failed."""


class Dialect(Protocol):
    @property
    def stream_type(self) -> str: ...

    @property
    def waiting(self) -> bytes:
        """The keep-alive of a stream."""

    def whole(self, spec: AnswerSpec, choices: Sequence[Choice], usage: TokenUsage) -> object:
        """Return a value for JSON. Functions in it are called later, perhaps on another thread."""

    def events(self, spec: AnswerSpec, streams: Sequence[AnswerStream]) -> AnswerEvents: ...


@dataclass(frozen=True, slots=True)
class ToolUse:
    format: ToolFormat
    names: AbstractSet[str]
    max_calls: int | None


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    dialect: Dialect
    requests: list[GenerationRequest]  #: one per choice; the choices of a prompt are consecutive
    num_answers: int  #: choices per prompt
    is_stream: bool
    tool_use: ToolUse | None = None
    is_echo: bool = False  #: answers begin with their prompt
    ignored_fields: tuple[str, ...] = ()  #: by the client's names

    @property
    def has_logprobs(self) -> bool:
        return self.requests[0].sampling.logprobs is not None


class ChoiceReader:
    """Splits the tokens of one choice into text and tool calls. Mutable."""

    def __init__(self, tool_use: ToolUse | None) -> None:
        self._parser = None
        if tool_use is not None:
            self._parser = ToolParser(tool_use.format, tool_use.names, tool_use.max_calls)

    def read(self, deltas: Sequence[TokenDelta]) -> list[str | ToolCall]:
        """Return what these tokens add; text that may become a call is held back."""
        text = "".join([delta.text for delta in deltas])
        if self._parser is None:
            return [text] if text else []
        parts = self._parser.push(text)
        has_ended = not deltas or deltas[-1].finish_reason is not None
        return parts + self._parser.flush() if has_ended else parts
