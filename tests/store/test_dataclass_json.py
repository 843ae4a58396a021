"""Dataclasses from JSON: as quickly as a library reads them, and with every field checked."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.errors import BadCheckpoint
from hearth.store import dataclass_json
from hearth.store.dataclass_json import decode

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
def test_what_the_library_reads_is_what_each_field_says(value: object) -> None:
    read = dataclass_json._convert(Tree, value)
    if read is not None:
        assert repr(read) == repr(dataclass_json._decode(Tree, value, "here"))


@pytest.mark.parametrize("note", [None, "old"])
def test_the_library_reads_what_is_whole(note: str | None) -> None:
    value = {
        "name": "oak",
        "height": 3,
        "is_old": False,
        "note": note,
        "leaves": [{"size": 1, "colour": "red"}],
    }
    read = dataclass_json._convert(Tree, value)
    assert read == Tree(Name("oak"), 3.0, False, note, (Leaf(1, Colour.RED),))
    assert read == decode(Tree, value, "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"other": 1}, "unknown fields: other"),
        ({"height": 1e999}, "here.height: must be a finite number"),
        ({"is_old": 1}, "here.is_old: must be bool"),
        ({"leaves": [{"size": True, "colour": "red"}]}, r"here.leaves\[0\].size: must be int"),
        ({"leaves": [{"size": 1.0, "colour": "red"}]}, r"here.leaves\[0\].size: must be int"),
        ({"leaves": [{"size": 1, "colour": "green"}]}, r"here.leaves\[0\].colour: must be one of red, blue"),
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
from hearth.store.dataclass_json import decode

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
    assert subprocess.run([sys.executable, "-c", MEETING], timeout=60).returncode == 0
