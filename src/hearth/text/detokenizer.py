"""Turns tokens into text, one token at a time and never half a character. One instance per request.

Does not look for stop strings and does not decide when a request ends.

The text of an output is what it adds to the text of its prompt: many tokenizers drop the space of a text's
first word, and the first word of an output is not that. So the text of the prompt and the text that comes out
are together what `Tokenizer.decode` gives for all tokens at once, with one exception. Where a run of
byte-fallback tokens is not UTF-8, the tokenizers package turns the whole run into U+FFFD, one per byte; by
then a stream has sent the characters at its start. So here only the bytes that are wrong become U+FFFD, one
per broken character, as in byte-level tokenizers.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hearth.text.token_spelling import SpelledTokens
from hearth.text.tokenizer import REPLACEMENT, Tokenizer

#: A character has at most 4 bytes, so a token that ends in the middle of one waits for at most 3 more.
_MAX_PENDING_TOKENS = 4
#: The most tokens of a prompt that are read to continue it; more are needed only where it is no UTF-8.
_MAX_TAIL_TOKENS = 16


class Detokenizer:
    """Mutable; written only by the request that it belongs to. `flush` ends it."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._stream = _Window(tokenizer) if tokenizer.spelled is None else _ByteStream(tokenizer.spelled)
        for token_id in self._tail(prompt):
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """Return the text that has become final; empty while a character is incomplete."""
        return "" if token_id in self._hidden_ids else self._stream.push(token_id)

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Return what pushing one after the other would, many times faster."""
        hidden = self._hidden_ids
        return self._stream.push_all([token_id for token_id in token_ids if token_id not in hidden])

    def flush(self) -> str:
        return self._stream.flush()

    def _tail(self, prompt: Sequence[int]) -> list[int]:
        """Return the last few tokens of a prompt, on which alone the text of its continuation depends."""
        tail: list[int] = []
        for token_id in reversed(prompt):
            if token_id in self._hidden_ids or self._tokenizer.token(token_id) is None:
                continue
            tail.insert(0, token_id)
            if len(tail) == _MAX_TAIL_TOKENS or self._begins_character(tail):
                break
        return tail

    def _begins_character(self, ids: list[int]) -> bool:
        heads = (ids[:size] for size in range(1, 1 + min(len(ids), _MAX_PENDING_TOKENS)))
        texts = (self._tokenizer.decode(head, skip_special_tokens=False) for head in heads)
        return any(text and not text.startswith(REPLACEMENT) for text in texts)


def prompt_text(tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool = True) -> str:
    """Half a character at the end is no text yet. Only the end is read token by token, which is slower."""
    num_read, text = len(prompt), tokenizer.decode(prompt, skip_special_tokens)
    while num_read and text.endswith(REPLACEMENT):
        num_read = max(0, num_read - max(_MAX_TAIL_TOKENS, len(prompt) - num_read))
        text = tokenizer.decode(prompt[:num_read], skip_special_tokens)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt[:num_read])
    return text + "".join(map(detokenizer.push, prompt[num_read:]))


class _ByteStream:
    """The decoder for tokenizers with a spelling: the cost of a token is its length."""

    def __init__(self, spelled: SpelledTokens) -> None:
        self._spelled = spelled
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        #: Characters that the start of the text may still lose; 0 once another one was seen.
        self._num_to_strip = spelled.spelling.max_stripped

    def push(self, token_id: int) -> str:
        return self._strip(self._utf8.decode(self._spelled[token_id]))

    def push_all(self, token_ids: Sequence[int]) -> str:
        return self._strip(self._utf8.decode(b"".join(map(self._spelled.__getitem__, token_ids))))

    def flush(self) -> str:
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._num_to_strip and text:
            if text[0] != self._spelled.spelling.stripped:
                self._num_to_strip = 0
                break
            self._num_to_strip -= 1
            text = text[1:]
        return text


class _Window:
    """The decoder where a token's text depends on its neighbours: decodes a few tokens again with each.

    tokens whose text was sent last | tokens whose text is held back
    <----------- context ----------> <----------- pending ----------->
    <---------------------------- window ---------------------------->
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._num_context = 0
        self._context_text = ""  #: the text of the window's first `_num_context` tokens alone

    def push(self, token_id: int) -> str:
        if self._tokenizer.token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._pending_text()
        num_pending = len(self._window) - self._num_context
        if text.endswith(REPLACEMENT) and num_pending < _MAX_PENDING_TOKENS:
            return ""
        if text:
            self._window = self._window[self._num_context :]
        elif len(self._window) > _MAX_TAIL_TOKENS:
            self._window.pop()  # or every token without text would cost as much as all before it
        self._num_context = len(self._window)
        self._context_text = self._decode(self._window)
        return text

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        return self._pending_text()

    def _pending_text(self) -> str:
        return self._decode(self._window)[len(self._context_text) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
