"""The fields that the bodies of Ollama's chat and generate share.

Defaults are those of Ollama, except `repeat_penalty`: Ollama's 1.1 is for the last 64 tokens, not for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

import msgspec
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
from hearth.control.deploy.preset import Preset
from hearth.core.config import parse_duration
from hearth.core.errors import BadSampling, ConfigError

#: Values that mean no seed and no limit.
_NO_SEED, _NO_LIMIT = -1, (-1, -2)


#: The parameters whose defaults are not those of OpenAI's API.
DEFAULT_SAMPLING: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}


class OllamaOptions(Strict):
    """Sampling options; those for loading models are ignored."""

    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.OLLAMA_OPTIONS

    num_predict: int | None = Field(
        None, ge=-2, le=MAX_INT, description="Maximum tokens to generate; below 0: all that fit."
    )
    temperature: Temperature | None = Field(None, description="0: greedy; default: 0.8.")
    top_k: TopK | None = Field(None, description="Default: 40.")
    top_p: TopP | None = Field(None, description="Default: 0.9.")
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: Seed | None = None
    stop: Stops = None
    repeat_penalty: RepetitionPenalty | None = Field(None, description="Over all tokens so far.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)

    def fields(self) -> dict[str, object]:
        """Return the sampling parameters that are given. Raises BadSampling."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not all(stops or ()):
            raise BadSampling("`options.stop` contains an empty text; remove it")
        if self.num_predict == 0:
            raise BadSampling("`options.num_predict` must be at least 1, or -1 for all that fit, given: 0")
        fields = {
            "max_tokens": None if self.num_predict in _NO_LIMIT else self.num_predict,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed == _NO_SEED else self.seed,
            "stop": stops,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        return {name: value for name, value in fields.items() if value is not None}


def preset_of(options: OllamaOptions, system: str | None, template: str | None) -> Preset:
    texts = {"system": system or None, "template": template or None}
    return msgspec.convert(options.fields() | texts, Preset)


class OllamaBody(Strict):
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.OLLAMA

    model: ModelName = Field(description="Name or alias of a deployed model; `:latest` is optional.")
    stream: bool | None = Field(None, description="Stream lines of JSON; default: true.")
    format: Literal["", "json"] | dict[str, ParsedJson] | None = Field(
        None, description="`json`, or a JSON schema of the output."
    )
    options: OllamaOptions | None = None
    keep_alive: float | Text | None = Field(
        None, description='How long the model stays loaded when idle: seconds, "5m", 0, or -1 for forever.'
    )
    think: bool | Text | None = Field(
        None, description="Switch thinking on or off, or `low`, `medium` or `high` for its effort."
    )

    @property
    def has_no_keep_alive(self) -> bool:
        """True if `keep_alive` is 0, which without a prompt unloads the model."""
        if self.keep_alive is None:
            return False
        try:
            return parse_duration(self.keep_alive) == 0
        except (ConfigError, OverflowError) as error:
            raise BadSampling(f"`keep_alive`: {error}") from error

    def inner_fields(self) -> dict[str, object]:
        return {
            "model": self.model,
            "stream": self.stream is not False,
            "keep_alive": self.keep_alive,
            "response_format": self._response_format(),
            **(self.options or OllamaOptions.model_validate({})).fields(),
        }

    def thinking_fields(self) -> dict[str, object]:
        effort = self.think if isinstance(self.think, str) else None
        return {
            "enable_thinking": None if self.think is None else bool(self.think),
            "reasoning_effort": effort,
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
