"""The dialect of an API: how it formats an answer, whole or as a stream.

The body of every dialect is translated to a `ChatBody`, `CompletionBody` or `EmbeddingBody`; the dialect then
formats the answer. Everything in between is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Protocol, TypeAlias

from hearth.control.requests.generation import AnswerStream, GenerationRequest, TokenDelta
from hearth.core.errors import HearthError
from hearth.core.types import FinishReason, PromptReading
from hearth.text.reasoning import Phase, ReasoningParser, ReasoningUse, Split, Thought
from hearth.text.tool_calls import ToolCall, ToolFormat, ToolParser

Part: TypeAlias = "Thought | str | ToolCall"


@dataclass(frozen=True, slots=True)
class TokenUsage:
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  #: of the prompts
    num_reasoning_tokens: int = 0  #: of the output

    @classmethod
    def of(cls, streams: Sequence[AnswerStream], num_answers: int) -> TokenUsage:
        firsts = streams[::num_answers]
        return cls(
            sum(stream.num_prompt_tokens for stream in firsts),
            sum(stream.num_output_tokens for stream in streams),
            sum(stream.num_cached_tokens for stream in firsts),
            sum(stream.num_reasoning_tokens for stream in streams),
        )


@dataclass(frozen=True, slots=True)
class Choice:
    stream: AnswerStream
    deltas: Sequence[TokenDelta]
    echo: str  #: the prompt, if `echo` was requested
    text: str  #: without reasoning and tool calls
    calls: Sequence[ToolCall]
    reasoning: str = ""
    reading: PromptReading | None = None  #: prompt logprobs or embedding

    @property
    def finish_reason(self) -> FinishReason:
        reason = self.stream.finish_reason
        assert reason is not None, "the choice has ended"
        return reason

    @property
    def mean_logprob(self) -> float:
        """The mean over all tokens, whose logprobs were requested."""
        return fmean([one.logprobs.logprob for one in self.deltas if one.logprobs] or [-inf])


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
    num_answers: int  #: choices per prompt that are generated
    is_stream: bool
    num_returned: int | None = None  #: those with the best mean logprob; None: all
    shows_logprobs: bool = True  #: False: they only rank the choices
    tool_use: ToolUse | None = None
    is_echo: bool = False  #: answers begin with their prompt
    ignored_fields: tuple[str, ...] = ()  #: by the client's names

    def best(self, choices: Sequence[Choice]) -> list[Choice]:
        """Return the choices that are returned: of each prompt, those with the best mean logprob."""
        if self.num_returned in (None, self.num_answers):
            return list(choices)
        prompts = range(0, len(choices), self.num_answers)
        of_prompts = (choices[begin : begin + self.num_answers] for begin in prompts)
        ranked = (sorted(one, key=lambda choice: -choice.mean_logprob) for one in of_prompts)
        return [choice for one in ranked for choice in one[: self.num_returned]]

    @property
    def has_logprobs(self) -> bool:
        return self.shows_logprobs and self.requests[0].sampling.logprobs is not None

    @property
    def reasoning(self) -> ReasoningUse | None:
        return self.requests[0].reasoning

    @property
    def is_split(self) -> bool:
        """True if an answer may have other parts than text."""
        return self.tool_use is not None or self.reasoning is not None


class ChoiceReader:
    """Splits the tokens of one choice into reasoning, text and tool calls. Mutable."""

    def __init__(self, spec: AnswerSpec, stream: AnswerStream) -> None:
        self._stream = stream
        self._calls = None
        if (tool_use := spec.tool_use) is not None:
            self._calls = ToolParser(tool_use.format, tool_use.names, tool_use.max_calls)
        self._reasoning = None
        self._shows_reasoning = False
        if (use := spec.reasoning) is not None:
            self._reasoning = ReasoningParser(use.marks, use.phase_after(stream.tokenizer, stream.prompt))
            self._shows_reasoning = use.is_shown
        self._num_tokens = 0  #: until the answer begins

    @property
    def is_thinking(self) -> bool:
        """True until the answer begins, if the model thinks."""
        return self._reasoning is not None and self._reasoning.phase in (Phase.THINKING, Phase.GAP)

    def read(self, deltas: Sequence[TokenDelta]) -> list[Part]:
        """Return what these tokens add; text that may become a call or a mark is held back."""
        has_ended = not deltas or deltas[-1].finish_reason is not None
        reasoning, text = self._split(deltas, has_ended)
        parts: list[Part] = [Thought(reasoning)] if reasoning and self._shows_reasoning else []
        if self._calls is None:
            return [*parts, text] if text else parts
        parts += self._calls.push(text)
        if has_ended:
            parts += self._calls.flush()
        return parts

    def _split(self, deltas: Sequence[TokenDelta], has_ended: bool) -> tuple[str, str]:
        """Return reasoning, and the text after it."""
        parser = self._reasoning
        if parser is None:
            return "", "".join([delta.text for delta in deltas])
        splits = list[Split]()
        for delta in deltas:
            was_answering = parser.phase in (Phase.GAP, Phase.ANSWER)
            splits.append(parser.push(delta.text))
            if not was_answering:
                self._num_tokens += 1
                self._stream.num_reasoning_tokens = self._num_tokens if parser.has_thought else 0
        if has_ended:
            splits.append(parser.flush())
        return "".join([split.reasoning for split in splits]), "".join([split.text for split in splits])
