"""The dialect of an API: how it spells an answer, in one or as the pieces of a stream. Generates nothing.

A dialect is a translation. Its body becomes a `ChatBody` or a `CompletionBody`, the one inner request, and
what comes of that is handed to the dialect to be spelt. All that happens in between is the same for all.
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
    """The tokens of an answer; a prompt counts once, however many choices it has."""

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
    """One whole answer to a prompt."""

    stream: AnswerStream
    deltas: Sequence[TokenDelta]
    echo: str  #: the prompt that it begins with, where that was asked for
    text: str  #: without the calls
    calls: Sequence[ToolCall]
    reading: PromptReading | None = None  #: what was asked of its prompt

    @property
    def finish_reason(self) -> FinishReason:
        reason = self.stream.finish_reason
        assert reason is not None, "the choice is whole"
        return reason


class AnswerEvents(Protocol):
    """Spells one answer as the pieces of a stream. Mutable. Nothing is sent where no bytes are returned."""

    def first(self, echoes: Sequence[str]) -> bytes:
        """Return what the stream begins with; `echoes`: the prompt that each choice begins with."""

    def write(self, index: int, deltas: Sequence[TokenDelta]) -> bytes:
        """Return the pieces for the next tokens of a choice; the last token has a finish reason."""

    def last(self, usage: TokenUsage) -> bytes:
        """Return what the stream ends with, when all its choices have ended."""

    def failed(self, error: HearthError) -> bytes:
        """Return what it ends with instead, when generation has failed."""


class Dialect(Protocol):
    """Spells the answers of one endpoint; made for one request, of which it may know more."""

    @property
    def stream_type(self) -> str:
        """The content type of a stream."""

    @property
    def waiting(self) -> bytes:
        """A piece that means nothing, to be sent when there is nothing to send."""

    def whole(self, spec: AnswerSpec, choices: Sequence[Choice], usage: TokenUsage) -> object:
        """Return the answer in one, as a value that becomes JSON.

        What takes long to be spelt is a function in it, which is called later and perhaps on another thread.
        """

    def events(self, spec: AnswerSpec, streams: Sequence[AnswerStream]) -> AnswerEvents: ...


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The format and the names by which calls of tools are found in an answer."""

    format: ToolFormat
    names: AbstractSet[str]
    max_calls: int | None


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """The answer that a client wants, of one or several choices, and the dialect that spells it."""

    dialect: Dialect
    requests: list[GenerationRequest]  #: one per choice, all choices of a prompt in a row
    num_answers: int  #: choices per prompt
    is_stream: bool
    tool_use: ToolUse | None = None
    is_echo: bool = False  #: an answer begins with its prompt
    ignored_fields: tuple[str, ...] = ()  #: of the request, by the names that the client gave them

    @property
    def has_logprobs(self) -> bool:
        return self.requests[0].sampling.logprobs is not None


class ChoiceReader:
    """Reads the tokens of one choice as what they say: text, and calls of tools. Mutable."""

    def __init__(self, tool_use: ToolUse | None) -> None:
        self._parser = None
        if tool_use is not None:
            self._parser = ToolParser(tool_use.format, tool_use.names, tool_use.max_calls)

    def read(self, deltas: Sequence[TokenDelta]) -> list[str | ToolCall]:
        """Return what these tokens add; text that may become a call is held back until that is clear."""
        text = "".join([delta.text for delta in deltas])
        if self._parser is None:
            return [text] if text else []
        parts = self._parser.push(text)
        has_ended = not deltas or deltas[-1].finish_reason is not None
        return parts + self._parser.flush() if has_ended else parts
