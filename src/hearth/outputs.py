"""Outputs of `LLM`, with vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hearth.core.types import FinishReason, TokenLogprob, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int | None  #: 1: the most likely; None: of a sampled token that is not among the best
    decoded_token: str | None  #: None: the model has no tokenizer


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str  #: empty if the model has no tokenizer
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None  #: of each token: itself first, then the most likely ones
    finish_reason: FinishReason | None  #: None: more follows
    stop_reason: str | int | None = None  #: the stop string or stop token; None: the model's end token


@dataclass(frozen=True, slots=True)
class Delta:
    """The text and tokens that one step adds to an answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str = field(compare=False)
    prompt: str | None  #: None: token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None  #: the first is None
    outputs: list[CompletionOutput]
    finished: bool


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]  #: of length 1 as a vector

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    request_id: str = field(compare=False)
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


def logprobs_by_token(
    token: int,
    logprob: float,
    rank: int | None,
    top: Sequence[TokenLogprob],
    decode: Callable[[int], str | None],
) -> dict[int, Logprob]:
    best = {one.token_id: Logprob(one.logprob, at, decode(one.token_id)) for at, one in enumerate(top, 1)}
    own = best.pop(token, None) or Logprob(logprob, rank, decode(token))
    return {token: own, **best}
