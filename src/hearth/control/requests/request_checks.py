"""Checks of requests that need no worker, made before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.control.deploy.catalog import CatalogEntry
from hearth.core.errors import BadPrompt, BadSampling, PromptTooLong
from hearth.core.types import SamplingParams

#: Characters per token and least limit beyond which text is refused without being tokenised.
MAX_TOKEN_CHARS, MIN_TEXT_CHARS = 64, 64 << 10
#: The most logprobs of a prompt, its own tokens' and others': they are some 50 MB of JSON.
MAX_PROMPT_LOGPROBS = 1 << 20


def max_chars(entry: CatalogEntry) -> int:
    return max(MIN_TEXT_CHARS, entry.max_context * MAX_TOKEN_CHARS)


def check_prompt(entry: CatalogEntry, prompt: tuple[int, ...], max_tokens: int | None) -> None:
    if not prompt:
        raise BadPrompt("prompt has 0 tokens, at least 1 is needed; send a text that is not empty")
    num_sampled = 0 if max_tokens == 0 else 1
    if len(prompt) + num_sampled > entry.max_context:
        raise PromptTooLong(
            f"prompt has {len(prompt)} tokens, limit for `{entry.name}`: "
            f"{entry.max_context - num_sampled} (the context holds {entry.max_context}"
            f"{', one is to be sampled' if num_sampled else ''}); shorten the prompt"
        )
    check_vocabulary(entry, prompt)


def check_reading(prompt: tuple[int, ...], sampling: SamplingParams) -> None:
    num_top = sampling.prompt_logprobs
    if num_top is not None and len(prompt) * (1 + num_top) > MAX_PROMPT_LOGPROBS:
        raise BadPrompt(
            f"a prompt of {len(prompt)} tokens has {len(prompt) * (1 + num_top)} logprobs with {num_top} of "
            f"the most likely at each, limit: {MAX_PROMPT_LOGPROBS}; ask for fewer, or shorten the prompt"
        )


def check_vocabulary(entry: CatalogEntry, prompt: Sequence[int]) -> None:
    vocab_size, name = entry.deployed.facts.dimensions.vocab_size, entry.name
    bad = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise BadPrompt(f"prompt holds token {bad}, a token of `{name}` is from 0 to {vocab_size - 1}")


def check_tokens(entry: CatalogEntry, sampling: SamplingParams) -> None:
    vocab_size, name = entry.deployed.facts.dimensions.vocab_size, entry.name
    named = {
        "logit_bias": sampling.bias_by_token,
        "stop_token_ids": sampling.stop_ids,
        "allowed_token_ids": sampling.allowed_token_ids or (),
    }
    for field, tokens in named.items():
        bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise BadSampling(
                f"`{field}` names token {bad}, a token of `{name}` is from 0 to {vocab_size - 1}"
            )
