"""Finds stop strings in streamed text, also where one is split across pieces. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The text that is safe after one more piece of it, and whether a stop string ended it."""

    text: str  #: safe to send
    stopped: bool  #: a stop string is complete; nothing comes after `text`


class StopStrings:
    """Mutable; written only by the request that it belongs to.

    The stop string that is complete first wins, wherever it began; of those that end together, the longest.
    So the outcome does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """Look for `stops`; `include` keeps the one that is found at the end of the text."""
        assert all(stops), f"empty stop string in {stops!r}"
        self._stops = tuple(stops)
        self._include = include
        #: The longest end of the text so far with which a stop string begins; never a whole one.
        self._held = ""
        self._is_stopped = False

    def push(self, text: str) -> StopMatch:
        assert not self._is_stopped, f"text after a stop string: {text!r}"
        text = self._held + text
        if span := self._first_stop(text):
            self._held, self._is_stopped = "", True
            return StopMatch(text[: span.stop if self._include else span.start], stopped=True)
        return StopMatch(self._hold_back(text), stopped=False)

    def skip(self, text: str) -> str:
        """Take text in which no stop string counts, though one may begin; returns what is safe to send."""
        return self._hold_back(self._held + text)

    def flush(self) -> str:
        """Return the text that was held back, at the end of the output; empty after a stop."""
        held, self._held = self._held, ""
        return held

    def _hold_back(self, text: str) -> str:
        num_safe = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[num_safe:]
        return text[:num_safe]

    def _first_stop(self, text: str) -> range | None:
        starts = [(text.find(stop), len(stop)) for stop in self._stops]
        spans = [range(start, start + length) for start, length in starts if start >= 0]
        return min(spans, key=lambda span: (span.stop, span.start), default=None)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins, short of all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
