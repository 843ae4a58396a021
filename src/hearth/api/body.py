"""The fields that all bodies share, with the types and ranges of OpenAI's API.

Unknown fields are accepted unless they would change the answer: see `unread_fields.py`. Validation of a list
stops at its first fault: finding all faults of a large body could take seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from hearth.control.requests.generation import GenerationRequest, Prompt
from hearth.core.config import PACE_LIMITS, TARGET_LIMITS, parse_duration
from hearth.core.errors import BadSampling, ConfigError
from hearth.core.types import (
    MAX_LOGPROBS,
    MAX_PENALTY,
    MIN_PENALTY,
    GuideSpec,
    SamplingParams,
    seed_of_answer,
)
from hearth.text.grammar import guides_of, schema_text

#: The largest integer on the wire and on the device.
MAX_INT = 2**31 - 1
MAX_BIASES = 1024
#: Stop strings of one request, and their characters in total.
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
#: Alternatives of a guided choice, and characters of each.
MAX_CHOICES, MAX_CHOICE_CHARS = 1024, 1024
#: Characters of a regular expression or grammar.
MAX_GRAMMAR_CHARS = 16_384


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("text must be valid Unicode; send no lone surrogates") from error
    return text


def _few_biases(bias_by_token: object) -> object:
    """Check the number first: pydantic validates a whole mapping even after a fault."""
    if isinstance(bias_by_token, dict) and len(bias_by_token) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens can have a bias, given: {len(bias_by_token)}")
    return bias_by_token


def _few_stops(stops: object) -> object:
    if isinstance(stops, list):
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings are allowed, given: {len(stops)}; send fewer")
        num_chars = sum(len(stop) for stop in stops if isinstance(stop, str))
        if num_chars > MAX_STOP_CHARS:
            raise ValueError(
                f"stop strings may have {MAX_STOP_CHARS} characters in total, given: {num_chars}; "
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
    """A part of a body: strict types; unknown fields are accepted, except those of `unsupported`."""

    model_config = ConfigDict(strict=True, extra="allow")
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = {}

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        if not self.model_extra:
            return self
        if (name := refused(self.model_extra, self.unsupported, self.value_of)) is not None:
            instead = self.unsupported[name].instead
            raise _refusal(name, f"is not supported and would change the answer; {instead}")
        return self

    def value_of(self, name: str) -> object:
        return getattr(self, name, None)

    @property
    def ignored_fields(self) -> tuple[str, ...]:
        return tuple(islice(self._ignored_fields(), MAX_IGNORED + 1))

    def _ignored_fields(self) -> Iterator[str]:
        yield from self.ignored("")

    def ignored(self, prefix: str) -> Iterator[str]:
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in self.unsupported:
                yield prefix + name


class OwnBody(Strict):
    """A body of Hearth's own routes, where unknown fields are errors."""

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
                "is unknown; " + (f"did you mean `{nearest[0]}`?" if nearest else f"valid: {known}"),
            )
        return body


def _refusal(field: str, reason: str) -> PydanticCustomError:
    whole = field.encode(errors="replace").decode()
    return PydanticCustomError(REFUSED_FIELD, "{reason}", {"field": whole, "reason": reason})


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="Send a last chunk with the token counts.")


class JsonSchema(Strict):
    name: str | None = None
    description: str | None = None
    strict: bool | None = Field(None, description="Accepted; the schema is always enforced.")
    schema_: dict[str, object] = Field(alias="schema", description="The JSON schema of the output.")


class ResponseFormat(Strict):
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = RESPONSE_FORMAT

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """The format of the output, as in vLLM: one of these."""

    unsupported: ClassVar[Mapping[str, UnsupportedField]] = STRUCTURED_OUTPUTS

    json_: GuideJson | None = Field(None, alias="json", description="A JSON schema.")
    regex: GuideText | None = Field(None, description="A regular expression for the whole output.")
    choice: GuideChoice | None = Field(None, description="The output is one of these texts.")
    grammar: GuideText | None = Field(None, description="A grammar, in Lark or GBNF.")
    json_object: bool | None = Field(None, description="Any JSON object.")


