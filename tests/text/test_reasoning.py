from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from hearth.text.reasoning import (
    MARKS,
    Phase,
    ReasoningMarks,
    ReasoningParser,
    ReasoningUse,
    Split,
    marks_in,
    marks_of,
    switches_in,
)
from hearth.text.tokenizer import Tokenizer
from tests.text.conftest import byte_level
from tests.text.reasoning_templates import DEEPSEEK, QWEN

THINK = MARKS[0]
ODD = ReasoningMarks("<<a>>", "<</a>>")  #: begins with a part of itself


def split(pieces: Sequence[str], phase: Phase, marks: ReasoningMarks = THINK) -> Split:
    parser = ReasoningParser(marks, phase)
    splits = [*(parser.push(piece) for piece in pieces), parser.flush()]
    return Split("".join(one.reasoning for one in splits), "".join(one.text for one in splits))


@pytest.mark.parametrize(
    ("text", "phase", "reasoning", "answer"),
    [
        ("<think>\nHm.\n</think>\n\nYes.\n", Phase.BEFORE, "Hm.", "Yes.\n"),
        ("\n <think>Hm.</think>Yes.", Phase.BEFORE, "Hm.", "Yes."),
        ("\nHm.\n\nSo.\n</think>\n\nYes.", Phase.THINKING, "Hm.\n\nSo.", "Yes."),
        ("\n</think>\n\nYes.", Phase.THINKING, "", "Yes."),
        (" Yes, <think> is a tag.", Phase.BEFORE, "", " Yes, <think> is a tag."),
        ("Yes.</think> No.", Phase.ANSWER, "", "Yes.</think> No."),
        ("Hm. </thin", Phase.THINKING, "Hm. </thin", ""),
        ("Hm. \n", Phase.THINKING, "Hm.", ""),
        ("<thi", Phase.BEFORE, "", "<thi"),
        ("a</think>b</think>c", Phase.THINKING, "a", "b</think>c"),
        ("", Phase.THINKING, "", ""),
    ],
)
def test_reasoning_and_answer_are_parted_at_the_marks(
    text: str, phase: Phase, reasoning: str, answer: str
) -> None:
    assert split([text], phase) == Split(reasoning, answer)


TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "</", "think>", " ", "\n\n", "a", "so"]), max_size=12
)


@given(texts=TEXTS, cuts=st.lists(st.integers(0, 60)), phase=st.sampled_from(list(Phase)), odd=st.booleans())
def test_pieces_joined_are_the_whole_however_the_text_is_cut(
    texts: list[str], cuts: list[int], phase: Phase, odd: bool
) -> None:
    marks = ODD if odd else THINK
    text = "".join(texts).replace("<think>", marks.open).replace("</think>", marks.close)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(ends)]

    whole = split([text], phase, marks)

    assert split(pieces, phase, marks) == whole
    assert split(text, phase, marks) == whole  # a character each
    assert whole.reasoning == whole.reasoning.strip()


def test_reasoning_is_returned_as_it_comes() -> None:
    parser = ReasoningParser(THINK, Phase.BEFORE)

    shown = [
        parser.push(piece) for piece in ("<th", "ink>", "\n", "Hm", ".\n", "So", "</", "think>", "\n", "Yes")
    ]

    assert [one.reasoning for one in shown] == ["", "", "", "Hm", ".", "\nSo", "", "", "", ""]
    assert [one.text for one in shown] == [*[""] * 9, "Yes"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return made(tmp_path, QWEN)


def made(directory: Path, template: str, tokens: Sequence[str] = ("<think>", "</think>")) -> Tokenizer:
    backend = byte_level()
    backend.add_tokens([AddedToken(token, special=False) for token in tokens])
    backend.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)
    (directory / "tokenizer_config.json").write_text(json.dumps({}))
    return Tokenizer.load(directory)


def test_marks_are_recognised_by_the_template_or_the_tokenizer(tmp_path: Path) -> None:
    assert marks_in(QWEN) == marks_in(DEEPSEEK) == THINK
    assert marks_in("{{ messages[0].content }}") is marks_in(None) is None
    assert marks_in("{{ '[THINK]' }}[/THINK]") == ReasoningMarks("[THINK]", "[/THINK]")
    assert marks_of(made(tmp_path, "{{ messages }}")) == THINK
    assert marks_of(made(tmp_path, "{{ messages }}", ["<think>"])) is None
    assert marks_of(made(tmp_path, QWEN, [])) == THINK


def test_the_switch_of_a_template_is_the_variable_that_it_tests() -> None:
    assert switches_in(QWEN) == ("enable_thinking",)
    assert switches_in("{% if not thinking is defined %}{% set thinking = false %}{% endif %}") == (
        "thinking",
    )
    assert switches_in(DEEPSEEK) == switches_in("You are thinking.") == switches_in(None) == ()


@pytest.mark.parametrize(
    ("template", "variables", "phase"),
    [
        (QWEN, {}, Phase.BEFORE),
        (QWEN, {"enable_thinking": False}, Phase.ANSWER),
        (DEEPSEEK, {}, Phase.THINKING),
    ],
)
def test_the_prompt_tells_where_the_answer_begins(
    tmp_path: Path, template: str, variables: dict[str, bool], phase: Phase
) -> None:
    tokenizer = made(tmp_path, template)
    for asked in ("Hi", "<think>", "</think>", "<think>\n"):
        text = tokenizer.chat_text([{"role": "user", "content": asked}], **variables)
        assert ReasoningUse(THINK).phase_after(tokenizer, tokenizer.encode(text)) is phase


@pytest.mark.parametrize(
    ("begun", "phase"),
    [
        ("<think>\nHm", Phase.THINKING),
        ("<think>Hm</think>\n\nY", Phase.ANSWER),
        ("Y", Phase.ANSWER),
        (" ", Phase.BEFORE),
    ],
)
def test_a_continued_message_tells_it_by_its_own_text(tokenizer: Tokenizer, begun: str, phase: Phase) -> None:
    prompt = tokenizer.encode("<|im_start|>assistant\n" + begun)

    assert ReasoningUse(THINK, begun=begun).phase_after(tokenizer, prompt) is phase
