"""Dataclasses from JSON, with every field checked."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import NewType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.core.errors import BadCheckpoint
from hearth.store.format.dataclass_json import decode

Name = NewType("Name", str)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Leaf:
    size: int
    colour: Colour


@dataclass(frozen=True)
class Tree:
    name: Name
    height: float
    is_old: bool
    note: str | None
    leaves: tuple[Leaf, ...]


ODD = st.sampled_from([None, True, 0, 1, 1.0, 1.5, 1e999, 2**70, "", "red", "green", [], {}, [1], {"a": 1}])
LEAVES = st.fixed_dictionaries(
    {"size": st.integers() | ODD, "colour": st.sampled_from(["red", "blue"]) | ODD}, optional={"other": ODD}
)
TREES = st.fixed_dictionaries(
    {
        "name": st.text() | ODD,
        "height": st.floats() | st.integers() | ODD,
        "is_old": st.booleans() | ODD,
        "note": st.none() | st.text() | ODD,
        "leaves": st.lists(LEAVES, max_size=3) | ODD,
    },
    optional={"other": ODD},
)


@given(TREES)
def test_what_is_decoded_is_all_that_was_given(value: object) -> None:
    with suppress(BadCheckpoint):
        assert json.loads(json.dumps(asdict(decode(Tree, value, "here")))) == value


@pytest.mark.parametrize("note", [None, "old"])
def test_a_whole_value_is_decoded(note: str | None) -> None:
    value = {
        "name": "oak",
        "height": 3,
        "is_old": False,
        "note": note,
        "leaves": [{"size": 1, "colour": "red"}],
    }
    assert decode(Tree, value, "here") == Tree(Name("oak"), 3.0, False, note, (Leaf(1, Colour.RED),))


RED = {"size": 1, "colour": "red"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"other": 1}, "here: missing fields: none, unknown fields: other;"),
        ({"height": 1e999}, "here.height: unsupported value: inf;"),
        ({"name": "\ud800"}, "here: 'utf-8' codec can't encode"),
        ({"is_old": 1}, "here.is_old: Expected `bool`, got `int`;"),
        ({"leaves": [{"size": True, "colour": "red"}]}, r"here.leaves\[0\].size: Expected `int`, got `bool`"),
        ({"leaves": [{"size": 1.0, "colour": "red"}]}, r"here.leaves\[0\].size: Expected `int`, got `float`"),
        (
            {"leaves": [{"size": 1, "colour": "green"}]},
            r"here.leaves\[0\].colour: Invalid enum value 'green'",
        ),
        ({"leaves": [{"size": 1}]}, r"here.leaves\[0\]: Object missing required field `colour`"),
        ({"leaves": [RED, {**RED, "width": 1}]}, r"here.leaves\[1\]: .* unknown fields: width;"),
    ],
)
def test_the_field_that_does_not_fit_is_named(change: dict[str, object], message: str) -> None:
    value = {"name": "oak", "height": 3.0, "is_old": False, "note": None, "leaves": [], **change}
    with pytest.raises(BadCheckpoint, match=message):
        decode(Tree, value, "here")


#: Four threads meet each of many classes for the first time, all at once.
MEETING = """
import sys, threading
from dataclasses import make_dataclass
from hearth.store.format.dataclass_json import decode

sys.setswitchinterval(1e-6)
for _ in range(100):
    leaf = make_dataclass("Leaf", [(f"field_{number}", int) for number in range(20)], frozen=True)
    tree = make_dataclass("Tree", [("leaf", leaf), ("leaves", tuple[leaf, ...])], frozen=True)
    value = {f"field_{number}": number for number in range(20)}
    start = threading.Barrier(4)
    given = {"leaf": value, "leaves": [value]}
    threads = [
        threading.Thread(target=lambda: start.wait() >= 0 and decode(tree, given, "here")) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_meet_a_class_at_once() -> None:
    assert subprocess.run([sys.executable, "-c", MEETING], timeout=240).returncode == 0
