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
from hearth.core.errors import BadPrompt, BadSampling

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
    suffix: str | None = Field(None, description="Not supported; must be empty.")
    best_of: int | None = Field(None, ge=1, le=128, description="Not supported; must be `n`.")

    def answer_spec(self, dialect: Dialect) -> AnswerSpec:
        self._check()
        sampling = self.sampling(self.logprobs)
        if self.echo and self.logprobs is not None:
            num_top = max(self.logprobs, self.prompt_logprobs or 0)
            sampling = replace(sampling, prompt_logprobs=num_top)
        guide = self.guide()
        prompts = self._prompts()
        if len(prompts) * self.num_answers > MAX_CHOICES:
            raise BadPrompt(
                f"`prompt` times `n` must be at most {MAX_CHOICES}, given: {len(prompts)} times "
                f"{self.num_answers}; send several requests"
            )
        return AnswerSpec(
            dialect=dialect,
            requests=self.requests(prompts, sampling, guide),
            num_answers=self.num_answers,
            is_stream=bool(self.stream),
            is_echo=bool(self.echo),
            ignored_fields=self.ignored_fields,
        )

    def _check(self) -> None:
        if self.suffix:
            raise BadSampling("`suffix` is not supported; put it into the prompt, or leave it out")
        if self.best_of is not None and self.best_of != self.num_answers:
            raise BadSampling(
                f"`best_of` must be equal to `n`: {self.num_answers}, given: {self.best_of}; leave it out"
            )
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
