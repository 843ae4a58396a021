"""A service that cannot start says why, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.service.harness import Service, assert_ended, eventually, hearth, keeper_of, run_hearth

pytestmark = pytest.mark.e2e


def serve(data_dir: Path, *flags: str) -> tuple[int, str]:
    """Exit code and complaint of a service that must not come up."""
    done = run_hearth("serve", "--data-dir", str(data_dir), "--device", "cpu", *flags)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, " ".join(done.stderr.split())


def _hear_ctrl_c() -> None:
    """Undo that a shell had the tests, started in the background, ignore Ctrl-C; children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_while_processes_are_imported_shows_no_traceback(tmp_path: Path) -> None:
    command = hearth("serve", "--data-dir", str(tmp_path / "data"), "--port", "0", "--device", "cpu")
    with (tmp_path / "out").open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, preexec_fn=_hear_ctrl_c
        )
    with process:
        started = eventually("the keeper is started", lambda: keeper_of(process.pid))
        eventually("it imports", lambda: any("msgspec" in one.path for one in started.memory_maps()))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert_ended([started])
    assert "Traceback" not in (tmp_path / "out").read_text(encoding="utf-8")


def test_tokenizers_are_read_while_the_first_workers_start(service: Service) -> None:
    assert "tokenizers_read num=" in service.logs()


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, complaint = serve(tmp_path / "data", "--port", str(port))
    assert code == 2
    assert str(port) in complaint
    assert "--port" in complaint


def test_a_data_directory_in_use_names_the_service_that_has_it(service: Service) -> None:
    code, complaint = serve(service.data_dir, "--port", "0")
    assert code == 1
    assert str(service.process.pid) in complaint
    assert service.url in complaint
    assert service.get("/health")["status"] == "ok"


def test_a_data_directory_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    (data_dir / "VERSION").write_text("99\n")
    code, complaint = serve(data_dir, "--port", "0")
    assert code == 1
    assert "99" in complaint
    assert [path.name for path in data_dir.iterdir()] == ["VERSION"]


def test_a_setting_with_a_typing_error_names_the_nearest(tmp_path: Path) -> None:
    code, complaint = serve(tmp_path / "data", "--set", "service.kep_alive=5m")
    assert code == 2
    assert "service.keep_alive" in complaint


def test_an_address_that_others_can_reach_needs_keys(tmp_path: Path) -> None:
    code, complaint = serve(tmp_path / "data", "--host", "0.0.0.0", "--port", "0")
    assert code == 2
    assert "hearth keys add" in complaint
