"""Reads from a service's log when its parts came up, and which graphs were restored. Times nothing itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_LINE = re.compile(
    r"(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) \w+ (?:\S+ )?hearth\S* (?P<event>\w+)(?P<fields>.*)"
)
_FIELD = re.compile(r"(\w+)=([^\s`]+)")
_SUFFIX = "_s"
#: The log has milliseconds.
_SLACK_S = 0.001


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    at_s: float  #: on the clock of `time.time`
    event: str
    fields: Mapping[str, str]  #: but those of several words

    @staticmethod
    def of(at_s: float, event: str, text: str) -> LoggedEvent:
        """Return an event by its name and the rest of its line."""
        return LoggedEvent(at_s, event, dict(_FIELD.findall(text)))

    @property
    def seconds(self) -> dict[str, float]:
        """The fields that are times, without their suffix."""
        return {
            name.removesuffix(_SUFFIX): float(text)
            for name, text in self.fields.items()
            if name.endswith(_SUFFIX)
        }


@dataclass(frozen=True, slots=True)
class Restoring:
    """The graphs of one snapshot that were restored beside everything else."""

    end_s: float  #: on the clock of `time.time`
    seconds: float
    num_restored: int
    num_graphs: int
    paused_s: float = 0.0  #: of the seconds, in which it gave way to first tokens, all but all of it at first
    num_rehearsed: int = 0  #: graphs of which kernels had to be found, which takes longer if none was loaded
    rehearsal_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        return 0 < self.num_graphs == self.num_restored

    @staticmethod
    def of(event: LoggedEvent) -> Restoring | None:
        """Return what an event tells of; None: it tells of something else."""
        if event.event != "graphs_restored":
            return None
        fields = event.fields
        return Restoring(
            event.at_s,
            float(fields["seconds"]),
            num_restored=int(fields["graphs"]),
            num_graphs=int(fields["of"]),
            paused_s=float(fields.get("paused_s", 0.0)),
            num_rehearsed=int(fields.get("rehearsed", 0)),
            rehearsal_s=float(fields.get("rehearsal_s", 0.0)),
        )


class LogTail:
    """Lines that are added to a log. Mutable; costs whoever looks no more than what is new."""

    def __init__(self, log: Path) -> None:
        """Begin at the end that the log has now."""
        self._log, self._offset, self._rest = log, log.stat().st_size, b""

    def new_events(self) -> list[LoggedEvent]:
        """Return the events of all lines that were ended since the last call, in their order."""
        with self._log.open("rb") as log:
            log.seek(self._offset)
            added = log.read()
        self._offset += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        return _events(line.decode(errors="replace") for line in lines)


def logged_events(log: Path, began_s: float) -> list[LoggedEvent]:
    """Return the events of a log since then, in its order; lines that are none are left out."""
    events = _events(log.read_text(errors="replace").splitlines())
    return [event for event in events if event.at_s >= began_s - _SLACK_S]


def _events(lines: Iterable[str]) -> list[LoggedEvent]:
    events = []
    for line in lines:
        if (found := _LINE.match(line)) is not None:
            at_s = datetime.strptime(found["at"], "%Y-%m-%d %H:%M:%S,%f").timestamp()
            events.append(LoggedEvent.of(at_s, found["event"], found["fields"]))
    return events


def breakdown(log: Path, began_s: float) -> dict[str, float]:
    """Return the seconds of each part of a service's start, which began then on the clock of `time.time`.

    `serving`, `template` and `forked` are counted from the beginning, for they overlap; those of the worker
    follow each other, and begin with the fork.
    """
    first = {event.event: event for event in reversed(logged_events(log, began_s))}
    names = {
        "serving": "serving",
        "template_ready": "template",
        "worker_forked": "forked",
        "worker_ready": "worker_ready",
    }
    times = {name: first[event].at_s - began_s for event, name in names.items() if event in first}
    started = first.get("worker_started")
    return times | ({} if started is None else {f"worker_{n}": s for n, s in started.seconds.items()})


def restorings(log: Path, began_s: float) -> list[Restoring]:
    """Return whose graphs were restored since then."""
    found = map(Restoring.of, logged_events(log, began_s))
    return [one for one in found if one is not None]


def num_rehearsals(log: Path, began_s: float) -> int:
    """Return how often a worker has loaded kernels ahead since then, each time those of some steps."""
    return sum(event.event == "steps_rehearsed" for event in logged_events(log, began_s))
