"""Fill in the middle: how code models are asked for the text between a prefix and a suffix.

Such a model has tokens that mark both parts and the beginning of the middle. Other marks are rows of `MARKS`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hearth.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """Tokens, in the order of the prompt."""

    prefix: str
    suffix: str
    middle: str
    #: That end the middle, as do the marks. Those that the tokenizer lacks do not count.
    stops: tuple[str, ...]


MARKS = (
    # Qwen2.5-Coder, CodeGemma
    InfillMarks(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, Granite Code
    InfillMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<|endoftext|>", "<fim_pad>", "<file_sep>")),
    InfillMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ()),  # noqa: RUF001  # DeepSeek-Coder
    InfillMarks("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # Code Llama
)
#: Before a text, it takes the space that some tokenizers put there. No token joins it with what follows.
_ANCHOR = "☺"


def infill_marks(tokenizer: Tokenizer) -> InfillMarks | None:
    """Return the marks of a model; None: it cannot fill in the middle."""
    has = tokenizer.has_token
    known = (marks for marks in MARKS if has(marks.prefix) and has(marks.suffix) and has(marks.middle))
    return next(known, None)


def infill_tokens(tokenizer: Tokenizer, marks: InfillMarks, prefix: str, suffix: str) -> tuple[int, ...]:
    return (
        *tokenizer.encode(""),  # the token that begins a text, if there is one
        tokenizer.token_id(marks.prefix),
        *tokenizer.encode(prefix, add_special_tokens=False),
        tokenizer.token_id(marks.suffix),
        *_encode_inside(tokenizer, suffix),
        tokenizer.token_id(marks.middle),
    )


def stop_ids(tokenizer: Tokenizer, marks: InfillMarks) -> list[int]:
    stops = (marks.prefix, marks.suffix, marks.middle, *marks.stops)
    return [tokenizer.token_id(stop) for stop in stops if tokenizer.has_token(stop)]


def _encode_inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text without the space that some tokenizers put before every text."""
    begin = tokenizer.encode("a", add_special_tokens=False)
    if tokenizer.token_bytes(begin[0]).strip() == tokenizer.token_bytes(begin[0]):
        return tokenizer.encode(text, add_special_tokens=False)
    num_before = len(tokenizer.encode(_ANCHOR, add_special_tokens=False))
    return tokenizer.encode(_ANCHOR + text, add_special_tokens=False)[num_before:]
