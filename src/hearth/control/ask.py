"""A question as the gateway takes it, and its answer as it comes back. Speaks no HTTP and knows no worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hearth.errors import HearthError
from hearth.messages import GuideOrder
from hearth.text.chat import Json, Message
from hearth.text.tokenizer import Tokenizer
from hearth.types import FinishReason, ModelId, RequestId, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Chat:
    """Rendered by the model's chat template; `extra` reaches the template under its own names."""

    messages: Sequence[Message]
    tools: Sequence[Json] | None = None
    extra: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    model: str  #: a name or an alias
    prompt: str | list[int] | Chat
    sampling: SamplingParams
    guide: GuideOrder | None = None
    keep_alive_s: float | None = None  #: infinite pins the model; None: as it is configured


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds to an answer; its text may be empty."""

    text: str
    token: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None  #: nothing follows after one


class Stream:
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
        self.num_cached_tokens = 0  #: of the prompt; known with the first piece
        self.is_ended = False  #: everything was delivered, or it was closed
        self._cancel = cancel
        self._pieces: list[Piece] = []
        self._error: HearthError | None = None
        self._wakeup: asyncio.Future[None] | None = None

    async def next(self, timeout_s: float | None = None) -> list[Piece]:
        """All pieces that are there, waiting for the first; [] if none came in time.

        Raises:
            HearthError: the request ended without an answer; nothing follows.
        """
        if not self._pieces and self._error is None:
            await self._wait(timeout_s)
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            return pieces
        if self._error is not None:
            raise self._error
        return []

    async def _wait(self, timeout_s: float | None) -> None:
        """A bare timer: `asyncio.wait` would cost more than all else that is done for a token."""
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
        """Why it ended without an answer."""
        return self._error

    def close(self) -> None:
        """Whoever reads has gone, or is done. A request that still runs is cancelled."""
        if not self.is_ended:
            self.is_ended = True
            self._cancel()

    # For the gateway.

    def put(self, pieces: Sequence[Piece]) -> None:
        self._pieces += pieces
        self.is_ended = self.is_ended or pieces[-1].finish_reason is not None
        self._wake()

    def fail(self, error: HearthError) -> None:
        self.is_ended = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
