"""The fields that the bodies of chat and plain completions share, with types and ranges of OpenAI's API.

Fields that nobody here knows are accepted unless they would change the answer: see `unread_fields.py`. Every
list stops at its first fault: to find all of them in a large body would take the event loop seconds. Starts
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from itertools import islice
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from hearth.api.unread_fields import (
    MAX_IGNORED,
    REFUSED_FIELD,
    RESPONSE_FORMAT,
    STRUCTURED_OUTPUTS,
    UnsupportedField,
    refused,
)
from hearth.core.config import PACE_LIMITS, TARGET_LIMITS, parse_duration
from hearth.core.errors import BadGuide, BadSampling, ConfigError
from hearth.core.types import MAX_LOGPROBS, MAX_PENALTY, MIN_PENALTY, GuideSpec, SamplingParams
from hearth.text.grammar import choice_grammar

#: The largest integer that fits the wire and the device.
MAX_INT = 2**31 - 1
#: The most tokens whose logits one request may change.
MAX_BIASES = 1024
#: The most stop strings of one request, and the most characters of all of them together.
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
#: The most texts of which an output may be one, and the most characters of each.
MAX_CHOICES, MAX_CHOICE_CHARS = 1024, 1024
#: The most characters of a regular expression or grammar that an output is held to.
MAX_GRAMMAR_CHARS = 16_384


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("text must be what UTF-8 can hold; send no lone surrogates") from error
    return text


def _few_biases(bias_by_token: object) -> object:
    """Refuse too many biases before any is looked at: the check of a mapping goes on after a fault."""
    if isinstance(bias_by_token, dict) and len(bias_by_token) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens can have one, given: {len(bias_by_token)}")
    return bias_by_token


def _few_stops(stops: object) -> object:
    """Refuse too much to look for; each stop string alone is checked as a field is."""
    if isinstance(stops, list):
        if len(stops) > MAX_STOPS:
            raise ValueError(
                f"at most {MAX_STOPS} stop strings are looked for, given: {len(stops)}; send fewer"
            )
        num_chars = sum(len(stop) for stop in stops if isinstance(stop, str))
        if num_chars > MAX_STOP_CHARS:
            raise ValueError(
                f"all stop strings together may have {MAX_STOP_CHARS} characters, given: {num_chars}; "
                "shorten them or send fewer"
            )
    return stops


Text = Annotated[str, AfterValidator(_whole_characters)]
Stop = Annotated[Text, Field(max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
GuideJson = dict[str, object] | Annotated[Text, Field(min_length=1)]
GuideText = Annotated[Text, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
GuideChoice = Annotated[
    list[Annotated[Text, Field(max_length=MAX_CHOICE_CHARS)]],
    Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES),
]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
ModelName = Annotated[Text, Field(min_length=1, max_length=256)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
TopP = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1, le=MAX_INT)]
RepetitionPenalty = Annotated[float, Field(ge=MIN_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_INT)]
StopList = Annotated[list[Stop], Field(fail_fast=True), BeforeValidator(_few_stops)]
Stops = Annotated[Stop | Annotated[list[Stop], Field(fail_fast=True)] | None, BeforeValidator(_few_stops)]


class Strict(BaseModel):
    """A part of a body: no text where a number is due; unknown fields are let through, save `unsupported`."""

    model_config = ConfigDict(strict=True, extra="allow")
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = {}

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        if not self.model_extra:
            return self
        if (name := refused(self.model_extra, self.unsupported, self.value_of)) is not None:
            instead = self.unsupported[name].instead
            raise _refusal(name, f"is not supported, and it would change the answer; {instead}")
        return self

    def value_of(self, name: str) -> object:
        """Return what a field that is read has the request done; None: nothing, or no such field is read."""
        return getattr(self, name, None)

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        """The fields that nothing reads: one more than are told at most, if there are that many."""
        return tuple(islice(self._ignored_fields(), MAX_IGNORED + 1))

    def _ignored_fields(self) -> Iterator[str]:
        """Yield the names of all fields that nothing reads, those of parts included."""
        yield from self.ignored("")

    def ignored(self, prefix: str) -> Iterator[str]:
        """Yield the names of the fields that nothing reads, behind `prefix`; null asks for nothing."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in self.unsupported:
                yield prefix + name


