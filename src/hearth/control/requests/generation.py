"""A generation request as the gateway takes it, and the stream of its answer. Knows no HTTP, no worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from hearth.core.errors import HearthError
from hearth.core.types import (
    FinishReason,
    GuideSpec,
    ModelId,
    Pooling,
    PromptReading,
    RequestId,
    SamplingParams,
    ThinkingSpec,
    TokenLogprobs,
)
from hearth.text.chat_template import Json, Message
from hearth.text.infill import InfillMarks
from hearth.text.reasoning import Phase, ReasoningUse
from hearth.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Message]
    tools: Sequence[Json] | None = None
    has_turn: bool = True  #: the prompt ends with the beginning of the assistant's turn
    is_continued: bool = False  #: the prompt ends within the last message, which the answer continues
    extra: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """The answer is what belongs between these texts."""

    marks: InfillMarks
    prefix: str
    suffix: str


Prompt: TypeAlias = str | list[int] | ChatPrompt | InfillPrompt


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    model: str  #: a name or an alias
    prompt: Prompt
    sampling: SamplingParams
    guide: GuideSpec | None = None  #: of the answer
    reasoning: ReasoningUse | None = None  #: None: the model does not think
    keep_alive_s: float | None = None  #: infinite pins the model; None: as it is configured
    tokens_per_s: float | None = None  #: of its `Pace`, as is the next; None: the model's
    first_token_s: float | None = None
    is_batch: bool = False  #: without a pace, at lower priority
    counts_prompt: bool = True  #: False: another answer to a prompt that was counted
    follows: tuple[int, ...] = ()  #: tokens of an earlier conversation, before the prompt
    pooling: Pooling | None = None  #: how its embedding is made, of no tokens; None: it is continued

    def full_guide(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> GuideSpec | None:
        """Return the guide of the whole output: that of the answer, after the thinking."""
        use = self.reasoning
        if use is None or (self.guide is None and use.budget_tokens is None):
            return self.guide
        phase = use.phase_after(tokenizer, prompt)
        if phase is Phase.ANSWER:
            return self.guide
        thinking = ThinkingSpec(use.marks.open, use.marks.close, phase is Phase.THINKING, use.budget_tokens)
        return replace(self.guide or GuideSpec("any"), thinking=thinking)


@dataclass(frozen=True, slots=True)
class TokenDelta:
    text: str
    token: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None  #: nothing follows after one
    offset: int  #: where the token's own text begins in the answer; `text` may lag behind
    stop: str | None = None  #: the stop string that ended the answer


class AnswerStream:
    """The answer to one request. Mutable; used on the event loop alone. One task reads it."""

    def __init__(
        self,
        request_id: RequestId,
        model: ModelId,
        tokenizer: Tokenizer,
        num_prompt_tokens: int,
        cancel: Callable[[], None],
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.tokenizer = tokenizer
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0  #: of the prompt; known with the first token
        self.num_output_tokens = 0  #: that have come, whether they were read or not
        self.num_reasoning_tokens = 0  #: of those; counted when they are read
        self.is_batch = False
        self.prompt: Sequence[int] = ()
        self.reading: PromptReading | None = None  #: as was asked for; it comes with the first token
        self.finish_reason: FinishReason | None = None  #: None: more tokens may come
        self.is_ended = False  #: everything was delivered, or it was closed
        self._cancel = cancel
        self._deltas: list[TokenDelta] = []
        self._error: HearthError | None = None
        self._wakeup: asyncio.Future[None] | None = None

    async def next(self, timeout_s: float | None = None) -> list[TokenDelta]:
        """Return arrived tokens, waiting for one; [] after `timeout_s` or at the end. Raises HearthError."""
        if not self._deltas and self._error is None and self.finish_reason is None:
            await self._wait(timeout_s)
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            return deltas
        if self._error is not None:
            raise self._error
        return []

    async def rest(self) -> list[TokenDelta]:
        deltas = await self.next()
        while self.finish_reason is None:
            deltas += await self.next()
        return deltas

    async def _wait(self, timeout_s: float | None) -> None:
        """Wait with a bare timer: `asyncio.wait` would cost more than all other work for a token."""
        loop = asyncio.get_running_loop()
        self._wakeup = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
        try:
            await self._wakeup
        finally:
            self._wakeup = None
            if timer is not None:
                timer.cancel()

    @property
    def error(self) -> HearthError | None:
        return self._error

    def close(self) -> None:
        """Stop reading. A request that still runs is cancelled."""
        if not self.is_ended:
            self.is_ended = True
            self._cancel()

    # For the gateway.

    def put(self, deltas: Sequence[TokenDelta]) -> None:
        self._deltas += deltas
        self.num_output_tokens += len(deltas)
        self.finish_reason = deltas[-1].finish_reason
        self.is_ended = self.is_ended or self.finish_reason is not None
        self._wake()

    def end(self, reason: FinishReason) -> None:
        self.finish_reason, self.is_ended = reason, True
        self._wake()

    def fail(self, error: HearthError) -> None:
        self.is_ended = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
