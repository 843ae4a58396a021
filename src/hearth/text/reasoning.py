"""Reasoning as models write it: marks around it, how a prompt leaves it, and a streaming parser.

A reasoning model thinks before it answers: `<think>...</think>`, then the answer. Its template may begin the
thinking in the prompt, or end it there, if thinking is switched off. Other marks are rows of `MARKS`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from hearth.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    open: str
    close: str


MARKS = (
    ReasoningMarks("<think>", "</think>"),  # DeepSeek, Qwen, GLM, MiniMax, SmolLM, Nemotron
    ReasoningMarks("<seed:think>", "</seed:think>"),  # Seed-OSS
    ReasoningMarks("[THINK]", "[/THINK]"),  # Magistral
)
#: Variables by which templates switch thinking on or off.
SWITCHES = ("enable_thinking", "thinking")
#: Tokens at the end of a prompt in which a mark and the white space after it fit.
MAX_END_TOKENS = 32


class Phase(Enum):
    BEFORE = "before"  #: the model may begin to think
    THINKING = "thinking"
    GAP = "gap"  #: the white space between thinking and answer
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """How the answer to a request is split."""

    marks: ReasoningMarks
    begun: str = ""  #: the text of the assistant that the answer continues
    budget_tokens: int | None = None  #: for thinking; None: unlimited
    is_shown: bool = True  #: False: the client gets the answer alone

    def phase_after(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> Phase:
        """Return where an answer begins. Marks inside the prompt, which users write, do not count."""
        if begun := self.begun.strip():
            is_open = begun.rfind(self.marks.open) > begun.rfind(self.marks.close)
            return Phase.THINKING if is_open else Phase.ANSWER
        end = tokenizer.decode(list(prompt[-MAX_END_TOKENS:]), skip_special_tokens=False).rstrip()
        if end.endswith(self.marks.open):
            return Phase.THINKING
        return Phase.ANSWER if end.endswith(self.marks.close) else Phase.BEFORE


def marks_in(template_text: str | None) -> ReasoningMarks | None:
    """Return the marks that a template knows; None: it is not for a reasoning model."""
    return next((marks for marks in MARKS if marks.close in (template_text or "")), None)


def marks_of(tokenizer: Tokenizer) -> ReasoningMarks | None:
    """Return the marks of a model: those of its template, or else those that are tokens."""
    by_token = (
        marks for marks in MARKS if tokenizer.has_token(marks.open) and tokenizer.has_token(marks.close)
    )
    return marks_in(tokenizer.chat_template_text) or next(by_token, None)


@lru_cache(maxsize=64)
def switches_in(template_text: str | None) -> tuple[str, ...]:
    """Return the variables by which a template switches thinking on or off."""
    tests = {name: rf"\b{name}\s+is\b|\b(?:if|not|and|or)\s+{name}\b" for name in SWITCHES}
    return tuple(name for name, test in tests.items() if re.search(test, template_text or ""))


@dataclass(frozen=True, slots=True)
class Thought:
    text: str


@dataclass(frozen=True, slots=True)
class Split:
    reasoning: str
    text: str  #: of the answer, after the reasoning


class ReasoningParser:
    """Splits a streamed answer into reasoning and text. Mutable; one per answer.

    The marks, and white space beside them, are in neither. What may be part of them is held back. The result
    does not depend on how the text is split into pieces.
    """

    def __init__(self, marks: ReasoningMarks, phase: Phase) -> None:
        self._marks = marks
        self.phase = phase
        self.has_thought = phase is Phase.THINKING
        self._held = ""  #: white space, then perhaps the beginning of a mark
        self._is_begun = False  #: reasoning was returned

    def push(self, text: str) -> Split:
        text, self._held, reasoning = self._held + text, "", ""
        if self.phase is Phase.BEFORE:
            begin = text.lstrip()
            if begin.startswith(self._marks.open):
                self.phase, self.has_thought = Phase.THINKING, True
                text = begin.removeprefix(self._marks.open)
            elif self._marks.open.startswith(begin):
                self._held = text
                return Split("", "")
            else:
                self.phase = Phase.ANSWER
        if self.phase is Phase.THINKING:
            before, close, text = text.partition(self._marks.close)
            before = before if self._is_begun else before.lstrip()
            num_free = len(before) - (0 if close else overlap(before, self._marks.close))
            reasoning = before[:num_free].rstrip()
            self._is_begun = self._is_begun or bool(reasoning)
            if close:
                self.phase = Phase.GAP
            else:
                self._held = before[len(reasoning) :]
        if self.phase is Phase.GAP and (text := text.lstrip()):
            self.phase = Phase.ANSWER
        return Split(reasoning, text)

    def flush(self) -> Split:
        held, self._held = self._held, ""
        return Split(held.rstrip(), "") if self.phase is Phase.THINKING else Split("", held)


def overlap(text: str, tag: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
