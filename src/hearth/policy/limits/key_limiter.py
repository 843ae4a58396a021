"""Limits of API keys: requests and tokens per minute, and requests at a time. Pure.

A request counts when it begins, is charged its prompt and an estimate of its output once the prompt is
known, and is settled to the actual tokens when it ends. A refused request counts for nothing, so that
retrying too often does not lock a key out.

The estimate is the request's limit, at most `MAX_ESTIMATE_TOKENS`, and never so much that the request could
not pass at all. Tokens beyond it are charged at the end, also beyond the limit.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from hearth.core.types import RateStatus, WindowStatus
from hearth.policy.limits.sliding_window import SlidingWindow, WindowSlot

#: The most tokens that one answer is charged in advance.
MAX_ESTIMATE_TOKENS = 1024
#: Idle keys are forgotten once there are this many keys, or twice as many as counted last.
MIN_KEYS = 16

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one API key; None: no limit."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrent: int | None = None  #: requests that have begun and not ended


class LimitKind(StrEnum):
    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"


@dataclass(frozen=True, slots=True)
class LimitRefusal:
    kind: LimitKind
    limit: int
    used: int  #: of the limit, by others
    wanted: int
    #: When the same request would pass, if no other came. None: never, or unknown.
    retry_s: float | None


@dataclass(slots=True, eq=False)
class _KeyState:
    requests: SlidingWindow = field(default_factory=SlidingWindow)
    tokens: SlidingWindow = field(default_factory=SlidingWindow)
    num_running: int = 0

    def counts(self, now_s: float) -> bool:
        self.requests.advance(now_s)
        self.tokens.advance(now_s)
        return bool(self.num_running or self.requests.used or self.tokens.used)


@dataclass(frozen=True, slots=True)
class _Charge:
    slot: WindowSlot
    num_tokens: int


@dataclass(slots=True, eq=False)
class Ticket:
    state: _KeyState
    request: WindowSlot  #: where it is counted as a request
    charges: list[_Charge] = field(default_factory=list)
    is_open: bool = True

    @property
    def charged_tokens(self) -> int:
        return sum(charge.num_tokens for charge in self.charges)


class KeyLimiter(Generic[Key]):
    """Mutable; one thread. Forgets keys that were idle for a minute.

    Limits are passed with every call, so a change applies to the next request.
    """

    def __init__(self) -> None:
        self._states: dict[Key, _KeyState] = {}
        self._max_states = MIN_KEYS

    def __len__(self) -> int:
        return len(self._states)

    def begin(self, key: Key, limits: KeyLimits, now_s: float) -> Ticket | LimitRefusal:
        state = self._states.get(key) or _KeyState()
        most = limits.concurrent
        if most is not None and state.num_running >= most:
            return LimitRefusal(LimitKind.CONCURRENT, most, state.num_running, 1, retry_s=None)
        most = limits.requests_per_min
        if most is not None and (wait_s := state.requests.wait_s(1, most, now_s)) > 0:
            return LimitRefusal(LimitKind.REQUESTS, most, state.requests.used, 1, wait_s)
        if key not in self._states:
            self._forget_idle(now_s)
            self._states[key] = state
        state.num_running += 1
        return Ticket(state, state.requests.take(1, now_s))

    def charge(
        self,
        ticket: Ticket,
        limits: KeyLimits,
        num_prompt_tokens: int,
        max_output_tokens: int | None,
        now_s: float,
    ) -> LimitRefusal | None:
        """Charge a request for an answer of at most `max_output_tokens`; None: it may have it."""
        assert ticket.is_open, f"charged after its end: {ticket}"
        window, most = ticket.state.tokens, limits.tokens_per_min
        num_output = MAX_ESTIMATE_TOKENS if max_output_tokens is None else max_output_tokens
        num_tokens = num_prompt_tokens + min(num_output, MAX_ESTIMATE_TOKENS)
        if most is not None:
            left = most - ticket.charged_tokens
            num_tokens = max(num_prompt_tokens, min(num_tokens, left))
            wait_s = math.inf if num_tokens > left else window.wait_s(num_tokens, most, now_s)
            if wait_s > 0:
                used = window.used - sum(one.num_tokens for one in ticket.charges if not one.slot.is_gone)
                wanted = ticket.charged_tokens + num_tokens
                retry_s = None if math.isinf(wait_s) else wait_s
                return LimitRefusal(LimitKind.TOKENS, most, used, wanted, retry_s)
        ticket.charges.append(_Charge(window.take(num_tokens, now_s), num_tokens))
        return None

    def end(self, ticket: Ticket, num_tokens: int, now_s: float) -> None:
        """Settle a request that has ended with `num_tokens`; a second call changes nothing."""
        if not self._close(ticket):
            return
        surplus = ticket.charged_tokens - num_tokens
        if surplus < 0:
            ticket.state.tokens.take(-surplus, now_s)
        for charge in reversed(ticket.charges):
            given_back = max(0, min(surplus, charge.num_tokens))
            ticket.state.tokens.give_back(charge.slot, given_back)
            surplus -= given_back

    def withdraw(self, ticket: Ticket) -> None:
        if self._close(ticket):
            ticket.state.requests.give_back(ticket.request, 1)
            for charge in ticket.charges:
                ticket.state.tokens.give_back(charge.slot, charge.num_tokens)

    def status(self, key: Key, limits: KeyLimits, now_s: float) -> RateStatus:
        state = self._states.get(key) or _KeyState()
        return RateStatus(
            _describe(state.requests, limits.requests_per_min, now_s),
            _describe(state.tokens, limits.tokens_per_min, now_s),
        )

    def _close(self, ticket: Ticket) -> bool:
        if not ticket.is_open:
            return False
        ticket.is_open = False
        ticket.state.num_running -= 1
        return True

    def _forget_idle(self, now_s: float) -> None:
        if len(self._states) >= self._max_states:
            self._states = {key: one for key, one in self._states.items() if one.counts(now_s)}
            self._max_states = max(MIN_KEYS, 2 * len(self._states))


def _describe(window: SlidingWindow, limit: int | None, now_s: float) -> WindowStatus | None:
    if limit is None:
        return None
    reset_s = window.reset_s(now_s)
    return WindowStatus(limit, max(0, limit - window.used), reset_s)
