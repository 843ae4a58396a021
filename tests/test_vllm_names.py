"""The table of vLLM's names in docs/guides/vllm.md against Hearth's classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from typing import get_type_hints

import pytest

import hearth
from hearth.core.errors import BadSampling
from hearth.vllm_options import ENGINE_FIELDS, REFUSED, WITHOUT_EFFECT

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "vllm.md"


@dataclass(frozen=True, slots=True)
class Row:
    where: str
    status: str
    names: tuple[str, ...]


def rows() -> Iterator[Row]:
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"\| (`[^|]+) \| (\w+) \| ([^|]+) \|", line):
            where = found[1].replace("`", "")
            yield Row(where, found[2], tuple(re.findall(r"`(\w+)`", found[3])))


def names_of(where: str) -> set[str]:
    """What a class or a function of Hearth takes or has by this entry of the table."""
    class_name, _, function = where.removesuffix(" methods").partition(".")
    cls = getattr(hearth, class_name)
    if function:
        return set(inspect.signature(getattr(cls, function)).parameters) - {"self"}
    if where == "LLM":
        options = {*ENGINE_FIELDS, *REFUSED, *WITHOUT_EFFECT, "enforce_eager"}
        return (set(inspect.signature(cls).parameters) - {"vllm_options"}) | options
    if where in ("AsyncLLM", "AsyncLLMEngine", "AsyncEngineArgs"):
        return set(inspect.signature(cls).parameters) - {"options"}
    if issubclass(cls, Enum):
        return set(cls.__members__)
    public = {name for name in dir(cls) if not name.startswith("_")}
    if is_dataclass(cls):
        # Of sampling parameters only what can be given.
        return set(inspect.signature(cls).parameters) if class_name.endswith("Params") else public
    return set(get_type_hints(cls)) if issubclass(cls, dict) else public


PLACES = sorted({row.where for row in rows()})


def test_the_table_has_all_names_that_the_package_offers() -> None:
    assert {place.partition(".")[0].removesuffix(" methods") for place in PLACES} == set(hearth.__all__)
    assert {row.status for row in rows()} == {"same", "different", "absent", "own"}


@pytest.mark.parametrize("where", PLACES)
def test_each_name_is_there_or_absent_as_the_table_says(where: str) -> None:
    listed = [(name, row.status) for row in rows() if row.where == where for name in row.names]
    here = {name for name, status in listed if status != "absent"}

    assert here == names_of(where)
    assert len({name for name, _ in listed}) == len(listed), "a name is listed twice"


@pytest.mark.parametrize("name", [name for row in rows() if row.status == "absent" for name in row.names])
def test_an_absent_name_is_no_argument(name: str) -> None:
    for row in rows():
        if row.status == "absent" and name in row.names:
            assert name not in names_of(row.where)
            if row.where in ("LLM", "SamplingParams", "StructuredOutputsParams", "LoRARequest"):
                given = {"model": "nowhere"} if row.where == "LLM" else {}
                with pytest.raises(TypeError, match=f"^{row.where}.*{name}"):
                    getattr(hearth, row.where)(**given, **{name: None})


def test_more_logprobs_than_the_table_says_are_refused() -> None:
    for count in (-1, 21):
        with pytest.raises(BadSampling, match="`logprobs` must be at least 0 and at most 20"):
            hearth.SamplingParams(logprobs=count)
