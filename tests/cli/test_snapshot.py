"""`hearth snapshot`, against a service that makes none, and against files on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from hearth.cli import local_models
from hearth.cli import snapshot as snapshot_command
from hearth.cli.client import SnapshotEvent
from hearth.cli.progress import Advance
from hearth.control.datadir import DataDir
from hearth.control.deploy.deployed import DeployedAdapter
from hearth.control.observe.views import SnapshotView
from hearth.snapshot import cost_profile, memory_profile
from hearth.snapshot.directory import SnapshotDirectory
from hearth.snapshot.memory_profile import MemoryProfile
from tests.cli.fake_service import FakeService
from tests.cli.shell import Completed, Hearth
from tests.sim.small_machine import MACHINE
from tests.snapshot.fingerprints import FINGERPRINT


@pytest.fixture
def snapshot(data_dir: Path, tiny: Path) -> Path:
    """The file of a snapshot of `tiny`."""
    directory = SnapshotDirectory.open(DataDir(data_dir).snapshots_path, 1 << 20)
    fingerprint = replace(FINGERPRINT, manifest=local_models.find(data_dir, "tiny").digest)
    sections = {
        memory_profile.SECTION: MemoryProfile(0, 0, 310 << 20).pack(),
        **{f"graph/{name}": b"" for name in ("decode-8", "tail-1", "tail-adapters-1")},
        cost_profile.SECTION: msgspec.json.encode(MACHINE.measured),
    }
    return directory.save(fingerprint, sections)


def test_a_service_is_asked_to_make_one_and_make_may_be_left_out(
    hearth: Hearth, service: FakeService
) -> None:
    for words in (("smol",), ("make", "smol")):
        shown = hearth("snapshot", *words, "--url", service.url)
        assert (shown.code, shown.err) == (0, "")
        assert shown.out == (
            "made a snapshot of smol: 12.0 KiB in 2.5 s; its worker uses 310 MiB outside the pool\n"
        )
    assert service.asked == [("POST", "/hearth/models/smol/snapshot", {})] * 2
    shown = hearth("snapshot", "smol", "--json", "--url", service.url)
    assert json.loads(shown.out)["num_bytes"] == 12 << 10


def test_progress_is_shown_and_says_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, int | None, str | None]] = []

    @contextmanager
    def step_bar(title: str) -> Iterator[Advance]:
        yield lambda done, total, what=None: shown.append((done, total, what))

    monkeypatch.setattr(snapshot_command, "step_bar", step_bar)
    view = SnapshotView("smol", 1, 2, 3.0)
    steps = [
        ("loading", 0, 0),
        ("waiting", 0, 0),
        ("measuring", 0, 9),
        ("measuring", 9, 9),
    ]

    class Making:
        def make_snapshot(self, name: str) -> Iterator[SnapshotEvent | SnapshotView]:
            yield from (SnapshotEvent("progress", *step) for step in steps)
            yield view

    assert snapshot_command.made(Making(), "smol") is view  # type: ignore[arg-type] # all that is asked of one
    assert shown == [
        (0, None, "loading smol"),
        (0, None, "waiting smol"),
        (0, 9, "measuring smol"),
        (9, 9, "measuring smol"),
    ]


def test_why_none_could_be_made_is_told(hearth: Hearth, service: FakeService) -> None:
    service.snapshot_failure = "the disk is full"
    shown = hearth("snapshot", "smol", "--url", service.url)
    assert (shown.code, shown.out) == (1, "")
    assert "the disk is full" in shown.err
    assert hearth("snapshot", "unknown", "--url", service.url).code == 3


def test_without_a_service_none_is_made(hearth: Hearth, data_dir: Path) -> None:
    shown = hearth("snapshot", "smol")
    assert shown.code == 3
    assert "hearth serve" in shown.err


def test_snapshots_are_listed(hearth: Hearth, snapshot: Path) -> None:
    header, line = hearth("snapshot", "ls").out.splitlines()
    assert header.split() == ["MODEL", "SIZE", "USED", "BESIDES", "GRAPHS", "DEVICE", "STATE"]
    assert line.startswith("tiny ")
    assert "310 MiB" in line
    assert " 2+1 " in line, "two graphs, and one for steps with adapters"
    assert "NVIDIA H200" in line
    assert line.endswith(" ok")
    (found,) = json.loads(hearth("snapshot", "ls", "--json").out)
    assert (found["model"], found["path"], found["problem"]) == ("tiny", str(snapshot), None)
    assert set(found["sections"]) >= {"cost", "memory", "graph/decode-8"}
    assert (found["num_graphs"], found["num_adapter_graphs"]) == (2, 1)


def test_a_damaged_snapshot_is_named(hearth: Hearth, snapshot: Path) -> None:
    ok = hearth("snapshot", "verify", "tiny")
    assert (ok.code, ok.err) == (0, "")
    assert ok.out.startswith(f"ok: {snapshot}")
    content = bytearray(snapshot.read_bytes())
    content[-1] ^= 1
    snapshot.write_bytes(content)
    bad = hearth("snapshot", "verify")
    assert bad.code == 1
    assert "is damaged" in bad.out
    os.truncate(snapshot, 100)
    assert hearth("snapshot", "ls").out.endswith(" truncated\n")
    (found,) = json.loads(hearth("snapshot", "ls", "--json").out)
    assert (found["state"], found["model"]) == ("truncated", "tiny")
    assert "should have" in found["problem"]
    assert "should have" in hearth("doctor", "--json").out


@pytest.mark.parametrize(
    ("spoil", "state", "reason"),
    [
        (lambda path: path.write_bytes(b"x" * 200), "foreign", "is not a snapshot"),
        (lambda path: path.chmod(0o666), "unauthenticated", "can write, and is of"),
        (lambda path: (path.parents[1] / "key").unlink(), "unauthenticated", "not written by this"),
        (lambda path: (path.parents[1] / "key").write_bytes(bytes(32)), "unauthenticated", "not written by"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), "unreadable", "cannot be read"),
        (lambda path: (path.unlink(), path.mkdir()), "unauthenticated", "must be a file"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "unauthenticated", "must be a file"),
    ],
    ids=["foreign", "mode", "no key", "another key", "link", "directory", "pipe"],
)
def test_what_is_wrong_with_a_snapshot_is_a_word_in_the_list_and_named_by_verify_and_the_doctor(
    hearth: Hearth, snapshot: Path, spoil: Callable[[Path], object], state: str, reason: str
) -> None:
    spoil(snapshot)
    _, line = hearth("snapshot", "ls").out.splitlines()
    assert line.endswith(f" {state}")
    bad = hearth("snapshot", "verify", "tiny")
    assert bad.code == 1
    assert bad.out.startswith("bad: ")
    assert reason in bad.out
    (note,) = json.loads(hearth("doctor", "--json").out)["snapshots"]["notes"]
    assert reason in note
    assert str(snapshot) in note
    assert hearth("snapshot", "rm", "tiny", "--yes").code == 0
    assert not snapshot.parent.exists()
    assert hearth("snapshot", "verify", "tiny").out == "no snapshot of tiny\n"


def test_a_broken_key_is_named_by_the_doctor(hearth: Hearth, snapshot: Path) -> None:
    key = snapshot.parents[1] / "key"
    key.chmod(0o644)
    assert "alone" in hearth("doctor", "--json").out
    refused = hearth("snapshot", "ls")
    assert refused.code == 1
    assert str(key) in refused.err


def test_snapshots_go_alone_or_with_their_model(hearth: Hearth, snapshot: Path, data_dir: Path) -> None:
    assert hearth("snapshot", "rm", "tiny").code == 2  # nobody can be asked
    assert snapshot.exists()
    content = snapshot.read_bytes()
    assert hearth("snapshot", "rm", "tiny", "--yes").out == "removed 1 snapshot of tiny\n"
    assert not snapshot.exists()
    snapshot.parent.mkdir()
    snapshot.write_bytes(content)
    assert hearth("rm", "tiny", "--yes").code == 0
    assert not snapshot.parent.exists()
    assert (DataDir(data_dir).snapshots_path / "key").exists()


def test_the_snapshots_of_an_adapter_are_those_of_its_base(
    hearth: Hearth, snapshot: Path, shop: DeployedAdapter
) -> None:
    assert hearth("snapshot", "verify", shop.name).out.startswith(f"ok: {snapshot}")
    assert "removed 1 snapshot" in hearth("snapshot", "rm", shop.name, "--yes").out
    assert not snapshot.exists()


def test_nothing_is_made_by_looking(hearth: Hearth, data_dir: Path) -> None:
    assert json.loads(hearth("snapshot", "ls", "--json").out) == []
    shown = hearth("snapshot", "verify")
    assert (shown.code, shown.out) == (0, "no snapshots\n")
    assert not data_dir.exists()


def test_a_simulation_runs_by_the_snapshot_of_a_model(hearth: Hearth, snapshot: Path) -> None:
    words = ("poisson:1", "--length", "5", "--json")
    shown = hearth("simulate", *words, "--profile", "snapshot:tiny", "--models", "1b")
    assert (shown.code, shown.err) == (0, "")
    assert json.loads(shown.out)["num_requests"] > 0
    snapshot.unlink()
    none = hearth("simulate", *words, "--profile", "snapshot:tiny", "--models", "1b")
    assert none.code == 1
    assert "hearth snapshot tiny" in none.err


def test_commands_and_names_are_completed(snapshot: Path, data_dir: Path, completed: Completed) -> None:
    assert completed("hearth snapshot ", data_dir) == ["make", "ls", "rm", "verify", "tiny"]
    assert completed("hearth snapshot verify t", data_dir) == ["tiny"]
