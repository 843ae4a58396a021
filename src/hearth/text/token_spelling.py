"""The spelling of tokens in bytes, where a tokenizer's text is just the bytes of its tokens in a row.

Covers byte-level BPE and sentencepiece BPE with byte fallback, so nearly every decoder-only model. Does not
cover decoders that look at neighbouring tokens (WordPiece, Metaspace): those have no `Spelling`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hearth.text.chat_template import Json


@dataclass(frozen=True, slots=True)
class Spelling:
    """A tokenizer's text is `bytes_of` each token in a row, as UTF-8, less a few characters at its start."""

    bytes_of: Callable[[str], bytes]
    stripped: str = " "
    max_stripped: int = 0  #: how many of `stripped` the start of the text loses


class SpelledTokens(dict[int, bytes]):
    """The bytes of tokens by id, made when first needed; empty outside the vocabulary. Thread-safe."""

    __slots__ = ("_name_of", "spelling")

    def __init__(self, spelling: Spelling, name_of: Callable[[int], str | None]) -> None:
        """`name_of` is what the vocabulary calls a token; None outside of it."""
        super().__init__()
        self.spelling, self._name_of = spelling, name_of

    def __missing__(self, token_id: int) -> bytes:
        name = self._name_of(token_id)
        spelled = self[token_id] = b"" if name is None else self.spelling.bytes_of(name)
        return spelled


def spelling_of(decoder: Json) -> Spelling | None:
    match decoder:
        case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return Spelling(_byte_level)
        case {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(space)},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *rest,
            ],
        }:
            bytes_of = _byte_fallback(mark, space)
        case _:
            return None
    match rest:
        case []:
            return Spelling(bytes_of)
        case [{"type": "Strip", "content": str(stripped), "start": int(count), "stop": 0}]:
            return Spelling(bytes_of, stripped, count)
        case _:
            return None


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 is itself, the other bytes are U+0100 and up, in order."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL_ALPHABET = _byte_level_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(token: str) -> bytes:
    """Return a token's bytes; one with a letter outside the alphabet was added by hand: it is its text."""
    try:
        return bytes([_BYTE_LEVEL_ALPHABET[letter] for letter in token])
    except KeyError:
        return token.encode()


def fallback_byte(token: str) -> bytes | None:
    """Return the byte that a token such as `<0xE4>` stands for where there is byte fallback; None: none."""
    byte = _BYTE_TOKEN.fullmatch(token)
    return None if byte is None else bytes.fromhex(byte[1])


def _byte_fallback(mark: str, space: str) -> Callable[[str], bytes]:
    def bytes_of(token: str) -> bytes:
        if (byte := fallback_byte(token)) is not None:
            return byte
        return token.replace(mark, space).encode()

    return bytes_of
