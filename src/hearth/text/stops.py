"""Finds stop strings in streamed text, also where one is split across pieces. Knows no tokens.

All stop strings of a request are one automaton, that of Aho and Corasick: a trie of them whose nodes know
where to go on when the next character does not fit. Each character of the text is read once, however many and
long the stop strings are, so that those of one client do not slow down the text of all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class StopMatch:
    text: str  #: safe to send
    stop: str | None = None  #: the stop string that is complete; nothing comes after `text` then


class StopStrings:
    """Mutable; written only by the request that it belongs to.

    The stop string that is complete first wins, wherever it began; of those that end together, the longest.
    So the outcome does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        assert all(stops), f"empty stop string in {stops!r}"
        self._automaton = _automaton(tuple(stops)) if stops else None
        self._include = include
        self._node = ROOT  #: of the automaton, after the text so far
        #: The longest end of the text so far with which a stop string begins and may go on: that of the node.
        self._held = ""
        self._is_stopped = False

    def push(self, text: str) -> StopMatch:
        assert not self._is_stopped, f"text after a stop string: {text!r}"
        if self._automaton is None:
            return StopMatch(text)
        if self._node == ROOT and self._automaton.first_chars.isdisjoint(text):
            return StopMatch(text)  # as most text is
        for num_read, char in enumerate(text, start=1):
            self._node = self._automaton.next(self._node, char)
            if length := self._automaton.match_lengths[self._node]:
                end = len(self._held) + num_read
                read = (self._held + text)[:end]
                self._held, self._is_stopped = "", True
                return StopMatch(read if self._include else read[:-length], read[-length:])
        return StopMatch(self._hold_back(text))

    def skip(self, text: str) -> str:
        """Take text in which no stop string counts, though one may begin; returns what is safe to send."""
        if self._automaton is None:
            return text
        for char in text:
            self._node = self._automaton.next(self._node, char)
        self._node = self._automaton.open_end(self._node)
        return self._hold_back(text)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _hold_back(self, text: str) -> str:
        assert self._automaton is not None, "nothing is held back where there are no stop strings"
        text = self._held + text
        num_safe = len(text) - self._automaton.depths[self._node]
        self._held = text[num_safe:]
        return text[:num_safe]


ROOT = 0


class _Automaton:
    """A trie of stop strings; a node stands for the text on the way to it. Immutable once built; shared."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]  #: by character, of each node
        self._fallbacks = [ROOT]  #: for each node, the node of the longest proper suffix of its text
        self.depths = [0]  #: the length of each node's text
        self.match_lengths = [0]  #: of the longest stop string with which a node's text ends; 0: with none
        for stop in stops:
            self._add(stop)
        self._link()
        self.first_chars = frozenset(self._children[ROOT])

    def next(self, node: int, char: str) -> int:
        while (child := self._children[node].get(char)) is None:
            if node == ROOT:
                return ROOT
            node = self._fallbacks[node]
        return child

    def open_end(self, node: int) -> int:
        """Return the node of the longest suffix of a node's text that is a prefix of a longer stop string."""
        while node != ROOT and not self._children[node]:
            node = self._fallbacks[node]
        return node

    def _add(self, stop: str) -> None:
        node = ROOT
        for depth, char in enumerate(stop, start=1):
            child = self._children[node].get(char)
            if child is None:
                child = self._children[node][char] = len(self._children)
                self._children.append({})
                self._fallbacks.append(ROOT)
                self.depths.append(depth)
                self.match_lengths.append(0)
            node = child
        self.match_lengths[node] = len(stop)

    def _link(self) -> None:
        """Find the fallbacks, the shallow nodes first: those of deeper nodes follow from them."""
        nodes = deque(self._children[ROOT].values())
        while nodes:
            node = nodes.popleft()
            self.match_lengths[node] = self.match_lengths[node] or self.match_lengths[self._fallbacks[node]]
            for char, child in self._children[node].items():
                self._fallbacks[child] = self.next(self._fallbacks[node], char)
                nodes.append(child)


#: All answers to a request, and most requests of a client, have the same stop strings.
_automaton = lru_cache(maxsize=16)(_Automaton)
