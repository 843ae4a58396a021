from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.errors import SnapshotFatal, SnapshotTruncated, StoreFull
from hearth.snapshot.directory import SnapshotDirectory, keep_quota, remove_others
from hearth.snapshot.fingerprint import Fingerprint
from hearth.snapshot.trial_mark import TrialMark
from tests.snapshot.fingerprints import FINGERPRINT
from tests.snapshot.test_trial_mark import die_in_a_trial_of

SECTIONS = {"memory": b"x" * 10_000}


@pytest.fixture
def directory(tmp_path: Path) -> SnapshotDirectory:
    return SnapshotDirectory.open(tmp_path / "snapshots", quota_bytes=1 << 20)


def used(path: Path, seconds_ago: float) -> None:
    os.utime(path, (time.time() - seconds_ago,) * 2)


def of(model: str, **changes: str) -> Fingerprint:
    return replace(FINGERPRINT, manifest=model, **changes)


def test_a_snapshot_is_found_by_its_fingerprint_alone(directory: SnapshotDirectory) -> None:
    path = directory.save(of("a"), SECTIONS)
    assert path.parent.name == "a"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with directory.load(of("a")) as found:  # type: ignore[union-attr] # it is there
        assert bytes(found["memory"]) == SECTIONS["memory"]
    assert directory.load(of("b")) is None
    assert directory.load(of("a", torch="2.12.0")) is None


def test_why_none_is_used_is_the_difference_to_the_one_used_last(directory: SnapshotDirectory) -> None:
    used(directory.save(of("a", driver="1", torch="old"), SECTIONS), seconds_ago=100)
    used(directory.save(of("a", driver="1"), SECTIONS), seconds_ago=50)
    assert [one.name for one in directory.differences(of("a"))] == ["driver"]
    assert directory.differences(of("b")) == []


def test_using_a_snapshot_makes_it_the_last_to_go(directory: SnapshotDirectory) -> None:
    old, new = directory.save(of("a"), SECTIONS), directory.save(of("b"), SECTIONS)
    used(old, seconds_ago=200)
    used(new, seconds_ago=100)
    found = directory.load(of("a"))
    assert found is not None
    found.close()
    assert keep_quota(directory.path, 15_000) == 1
    assert [entry.path for entry in directory.entries()] == [old]


def test_a_new_snapshot_has_others_go(directory: SnapshotDirectory) -> None:
    small = replace(directory, quota_bytes=25_000)
    paths = [small.save(of(model), SECTIONS) for model in ("a", "b")]
    used(paths[0], seconds_ago=100)
    used(paths[1], seconds_ago=200)
    third = small.save(of("c"), SECTIONS)
    assert {entry.path for entry in small.entries()} == {paths[0], third}


def test_a_snapshot_beyond_the_quota_is_refused(directory: SnapshotDirectory) -> None:
    with pytest.raises(StoreFull, match=r"store\.snapshot_bytes"):
        replace(directory, quota_bytes=9_999).save(of("a"), SECTIONS)
    assert directory.entries() == []


def test_snapshots_go_with_their_models(directory: SnapshotDirectory) -> None:
    for model in ("a", "b", "c"):
        directory.save(of(model), SECTIONS)
    left = directory.path / "a" / ".x.snapshot.123"
    left.write_bytes(b"half")
    used(left, seconds_ago=7200)
    assert remove_others(directory.path, {"a", "b"}) == 1
    assert [entry.model for entry in directory.entries()] == ["a", "b"]
    assert not left.exists()
    assert directory.remove("a") == 1
    assert directory.remove("a") == 0
    assert [entry.model for entry in directory.entries()] == ["b"]
    assert remove_others(directory.path / "nowhere", ()) == 0


def test_a_damaged_snapshot_is_refused(directory: SnapshotDirectory) -> None:
    os.truncate(directory.save(of("a"), SECTIONS), 500)
    with pytest.raises(SnapshotTruncated):
        directory.load(of("a"))
    assert directory.newest("a") is None


def test_a_snapshot_that_a_process_died_of_is_removed(directory: SnapshotDirectory) -> None:
    path = directory.save(of("a"), SECTIONS)
    die_in_a_trial_of(path)
    with pytest.raises(SnapshotFatal, match="a worker ended while it tried"):
        directory.load(of("a"))
    assert directory.load(of("a")) is None
    assert list(path.parent.iterdir()) == []


def test_a_snapshot_that_another_process_tries_is_used(directory: SnapshotDirectory) -> None:
    mark = TrialMark(directory.save(of("a"), SECTIONS))
    mark.set()
    with directory.load(of("a")) as found:  # type: ignore[union-attr] # it is there
        assert bytes(found["memory"]) == SECTIONS["memory"]
    mark.clear()


def test_a_new_snapshot_does_not_answer_for_the_one_before(directory: SnapshotDirectory) -> None:
    """The old one went by the quota, before anybody looked for it again."""
    path = directory.save(of("a"), SECTIONS)
    die_in_a_trial_of(path)
    path.unlink()
    directory.save(of("a"), SECTIONS)
    with directory.load(of("a")) as found:  # type: ignore[union-attr] # it is there
        assert found.num_bytes > 0
