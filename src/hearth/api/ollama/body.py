"""The fields that the bodies of Ollama's chat and generate share, turned into those of the inner request.

What a client leaves out is as Ollama documents it, but for the penalty of repetition: Ollama's looks at the
last 64 tokens, and over all tokens its 1.1 would be another one. Generates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from hearth.api import unread_fields
from hearth.api.body import (
    MAX_INT,
    JsonSchema,
    ModelName,
    RepetitionPenalty,
    ResponseFormat,
    Seed,
    Stops,
    Strict,
    Temperature,
    Text,
    TopK,
    TopP,
)
from hearth.api.openai.chat import ParsedJson
from hearth.api.unread_fields import UnsupportedField
from hearth.core.config import parse_duration
from hearth.core.errors import BadSampling, ConfigError

#: Seeds, and limits of tokens, that mean none.
_NO_SEED, _NO_LIMIT = -1, (-1, -2)


class OllamaOptions(Strict):
    """How to sample. Those of loading a model are not read: Hearth sees to that by itself."""

    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.OLLAMA_OPTIONS

    num_predict: int | None = Field(
        None, ge=-2, le=MAX_INT, description="The most tokens to generate; below 0: all that fit."
    )
    temperature: Temperature | None = Field(None, description="0 is greedy; without, 0.8.")
    top_k: TopK | None = Field(None, description="Without, 40.")
    top_p: TopP | None = Field(None, description="Without, 0.9.")
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: Seed | None = None
    stop: Stops = None
    repeat_penalty: RepetitionPenalty | None = Field(None, description="Of all tokens so far.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)

    def fields(self) -> dict[str, object]:
        """Return the fields of the inner request. Raises BadSampling."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not all(stops or ()):
            raise BadSampling("`options.stop` holds an empty text; every one needs a character")
        if self.num_predict == 0:
            raise BadSampling("`options.num_predict` must be 1 at least, or -1 for all that fit, given: 0")
        return {
            "max_tokens": None if self.num_predict in _NO_LIMIT else self.num_predict,
            "temperature": 0.8 if self.temperature is None else self.temperature,
            "top_k": 40 if self.top_k is None else self.top_k,
            "top_p": 0.9 if self.top_p is None else self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed == _NO_SEED else self.seed,
            "stop": stops,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }


class OllamaBody(Strict):
    """A question to a model, and how it is to be answered."""

    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.OLLAMA

    model: ModelName = Field(description="The name or an alias of a deployed model, perhaps with `:latest`.")
    stream: bool | None = Field(None, description="Without: send the answer in pieces, a line of JSON each.")
    format: Literal["", "json"] | dict[str, ParsedJson] | None = Field(
        None, description="`json`, or the JSON schema that the output is held to."
    )
    options: OllamaOptions | None = None
    keep_alive: float | Text | None = Field(
        None, description='How long the model stays warm after this: seconds, "5m", 0, or -1 for ever.'
    )
    think: bool | Text | None = Field(
        None, description="False: the chat template's variable `enable_thinking`. Nothing else is supported."
    )

    @property
    def has_no_keep_alive(self) -> bool:
        """True if the model is not to stay: where nothing is asked of it, it is to leave."""
        if self.keep_alive is None:
            return False
        try:
            return parse_duration(self.keep_alive) == 0
        except (ConfigError, OverflowError) as error:
            raise BadSampling(f"`keep_alive`: {error}") from error

    def inner_fields(self) -> dict[str, object]:
        """Return the fields of the inner request that both of its kinds have.

        Raises:
            RequestError: the body contradicts itself or wants what is not supported.
        """
        if self.think:
            raise BadSampling(
                f"`think` must be false, given: {self.think!r:.80}; what a model thinks is part of its answer"
            )
        return {
            "model": self.model,
            "stream": self.stream is not False,
            "keep_alive": self.keep_alive,
            "response_format": self._response_format(),
            **(self.options or OllamaOptions.model_validate({})).fields(),
        }

    def _response_format(self) -> ResponseFormat | None:
        match self.format:
            case None | "":
                return None
            case "json":
                return ResponseFormat(type="json_object")
            case dict() as schema:
                held_to = JsonSchema.model_validate({"schema": schema})
                return ResponseFormat(type="json_schema", json_schema=held_to)

    def _ignored_fields(self) -> Iterator[str]:
        yield from super()._ignored_fields()
        if self.options is not None:
            yield from self.options.ignored("options.")
