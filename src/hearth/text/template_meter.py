"""Meters what the rendering of a chat template takes. Knows no template.

Whoever makes text or containers for a template pays first: C code that has begun is not interrupted.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

#: The most characters and elements that one rendering may make in all.
MAX_CHARS = 128 << 20
#: How much cheaper it is to read text than to make it.
READ_SHARE = 16


class OverLimit(SecurityError):
    """The template takes too long, or makes too much."""


class Meter:
    """The budget of one rendering. Mutable; used by the thread that renders."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._deadline_s = time.monotonic() + limit_s
        self._num_chars = 0

    def spend(self, num_chars: int) -> None:
        """Pay for so many characters. Raises OverLimit."""
        self._num_chars += num_chars
        if self._num_chars > MAX_CHARS:
            raise OverLimit(f"it makes more text than the limit: {MAX_CHARS} characters")
        if time.monotonic() > self._deadline_s:
            raise OverLimit(f"it takes longer than the limit: {self._limit_s:g} s")


#: The meter of the rendering or compilation in this thread.
METER: ContextVar[Meter | None] = ContextVar("meter", default=None)


def spend(num_chars: int = 1) -> None:
    if (meter := METER.get()) is not None:
        meter.spend(num_chars)


def weigh(value: object, share: int = 1) -> int:
    """Pay for each element of `value`, and for one in `share` of its characters; returns what that was.

    Lists that hold one list twice grow exponentially, so it is paid for on the way.
    """
    if isinstance(value, str):  # first: nearly all values of a prompt are texts
        spend(len(value) // share)
        return len(value) // share
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        spend(len(value))
        return len(value) + sum(weigh(item, share) for item in value)
    return 0


def walked(value: object) -> object:
    """Return `value`, after paying for all that is in it."""
    weigh(value)
    return value


def read(value: object) -> object:
    """Return `value`, after paying for its comparison with another."""
    weigh(value, READ_SHARE)
    return value


def joined(parts: Iterable[str], separator: str = "") -> str:
    parts = list(parts)
    spend(sum(map(len, parts)) + len(parts) * len(separator))
    return separator.join(parts)
