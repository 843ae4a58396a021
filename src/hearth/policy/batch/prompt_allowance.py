"""How many prompt tokens a step may have: decoding requests and other models wait for its end.

    seconds = rows_s + token_s * prompt tokens

`rows_s` is the time of decode rows and of reading the weights. It follows the load, because rows and context
change little from step to step. `token_s` is the time of a prompt token. Each measured step corrects both by
a part of its error, in proportion to their share of the step: a step without prompts changes `token_s` not at
all. A few tokens are nearly free while the device waits for weights, so the cost of many is kept as well,
from the last step that had many: otherwise long prompts behind short ones would get too many.

If nothing decodes, a GPU computes its whole budget in a moment, and nothing is held back. A slow device,
which may take minutes, begins with few tokens and continues with as many as fit by the last such steps.

A step with few prompt tokens does not tell what they cost: nearly all of it may be the weights. Were it
charged to the tokens, later steps would have as few, take as long and so confirm it. So on a slow device,
whose decode rows leave no time within `max_step`, steps grow until one has many more tokens than another, and
the difference tells the cost of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: The part of an error that is corrected at once. One step alone may be an outlier.
GAIN = 0.25
#: Prompt tokens beside decoding requests, before any step was measured.
FIRST_TOKENS = 256
#: Time of prompts in any step, per second of decode rows. Below 1, decoding keeps more than half its pace.
FAIR_SHARE = 0.6
#: Waiting prompts may have as much time as spreads them over this many steps.
SPREAD_STEPS = 12
#: A step has many tokens of prompts if it has at least this part of those in the last step that had many.
MANY_SHARE = 0.25
#: Without decoding, a step of a slow device may take this many times `max_step`: other models wait meanwhile,
#: but shorter steps would read all weights for too few tokens.
LONE_STEPS = 40
#: Tokens of prompts in such a step before any was measured, and always.
FIRST_LONE_TOKENS = 16
#: The most tokens that such a step has, for each of those in one that was measured.
GROWTH = 8
#: Of the first steps with prompts, what rows that decode take at least, and what the tokens take.
_LEAST_SHARE = 0.05
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class _MeasuredStep:
    num_prompt_tokens: int
    seconds: float


class PromptAllowance:
    """Mutable; the step loop reports each measured step."""

    def __init__(self, max_step_s: float, *, is_slow: bool = False) -> None:
        """`max_step_s`: the longest that a step should take because of prompts. `is_slow`: the device may
        take long for the whole budget."""
        assert max_step_s > 0, f"{max_step_s=}"
        self._max_step_s = max_step_s
        #: Prompt tokens in a step without decoding; None: any number.
        self.num_lone_tokens = FIRST_LONE_TOKENS if is_slow and not math.isinf(max_step_s) else None
        #: As above, both positive; None: not measured.
        self._rows_s: float | None = None
        self._token_s: float | None = None
        #: Of a slow device: the quickest step with few prompt tokens, until the cost of a token is known.
        self._quickest: _MeasuredStep | None = None
        #: The prompt tokens in the last step that had many, and the time of each.
        self._num_many, self._many_token_s = 0, 0.0
        self._is_crowded = False  #: until no prompt waits

    def num_tokens(self, num_waiting_tokens: int) -> int | None:
        """Return the limit of prompt tokens in the next step, of those that wait; None: no limit.

        Prompts always get their fair share, and more if several such steps would not compute all that wait. A
        crowd, which one step of `max_step` could not compute, gets all of `max_step` until none waits.
        """
        if math.isinf(self._max_step_s):
            return None
        if self._token_s is None:
            return FIRST_TOKENS if self.num_lone_tokens is None else min(FIRST_TOKENS, self.num_lone_tokens)
        rows_s = self._rows_s or 0.0
        waiting_s = self._token_s * num_waiting_tokens
        self._is_crowded = num_waiting_tokens > 0 and (self._is_crowded or waiting_s > self._max_step_s)
        wanted_s = waiting_s if self._is_crowded else waiting_s / SPREAD_STEPS
        prompts_s = max(FAIR_SHARE * rows_s, min(wanted_s, self._max_step_s - rows_s))
        fair_tokens = FAIR_SHARE * rows_s / self._token_s
        most_tokens = (self._max_step_s - rows_s) / max(self._token_s, self._many_token_s)
        return max(1, int(min(prompts_s / self._token_s, max(fair_tokens, most_tokens))))

    def measured(self, num_decode_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        seconds = max(seconds, _LEAST_S)
        if self._token_s is None and self.num_lone_tokens is not None:
            self._measured_first(_MeasuredStep(num_prompt_tokens, seconds))
            if self._token_s is None:
                return
        if num_prompt_tokens and MANY_SHARE * self._num_many <= num_prompt_tokens:
            own_s = seconds - (self._rows_s or 0.0) if num_decode_rows else seconds
            self._num_many, self._many_token_s = num_prompt_tokens, max(0.0, own_s) / num_prompt_tokens
        if not num_decode_rows:
            # It also read the weights, so a token costs no more than that.
            most_s = seconds / num_prompt_tokens
            self._token_s = most_s if self._token_s is None else min(self._token_s, most_s)
            self._measured_alone(num_prompt_tokens, seconds)
            return
        if num_prompt_tokens and self._token_s is None:
            self._token_s = seconds / 2 / num_prompt_tokens
        prompts_s = (self._token_s or 0.0) * num_prompt_tokens
        if self._rows_s is None:
            self._rows_s = max(seconds - prompts_s, seconds * _LEAST_SHARE)
        rows_s = self._rows_s
        # A step that takes much longer may be an outlier: memory was mapped, a kernel loaded.
        error_s = min(seconds - rows_s - prompts_s, rows_s + prompts_s)
        correction = GAIN * error_s / (rows_s**2 + prompts_s**2)
        self._rows_s = max(_LEAST_S, rows_s * (1 + correction * rows_s))
        if self._token_s is not None:
            self._token_s = max(_LEAST_S, self._token_s * (1 + correction * prompts_s))

    def _measured_first(self, step: _MeasuredStep) -> None:
        num_tokens, seconds, few = step.num_prompt_tokens, step.seconds, self._quickest
        if few is None or num_tokens < 2 * max(few.num_prompt_tokens, FIRST_LONE_TOKENS):
            if few is None or seconds < few.seconds:
                self._quickest = step
            if num_tokens:
                self._measured_alone(num_tokens, seconds)
            return
        tokens_s = max(seconds - few.seconds, _LEAST_SHARE * seconds)
        self._token_s = tokens_s / (num_tokens - few.num_prompt_tokens)
        self._rows_s = max(seconds - self._token_s * num_tokens, _LEAST_SHARE * seconds)

    def _measured_alone(self, num_tokens: int, seconds: float) -> None:
        if self.num_lone_tokens is None:
            return
        longest_s = LONE_STEPS * self._max_step_s
        num_fitting = int(num_tokens * min(GROWTH, longest_s / seconds))
        if num_fitting > self.num_lone_tokens or seconds > longest_s:
            self.num_lone_tokens = max(FIRST_LONE_TOKENS, num_fitting)
