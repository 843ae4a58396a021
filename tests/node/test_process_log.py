"""What processes say goes to the log file and to standard error, each line once, and nobody waits for it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hearth.node import process_log
from hearth.node.process_log import ProcessLog, is_open_as


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def say(log: ProcessLog, text: str) -> None:
    """Have a process write to its standard error."""
    code = "import sys; sys.stderr.write(sys.argv[1])"
    subprocess.run([sys.executable, "-S", "-c", code, text], stderr=log.fd, check=True)


def test_lines_of_processes_are_in_the_file_and_on_standard_error(tmp_path: Path) -> None:
    path = tmp_path / "service.log"
    path.write_text("before\n")
    with pipe() as (reader, stderr):
        log = ProcessLog(path, to_stderr=True, stderr=stderr)
        say(log, "one\n")
        say(log, "two\n")
        log.close()

        assert log.note is None
        assert path.read_text() == "before\none\ntwo\n"
        assert os.read(reader, 100) == b"one\ntwo\n"


def test_lines_are_there_once_where_standard_error_is_the_file(tmp_path: Path) -> None:
    path = tmp_path / "service.log"
    stderr = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    log = ProcessLog(path, to_stderr=True, stderr=stderr)
    os.write(log.fd, b"one\n")
    log.close()

    assert is_open_as(path, stderr)
    os.close(stderr)
    assert path.read_text() == "one\n"


@pytest.mark.parametrize("to_stderr", [True, False])
def test_a_standard_error_that_is_closed_or_not_wanted_loses_no_line_of_the_file(
    to_stderr: bool, tmp_path: Path
) -> None:
    with pipe() as (_, stderr):
        closed = fcntl.fcntl(stderr, fcntl.F_DUPFD, 900)  # a number that the log's own files will not get
    os.close(closed)
    log = ProcessLog(tmp_path / "service.log", to_stderr=to_stderr, stderr=closed)
    os.write(log.fd, b"one\n")
    log.close()

    assert (tmp_path / "service.log").read_text() == "one\n"


def test_a_standard_error_that_takes_nothing_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_log, "MAX_WAIT_S", 0.01)
    lines = [b"%0999d\n" % number for number in range(300)]  # more than two pipes hold
    with pipe() as (reader, stderr):
        log = ProcessLog(tmp_path / "service.log", to_stderr=True, stderr=stderr)
        for line in lines:
            os.write(log.fd, line)
        taken = b""
        while not taken.endswith(b"the last\n"):  # a moment after there is room again
            taken += os.read(reader, 1 << 16)
            os.write(log.fd, b"the last\n")
        log.close()

    in_file = (tmp_path / "service.log").read_bytes()
    assert in_file.startswith(b"".join(lines))
    assert b"log_lines_left_out lines=" in taken
    assert log.note is not None
    assert re.match(r"\d+ lines of its processes were left out of standard error", log.note)
    assert len(taken) < len(in_file)


def test_a_file_that_takes_no_line_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "service.log").symlink_to("/dev/full")
    log = ProcessLog(tmp_path / "service.log", to_stderr=False)
    os.write(log.fd, b"one\n")
    log.close()

    assert log.note is not None
    assert log.note.endswith("service.log` cannot be written: [Errno 28] No space left on device")


def test_a_line_longer_than_what_is_read_at_once_becomes_several_objects(tmp_path: Path) -> None:
    path = tmp_path / "service.log"
    log = ProcessLog(path, to_stderr=False, is_json=True)
    os.write(log.fd, b"before\n" + b"x" * 300_000 + b"\nthe end")
    log.close()

    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert (texts[0], texts[-1]) == ("before", "the end")
    assert "".join(texts[1:-1]) == "x" * 300_000
    assert max(map(len, texts)) < 150_000


def test_whole_lines_are_written_before_the_end_of_the_next_one_comes(tmp_path: Path) -> None:
    with pipe() as (reader, stderr):
        log = ProcessLog(tmp_path / "service.log", to_stderr=True, stderr=stderr, is_json=True)
        os.write(log.fd, b"one\nthe beg")
        assert json.loads(os.read(reader, 1000)) == {"text": "one"}
        os.write(log.fd, b"inning\n")
        log.close()
        assert json.loads(os.read(reader, 1000)) == {"text": "the beginning"}


def test_lines_of_processes_become_objects_also_if_they_come_in_pieces(tmp_path: Path) -> None:
    with pipe() as (reader, stderr):
        log = ProcessLog(tmp_path / "service.log", to_stderr=True, stderr=stderr, is_json=True)
        os.write(log.fd, b"2026-01-02 03:04:05,678 INFO keeper hearth.store.keeper ready ")
        os.write(log.fd, b"port=1\nFatal Python error: Abo")
        os.write(log.fd, b"rted\n")
        log.close()

        written = (tmp_path / "service.log").read_text()
        first, second = map(json.loads, written.splitlines())
        assert (first["process"], first["event"], first["fields"]) == ("keeper", "ready", {"port": "1"})
        assert second == {"text": "Fatal Python error: Aborted"}
        assert os.read(reader, 1000).decode() == written
