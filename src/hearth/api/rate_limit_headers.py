"""The rate-limit and retry headers of OpenAI's API."""

from __future__ import annotations

import math

from hearth.core.types import RateStatus

#: All headers of the functions below, which browsers must be told to expose.
RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{figure}-{what}"
    for figure in ("limit", "remaining", "reset")
    for what in ("requests", "tokens")
)
RETRY_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")


def rate_limit_headers(status: RateStatus | None) -> dict[str, str]:
    headers: dict[str, str] = {}
    if status is not None:
        for what, window in (("requests", status.requests), ("tokens", status.tokens)):
            if window is not None:
                headers[f"x-ratelimit-limit-{what}"] = str(window.limit)
                headers[f"x-ratelimit-remaining-{what}"] = str(window.remaining)
                headers[f"x-ratelimit-reset-{what}"] = openai_duration(window.reset_s)
    return headers


def retry_headers(retry_s: float | None) -> dict[str, str]:
    """`retry_s` None: a retry would not help."""
    if retry_s is None:
        return {"x-should-retry": "false"}
    num_ms = math.ceil(retry_s * 1000)
    return {"retry-after": str(max(1, math.ceil(retry_s))), "retry-after-ms": str(num_ms)}


def openai_duration(seconds: float) -> str:
    """Format a duration as OpenAI does: `0s`, `120ms`, `7.66s`, `1m0s`."""
    num_ms = math.ceil(seconds * 1000)
    if 0 < num_ms < 1000:
        return f"{num_ms}ms"
    minutes, rest_ms = divmod(num_ms, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest_ms / 1000:g}s"
