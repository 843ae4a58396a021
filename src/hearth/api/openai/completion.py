"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from hearth.api import unread_fields
from hearth.api.body import MAX_INT, Body, Text, TokenId
from hearth.api.dialect import AnswerSpec, Dialect
from hearth.api.json_body import MAX_VALUES
from hearth.api.unread_fields import UnsupportedField
from hearth.control.requests.generation import InfillPrompt, Prompt
from hearth.core.errors import BadPrompt, BadSampling
from hearth.text.infill import MARKS, InfillMarks, infill_marks, stop_ids
from hearth.text.tokenizer import Tokenizer

#: Choices of one request, of all its prompts in total.
MAX_CHOICES = 256

Tokens = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_VALUES)]


class CompletionBody(Body):
    unsupported: ClassVar[Mapping[str, UnsupportedField]] = unread_fields.COMPLETION
    default_max_tokens: ClassVar[int | None] = 16  # as in OpenAI's API

    prompt: (
        Text
        | Tokens
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
        | Annotated[list[Tokens], Field(fail_fast=True, min_length=1, max_length=MAX_CHOICES)]
    ) = Field(description="A text, a list of token ids, or a list of either.")
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_INT,
        description="Maximum tokens to generate, default 16; 0, with `echo` or `prompt_logprobs`: only the "
        "prompt is computed.",
    )
    echo: bool | None = Field(None, description="Begin each answer, and its `logprobs`, with the prompt.")
    logprobs: int | None = Field(None, ge=0, le=5, description="Return this many of the likeliest tokens.")
    suffix: Text | None = Field(
        None, description="The text after the answer; for models whose tokenizer can fill in the middle."
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=128,
        description="Generate so many answers and return the `n` with the best mean logprob; default: `n`.",
    )

    def answer_spec(self, dialect: Dialect, tokenizer: Tokenizer) -> AnswerSpec:
        """Translate the body. Raises RequestError."""
        self._check()
        is_ranked = self.num_answers > self.num_returned
        sampling = self.sampling((self.logprobs or 0) if is_ranked else self.logprobs)
        if self.echo and self.logprobs is not None:
            num_top = max(self.logprobs, self.prompt_logprobs or 0)
            sampling = replace(sampling, prompt_logprobs=num_top)
        guide = self.guide()
        prompts: list[Prompt] = [*self._prompts()]
        if self.suffix:
            marks = _marks(tokenizer, self.model)
            prompts = [_infill(marks, prompt, self.suffix) for prompt in prompts]
            stops = (*sampling.stop_ids, *stop_ids(tokenizer, marks))
            sampling = replace(sampling, stop_token_ids=stops)
        if len(prompts) * self.num_answers > MAX_CHOICES:
            raise BadPrompt(
                f"`prompt` times `{'best_of' if is_ranked else 'n'}` must be at most {MAX_CHOICES}, given: "
                f"{len(prompts)} times {self.num_answers}; send several requests"
            )
        return AnswerSpec(
            dialect=dialect,
            requests=self.requests(prompts, sampling, guide),
            num_answers=self.num_answers,
            num_returned=self.num_returned,
            shows_logprobs=self.logprobs is not None,
            is_stream=bool(self.stream),
            is_echo=bool(self.echo),
            ignored_fields=self.ignored_fields,
        )

    @property
    def num_answers(self) -> int:
        return self.best_of or self.num_returned

    @property
    def num_returned(self) -> int:
        return self.n or 1

    def _check(self) -> None:
        if self.num_answers < self.num_returned:
            raise BadSampling(
                f"`best_of` must be at least `n`: {self.num_returned}, given: {self.best_of}; leave it out"
            )
        if self.num_answers > self.num_returned and self.stream:
            raise BadSampling(
                f"`best_of` above `n`: {self.num_returned} cannot be streamed, given: {self.best_of}; leave "
                "one of `best_of` and `stream` out"
            )
        if self.suffix and self.echo:
            raise BadSampling("`suffix` and `echo` cannot be combined; leave one of them out")
        if self.echo and self.logprobs is not None and self.stream:
            raise BadSampling(
                "`echo` with `logprobs` includes those of the prompt, which cannot be streamed; leave one of "
                "`echo`, `logprobs` and `stream` out"
            )
        if self.token_limit == 0:
            self._check_no_tokens()

    def _check_no_tokens(self) -> None:
        if not self.echo and self.prompt_logprobs is None:
            raise BadSampling(
                "`max_tokens` of 0 needs `echo` or `prompt_logprobs`; set one of them, or at least 1 token"
            )
        if self.stream:
            raise BadSampling("`max_tokens` of 0 leaves nothing to stream; leave `stream` out")

    def _prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


def _marks(tokenizer: Tokenizer, model: str) -> InfillMarks:
    if (marks := infill_marks(tokenizer)) is None:
        known = ", ".join(f"`{marks.prefix}`" for marks in MARKS)
        raise BadSampling(
            f"`suffix` needs a model that fills in the middle, but the tokenizer of `{model}` has no token "
            f"for it: {known}; leave `suffix` out, or use a code model"
        )
    return marks


def _infill(marks: InfillMarks, prompt: Prompt, suffix: str) -> InfillPrompt:
    if not isinstance(prompt, str):
        raise BadPrompt("`suffix` needs a `prompt` that is text, given: token ids; send the text")
    return InfillPrompt(marks, prompt, suffix)
