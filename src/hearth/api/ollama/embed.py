"""POST /api/embed and its older form: bodies and dialects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from pydantic import Field

from hearth.api import unread_fields
from hearth.api.answer import NDJSON_TYPE
from hearth.api.body import ModelName, Strict, Text
from hearth.api.dialect import AnswerEvents, AnswerSpec, Choice, TokenUsage
from hearth.api.ollama.dialect import durations
from hearth.api.openai.embedding import MAX_INPUTS, EmbeddingBody, json_of
from hearth.api.unread_fields import UnsupportedField
from hearth.control.observe.views import Explanation
from hearth.control.requests.generation import AnswerStream


class EmbedBody(Strict):
    """Without texts, it only checks that the model is deployed."""

    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.OLLAMA_EMBED

    model: ModelName = Field(description="The name or an alias of a deployed model, perhaps with `:latest`.")
    input: Text | Annotated[list[Text], Field(fail_fast=True, max_length=MAX_INPUTS)]
    keep_alive: float | Text | None = None
    truncate: bool | None = Field(None, description="Must not be needed: what is too long is refused.")
    options: dict[str, object] | None = Field(None, description="Accepted and not used.")

    def embedding_body(self) -> EmbeddingBody:
        fields = {"model": self.model, "input": self.input, "keep_alive": self.keep_alive}
        return EmbeddingBody.model_validate(fields)


class LegacyEmbedBody(Strict):
    """The body of /api/embeddings, which older clients send."""

    model: ModelName = Field(description="The name or an alias of a deployed model, perhaps with `:latest`.")
    prompt: Text
    keep_alive: float | Text | None = None
    options: dict[str, object] | None = Field(None, description="Accepted and not used.")

    def embedding_body(self) -> EmbeddingBody:
        fields = {"model": self.model, "input": self.prompt, "keep_alive": self.keep_alive}
        return EmbeddingBody.model_validate(fields)


@dataclass(frozen=True, slots=True)
class EmbedDialect:
    model: str  #: the name that the client sent
    explain: Callable[[str], Explanation | None]  #: by request id

    stream_type = NDJSON_TYPE
    waiting = b""

    def whole(self, spec: AnswerSpec, choices: Sequence[Choice], usage: TokenUsage) -> object:
        told: dict[str, object] = {
            "model": self.model,
            "embeddings": [partial(json_of, choice) for choice in choices],
        }
        if (explanation := self.explain(choices[-1].stream.request_id)) is not None:
            took = durations(explanation)
            told |= {name: took[name] for name in ("total_duration", "load_duration")}
        return told | {"prompt_eval_count": usage.num_prompt_tokens}

    def events(self, spec: AnswerSpec, streams: Sequence[AnswerStream]) -> AnswerEvents:
        raise AssertionError("embeddings come in one")


@dataclass(frozen=True, slots=True)
class LegacyEmbedDialect:
    stream_type = NDJSON_TYPE
    waiting = b""

    def whole(self, spec: AnswerSpec, choices: Sequence[Choice], usage: TokenUsage) -> object:
        (choice,) = choices
        return {"embedding": partial(json_of, choice)}

    def events(self, spec: AnswerSpec, streams: Sequence[AnswerStream]) -> AnswerEvents:
        raise AssertionError("embeddings come in one")
