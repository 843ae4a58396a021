from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from hearth.text.infill import MARKS, InfillMarks, infill_marks, infill_tokens, stop_ids
from hearth.text.tokenizer import Tokenizer
from tests.text.conftest import byte_fallback, byte_level

PREFIX, SUFFIX = "def warm(house):\n    return ", "[room for room in house]\n\ttabs"


def saved(backend: Backend, directory: Path, marks: InfillMarks) -> Tokenizer:
    """As in models: Qwen's marks are not special, so decoders would show them."""
    is_special = marks is not MARKS[0]
    names = (marks.prefix, marks.suffix, marks.middle, *marks.stops)
    backend.add_tokens([AddedToken(name, special=is_special, normalized=False) for name in names])
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.prefix)
def test_a_prompt_has_the_format_that_models_were_trained_with(marks: InfillMarks, tmp_path: Path) -> None:
    tokenizer = saved(byte_level(), tmp_path, marks)

    assert infill_marks(tokenizer) is marks
    whole = f"{marks.prefix}{PREFIX}{marks.suffix}{SUFFIX}{marks.middle}"
    assert list(infill_tokens(tokenizer, marks, PREFIX, SUFFIX)) == tokenizer.encode(whole)
    stops = [marks.prefix, marks.suffix, marks.middle, *marks.stops]
    assert [tokenizer.token(stop) for stop in stop_ids(tokenizer, marks)] == stops


def test_code_gemma_ends_a_middle_by_its_file_separator_or_another_mark(tmp_path: Path) -> None:
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_separator|>"]
    backend = byte_level()
    backend.add_tokens(names)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    marks = infill_marks(tokenizer)
    assert marks is not None

    assert [tokenizer.token(stop) for stop in stop_ids(tokenizer, marks)] == names


@pytest.mark.parametrize("suffix", [SUFFIX, " house", "\n", ""])
def test_a_suffix_gets_no_space_from_a_tokenizer_that_puts_one_before_texts(
    suffix: str, tmp_path: Path
) -> None:
    """As Code Llama's own tokenizer does; the prefix has that space, after the first token of the text."""
    marks = MARKS[-1]
    tokenizer = saved(byte_fallback(), tmp_path, marks)

    tokens = infill_tokens(tokenizer, marks, PREFIX, suffix)

    begin, middle = tokens.index(tokenizer.token_id(marks.suffix)), tokenizer.token_id(marks.middle)
    assert b"".join(map(tokenizer.token_bytes, tokens[begin + 1 : -1])) == suffix.encode()
    assert tokens[-1] == middle
    assert tokenizer.token(tokens[0]) == "<s>"
    assert list(tokens[2:begin]) == tokenizer.encode(PREFIX, add_special_tokens=False)


def test_a_tokenizer_without_all_marks_cannot_fill_in(tmp_path: Path) -> None:
    backend = byte_level()
    backend.add_tokens(["<fim_prefix>", "<fim_suffix>"])
    backend.save(str(tmp_path / "tokenizer.json"))

    assert infill_marks(Tokenizer.load(tmp_path)) is None
