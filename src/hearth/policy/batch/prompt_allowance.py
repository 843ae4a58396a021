"""How many tokens of prompts a step may have: requests that decode, and other models, wait for its end.

Measures nothing and plans nothing: it is told how long steps took, and says how many tokens fit into one.

    seconds = rows_s + token_s * tokens of prompts

`rows_s` is what the rows that decode take, with the weights that every step reads. It follows the load, for
their number and their context change little from one step to the next. `token_s` is the price of a token of a
prompt. Each measured step corrects both by a part of its error, each by its share in the step: one without
prompts says nothing about `token_s`, and one with a few tokens of them next to nothing. That is as well, for
where the device waits for weights a few are nearly free. So what many of them cost is kept beside it, from
the last step that had many: behind short prompts long ones would else be given more than fits.

Where nobody decodes, a GPU takes its whole budget in a moment, and nothing is held back. A slow device, which
may take minutes for that, begins with few tokens and goes on with as many as fit by the last such steps.
"""

from __future__ import annotations

import math

#: The part of an error that is corrected at once: a few steps tell a new load, one alone may be an accident.
GAIN = 0.25
#: Tokens of prompts beside requests that decode, before any step was measured.
FIRST_TOKENS = 256
#: Time that prompts may have in any step, for each second that the rows take which decode. With less than 1
#: these get their tokens at more than half the pace that they would have alone.
FAIR_SHARE = 0.6
#: Prompts that wait may have as much time as spreads them over so many steps.
SPREAD_STEPS = 12
#: A step has many tokens of prompts if it has at least this part of those in the last step that had many.
MANY_SHARE = 0.25
#: Where nobody decodes, a step of a slow device may take so many times `max_step`: other models wait, and
#: orders, but shorter steps would read all weights for too few tokens.
LONE_STEPS = 40
#: Tokens of prompts in such a step before any was measured, and always.
FIRST_LONE_TOKENS = 16
#: The most tokens that such a step has, for each of those in one that was measured.
GROWTH = 8
#: Of the first step with prompts, what rows that decode take at least.
_LEAST_SHARE = 0.05
#: Less than anything takes.
_LEAST_S = 1e-9


class PromptAllowance:
    """Mutable; whoever steps an engine tells it of each step that was measured."""

    def __init__(self, max_step_s: float, *, is_slow: bool = False) -> None:
        """`max_step_s` is the longest that a step should take because of prompts; infinite: any time.

        `is_slow`: the device may take long for the whole budget.
        """
        assert max_step_s > 0, f"{max_step_s=}"
        self._max_step_s = max_step_s
        #: Tokens of prompts in a step where nobody decodes; None: any number.
        self.num_lone_tokens = FIRST_LONE_TOKENS if is_slow and not math.isinf(max_step_s) else None
        #: As above, both positive; None: nothing of the kind was measured.
        self._rows_s: float | None = None
        self._token_s: float | None = None
        #: The tokens of prompts in the last step that had many, and the price of each there.
        self._num_many, self._many_token_s = 0, 0.0
        self._is_crowded = False  #: until nobody waits

    def num_tokens(self, num_waiting_tokens: int) -> int | None:
        """Return how many tokens of prompts the next step may have, of so many that wait; None: any number.

        Prompts always have their fair share. Where more wait than some such steps compute they have more. And
        a crowd, of which one step of `max_step` could not compute all, has whatever that leaves until nobody
        waits: most of those who would be spared long steps are in the crowd themselves.
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

    def predicted_s(self, num_prompt_tokens: int) -> float | None:
        """Return how long the next step takes with so many tokens of prompts; None: nobody knows yet."""
        if self._rows_s is None or self._token_s is None:
            return None
        return self._rows_s + self._token_s * num_prompt_tokens

    def measured(self, num_decode_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step that took so long."""
        seconds = max(seconds, _LEAST_S)
        if num_prompt_tokens and MANY_SHARE * self._num_many <= num_prompt_tokens:
            own_s = seconds - (self._rows_s or 0.0) if num_decode_rows else seconds
            self._num_many, self._many_token_s = num_prompt_tokens, max(0.0, own_s) / num_prompt_tokens
        if not num_decode_rows:
            # It also read the weights, so that a token costs no more than that.
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
        # A step that takes much longer than it should may be an accident: memory was mapped, a kernel loaded.
        error_s = min(seconds - rows_s - prompts_s, rows_s + prompts_s)
        correction = GAIN * error_s / (rows_s**2 + prompts_s**2)
        self._rows_s = max(_LEAST_S, rows_s * (1 + correction * rows_s))
        if self._token_s is not None:
            self._token_s = max(_LEAST_S, self._token_s * (1 + correction * prompts_s))

    def _measured_alone(self, num_tokens: int, seconds: float) -> None:
        """Learn how many tokens fit where nobody decodes.

        More tokens are cheaper, each, so that what fits by the price of fewer does fit. A step that had few
        and was short says nothing against more.
        """
        if self.num_lone_tokens is None:
            return
        longest_s = LONE_STEPS * self._max_step_s
        num_fitting = int(num_tokens * min(GROWTH, longest_s / seconds))
        if num_fitting > self.num_lone_tokens or seconds > longest_s:
            self.num_lone_tokens = max(FIRST_LONE_TOKENS, num_fitting)
