"""Inputs of `LLM`, with vLLM's names: prompts, sampling parameters and adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NotRequired, TypedDict, TypeVar

from hearth.core.errors import BadPrompt, BadSampling
from hearth.core.types import GuideSpec, SamplingParams, seed_of_answer
from hearth.text.grammar import guides_of


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]  #: returned with the output, and not read otherwise


T = TypeVar("T")
Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True, slots=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int = 0  #: unused
    lora_path: str = ""  #: read with the first request that has this name


Adapter = str | LoRARequest | None  #: a name alone is one that the model has, from `adapters` or a request


class RequestOutputKind(Enum):
    """The content of the outputs of `AsyncLLM.generate`."""

    CUMULATIVE = 0  #: the whole answer so far
    DELTA = 1  #: what is new
    FINAL_ONLY = 2  #: the whole answer, once


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """One constraint for the output."""

    json: str | Mapping[str, object] | None = field(default=None, hash=False)  #: a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = field(default=None, hash=False)
    grammar: str | None = None  #: Lark or GBNF
    json_object: bool | None = None  #: any JSON object

    def __post_init__(self) -> None:
        self.guide()

    def guide(self) -> GuideSpec:
        guides = guides_of(
            schema=self.json,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            is_object=self.json_object,
        )
        if len(guides) != 1:
            given = " and ".join(f"`{name}`" for name in guides) or "none"
            raise BadSampling(f"`StructuredOutputsParams` takes exactly one constraint, given: {given}")
        return next(iter(guides.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestParams(SamplingParams):
    """The sampling parameters of all answers to a prompt; `hearth.SamplingParams`."""

    n: int = 1  #: answers; with a seed, each has one of its own
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  #: of `AsyncLLM`

    def __post_init__(self) -> None:
        SamplingParams.__post_init__(self)  # `super()` does not work in a dataclass with slots
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise BadSampling(f"`n` must be a whole number of at least 1, given: {self.n!r}")

    def of_answer(self, index: int) -> SamplingParams:
        if index == 0:
            return self
        seed = None if self.seed is None else seed_of_answer(self.seed, index)
        return replace(self, seed=seed, prompt_logprobs=None)


# Errors have the name that callers know.
RequestParams.__init__.__qualname__ = "SamplingParams.__init__"


def sampling_of_answers(params: SamplingParams) -> list[SamplingParams]:
    """Return the parameters of each answer to a prompt."""
    return [params.of_answer(at) for at in range(params.n)] if isinstance(params, RequestParams) else [params]


def output_kind_of(params: SamplingParams) -> RequestOutputKind:
    return params.output_kind if isinstance(params, RequestParams) else RequestOutputKind.CUMULATIVE


def guide_of(params: SamplingParams) -> GuideSpec | None:
    outputs = params.structured_outputs if isinstance(params, RequestParams) else None
    return None if outputs is None else outputs.guide()


def text_and_tokens(prompt: Prompt) -> tuple[str | None, Sequence[int] | None]:
    """Return the text and token ids of a prompt, as far as given. Raises BadPrompt."""
    if isinstance(prompt, str):
        return prompt, None
    text: str | None = None
    token_ids: object = prompt
    if isinstance(prompt, Mapping):
        if not prompt or prompt.keys() - {"prompt", "prompt_token_ids"}:
            given = ", ".join(prompt) or "none"
            raise BadPrompt(f"a prompt as a dict has `prompt`, `prompt_token_ids` or both, given: {given}")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if token_ids is None and isinstance(text, str):
            return text, None
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes):
        kind = type(token_ids).__name__
        raise BadPrompt(f"a prompt must be text or a list of token ids, given: {kind}")
    return text, token_ids


def as_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]  # type: ignore[list-item] # one prompt, or an invalid one
    items = list(prompts)
    token_ids = [item for item in items if isinstance(item, int)]
    many = [item for item in items if not isinstance(item, int)]
    if token_ids and many:
        raise BadPrompt(
            f"a list must have token ids or prompts, not both, given: {len(token_ids)} and {len(many)} of "
            "them; put the token ids of one prompt into a list of their own"
        )
    return [token_ids] if token_ids else many


def adapters_for(given: Adapter | Sequence[Adapter], num_prompts: int) -> list[Adapter]:
    if isinstance(given, str):
        return [given] * num_prompts
    return one_for_each(given, num_prompts)


def one_for_each(given: T | Sequence[T], num_prompts: int) -> list[T]:
    if not isinstance(given, Sequence):
        return [given] * num_prompts
    if len(given) != num_prompts:
        raise BadSampling(
            f"{len(given)} sampling params or adapters for {num_prompts} prompts; pass one, or one for each"
        )
    return list(given)
