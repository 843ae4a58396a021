"""Reads from a service's log when its parts came up. Times nothing itself."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_LINE = re.compile(
    r"(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) \w+ (?:\S+ )?hearth\S* (?P<event>\w+)(?P<fields>.*)"
)
_SECONDS = re.compile(r"(\w+)_s=([0-9.]+)")


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    at_s: float  #: on the clock of `time.time`
    event: str
    seconds: Mapping[str, float]  #: its fields that are times, without their suffix


def logged_events(text: str) -> list[LoggedEvent]:
    """Return the events of a log, in its order; lines that are none are left out."""
    events = []
    for line in text.splitlines():
        if (found := _LINE.match(line)) is not None:
            at_s = datetime.strptime(found["at"], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            seconds = {name: float(value) for name, value in _SECONDS.findall(found["fields"])}
            events.append(LoggedEvent(at_s, found["event"], seconds))
    return events


def breakdown(log: Path, began_s: float) -> dict[str, float]:
    """Return the seconds of each part of a service's start, which began then on the clock of `time.time`.

    `serving`, `template` and `forked` are counted from the beginning, for they overlap; those of the worker
    follow each other, and begin with the fork.
    """
    events = logged_events(log.read_text(errors="replace"))
    first = {event.event: event for event in reversed(events) if event.at_s >= began_s - 0.001}
    names = {
        "serving": "serving",
        "template_ready": "template",
        "worker_forked": "forked",
        "worker_ready": "worker_ready",
    }
    times = {name: first[event].at_s - began_s for event, name in names.items() if event in first}
    started = first.get("worker_started")
    return times | ({} if started is None else {f"worker_{n}": s for n, s in started.seconds.items()})
