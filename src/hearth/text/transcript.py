"""The text of one answer as its tokens arrive: complete characters, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hearth.core.types import FinishReason, SamplingParams
from hearth.text.detokenizer import Detokenizer
from hearth.text.stops import StopStrings
from hearth.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    finish_reason: FinishReason | None
    offset: int  #: of the token's own text in the answer; `text` may lag behind
    stop: str | None = None  #: the stop string that ended it


class Transcript:
    """Mutable; owned by one thread. A finish reason ends it."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, prompt)
        self.has_stop_strings = bool(params.stop_strings)
        self._stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._keeps_stop_token = params.include_stop_str_in_output
        self._num_tokens = 0
        self._num_chars = 0  #: including held text

    def push(self, token: int, finish_reason: FinishReason | None) -> TextDelta:
        self._num_tokens += 1
        is_hidden = finish_reason is FinishReason.STOP and not self._keeps_stop_token
        text = "" if is_hidden else self._detokenizer.push(token)
        if finish_reason is not None:
            text += self._detokenizer.flush()
        offset = self._num_chars
        self._num_chars += len(text)
        if self._num_tokens <= self._min_tokens:
            safe = self._stops.skip(text)
        else:
            match = self._stops.push(text)
            if match.stop is not None:
                return TextDelta(match.text, FinishReason.STOP, offset, match.stop)
            safe = match.text
        rest = self._stops.flush() if finish_reason is not None else ""
        return TextDelta(safe + rest, finish_reason, offset)

    def flush(self) -> str:
        """Return the text held back, as the answer was cancelled."""
        return self._stops.push(self._detokenizer.flush()).text + self._stops.flush()

    def push_all(self, tokens: Sequence[int], finish_reason: FinishReason | None) -> str:
        """Add tokens of an answer without stop strings; `finish_reason` is that of the last."""
        assert not self.has_stop_strings, "stop strings are looked for token by token"
        assert not self._num_tokens, f"{self._num_tokens=} were taken one by one"
        is_hidden = finish_reason is FinishReason.STOP and not self._keeps_stop_token
        text = self._detokenizer.push_all(tokens[:-1] if is_hidden else tokens)
        return text if finish_reason is None else text + self._detokenizer.flush()
