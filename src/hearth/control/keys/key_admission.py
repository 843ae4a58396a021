"""Admits HTTP requests by the limits of their API keys (`policy/limits`), and counts their usage."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType

from hearth.control.keys.key_usage import KeyUsage
from hearth.control.observe.metrics import Metrics
from hearth.control.requests.caller import Caller, KeyId
from hearth.control.requests.generation import AnswerStream
from hearth.core.errors import RateLimited
from hearth.core.types import RateStatus
from hearth.policy.limits.key_limiter import KeyLimiter, LimitKind, LimitRefusal, Ticket

#: Retry time of a client with too many running requests: when one ends is unknown.
CONCURRENT_RETRY_S = 1.0


class KeyAdmissions:
    """Mutable; used on the event loop alone."""

    def __init__(self, usage: KeyUsage, metrics: Metrics, now_s: Callable[[], float]) -> None:
        self.usage, self._metrics, self._now_s = usage, metrics, now_s
        self._limiter: KeyLimiter[KeyId] = KeyLimiter()

    def admit(self, caller: Caller) -> KeyAdmission:
        """Admit a request until its context ends. Raises RateLimited."""
        if caller.key_id is None:
            return KeyAdmission(self, caller, None)
        outcome = self._limiter.begin(caller.key_id, caller.terms.limits, self._now_s())
        if isinstance(outcome, LimitRefusal):
            raise self._refused(caller, outcome)
        return KeyAdmission(self, caller, outcome)

    def status(self, caller: Caller) -> RateStatus | None:
        limits = caller.terms.limits
        if caller.key_id is None or limits.requests_per_min is limits.tokens_per_min is None:
            return None
        return self._limiter.status(caller.key_id, limits, self._now_s())

    # For the admissions.

    def charge(self, caller: Caller, ticket: Ticket, num_prompt_tokens: int, max_tokens: int | None) -> None:
        limits = caller.terms.limits
        refusal = self._limiter.charge(ticket, limits, num_prompt_tokens, max_tokens, self._now_s())
        if refusal is not None:
            self._limiter.withdraw(ticket)
            raise self._refused(caller, refusal)

    def end(self, caller: Caller, ticket: Ticket, prompt_tokens: int, output_tokens: int) -> None:
        if ticket.is_open:
            self._limiter.end(ticket, prompt_tokens + output_tokens, self._now_s())
            self.usage.count(caller, prompt_tokens, output_tokens)

    def _refused(self, caller: Caller, refusal: LimitRefusal) -> RateLimited:
        self._metrics.key_refusals.labels(self._metrics.key_label(caller.name), refusal.kind).inc()
        name, limit, used, wanted = caller.name, refusal.limit, refusal.used, refusal.wanted
        match refusal.kind:
            case LimitKind.CONCURRENT:
                return RateLimited(
                    f"key `{name}` has {used} requests running, its limit: {limit}; wait until one has ended",
                    LimitKind.REQUESTS,
                    CONCURRENT_RETRY_S,
                )
            case LimitKind.REQUESTS:
                what = f"key `{name}` has sent {used} requests in the last minute, its limit: {limit}"
            case LimitKind.TOKENS if refusal.retry_s is None:
                what = (
                    f"the request is charged {wanted} tokens, limit of key `{name}` per minute: {limit}; "
                    "send less, or have the limit raised"
                )
            case LimitKind.TOKENS:
                what = (
                    f"key `{name}` has used {used} tokens in the last minute and the request is charged "
                    f"{wanted} more, its limit: {limit}"
                )
        if refusal.retry_s is not None:
            what += f"; try again in {math.ceil(refusal.retry_s)} s"
        return RateLimited(what, refusal.kind, refusal.retry_s)


class KeyAdmission:
    """An admitted request, until it ends. Mutable; used by the one task that answers it."""

    def __init__(self, gate: KeyAdmissions, caller: Caller, ticket: Ticket | None) -> None:
        self.caller = caller
        self._gate, self._ticket = gate, ticket
        #: Streams of its answers, and whether the prompt of each is to be counted.
        self._streams: list[tuple[AnswerStream, bool]] = []

    def charge(self, num_prompt_tokens: int, max_tokens: int | None) -> None:
        """Charge a prompt and the longest answer. Raises RateLimited; nothing is counted then."""
        if self._ticket is not None:
            self._gate.charge(self.caller, self._ticket, num_prompt_tokens, max_tokens)

    def follow(self, stream: AnswerStream, *, counts_prompt: bool) -> None:
        self._streams.append((stream, counts_prompt))

    def __enter__(self) -> KeyAdmission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Settle the charge, once. A prompt counts unless the service failed before the first token."""
        if self._ticket is None:
            return
        prompt_tokens = sum(
            stream.num_prompt_tokens
            for stream, counts_prompt in self._streams
            if counts_prompt and (stream.error is None or stream.num_output_tokens)
        )
        output_tokens = sum(stream.num_output_tokens for stream, _ in self._streams)
        self._gate.end(self.caller, self._ticket, prompt_tokens, output_tokens)
