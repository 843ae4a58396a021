"""The journal of the brain's events on disk, and its replay. Decides nothing and reads no clock.

JSON lines. The first holds the version and the configuration of the brain, each other one an event with the
actions that followed, both under their tags:

    {"event": ["RequestArrived", {"now_s": 12.5, ...}], "actions": [["Dispatch", {...}]]}

`replay` runs the events through a new fleet and demands the same actions: the proof that a simulator or a
test runs the policy that was live.

A file that has reached half of the journal's size is set aside. The next file's first line also holds the
state of the fleet (`FleetState`), from which its events are replayed. If the disk is full, the next file
begins when it has room again.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, get_args

import msgspec

from hearth.core.errors import DataDirError
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import Action, BrainConfig, Event, ModelDeployed, RequestArrived
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.fleet_state import FleetState, restore, save

log = logging.getLogger(__name__)

#: Raise it when older journals become unreadable: a tag is gone, or a new field has no default.
VERSION = 10

#: Between two tries after the disk was full, by the times of events.
RETRY_S = 60.0

#: The names of events and actions in a journal. To rename a class, keep its old tag here.
TAGS: dict[type[Event | Action], str] = {kind: kind.__name__ for kind in get_args(Event | Action)}
_EVENTS: dict[str, type[Event]] = {TAGS[kind]: kind for kind in get_args(Event)}
_ACTIONS: dict[str, type[Action]] = {TAGS[kind]: kind for kind in get_args(Action)}
_ENCODER = msgspec.json.Encoder()


class Journal:
    """Two files of `max_bytes` together. Recording stops, logged once, while the disk is full."""

    def __init__(self, path: Path, config: BrainConfig, max_bytes: int) -> None:
        self.path = path
        self.is_stopped = False
        self._why_stopped = ""
        #: When to try again, by the time of events; infinite unless the disk is why recording has stopped.
        self._retry_s = math.inf
        self._now_s = 0.0  #: of the last event
        self._num_missed = 0  #: events since recording has stopped
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._flushes_each = True  #: False: lines reach the system together, when all have come
        self._config = config
        try:
            with suppress(FileNotFoundError):
                path.replace(previous(path))
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise DataDirError(
                f"the journal `{path}` cannot be begun: {error}; check the data directory, or choose "
                "another: `--data-dir`"
            ) from error
        self._write(_infinite_json(_JournalHeader(VERSION, config)))

    @property
    def must_rotate(self) -> bool:
        if self.is_stopped:
            return self._now_s >= self._retry_s
        return self._num_bytes >= self._max_bytes // 2

    @property
    def note(self) -> str | None:
        return f"the journal `{self.path}` has stopped: {self._why_stopped}" if self.is_stopped else None

    def rotate(self, fleet: Fleet) -> None:
        """Set the file aside and begin the next one with the state of the fleet.

        It took 140 ms for 2,000 loaded models with a request each, and is due every 400,000 events or so.
        """
        header = _infinite_json(_JournalHeader(VERSION, self._config, save(fleet)))
        if len(header) > self._max_bytes // 4:  # or it would be time for the next one before long
            self._stop(
                f"a snapshot takes {len(header)} bytes, limit, a quarter of all: {self._max_bytes // 4}"
            )
            return
        try:
            file = _next_file(self.path, header)
        except OSError as error:
            self._stop(f"the next file cannot be begun: {error}", self._now_s + RETRY_S)
            return
        self.close()
        self._file, self._num_bytes = file, len(header) + 1
        if self.is_stopped:
            log.info("journal_resumed path=%s num_missed=%d", self.path, self._num_missed)
        self.is_stopped, self._retry_s, self._num_missed = False, math.inf, 0

    def record(self, event: Event, actions: Sequence[Action]) -> None:
        self._now_s = event.now_s
        if self.is_stopped:
            self._num_missed += 1
            return
        fields = _infinite_json(event) if _is_infinite(event) else _ENCODER.encode(event)
        orders = _ENCODER.encode([(TAGS[type(action)], action) for action in actions])
        self._write(b'{"event": ["%b", %b], "actions": %b}' % (TAGS[type(event)].encode(), fields, orders))

    @contextmanager
    def flushing_once(self) -> Iterator[None]:
        self._flushes_each = False
        try:
            yield
        finally:
            self._flushes_each = True
            if not self.is_stopped:
                try:
                    self._file.flush()
                except OSError as error:
                    self._stop(f"the disk takes no more: {error}", self._now_s + RETRY_S)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            self._stop(f"the disk takes no more: {error}", self._now_s + RETRY_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        if self._num_bytes + len(line) + 1 > self._max_bytes:
            self._stop(f"it has reached its limit: {self._max_bytes} bytes")
            return
        try:
            self._num_bytes += self._file.write(line + b"\n")
            if self._flushes_each:
                self._file.flush()  # microseconds, for which a process that is killed leaves all it recorded
        except OSError as error:
            self._stop(f"the disk takes no more: {error}", self._now_s + RETRY_S)

    def _stop(self, why: str, retry_s: float = math.inf) -> None:
        self._retry_s, self._why_stopped = retry_s, why
        if not self.is_stopped:
            self.is_stopped = True
            log.warning("journal_stopped path=%s num_bytes=%d reason=%s", self.path, self._num_bytes, why)


@dataclass(frozen=True, slots=True)
class _JournalHeader:
    version: int
    config: BrainConfig
    fleet: FleetState | None = None  #: before the first event of this file; None: a new one


@dataclass(frozen=True, slots=True)
class Replay:
    num_events: int  #: that were replayed
    first_difference: str | None  #: None: every action was the same
    is_torn: bool  #: the last line was cut short, as by a crash


def replay(path: Path) -> Replay:
    """Run the events of a file until the first difference in actions. Raises DataDirError."""
    fleet, entries = read(path)
    num_events = 0
    for entry in entries:
        if entry is None:
            return Replay(num_events, None, is_torn=True)
        event, recorded = entry
        actions = step(fleet, event)
        num_events += 1
        if actions != recorded:
            difference = f"event {num_events}, {event}: recorded {recorded}, now {actions}"
            return Replay(num_events, difference, is_torn=False)
    return Replay(num_events, None, is_torn=False)


def read(path: Path) -> tuple[Fleet, Iterator[tuple[Event, list[Action]] | None]]:
    """Return the fleet before the first event of a file, and all events with their actions.

    None ends a file whose last line was cut short, as by a crash. Raises DataDirError.
    """
    lines = _lines(path)
    fleet = _first_fleet(path, next(lines, b""))

    def entries() -> Iterator[tuple[Event, list[Action]] | None]:
        for number, line in enumerate(lines, 2):
            if not line.endswith(b"\n"):
                yield None
                return
            try:
                yield decode(line)
            except (ValueError, KeyError, TypeError) as error:
                raise _damaged(path, number, error) from error

    return fleet, entries()


def decode(line: bytes) -> tuple[Event, list[Action]]:
    entry = json.loads(line)
    tag, values = entry["event"]
    actions = [msgspec.convert(order, _ACTIONS[name]) for name, order in entry["actions"]]
    return msgspec.convert(values, _EVENTS[tag]), actions


def previous(path: Path) -> Path:
    """Return the path of the file before: `events.1.jsonl` for `events.jsonl`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def _next_file(path: Path, header: bytes) -> BinaryIO:
    """Begin a file; the present one is set aside only when the new one's first line is on disk."""
    beginning = path.with_name(f".{path.name}")
    try:
        file = beginning.open("wb")
        try:
            file.write(header + b"\n")
            file.flush()
        except OSError:
            with suppress(OSError):  # again, for what was not written
                file.close()
            raise
        path.replace(previous(path))
        beginning.replace(path)
    except OSError:
        beginning.unlink(missing_ok=True)
        raise
    return file


def _lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


def _first_fleet(path: Path, line: bytes) -> Fleet:
    try:
        values = json.loads(line)
        version = values["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataDirError(f"not a journal: its first line has no version; file: {path}") from error
    if version != VERSION:
        raise DataDirError(f"the journal has version {version}, this program reads: {VERSION}; file: {path}")
    try:
        header = msgspec.convert(values, _JournalHeader)
        return Fleet(header.config) if header.fleet is None else restore(header.config, header.fleet)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise _damaged(path, 1, error) from error


def _damaged(path: Path, number: int, error: Exception) -> DataDirError:
    return DataDirError(f"line {number} of the journal is damaged: {error!r}; file: {path}")


def _is_infinite(event: Event) -> bool:
    match event:
        case RequestArrived():
            return event.keep_alive_s == math.inf
        case ModelDeployed():
            return event.profile.keep_alive_s == math.inf
        case _:
            return False


def _infinite_json(value: object) -> bytes:
    """Return JSON that keeps infinite numbers; slower than msgspec."""
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode()
