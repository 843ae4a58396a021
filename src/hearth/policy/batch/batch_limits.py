"""Limits of what one engine computes at once, and which requests it can serve. Immutable."""

from __future__ import annotations

from dataclasses import dataclass

from hearth.core.errors import BadPrompt, ConfigError, PromptTooLong
from hearth.policy.batch.plan import EngineRequest


@dataclass(frozen=True, slots=True)
class BatchLimits:
    max_batch_tokens: int  #: computed by one step
    max_seqs: int  #: running at once, each in a slot
    max_context: int  #: prompt and output tokens of one sequence
    #: Tokens that a step with prompts is padded to: prompts are best cut there. Empty: no padding.
    step_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.max_batch_tokens, self.max_seqs, self.max_context) < 1:
            raise ConfigError(
                f"every limit of a batch must be at least 1, given: {self}; raise the one below"
            )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How long one request may be so that, alone, it can always finish. Any thread may read it."""

    max_context: int  #: tokens of prompt and output that the model supports
    kv_tokens: int  #: that fit into the promised KV

    @property
    def max_length(self) -> int:
        return min(self.max_context, self.kv_tokens)

    def check(self, request: EngineRequest) -> None:
        """Raise if the request can never be served.

        Raises:
            BadPrompt: it is empty, or its earlier output is complete.
            PromptTooLong: it leaves no room for a single token.
        """
        num_prompt, num_output = len(request.prompt), len(request.output)
        if num_prompt == 0:
            raise BadPrompt("prompt has 0 tokens, at least 1 is needed; give a token to continue from")
        max_tokens = request.sampling.max_tokens
        num_sampled = 0 if max_tokens == 0 else 1  # a token that is not reported is not computed
        if num_prompt + num_output + num_sampled > self.max_length:
            what = f"prompt has {num_prompt} tokens" + (f" and output {num_output}" if num_output else "")
            raise PromptTooLong(
                f"{what}, limit: {self.max_length - num_sampled} (the context holds "
                f"{self.max_context}, the KV memory {self.kv_tokens}"
                f"{', one is to be sampled' if num_sampled else ''}); shorten the prompt or raise the lower "
                "one"
            )
        is_full = max_tokens is not None and num_output >= max(1, max_tokens)
        if is_full or (num_output and request.is_stopped_by(request.output[-1], num_output - 1)):
            raise BadPrompt(
                f"the output of {num_output} tokens is complete ({max_tokens=}, last token: "
                f"{request.output[-1]}), so nothing is left to sample; resume only what has not ended"
            )

    def length_of(self, request: EngineRequest) -> int:
        max_tokens = request.sampling.max_tokens
        if max_tokens is None:
            return self.max_length
        if max_tokens == 0:  # it ends by a token that is not reported
            return len(request.prompt) + 1
        return min(self.max_length, len(request.prompt) + max_tokens)
