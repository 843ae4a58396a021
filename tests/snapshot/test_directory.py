from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hearth.core.errors import (
    SnapshotError,
    SnapshotFatal,
    SnapshotForeign,
    SnapshotTruncated,
    SnapshotUnauthenticated,
    StoreFull,
)
from hearth.snapshot import directory as directory_module
from hearth.snapshot import trial_mark
from hearth.snapshot.directory import (
    SUFFIX,
    SnapshotDirectory,
    SnapshotEntry,
    keep_quota,
    remove_others,
    remove_unfinished,
)
from hearth.snapshot.fingerprint import Fingerprint
from hearth.snapshot.trial_mark import TrialMark
from tests.snapshot.fingerprints import FINGERPRINT, OTHER_KEY
from tests.snapshot.test_file import run_script
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


def test_a_snapshot_that_its_writer_takes_is_within_the_quota_of_the_next_start(tmp_path: Path) -> None:
    """All bytes of the file count, not those of its sections alone: else each start would remove it."""
    num_bytes = SnapshotDirectory.open(tmp_path, 1 << 20).save(of("a"), SECTIONS).stat().st_size
    exact = SnapshotDirectory.open(tmp_path, num_bytes)
    path = exact.save(of("a"), SECTIONS)
    assert keep_quota(tmp_path, num_bytes) == 0
    assert path.exists()
    with pytest.raises(StoreFull, match=f"takes {num_bytes} bytes, .*: {num_bytes - 1}; raise it"):
        SnapshotDirectory.open(tmp_path, num_bytes - 1).save(of("a"), SECTIONS)


#: Saves a snapshot over another one again and again, each time killed some lines later than the time before,
#: and says what was found afterwards.
DIE_LATER_AND_LATER = """
import collections, os, signal, sys
from pathlib import Path
from hearth.snapshot.directory import SnapshotDirectory, remove_unfinished
from tests.snapshot.fingerprints import FINGERPRINT
OLD, NEW = {"memory": b"old" * 10_000}, {"memory": b"new" * 20_000}

def save_and_die(directory, num_lines):
    def trace(frame, event, argument):
        nonlocal num_lines
        num_lines -= 1
        if num_lines == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    directory.save(FINGERPRINT, NEW)
    os._exit(0)

directory = SnapshotDirectory.open(Path(sys.argv[1]), 1 << 20)
found, num_lines, has_died = collections.Counter(), 1, True
while has_died:
    directory.save(FINGERPRINT, OLD)
    if (child := os.fork()) == 0:
        save_and_die(directory, num_lines)
    has_died = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    with directory.load(FINGERPRINT) as opened:
        content = bytes(opened["memory"])
        opened.verify()
    found["old" if content == OLD["memory"] else "new" if content == NEW["memory"] else "neither"] += 1
    remove_unfinished(directory.path)
    assert not list(directory.path.rglob(".*")), "all that was left is known as such"
    num_lines += 19
print(sum(found.values()), *sorted(found))
"""


def test_a_process_that_is_killed_at_any_line_leaves_the_old_snapshot_or_the_new_one(tmp_path: Path) -> None:
    run = run_script(DIE_LATER_AND_LATER, tmp_path)
    assert run.returncode == 0, run.stderr
    number, *found = run.stdout.split(maxsplit=1)
    assert found == ["new old\n"], run.stderr
    assert int(number) > 40


def test_snapshots_go_with_their_models(directory: SnapshotDirectory) -> None:
    for model in ("a", "b", "c"):
        directory.save(of(model), SECTIONS)
    assert remove_others(directory.path, {"a", "b"}) == 1
    assert [entry.model for entry in directory.entries()] == ["a", "b"]
    assert directory.remove("a") == 1
    assert directory.remove("a") == 0
    assert [entry.model for entry in directory.entries()] == ["b"]
    assert remove_others(directory.path / "nowhere", ()) == 0


