"""Guides of outputs that begin with thinking, over a small tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from hearth.core.types import FinishReason, GuideSpec, ThinkingSpec
from hearth.engine.guide import Guides, ThinkingGuide
from tests.text.conftest import byte_level

YES_OR_NO = GuideSpec("json_schema", json.dumps({"enum": ["yes", "no"]}))
END = "<|im_end|>"


class Writer:
    """Writes an output under a guide, and checks that each token is allowed. Mutable."""

    def __init__(
        self, directory: Path, spec: GuideSpec, marks: tuple[str, ...] = ("<think>", "</think>")
    ) -> None:
        backend = byte_level()
        backend.add_tokens([AddedToken(mark, special=False) for mark in marks])
        backend.add_special_tokens([AddedToken(END, special=True)])
        backend.save(str(directory / "tokenizer.json"))
        self.tokenizer: Tokenizer = backend
        self.eos_id = self.id_of(END)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        guides = Guides(directory / "tokenizer.json", self.vocab_size, frozenset([self.eos_id]))
        guide = guides.guide(spec, ignore_eos=False)
        assert isinstance(guide, ThinkingGuide)
        self.guide = guide
        self.tokens: list[int] = []
        self.masks = [self.allowed()]  #: after each of them

    def id_of(self, token: str) -> int:
        token_id = self.tokenizer.token_to_id(token)
        assert token_id is not None
        return token_id

    def allowed(self) -> set[int]:
        mask = self.guide.mask
        assert len(mask) % 4 == 0
        if self.guide.num_free:
            assert mask == b"\xff" * len(mask)
        return {token for token in range(self.vocab_size) if mask[token // 8] >> token % 8 & 1}

    def write(self, text: str) -> FinishReason | None:
        reason = None
        for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
            assert token in self.allowed(), f"{self.tokenizer.id_to_token(token)} in {text!r}"
            reason = self.guide.take(token)
            self.tokens.append(token)
            self.masks.append(self.allowed())
        return reason

    @property
    def everything(self) -> set[int]:
        return set(range(self.vocab_size))


def thinking(is_open: bool, budget_tokens: int | None = None) -> ThinkingSpec:
    return ThinkingSpec("<think>", "</think>", is_open, budget_tokens)


def after(spec: GuideSpec, thought: ThinkingSpec) -> GuideSpec:
    return GuideSpec(spec.kind, spec.text, thought)


def test_a_schema_applies_to_the_answer_and_not_to_the_thinking(tmp_path: Path) -> None:
    writer = Writer(tmp_path, after(YES_OR_NO, thinking(is_open=True)))

    assert writer.allowed() == writer.everything - {writer.eos_id}
    writer.write("Hm, {maybe}.</think>")
    assert writer.allowed() < writer.everything
    assert writer.id_of("</think>") not in writer.allowed()
    writer.write('"yes"')
    assert writer.write(END) is FinishReason.STOP


def test_a_model_may_begin_to_think_or_answer_at_once(tmp_path: Path) -> None:
    thinks = Writer(tmp_path, after(YES_OR_NO, thinking(is_open=False)))
    thinks.write('<think>Hm.</think>"no"')
    answers = Writer(tmp_path, after(YES_OR_NO, thinking(is_open=False)))
    answers.write('"yes"')

    assert thinks.write(END) is answers.write(END) is FinishReason.STOP


def test_the_closing_mark_is_forced_when_the_budget_is_used_up(tmp_path: Path) -> None:
    writer = Writer(tmp_path, after(GuideSpec("any"), thinking(is_open=True, budget_tokens=4)))

    for num_free, char in zip((4, 3, 2, 1), "abcd", strict=True):
        assert writer.guide.num_free == num_free
        writer.write(char)
    assert writer.guide.num_free == 0
    assert writer.allowed() == {writer.id_of("</think>")}
    writer.write("</think>")
    assert writer.allowed() == writer.everything
    writer.write("free</think>again" + END)
    assert writer.allowed() == writer.everything


def test_a_model_that_ends_its_thinking_in_time_is_not_forced(tmp_path: Path) -> None:
    writer = Writer(tmp_path, after(GuideSpec("any"), thinking(is_open=False, budget_tokens=4)))

    writer.write("<think>abc</think>abcdefghijk")

    assert writer.allowed() == writer.everything


@pytest.mark.parametrize("is_open", [True, False])
def test_without_a_budget_for_it_thinking_ends_where_it_begins(tmp_path: Path, is_open: bool) -> None:
    writer = Writer(tmp_path, after(GuideSpec("any"), thinking(is_open, budget_tokens=0)))

    writer.write("" if is_open else "<think>")

    assert writer.allowed() == {writer.id_of("</think>")}


def test_marks_of_many_tokens_are_found_and_forced(tmp_path: Path) -> None:
    spec = GuideSpec(YES_OR_NO.kind, YES_OR_NO.text, ThinkingSpec("((", "))", True, 9))
    writer = Writer(tmp_path, spec)
    writer.write("a)b))")
    assert writer.id_of("a") not in writer.allowed()

    forced = Writer(tmp_path, spec)
    for char in "abcdefghi":
        forced.write(char)
    assert forced.allowed() == {forced.id_of(")")}
    forced.write(")")
    assert forced.allowed() == {forced.id_of(")")}
    forced.write(")")
    assert forced.write('"no"' + END) is FinishReason.STOP


@pytest.mark.parametrize("is_open", [True, False])
def test_an_output_is_resumed_at_any_token(tmp_path: Path, is_open: bool) -> None:
    spec = after(YES_OR_NO, thinking(is_open, budget_tokens=3))
    writer = Writer(tmp_path, spec)
    for text in (*([] if is_open else ["<think>"]), "a", "b", "c", "</think>", '"yes"'):
        writer.write(text)

    for num_before in range(len(writer.tokens) + 1):
        resumed = Writer(tmp_path, spec)
        resumed.guide.take_all(writer.tokens[:num_before])
        assert resumed.allowed() == writer.masks[num_before]
