"""Marks of trials: what a process leaves behind that dies in the middle of one, and one that does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hearth.snapshot.trial_mark import TrialMark, abandoned_marks

_DIE = """
import os, pathlib, sys
from hearth.snapshot.trial_mark import TrialMark
TrialMark(pathlib.Path(sys.argv[1])).set()
os.kill(os.getpid(), 9)
"""


def die_in_a_trial_of(snapshot: Path) -> None:
    assert subprocess.run([sys.executable, "-c", _DIE, str(snapshot)], check=False).returncode == -9


def test_a_mark_outlives_a_process_that_dies_in_a_trial(tmp_path: Path) -> None:
    snapshot, other = tmp_path / "one.snapshot", tmp_path / "other.snapshot"
    mark = TrialMark(snapshot)
    mark.set()
    assert abandoned_marks(snapshot) == [], "its process lives"
    die_in_a_trial_of(snapshot)
    assert len(abandoned_marks(snapshot)) == 1
    assert abandoned_marks(other) == []
    mark.clear()
    assert len(abandoned_marks(snapshot)) == 1


def test_two_who_look_at_once_both_find_that_a_process_has_died(tmp_path: Path) -> None:
    snapshot = tmp_path / "one.snapshot"
    die_in_a_trial_of(snapshot)
    (left,) = abandoned_marks(snapshot)
    looks: list[list[Path]] = []
    exists = Path.exists

    def look_as_well(path: Path) -> bool:  # while the first one holds its lock
        if not looks:
            looks.append([])
            looks[0] = abandoned_marks(snapshot)
        return exists(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "exists", look_as_well)
        looks.append(abandoned_marks(snapshot))
    assert looks == [[left], [left]]


def test_a_mark_is_set_and_cleared_for_every_trial(tmp_path: Path) -> None:
    mark = TrialMark(tmp_path / "one.snapshot")
    for _ in range(3):
        mark.set()
        mark.set()
        assert [path.suffix for path in tmp_path.iterdir()] == [".trial"]
        mark.clear()
        mark.clear()
        assert list(tmp_path.iterdir()) == []


def test_a_mark_that_cannot_be_written_is_told_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = TrialMark(tmp_path / "nowhere" / "one.snapshot")
    for _ in range(2):
        mark.set()
        mark.clear()
    assert [record.message.split()[1] for record in caplog.records] == ["trials=unmarked"]
