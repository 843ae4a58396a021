"""Checks and resolves requests before an engine gets them. Computes nothing."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from hearth.core.errors import BadPrompt, BadSampling
from hearth.core.types import (
    AdapterId,
    GuideSpec,
    Pooling,
    RequestId,
    SamplingParams,
)
from hearth.engine.guide import Guides
from hearth.policy.batch.batch_limits import RequestLimits
from hearth.policy.batch.plan import EngineRequest, Guide


class Intake:
    """Checks and resolves requests. Any thread may call it."""

    def __init__(
        self, limits: RequestLimits, guides: Guides, vocab_size: int, eos_ids: frozenset[int]
    ) -> None:
        self._limits, self._guides = limits, guides
        self._vocab_size, self._eos_ids = vocab_size, eos_ids

    def request(
        self,
        request_id: RequestId,
        prompt: Sequence[int],
        params: SamplingParams,
        salt: bytes = b"",
        output: Sequence[int] = (),
        guide: GuideSpec | None = None,
        pooling: Pooling | None = None,
        adapter: AdapterId | None = None,
        *,
        is_streamed: bool = True,
    ) -> EngineRequest:
        """Return a checked request. Changes no state.

        `output`: tokens that a lost engine has already sampled; the request resumes after them. A guide is
        compiled here, which takes milliseconds, and 0.3 s for the first of a model.
        """
        words = _checked_words("prompt", prompt, self._vocab_size, BadPrompt)
        _checked_words("output", output, self._vocab_size, BadPrompt)
        _checked_words("allowed_token_ids", params.allowed_token_ids or (), self._vocab_size, BadSampling)
        _checked_words("logit_bias", params.bias_by_token, self._vocab_size, BadSampling)
        _checked_words("stop_token_ids", params.stop_ids, self._vocab_size, BadSampling)
        stops = set(params.stop_ids) | (set() if params.ignore_eos else self._eos_ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        resolved = params.resolved(stop=params.stop_strings, stop_token_ids=tuple(sorted(stops)), seed=seed)
        request = EngineRequest(
            request_id,
            words,
            resolved,
            salt,
            tuple(output),
            pooling=pooling,
            adapter=adapter,
            is_streamed=is_streamed,
        )
        self._limits.check(request)
        return request if guide is None else replace(request, guide=self._guide(guide, params, output))

    def _guide(self, spec: GuideSpec, params: SamplingParams, output: Sequence[int]) -> Guide:
        if params.min_tokens or params.allowed_token_ids is not None:
            raise BadSampling(
                "beside a schema or grammar, `min_tokens` and `allowed_token_ids` might leave no token to "
                "choose; leave out one or the other"
            )
        guide = self._guides.guide(spec, params.ignore_eos)
        guide.take_all(output)
        return guide


def _checked_words(
    name: str, tokens: Collection[int], vocab_size: int, error: type[BadPrompt] | type[BadSampling]
) -> array[int]:
    if len(tokens) == 0:
        return array("I")
    # The common case runs in C: this delays the first token.
    if list(map(type, tokens)).count(int) == len(tokens):
        try:
            words = array("I", tokens)
        except OverflowError:
            words = array("I")
        if len(words) == len(tokens) and int(np.frombuffer(words, np.uint32).max()) < vocab_size:
            return words
    bad = next(token for token in tokens if type(token) is not int or not 0 <= token < vocab_size)
    raise error(f"`{name}` holds {bad!r}, a token id must be an integer from 0 to {vocab_size - 1}")
