"""The log of a service stays within its size while processes write to it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from hearth.control.observe import log_rotation
from hearth.control.observe.log_rotation import LogRotation, rotate, rotated_path

#: A process that logs as workers do: a line for each that it is told, to an error output opened by another.
WRITER = (
    "import sys\nfor line in sys.stdin: print(line, end='', file=sys.stderr, flush=True); print(flush=True)"
)


def lines_of(first: int, last: int) -> str:
    return "".join(f"line {number:04d}\n" for number in range(first, last))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "service.log"


def test_a_log_within_its_limit_stays_as_it_is(path: Path) -> None:
    path.write_text(lines_of(0, 10))
    rotate(path, max_bytes=100)
    assert path.read_text() == lines_of(0, 10)
    assert not rotated_path(path).exists()


def test_a_log_that_is_not_there_yet_is_none_of_its_business(path: Path) -> None:
    rotate(path)
    assert not path.exists()


def test_the_newest_whole_lines_are_kept(path: Path) -> None:
    path.write_text(lines_of(0, 1000))
    rotate(path, max_bytes=105)
    assert path.read_text() == ""
    assert rotated_path(path).read_text() == lines_of(990, 1000)


def test_a_log_without_an_end_of_line_is_cut_as_well(path: Path) -> None:
    path.write_text("x" * 1_000_000)
    rotate(path, max_bytes=100_000)
    assert path.stat().st_size == 0
    assert 0 < rotated_path(path).stat().st_size <= 100_000


def test_what_was_set_aside_before_gives_way(path: Path) -> None:
    for first in (0, 100):
        path.write_text(lines_of(first, first + 20))
        rotate(path, max_bytes=100)
    assert rotated_path(path).read_text() == lines_of(110, 120)


def test_a_process_that_has_the_log_open_goes_on_writing_to_it(path: Path) -> None:
    with (
        path.open("ab") as log,
        subprocess.Popen(
            [sys.executable, "-c", WRITER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as writer,
    ):
        assert writer.stdin is not None
        assert writer.stdout is not None
        for first in (0, 20):
            writer.stdin.write(lines_of(first, first + 20))
            writer.stdin.flush()
            for _ in range(20):
                writer.stdout.readline()
            if first == 0:
                rotate(path, max_bytes=150)
        writer.stdin.close()
    assert rotated_path(path).read_text() == lines_of(5, 20)
    assert path.read_text() == lines_of(20, 40)


def test_a_log_is_rotated_while_the_service_runs(path: Path) -> None:
    async def scene() -> None:
        path.write_text("")
        rotation = LogRotation(path, max_bytes=100, look_s=0.001)
        for first in (0, 20):
            with path.open("a") as log:
                log.write(lines_of(first, first + 20))
            async with asyncio.timeout(60.0):
                while path.stat().st_size > 0:
                    await asyncio.sleep(0.001)
        await rotation.close()

    asyncio.run(scene())
    assert rotated_path(path).read_text() == lines_of(30, 40)


def test_a_log_that_cannot_be_rotated_is_told_once_and_tried_again(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def counted(log: Path, max_bytes: int) -> None:
        tries.append(max_bytes)
        rotate(log, max_bytes)

    monkeypatch.setattr(log_rotation, "rotate", counted)

    async def scene() -> None:
        path.write_text(lines_of(0, 20))
        rotated_path(path).mkdir()
        rotation = LogRotation(path, max_bytes=100, look_s=0.001)
        async with asyncio.timeout(60.0):
            while len(tries) < 3:  # the last of which has not failed yet
                await asyncio.sleep(0.001)
        rotated_path(path).rmdir()
        async with asyncio.timeout(60.0):
            while path.stat().st_size > 0:
                await asyncio.sleep(0.001)
        await rotation.close()

    asyncio.run(scene())
    assert [record.message.split()[0] for record in caplog.records] == ["log_not_rotated"]