class OwnBody(Strict):
    """A body of Hearth's own routes: no client sends fields of another server there, so all must be known."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, body: object) -> object:
        unknown = [] if not isinstance(body, dict) else sorted(body.keys() - cls.model_fields.keys())
        if unknown:
            nearest = get_close_matches(unknown[0][:128], cls.model_fields, n=1)
            known = ", ".join(f"`{name}`" for name in cls.model_fields)
            raise _refusal(
                unknown[0],
                "is not known; " + (f"did you mean `{nearest[0]}`?" if nearest else f"known are: {known}"),
            )
        return body


def _refusal(field: str, reason: str) -> PydanticCustomError:
    """Return pydantic's error for a field; pydantic itself cannot hold half characters."""
    whole = field.encode(errors="replace").decode()
    return PydanticCustomError(REFUSED_FIELD, "{reason}", {"field": whole, "reason": reason})


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="Send a last chunk that counts the tokens.")


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    strict: bool | None = Field(None, description="Accepted; the schema is always kept.")
    schema_: dict[str, object] = Field(alias="schema", description="The schema that the output is held to.")


class ResponseFormat(Strict):
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = RESPONSE_FORMAT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """A form of the output, as vLLM has it: one of these."""

    unsupported: ClassVar[Mapping[str, UnsupportedField]] = STRUCTURED_OUTPUTS

    json_: GuideJson | None = Field(None, alias="json", description="A JSON schema.")
    regex: GuideText | None = Field(None, description="A regular expression that matches all of the output.")
    choice: GuideChoice | None = Field(None, description="Texts of which the output is one.")
    grammar: GuideText | None = Field(None, description="A grammar, in Lark or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")


class ModelBody(Strict):
    """The fields of all that is asked of a model: of which one, and how urgently."""

    model: ModelName = Field(description="The name or an alias of a deployed model.")
    user: str | None = Field(None, description="Accepted and not used.")
    keep_alive: float | Text | None = Field(
        None, description='How long the model stays warm after this: seconds, "5m", 0, or -1 for ever.'
    )
    first_token_target: float | None = Field(
        None,
        ge=TARGET_LIMITS.low,
        le=TARGET_LIMITS.high,
        allow_inf_nan=False,
        description="Seconds until the first token is due, where models have to take turns.",
    )
    service_tier: Literal["auto", "default", "flex", "batch", "scale", "priority"] | None = Field(
        None,
        description="`flex` or `batch`: nobody reads along, so the request has no pace and gives way to "
        "others for its first 30 s. All others: as the key's class of service has it.",
    )

    @property
    def is_batch(self) -> bool:
        return self.service_tier in ("flex", "batch")

    def keep_alive_s(self) -> float | None:
        if self.keep_alive is None:
            return None
        try:
            return parse_duration(self.keep_alive)
        except (ConfigError, OverflowError) as error:
            raise BadSampling(f"`keep_alive`: {error}") from error


class GenerationBody(ModelBody):
    """The fields of every endpoint that generates: how to sample."""

    stream: bool | None = Field(None, description="Send the answer in pieces, as server-sent events.")
    temperature: Temperature | None = Field(None, description="0 is greedy.")
    top_p: TopP | None = None
    stop: Stops = Field(
        None,
        description=f"Up to {MAX_STOPS} texts at which the answer ends; {MAX_STOP_CHARS} characters in all.",
    )
    seed: Seed | None = Field(None, description="The same seed and parameters give the same answer.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None,
        BeforeValidator(_few_biases),
    ] = Field(None, description="What to add to the logits of up to 1024 tokens, by token id.")
    pace: float | None = Field(
        None,
        ge=PACE_LIMITS.low,
        le=PACE_LIMITS.high,
        allow_inf_nan=False,
        description="Tokens per second that are due after the first, where models have to take turns; what "
        "comes sooner is slack. 0: nobody reads along, so others may go first.",
    )
    # As vLLM has them.
    top_k: TopK | None = None
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=1024)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None


