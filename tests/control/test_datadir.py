from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hearth.control.datadir import DataDir, ServiceFile, running_service
from hearth.core.errors import DataDirError

URL = "http://127.0.0.1:8000"
_NOBODY = 65534  #: a user who owns nothing
#: Holds the directory that it is told, says so, and lives until its input ends.
HOLDER = f"""
import os
import sys
import tempfile
from hearth.control.datadir import DataDir, ServiceFile
with DataDir.hold(sys.argv[1]) as data_dir:
    data_dir.announce(ServiceFile(os.getpid(), "{URL}", "life-1", "keys.json"), "secret")
    print("held", flush=True)
    sys.stdin.read()
"""


def service_file(pid: int | None = None) -> ServiceFile:
    return ServiceFile(os.getpid() if pid is None else pid, URL, "life-1", "keys.json")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def holder(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_new_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    data_dir = DataDir.open(tmp_path / "deep" / "data")

    assert mode(data_dir.path) == 0o700
    assert [mode(data_dir.path / part) for part in ("models", "downloads", "logs", "run")] == [0o700] * 4
    assert DataDir.open(data_dir.path).path == data_dir.path


@pytest.mark.parametrize("text", ["1", "3", "", "one", "-1", "²"])
def test_a_directory_of_another_format_version_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "VERSION").write_text(f"{text}\n")
    expected = rf"has format version '{text}', .* version 2 only; .*`--data-dir` and deploy the models again"
    with pytest.raises(DataDirError, match=expected):
        DataDir.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["VERSION"]


def test_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(DataDirError, match=r"data` cannot be used: .*; check it, or choose another"):
        DataDir.open(tmp_path / "data")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_names_its_owner() -> None:
    with tempfile.TemporaryDirectory() as place:  # not in that of pytest, which only root may enter
        os.chmod(place, 0o755)
        data = Path(place) / "data"
        data.mkdir(mode=0o700)
        os.seteuid(_NOBODY)
        try:
            with pytest.raises(
                DataDirError, match=r"Permission denied.*; run this as its owner, .* -u root "
            ):
                DataDir.open(data)
            with pytest.raises(
                DataDirError, match=r"Permission denied.*; run this as its owner, .* -u root "
            ):
                running_service(data)
            with pytest.raises(
                DataDirError, match=r"Permission denied.*; run this as its owner, .* -u root "
            ):
                _ = DataDir(data).has_registry
        finally:
            os.seteuid(0)


def test_a_service_is_found_while_it_runs_and_not_afterwards(tmp_path: Path) -> None:
    assert running_service(tmp_path) is None
    with DataDir.hold(tmp_path) as data_dir:
        assert running_service(tmp_path) is None, "it has not said where it is"
        data_dir.announce(service_file(), "secret")
        assert running_service(tmp_path) == service_file()
        assert mode(data_dir.run_path / "service.json") == 0o600
        assert "secret" not in (data_dir.run_path / "service.json").read_text()
        assert (data_dir.read_admin_token(), mode(data_dir.run_path / "admin_token")) == ("secret", 0o600)
        data_dir.withdraw()
        assert running_service(tmp_path) is None
    assert running_service(tmp_path) is None
    assert DataDir(tmp_path).read_admin_token() is None


def test_a_directory_that_cannot_be_looked_into_is_not_said_to_have_no_service(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("run")
    with pytest.raises(DataDirError, match=r"cannot be used: .*; check it"):
        running_service(tmp_path)


def test_a_service_that_fails_is_not_found_either(tmp_path: Path) -> None:
    def fail() -> None:
        with DataDir.hold(tmp_path) as data_dir:
            data_dir.announce(service_file(), "secret")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not (tmp_path / "run" / "service.json").exists()


def test_a_second_service_is_refused_with_pid_and_url_of_the_first(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        with (
            pytest.raises(DataDirError, match=rf"already: process {first.pid} at {URL}; use that one"),
            DataDir.hold(tmp_path),
        ):
            pass
        assert running_service(tmp_path) == service_file(first.pid)
        assert first.stdin is not None
        first.stdin.close()
    assert not (tmp_path / "run" / "service.json").exists()


def test_a_service_that_is_starting_is_named_by_its_pid(tmp_path: Path) -> None:
    with (
        DataDir.hold(tmp_path),
        pytest.raises(DataDirError, match=rf"process {os.getpid()}, which is starting"),
        DataDir.hold(tmp_path),
    ):
        pass


def test_a_killed_service_leaves_nothing_locked(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        first.send_signal(signal.SIGKILL)
    assert (tmp_path / "run" / "service.json").exists()
    assert (tmp_path / "run" / "admin_token").exists()
    assert running_service(tmp_path) is None

    with DataDir.hold(tmp_path) as data_dir:
        assert not (data_dir.run_path / "service.json").exists()
        assert not (data_dir.run_path / "admin_token").exists()


def test_processes_that_the_service_has_started_do_not_keep_the_lock(tmp_path: Path) -> None:
    with DataDir.hold(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    with child, DataDir.hold(tmp_path):
        assert child.stdin is not None
        child.communicate(b"\n")


@pytest.mark.parametrize("text", ["", "[]", '{"pid": 1, "url": "http://h", "admin_token": "secret"}'])
def test_a_service_file_that_is_broken_is_told(tmp_path: Path, text: str) -> None:
    with DataDir.hold(tmp_path) as data_dir:
        (data_dir.run_path / "service.json").write_text(text)
        with pytest.raises(DataDirError, match=r"service.json` ") as caught:
            running_service(tmp_path)
        assert "secret" not in str(caught.value)
