"""Turns tokens into text, one token at a time and never half a character. One instance per request.

Does not look for stop strings and does not decide when a request ends.

The text that comes out is what `Tokenizer.decode` gives for all tokens at once, with one exception. Where
a run of byte-fallback tokens is not UTF-8, the tokenizers package turns the whole run into U+FFFD, one per
byte; by then a stream has sent the characters at its start. So here only the bytes that are wrong become
U+FFFD, one per broken character, as in byte-level tokenizers.
"""

from __future__ import annotations

import codecs

from hearth.text.token_spelling import Spelling
from hearth.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  #: what decoders put for bytes that are not UTF-8, or not yet

#: A character has at most 4 bytes, so a token that ends in the middle of one waits for at most 3 more.
_MAX_PENDING_TOKENS = 4


class Detokenizer:
    """Mutable; written only by the request that it belongs to. `flush` ends it."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._stream = _Window(tokenizer) if tokenizer.spelling is None else _ByteStream(tokenizer.spelling)

    def push(self, token_id: int) -> str:
        """Return the text that has become final; empty while a character is incomplete."""
        token = self._tokenizer.token(token_id)
        if token is None or token_id in self._hidden_ids:
            return ""
        return self._stream.push(token_id, token)

    def flush(self) -> str:
        """Return the text that was held back, at the end of the output."""
        return self._stream.flush()


class _ByteStream:
    """The decoder for tokenizers with a spelling: the cost of a token is its length."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        #: Characters that the start of the text may still lose; 0 once another one was seen.
        self._num_to_strip = spelling.max_stripped

    def push(self, token_id: int, token: str) -> str:
        return self._strip(self._utf8.decode(self._spelling.bytes_of(token)))

    def flush(self) -> str:
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._num_to_strip and text:
            if text[0] != self._spelling.stripped:
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

    def push(self, token_id: int, token: str) -> str:
        self._window.append(token_id)
        text = self._pending_text()
        num_pending = len(self._window) - self._num_context
        if text.endswith(REPLACEMENT) and num_pending < _MAX_PENDING_TOKENS:
            return ""
        if text:
            self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._context_text = self._decode(self._window)
        return text

    def flush(self) -> str:
        return self._pending_text()

    def _pending_text(self) -> str:
        return self._decode(self._window)[len(self._context_text) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
