"""Guided decoding: which tokens a schema or grammar allows next, by llguidance."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hearth.core.errors import BadGuide, GuideStuck
from hearth.core.types import FinishReason, GuideSpec, ThinkingSpec
from hearth.text.grammar import grammar_of, parser_limits, refusal

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Guides:
    """Compiles the guides of one model. Any thread may call it."""

    def __init__(self, tokenizer_json: Path | None, vocab_size: int, eos_ids: frozenset[int]) -> None:
        """`vocab_size` is the model's, which may be padded beyond the tokenizer's."""
        self._path = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        #: Built for the first guided request: it takes 0.3 s, and few models need it.
        self._tokenizer: LLTokenizer | None = None
        self._building = threading.Lock()

    def guide(self, spec: GuideSpec, ignore_eos: bool) -> GrammarGuide | ThinkingGuide:
        """Return a guide at the start of an output. Raises BadGuide if it cannot be compiled."""
        tokenizer = self._built_tokenizer()
        answer = None if spec.kind == "any" else self._grammar(spec, tokenizer, ignore_eos)
        if spec.thinking is not None:
            return ThinkingGuide(spec.thinking, answer, tokenizer, self._vocab_size, self._eos_ids)
        assert answer is not None, "a guide without a grammar is for thinking"
        return answer

    def _grammar(self, spec: GuideSpec, tokenizer: LLTokenizer, ignore_eos: bool) -> GrammarGuide:
        from llguidance import LLMatcher

        matcher = LLMatcher(tokenizer, grammar_of(spec), log_level=0, limits=parser_limits())
        # If the model has no end token, llguidance has chosen one.
        guide = GrammarGuide(matcher, tokenizer, avoids_end=ignore_eos or not self._eos_ids)
        if guide.is_stuck:
            raise refusal(spec, _said(matcher))
        return guide

    def _built_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._building:
            if self._tokenizer is None:
                if self._path is None or not self._path.is_file():
                    raise BadGuide(
                        "the model has no `tokenizer.json`, so its output cannot be guided; "
                        "add one to its directory, or leave out the schema or grammar"
                    )
                try:
                    # The content: llguidance looks up a missing path on the network.
                    content = self._path.read_text(encoding="utf-8")
                    self._tokenizer = LLTokenizer(content, self._vocab_size, sorted(self._eos_ids) or None)
                except (OSError, ValueError) as error:
                    raise BadGuide(
                        f"the model's output cannot be guided, its tokenizer is not supported: {error}; "
                        "leave out the schema or grammar"
                    ) from error
            return self._tokenizer


class GrammarGuide:
    """A `plan.Guide` of an output that ends with an end token. Mutable; one thread at a time calls it."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, *, avoids_end: bool) -> None:
        """`avoids_end`: an end token is allowed only where no other token is."""
        self._matcher, self._tokenizer = matcher, tokenizer
        self._end_ids = tokenizer.eos_tokens
        #: End tokens that `tokenizer.json` does not list as special. llguidance allows them as text.
        self._plain_end_ids = [token for token in self._end_ids if not tokenizer.is_special_token(token)]
        self._avoids_end = avoids_end
        self._num_taken = 0
        self._mask = self._next_mask()

    @property
    def mask(self) -> bytes:
        assert not self.is_stuck, f"no token is allowed: {self._matcher.stop_reason()}"
        return self._mask

    @property
    def num_free(self) -> int:
        return 0

    @property
    def is_stuck(self) -> bool:
        return self._matcher.is_error() or not _allows_any(self._mask)

    def take(self, token: int) -> FinishReason | None:
        assert self._mask[token // 8] >> token % 8 & 1, f"sampled against the mask: {token=}"
        if token in self._end_ids:
            return FinishReason.STOP
        self._num_taken += 1
        try:
            self._matcher.consume_token(token)
            self._mask = self._next_mask()
        except BaseException as error:  # a panic of llguidance is no Exception
            raise self._stuck(f"llguidance broke by {type(error).__name__}") from error
        if self.is_stuck:
            raise self._stuck(_said(self._matcher))
        return None

    def take_all(self, tokens: Sequence[int]) -> None:
        """Follow an output that began elsewhere. Raises BadGuide if the guide does not allow it."""
        num_taken = self._matcher.try_consume_tokens(list(tokens))
        self._num_taken += num_taken
        self._mask = self._next_mask()
        if num_taken < len(tokens) or self.is_stuck:
            raise BadGuide(
                f"an output of {len(tokens)} tokens is to be resumed, but the schema or grammar allows only "
                f"the first {num_taken}; resume it under the one that it began with"
            )

    def _stuck(self, reason: str) -> GuideStuck:
        return GuideStuck(
            f"the schema or grammar cannot be followed beyond token {self._num_taken} of the output: "
            f"{reason}; make it simpler, with fewer alternatives and optional fields, or leave it out"
        )

    def _next_mask(self) -> bytes:
        forced = self._matcher.compute_ff_tokens()[:1]
        mask = self._matcher.compute_bitmask()
        if forced and not self._matcher.validate_tokens(forced):
            mask = self._respelled(mask)
        if self._plain_end_ids and not self._matcher.is_accepting():
            mask = _without(mask, self._plain_end_ids)
        if self._avoids_end and _allows_any(others := _without(mask, self._end_ids)):
            mask = others
        return mask

    def _respelled(self, mask: bytes) -> bytes:
        """Return the mask where llguidance forces a token that its own grammar does not accept."""
        text, is_token, _ = self._matcher.compute_ff_bytes().partition(b"\xff")
        if not text and is_token:
            return mask  # the grammar names an end token, `<|im_end|>` without quotes
        spelled = bytearray(len(mask))
        for first in self._tokenizer.greedy_tokenize(text.decode(errors="ignore")[:1])[:1]:
            spelled[first // 8] = 1 << first % 8
        return bytes(spelled)  # without any token the guide is stuck


class ThinkingGuide:
    """A `plan.Guide` of thinking and an answer after it. Mutable; one thread at a time calls it.

    The closing mark ends the thinking and is forced once the budget is used up. The answer follows `answer`,
    if there is one. The model may also answer without thinking; where the opening mark is not one token, it
    must answer `answer` at once, unless the prompt has the mark.
    """

    def __init__(
        self,
        spec: ThinkingSpec,
        answer: GrammarGuide | None,
        tokenizer: LLTokenizer,
        vocab_size: int,
        eos_ids: frozenset[int],
    ) -> None:
        self._spec, self._answer, self._tokenizer = spec, answer, tokenizer
        self._open_ids = tokenizer.tokenize_str(spec.open)
        self._any = b"\xff" * (-(-vocab_size // 32) * 4)
        #: An output that ends in its thinking would not follow the grammar.
        self._thinking_mask = self._any if answer is None else _without(self._any, eos_ids)
        self._is_thinking, self._is_answering = spec.is_open, False
        self._written = b""  #: since the thinking or the output began, as far as a mark may reach
        self._num_tokens = 0  #: of the thinking
        self._forced: list[int] = []
        self._force_close()

    @property
    def mask(self) -> bytes:
        if self._forced:
            return _with(bytes(len(self._any)), self._forced[0])
        if self._is_thinking:
            return self._thinking_mask
        mask = self._any if self._answer is None else self._answer.mask
        may_think = not self._is_answering and len(self._open_ids) == 1
        return _with(mask, self._open_ids[0]) if may_think else mask

    @property
    def num_free(self) -> int:
        if self._answer is not None or self._forced:
            return 0
        if self._is_answering or (budget := self._spec.budget_tokens) is None:
            return sys.maxsize
        return budget - self._num_tokens

    def take(self, token: int) -> FinishReason | None:
        if self._forced:
            del self._forced[0]
        elif self._answer is not None and not self._is_thinking and [token] != self._open_ids:
            self._is_answering = True
        if self._is_answering:
            return None if self._answer is None else self._answer.take(token)
        self._read(token)
        return None

    def take_all(self, tokens: Sequence[int]) -> None:
        """Follow an output that began elsewhere. Raises BadGuide if the guide does not allow it."""
        for at, token in enumerate(tokens):
            if self._is_answering:
                if self._answer is not None:
                    self._answer.take_all(tokens[at:])
                return
            self.take(token)

    def _read(self, token: int) -> None:
        text = self._written + self._tokenizer.decode_bytes([token])
        open, close = self._spec.open.encode(), self._spec.close.encode()
        if self._is_thinking:
            self._num_tokens += 1
            self._written = text[1 - len(close) :]
            self._is_answering = close in text
            self._is_thinking = not self._is_answering
            self._force_close()
            return
        self._written = text.lstrip()
        if self._written.startswith(open):
            self._is_thinking, self._written = True, b""
            self._force_close()
        else:
            self._is_answering = not open.startswith(self._written)

    def _force_close(self) -> None:
        budget = self._spec.budget_tokens
        if self._is_thinking and not self._forced and budget is not None and self._num_tokens >= budget:
            self._forced = self._tokenizer.tokenize_str(self._spec.close)


def _with(mask: bytes, token: int) -> bytes:
    others = bytearray(mask)
    others[token // 8] |= 1 << token % 8
    return bytes(others)


def _without(mask: bytes, tokens: Iterable[int]) -> bytes:
    others = bytearray(mask)
    for token in tokens:
        others[token // 8] &= ~(1 << token % 8)
    return bytes(others)


def _allows_any(mask: bytes) -> bool:
    return mask.count(0) < len(mask)  # `any` is slow over thousands of bytes, at every token


def _said(matcher: LLMatcher) -> str:
    """Return why a matcher stopped, without the state dump, which quotes the output."""
    error = (matcher.get_error() or "").partition("<state>")[0].strip()
    return "no token is allowed" if error in ("", "NoExtensionBias") else error  # llguidance's word for it
