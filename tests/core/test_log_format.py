from __future__ import annotations

import json
import logging
from datetime import datetime

import pytest

from hearth.core.log_format import formatter_of, json_line


def test_a_line_of_a_worker_names_its_process() -> None:
    line = "2026-01-02 03:04:05,678 INFO w0 hearth.loads loaded model=tiny at=`on disk` why=no `x` load_s=0.5"

    found = json.loads(json_line(line))

    time = datetime.fromisoformat(found.pop("time"))
    assert time.tzinfo is not None
    assert time == datetime(2026, 1, 2, 3, 4, 5, 678_000).astimezone()
    assert found == {
        "level": "INFO",
        "process": "w0",
        "logger": "hearth.loads",
        "event": "loaded",
        "fields": {"model": "tiny", "at": "on disk", "why": "no `x`", "load_s": "0.5"},
        "text": "loaded model=tiny at=`on disk` why=no `x` load_s=0.5",
    }


def test_what_is_no_log_line_is_text_and_an_object_stays_as_it_is() -> None:
    assert json.loads(json_line('a "crash"\tof C')) == {"text": 'a "crash"\tof C'}
    assert json_line('{"status": 200}') == '{"status": 200}'


@pytest.mark.parametrize("time", ["2026-13-45 99:00:00", "0001-01-01 00:00:00", "2026-Jan-01 later"])
def test_a_time_that_is_none_makes_a_line_text(time: str) -> None:
    line = f"{time} INFO w0 hearth.worker.loads loaded model=tiny"

    found = json.loads(json_line(line))

    assert found["text"].endswith("loaded model=tiny")


def test_each_line_of_a_traceback_is_an_object() -> None:
    try:
        raise ValueError("no\nway")
    except ValueError as error:
        record = logging.LogRecord(
            "asyncio",
            logging.ERROR,
            "x.py",
            1,
            "Task %s failed",
            ("a",),
            (ValueError, error, error.__traceback__),
        )
    first, *others = [json.loads(line) for line in formatter_of("json").format(record).splitlines()]

    assert (first["level"], first["logger"], first["text"]) == ("ERROR", "asyncio", "Task a failed")
    assert "process" not in first
    assert [other["text"] for other in others][-2:] == ["ValueError: no", "way"]