class ModelBody(Strict):
    """The fields of every request to a model."""

    model: ModelName = Field(description="The name or an alias of a deployed model.")
    user: str | None = Field(None, description="Accepted and not used.")
    keep_alive: float | Text | None = Field(
        None, description='How long the model stays loaded when idle: seconds, "5m", 0, or -1 for forever.'
    )
    first_token_target: float | None = Field(
        None,
        ge=TARGET_LIMITS.low,
        le=TARGET_LIMITS.high,
        allow_inf_nan=False,
        description="Target for the time to first token in seconds, when models take turns.",
    )
    service_tier: Literal["auto", "default", "flex", "batch", "scale", "priority"] | None = Field(
        None,
        description="`flex` or `batch`: not interactive, so the request has no pace and lower priority for "
        "its first 30 s. Others: by the service class of the key.",
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
    """The sampling fields of every endpoint that generates."""

    stream: bool | None = Field(None, description="Stream the answer as server-sent events.")
    temperature: Temperature | None = Field(None, description="0: greedy.")
    top_p: TopP | None = None
    stop: Stops = Field(
        None,
        description=f"Up to {MAX_STOPS} texts that end the answer, {MAX_STOP_CHARS} characters in total.",
    )
    seed: Seed | None = Field(None, description="The same seed and parameters give the same answer.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None,
        BeforeValidator(_few_biases),
    ] = Field(None, description="Added to the logits of up to 1024 tokens, by token id.")
    pace: float | None = Field(
        None,
        ge=PACE_LIMITS.low,
        le=PACE_LIMITS.high,
        allow_inf_nan=False,
        description="Target for tokens per second after the first, when models take turns. 0: not "
        "interactive, lower priority.",
    )
    # As in vLLM.
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
    """The fields of chat and plain completions."""

    default_max_tokens: ClassVar[int | None] = None  #: None: until the context is full
    default_sampling: ClassVar[
        Mapping[str, float]
    ] = {}  #: what differs from the defaults of `SamplingParams`

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=128, description="Number of answers.")
    max_tokens: MaxTokens | None = Field(
        None,
        description="Maximum tokens to generate; default: 16 in plain completions, all that fit in chat.",
    )
    max_completion_tokens: MaxTokens | None = Field(
        None, description="The newer name of `max_tokens`; wins if both are set."
    )
    response_format: ResponseFormat | None = Field(None, description="The format of the output.")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_LOGPROBS,
        description="Return the logprob of each prompt token, and this many of the likeliest tokens.",
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="The format of the output.")
    guided_json: GuideJson | None = Field(None, description="The older name of `structured_outputs.json`.")
    guided_regex: GuideText | None = Field(None, description="The older name of `structured_outputs.regex`.")
    guided_choice: GuideChoice | None = Field(
        None, description="The older name of `structured_outputs.choice`."
    )
    guided_grammar: GuideText | None = Field(
        None, description="The older name of `structured_outputs.grammar`."
    )

    def sampling(self, logprobs: int | None) -> SamplingParams:
        if self.stream and self.prompt_logprobs is not None:
            raise BadSampling(
                "`prompt_logprobs` cannot be streamed; remove one of `stream` and `prompt_logprobs`"
            )
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **{**self.default_sampling, **given},
            max_tokens=self.token_limit,
            logprobs=logprobs,
            logit_bias=_bias(self.logit_bias),
        )

    def lacking(self, sampling: Mapping[str, object]) -> dict[str, object]:
        """Return those of `sampling` that the body does not set."""
        given = [name for name in sampling if getattr(self, name) is not None]
        given += ["max_tokens"] if self.max_completion_tokens is not None else []
        return {name: value for name, value in sampling.items() if name not in given}

    @property
    def token_limit(self) -> int | None:
        """None: until the context is full."""
        limits = (self.max_completion_tokens, self.max_tokens, self.default_max_tokens)
        return next((limit for limit in limits if limit is not None), None)

    def requests(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        guide: GuideSpec | None,
    ) -> list[GenerationRequest]:
        """Return a request per answer, those of a prompt together. Each has a seed of its own."""
        keep_alive_s = self.keep_alive_s()
        params = [sampling] * self.num_answers
        if sampling.seed is not None:
            seeds = (seed_of_answer(sampling.seed, index) for index in range(self.num_answers))
            params = [replace(sampling, seed=seed) for seed in seeds]
        return [
            GenerationRequest(
                self.model,
                prompt,
                one,
                guide,
                keep_alive_s=keep_alive_s,
                tokens_per_s=self.pace,
                first_token_s=self.first_token_target,
                is_batch=self.is_batch,
            )
            for prompt in prompts
            for one in params
        ]

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
        """None: any format. Raises BadSampling if several are given, or they contradict each other."""
        older = guides_of(
            schema=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
        )
        guides = {f"guided_{name}": guide for name, guide in older.items()}
        if (given := self.structured_outputs) is not None:
            newer = guides_of(
                schema=given.json_,
                regex=given.regex,
                choice=given.choice,
                grammar=given.grammar,
                is_object=given.json_object,
            )
            guides |= {f"structured_outputs.{name}": guide for name, guide in newer.items()}
        if (by_format := self._format_guide()) is not None:
            guides["response_format"] = by_format
        if len(guides) > 1:
            raise BadSampling(
                f"an output can have one format, given: {', '.join(f'`{name}`' for name in guides)}; "
                "remove all but one"
            )
        return next(iter(guides.values()), None)

    def _format_guide(self) -> GuideSpec | None:
        match self.response_format:
            case ResponseFormat(type="text" | "json_object", json_schema=JsonSchema()):
                raise BadSampling(
                    f"`response_format` of type `{self.response_format.type}` takes no `json_schema`; use "
                    "the type `json_schema`, or remove the schema"
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
                return GuideSpec("json_schema", schema_text(schema))
        raise AssertionError(f"unknown response format: {self.response_format!r}")


#: Fields of the same name in `SamplingParams`.
_SAMPLING = (
    "temperature",
    "top_p",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "allowed_token_ids",
    "prompt_logprobs",
)


def _bias(bias_by_token: dict[str, float] | None) -> dict[int, float]:
    bias: dict[int, float] = {}
    for token, value in (bias_by_token or {}).items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10 and int(token) <= MAX_INT):
            raise BadSampling(f"the keys of `logit_bias` must be token ids, given: {token!r:.80}")
        bias[int(token)] = value
    return bias
