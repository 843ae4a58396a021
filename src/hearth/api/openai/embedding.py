"""Embeddings in OpenAI's API: the body and the dialect."""

from __future__ import annotations

from array import array
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import msgspec
from pydantic import Field

from hearth.api import unread_fields
from hearth.api.answer import SSE_TYPE, WAITING
from hearth.api.body import ModelBody, Text
from hearth.api.dialect import AnswerEvents, AnswerSpec, Choice, Dialect, TokenUsage
from hearth.api.openai.completion import Tokens
from hearth.api.unread_fields import UnsupportedField
from hearth.control.requests.generation import AnswerStream, GenerationRequest
from hearth.core.types import Pooling, SamplingParams

MAX_INPUTS = 2048


class EmbeddingBody(ModelBody):
    """Texts to embed: the hidden states after the last norm of the model, pooled."""

    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.EMBEDDING

    input: (
        Text
        | Tokens
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
        | Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    ) = Field(description=f"A text, a list of token ids, or a list of up to {MAX_INPUTS} of either.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="`base64`: little-endian float32 numbers."
    )
    pooling: Literal["last", "mean"] | None = Field(
        None, description="The hidden state of the last token, as in vLLM, or the mean over all."
    )

    def answer_spec(self, dialect: Dialect) -> AnswerSpec:
        sampling = SamplingParams(temperature=0.0, max_tokens=0)
        keep_alive_s, pooling = self.keep_alive_s(), Pooling(self.pooling or Pooling.LAST)
        return AnswerSpec(
            dialect=dialect,
            requests=[
                GenerationRequest(
                    self.model,
                    one,
                    sampling,
                    keep_alive_s=keep_alive_s,
                    first_token_s=self.first_token_target,
                    is_batch=self.is_batch,
                    pooling=pooling,
                )
                for one in self._inputs()
            ],
            num_answers=1,
            is_stream=False,
            ignored_fields=self.ignored_fields,
        )

    def _inputs(self) -> list[str | list[int]]:
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [[token for token in self.input if isinstance(token, int)]]
        return [one for one in self.input if not isinstance(one, int)]


@dataclass(frozen=True, slots=True)
class EmbeddingDialect:
    is_base64: bool

    stream_type = SSE_TYPE
    waiting = WAITING

    def whole(self, spec: AnswerSpec, choices: Sequence[Choice], usage: TokenUsage) -> object:
        spell = base64_of if self.is_base64 else json_of
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": partial(spell, choice)}
                for index, choice in enumerate(choices)
            ],
            "model": choices[0].stream.model,
            "usage": {"prompt_tokens": usage.num_prompt_tokens, "total_tokens": usage.num_prompt_tokens},
        }

    def events(self, spec: AnswerSpec, streams: Sequence[AnswerStream]) -> AnswerEvents:
        raise AssertionError("embeddings come in one")


def base64_of(choice: Choice) -> str:
    return b64encode(_vector_of(choice)).decode()


def json_of(choice: Choice) -> msgspec.Raw:
    """Return an embedding as JSON: the numbers of all at once would take eight times the memory."""
    floats = array("f")
    floats.frombytes(_vector_of(choice))
    return msgspec.Raw(msgspec.json.encode(floats.tolist()))


def _vector_of(choice: Choice) -> bytes:
    embedding = None if choice.reading is None else choice.reading.embedding
    assert embedding is not None, f"{choice.stream.request_id} has no embedding"
    return embedding