class Body(GenerationBody):
    """The fields of chat and of plain completions alone."""

    default_max_tokens: ClassVar[int | None] = None  #: None: to the end of the context

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128, description="How many answers to generate.")
    max_tokens: MaxTokens | None = Field(
        None,
        description="The most tokens to generate; without, 16 in plain completions, in chat all that fit.",
    )
    max_completion_tokens: MaxTokens | None = Field(
        None, description="The newer name of `max_tokens`, and stronger where both are set."
    )
    response_format: ResponseFormat | None = Field(None, description="What the output is held to.")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Tell the logprob of each token of the prompt, and of so many of the likeliest ones.",
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="What the output is held to.")
    guided_json: GuideJson | None = Field(None, description="`structured_outputs.json`, by its older name.")
    guided_regex: GuideText | None = Field(None, description="Likewise for `regex`.")
    guided_choice: GuideChoice | None = Field(None, description="Likewise for `choice`.")
    guided_grammar: GuideText | None = Field(None, description="Likewise for `grammar`.")

    def sampling(self, logprobs: int | None) -> SamplingParams:
        if self.stream and self.prompt_logprobs is not None:
            raise BadSampling("`prompt_logprobs` come in one, not in a stream; leave out one or the other")
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **given, max_tokens=self.token_limit, logprobs=logprobs, logit_bias=_bias(self.logit_bias)
        )

    @property
    def token_limit(self) -> int | None:
        """The most tokens that an answer may have; None: as many as the context holds."""
        limits = (self.max_completion_tokens, self.max_tokens, self.default_max_tokens)
        return next((limit for limit in limits if limit is not None), None)

    def value_of(self, name: str) -> object:
        return self.token_limit if name == "max_tokens" else super().value_of(name)

    @property
    def num_answers(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def _ignored_fields(self) -> Iterator[str]:
        yield from super()._ignored_fields()
        if self.stream_options is not None:
            yield from self.stream_options.ignored("stream_options.")
        if self.response_format is not None:
            yield from self.response_format.ignored("response_format.")
            if self.response_format.json_schema is not None:
                yield from self.response_format.json_schema.ignored("response_format.json_schema.")
        if self.structured_outputs is not None:
            yield from self.structured_outputs.ignored("structured_outputs.")

    def guide(self) -> GuideSpec | None:
        """Return the form that the output is held to; None: any.

        Raises:
            BadSampling: several forms are asked for, or `response_format` contradicts itself.
        """
        guides = _guides(
            *("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        )
        if (newer := self.structured_outputs) is not None:
            guides |= _guides(
                *("structured_outputs.", newer.json_, newer.regex, newer.choice, newer.grammar),
                is_object=newer.json_object,
            )
        if (by_format := self._format_guide()) is not None:
            guides["response_format"] = by_format
        if len(guides) > 1:
            raise BadSampling(
                f"an output can be held to one form, given: {', '.join(f'`{name}`' for name in guides)}; "
                "leave all but one out"
            )
        return next(iter(guides.values()), None)

    def _format_guide(self) -> GuideSpec | None:
        match self.response_format:
            case ResponseFormat(type="text" | "json_object", json_schema=JsonSchema()):
                raise BadSampling(
                    f"`response_format` of type `{self.response_format.type}` takes no `json_schema`; use "
                    "the type `json_schema`, or leave the schema out"
                )
            case None | ResponseFormat(type="text"):
                return None
            case ResponseFormat(type="json_object"):
                return GuideSpec("json_object")
            case ResponseFormat(json_schema=None):
                raise BadSampling(
                    "`response_format` of type `json_schema` needs `json_schema` with a `schema`, given: none"
                )
            case ResponseFormat(json_schema=JsonSchema(schema_=schema)):
                return GuideSpec("json_schema", _schema_text(schema))
        raise AssertionError(f"unknown response format: {self.response_format!r}")


#: Fields that `SamplingParams` spells alike.
_SAMPLING = (
    *("temperature", "top_p", "stop", "seed", "presence_penalty", "frequency_penalty", "top_k", "min_p"),
    *("repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output"),
    *("skip_special_tokens", "allowed_token_ids", "prompt_logprobs"),
)


def seeds(sampling: SamplingParams, num_answers: int) -> list[SamplingParams]:
    """Return the parameters of each answer: one seed for all would give the same answer to each."""
    if sampling.seed is None:
        return [sampling] * num_answers
    seed = sampling.seed
    wrapped = [(seed + index + 2**63) % 2**64 - 2**63 for index in range(num_answers)]
    return [replace(sampling, seed=one) for one in wrapped]


def _guides(
    prefix: str,
    schema: dict[str, object] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
    is_object: bool | None = False,
) -> dict[str, GuideSpec]:
    """Return the forms that fields of vLLM ask for, by name behind `prefix`."""
    guides = {}
    if schema is not None:
        guides[f"{prefix}json"] = GuideSpec("json_schema", _schema_text(schema))
    if regex is not None:
        guides[f"{prefix}regex"] = GuideSpec("regex", regex)
    if choice is not None:
        guides[f"{prefix}choice"] = GuideSpec("lark", choice_grammar(choice))
    if grammar is not None:
        guides[f"{prefix}grammar"] = GuideSpec("grammar", grammar)
    if is_object:
        guides[f"{prefix}json_object"] = GuideSpec("json_object")
    return guides


def _schema_text(schema: dict[str, object] | str) -> str:
    if isinstance(schema, str):
        return schema
    try:
        return json.dumps(schema)
    except RecursionError:
        raise BadGuide("the JSON schema is nested too deep to guide an output; flatten it") from None


def _bias(bias_by_token: dict[str, float] | None) -> dict[int, float]:
    bias: dict[int, float] = {}
    for token, value in (bias_by_token or {}).items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10 and int(token) <= MAX_INT):
            raise BadSampling(f"the keys of `logit_bias` are token ids, given: {token!r:.80}")
        bias[int(token)] = value
    return bias