def test_a_model_is_removed_while_a_worker_writes_a_snapshot_of_it(
    directory: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.save(of("a"), SECTIONS)
    fsync = os.fsync

    def remove_and_sync(file: int) -> None:
        assert directory.remove("a") == 1
        fsync(file)

    monkeypatch.setattr(os, "fsync", remove_and_sync)
    with pytest.raises(SnapshotError, match="cannot be written"):
        directory.save(of("a"), SECTIONS)
    assert os.listdir(directory.path) == ["key"]


def test_a_directory_that_another_process_removes_meanwhile_is_one_without_snapshots(
    directory: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory.save(of("a"), SECTIONS)
    directory.remove("a")
    monkeypatch.setattr(directory_module, "_model_directories", lambda _: [path.parent])
    monkeypatch.setattr(Path, "is_dir", lambda _: True)  # it was, a moment ago
    assert directory.entries() == []
    assert directory.differences(of("a")) == []
    assert directory.slot_of("a") is None
    assert keep_quota(directory.path, 0) == 0


def test_a_file_that_goes_while_it_is_looked_at_is_none(
    directory: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = SnapshotEntry(directory.path_of(of("a")), "a", 1, 0.0)
    monkeypatch.setattr(SnapshotDirectory, "entries", lambda *_: [entry])
    assert directory.newest("a") is None


def test_what_was_never_finished_goes_and_all_else_stays(directory: SnapshotDirectory) -> None:
    kept = directory.save(of("a"), SECTIONS)
    mark = f".{kept.stem}.12ab{trial_mark.SUFFIX}"
    for left in (kept.with_name(f".{kept.name}.123"), kept.with_name(mark), directory.path / ".key.123"):
        left.write_bytes(b"half")
    (directory.path / ".profile").write_bytes(b"of a user who chose this directory")
    (directory.path / ".mounted").mkdir()
    remove_unfinished(directory.path)
    assert os.listdir(kept.parent) == [kept.name]
    assert sorted(os.listdir(directory.path)) == [".mounted", ".profile", "a", "key"]
    remove_unfinished(directory.path / "nowhere")


def test_what_lies_behind_a_link_is_neither_ours_nor_removed(
    directory: SnapshotDirectory, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name in (".profile", f"my{SUFFIX}", f"{of('a').digest}{SUFFIX}"):
        (home / name).write_bytes(b"private")
    (directory.path / "a").symlink_to(home)
    remove_others(directory.path, ())
    remove_unfinished(directory.path)
    assert keep_quota(directory.path, 0) == 0
    assert directory.entries() == directory.entries("a") == []
    with pytest.raises(SnapshotError, match="through a link"):
        directory.save(of("a"), SECTIONS)
    assert directory.remove("a") == 0
    assert {one.read_bytes() for one in home.iterdir()} == {b"private"}
    assert not (directory.path / "a").is_symlink(), "the link itself goes"
    directory.save(of("a"), SECTIONS)


def test_files_that_nobody_can_ever_use_go_when_their_model_has_a_new_one(
    directory: SnapshotDirectory,
) -> None:
    other_key = replace(directory, key=OTHER_KEY)
    for number, spoil in enumerate([other_key.save, directory.save, directory.save]):
        path = spoil(of("a", driver=f"{number}"), SECTIONS)
        if number == 1:
            os.truncate(path, 500)
    usable = path
    theirs = other_key.save(of("b"), SECTIONS)
    new = directory.save(of("a"), SECTIONS)
    assert {one.path for one in directory.entries()} == {usable, theirs, new}


def test_what_cannot_be_removed_for_the_quota_has_another_go(
    directory: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [directory.save(of(model), SECTIONS) for model in ("a", "b")]
    for path in paths:
        used(path, seconds_ago=100 if path == paths[0] else 50)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == paths[0]:
            raise PermissionError(errno.EPERM, "it is immutable")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert keep_quota(directory.path, 15_000) == 1
    assert [one.path for one in directory.entries()] == [paths[0]]
    assert "it is immutable" in caplog.text


def test_looking_makes_no_key_and_without_one_nothing_is_authentic(directory: SnapshotDirectory) -> None:
    path = directory.save(of("a"), SECTIONS)
    key = directory.path / "key"
    found = SnapshotDirectory.find(directory.path)
    assert found is not None
    found.open_file(path).close()
    key.unlink()
    found = SnapshotDirectory.find(directory.path)
    assert found is not None
    with pytest.raises(SnapshotUnauthenticated):
        found.open_file(path)
    assert not key.exists()
    assert SnapshotDirectory.find(directory.path / "nowhere") is None


def test_a_snapshot_of_another_start_under_this_name_is_refused(directory: SnapshotDirectory) -> None:
    """An authentic one, such as an older file that was moved there."""
    older = directory.save(of("a", driver="1"), SECTIONS)
    older.rename(directory.path_of(of("a")))
    with pytest.raises(SnapshotForeign, match=r"`driver` is 570.86 here and 1 there"):
        directory.load(of("a"))
    directory.save(of("a"), SECTIONS)
    assert directory.load(of("a")) is not None


def test_a_damaged_snapshot_is_refused(directory: SnapshotDirectory) -> None:
    os.truncate(directory.save(of("a"), SECTIONS), 500)
    with pytest.raises(SnapshotTruncated):
        directory.load(of("a"))
    for ask in (directory.newest, lambda model: directory.differences(of(model, driver="1"))):
        with pytest.raises(SnapshotTruncated):
            ask("a")
        assert not ask("b")
    assert directory.slot_of("a") is None


def test_one_that_cannot_be_read_stands_in_nobodys_way(directory: SnapshotDirectory) -> None:
    addresses = "slot=5 weights=0x18000000000"
    used(directory.save(of("a", driver="1", addresses=addresses), SECTIONS), seconds_ago=100)
    os.truncate(directory.save(of("a", driver="2"), SECTIONS), 500)
    assert [one.name for one in directory.differences(of("a", addresses=addresses))] == ["driver"]
    assert directory.slot_of("a") == 5


def test_a_snapshot_that_a_process_died_of_is_removed(directory: SnapshotDirectory) -> None:
    path = directory.save(of("a"), SECTIONS)
    die_in_a_trial_of(path)
    with pytest.raises(SnapshotFatal, match="a worker died while it tried"):
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
    """The quota removed the old one before the next start."""
    path = directory.save(of("a"), SECTIONS)
    die_in_a_trial_of(path)
    path.unlink()
    directory.save(of("a"), SECTIONS)
    with directory.load(of("a")) as found:  # type: ignore[union-attr] # it is there
        assert found.num_bytes > 0
