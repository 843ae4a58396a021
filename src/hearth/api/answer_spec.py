"""The specification of an answer: the generation requests behind it and the format of an endpoint.

Sends nothing and generates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from hearth.api.logprobs import chat_logprobs, completion_logprobs
from hearth.control.generation import GenerationRequest, TokenDelta
from hearth.text.tokenizer import Tokenizer
from hearth.text.tool_calls import ToolFormat, ToolParser


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The way in which one endpoint spells its answers.

    The bytes are JSON: what stands between a choice's index and its logprobs.
    """

    id_prefix: str
    whole: str  #: the name of the object when it is sent as one
    chunk: str  #: the name of each object of a stream
    first: bytes | None  #: what the first chunk of a choice has; None: there is no such chunk
    before_text: bytes
    after_text: bytes
    empty: bytes  #: a chunk that adds nothing
    logprobs: Callable[[Tokenizer, Sequence[TokenDelta], int], object]


CHAT = AnswerFormat(
    id_prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    first=b'"delta":{"role":"assistant","content":""}',
    before_text=b'"delta":{"content":',
    after_text=b"}",
    empty=b'"delta":{}',
    logprobs=chat_logprobs,
)
COMPLETION = AnswerFormat(
    id_prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    first=None,
    before_text=b'"text":',
    after_text=b"",
    empty=b'"text":""',
    logprobs=completion_logprobs,
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The format and the names by which calls of tools are found in an answer."""

    format: ToolFormat
    names: AbstractSet[str]
    max_calls: int | None

    def parser(self) -> ToolParser:
        return ToolParser(self.format, self.names, self.max_calls)


@dataclass(frozen=True, slots=True)
class AnswerSpec:
    """The answer that a client wants, of one or several choices."""

    format: AnswerFormat
    requests: list[GenerationRequest]  #: one per choice, all choices of a prompt in a row
    num_answers: int  #: choices per prompt
    is_stream: bool
    includes_usage: bool  #: in a stream; a whole answer always does
    fingerprint: str
    tool_use: ToolUse | None = None
    is_echo: bool = False  #: an answer begins with its prompt
    ignored_fields: tuple[str, ...] = ()  #: of the request, by the names that the client gave them
    has_service_tier: bool = False  #: the client has named one, and is told which it got

    @property
    def has_logprobs(self) -> bool:
        return self.requests[0].sampling.logprobs is not None
