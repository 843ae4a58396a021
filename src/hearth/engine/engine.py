"""One model being served: plan, run, commit, one step ahead of the device. Knows no text and no threads."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass, replace

from hearth.engine.runner import Pending, Runner, StepResult
from hearth.errors import BadPrompt, BadSampling
from hearth.policy.batch import Batcher
from hearth.policy.plan import Request, StepPlan
from hearth.types import FinishReason, RequestId, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Output:
    """One token of one request."""

    request_id: RequestId
    token: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    pending: Pending


class Engine:
    """Mutable; one thread calls it."""

    def __init__(self, batcher: Batcher, runner: Runner, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self.batcher = batcher
        self.runner = runner
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._flight: _Flight | None = None

    @property
    def has_work(self) -> bool:
        return self.batcher.has_work

    def request(
        self, request_id: RequestId, prompt: list[int], params: SamplingParams, salt: bytes = b""
    ) -> Request:
        """Check and resolve a request. Touches no state, so any thread may call it."""
        _check_tokens("prompt", prompt, self._vocab_size, BadPrompt)
        _check_tokens("allowed_token_ids", params.allowed_token_ids or (), self._vocab_size, BadSampling)
        _check_tokens("logit_bias", params.bias_by_token, self._vocab_size, BadSampling)
        _check_tokens("stop_token_ids", params.stop_ids, self._vocab_size, BadSampling)
        stops = set(params.stop_ids) | (set() if params.ignore_eos else self._eos_ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request = Request(
            request_id, tuple(prompt), replace(params, stop_token_ids=tuple(sorted(stops)), seed=seed), salt
        )
        self.batcher.check_fits(request)
        return request

    def add(self, request: Request) -> None:
        self.batcher.add(request)

    def cancel(self, request_id: RequestId) -> bool:
        return self.batcher.cancel(request_id)

    def step(self) -> list[Output]:
        """Launch the next step, then take in the one before it, whose tokens are returned."""
        plan = self.batcher.plan()
        launched = None if plan is None else _Flight(plan, self.runner.launch(plan))
        landed, self._flight = self._flight, launched
        assert launched or landed or not self.has_work, (
            "there is work, but nothing to compute and to wait for"
        )
        return [] if landed is None else self._commit(landed.plan, landed.pending.wait())

    def _commit(self, plan: StepPlan, result: StepResult) -> list[Output]:
        outputs = []
        for emission in self.batcher.commit(plan, result.tokens):
            logprobs = None if result.logprobs is None else result.logprobs[emission.sample_index]
            outputs.append(Output(emission.request_id, emission.token, logprobs, emission.finish_reason))
        return outputs


def _check_tokens(
    name: str, tokens: Collection[int], vocab_size: int, error: type[BadPrompt] | type[BadSampling]
) -> None:
    """Raise `error` at the first that is no token of the vocabulary."""
    # The common case at the speed of C: this stands between a prompt and its first token.
    if (
        set(map(type, tokens)) <= {int}
        and min(tokens, default=0) >= 0
        and max(tokens, default=0) < vocab_size
    ):
        return
    bad = next(token for token in tokens if type(token) is not int or not 0 <= token < vocab_size)
    raise error(f"`{name}` holds {bad!r}, a token id must be an integer from 0 to {vocab_size - 1}")
