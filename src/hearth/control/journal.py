"""The journal of the brain's events on disk, and its replay. Decides nothing and knows no clock.

JSON lines. The first holds the version and the configuration of the brain, each other one an event with the
actions that followed, both under the names of their types:

    {"event": ["RequestArrived", {"now_s": 12.5, ...}], "actions": [["Dispatch", {...}]]}

`replay` runs the events through a new fleet and demands the very same actions: the proof that whatever else
drives the brain, a simulator or a test, runs the policy that was live.

A file that has taken half of the journal's bytes is set aside for the next one, whose first line also holds
the fleet as it was: its events are replayed from there, and what happened last is always on disk. So is one
that the disk would not take: the next one begins when the disk does again.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, get_args

import msgspec

from hearth.errors import DataDirError
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import Action, BrainConfig, Event, ModelDeployed, RequestArrived
from hearth.policy.fleet.fleet import Fleet

log = logging.getLogger(__name__)

#: Raise it when events, actions, decisions or the records of the fleet change, so that an old recording is
#: not taken for a wrong one.
VERSION = 8

#: Between two tries to go on after the disk took no more, by the times of events.
RETRY_S = 60.0

_EVENTS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}
_ENCODER = msgspec.json.Encoder()


class Journal:
    """The file of events, and the one before. Mutable; written by the driver alone.

    Both together take `max_bytes`. Recording ends, logged once, where that is too little for a snapshot, and
    while the disk takes no more: the service matters more.
    """

    def __init__(self, path: Path, config: BrainConfig, max_bytes: int) -> None:
        """Begin a file. Raises DataDirError if it cannot be written."""
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
        self._header: dict[str, object] = {"version": VERSION, "config": config}
        try:
            with suppress(FileNotFoundError):
                path.replace(previous(path))
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise DataDirError(
                f"the journal `{path}` cannot be begun: {error}; check the data directory, or choose "
                "another: `--data-dir`"
            ) from error
        self._write(_infinite_json(self._header))

    @property
    def must_rotate(self) -> bool:
        """True if the file has its half of the bytes, the other half being that of the file before; or if it
        is time to see whether a disk that took no more does so again.
        """
        if self.is_stopped:
            return self._now_s >= self._retry_s
        return self._num_bytes >= self._max_bytes // 2

    @property
    def note(self) -> str | None:
        """Say why nothing is recorded; None: it is."""
        return f"the journal `{self.path}` has stopped: {self._why_stopped}" if self.is_stopped else None

    def rotate(self, fleet: Fleet) -> None:
        """Set the file aside and begin the next one with the fleet, to which all that was recorded happened.

        That took 130 ms for 2,000 loaded models with a request each, and is due every 400,000 events or so.
        """
        try:
            snapshot = base64.b64encode(pickle.dumps(fleet)).decode()
        except RecursionError:
            self._stop("the fleet refers to itself too deeply for a snapshot")
            return
        header = _infinite_json({**self._header, "fleet": snapshot})
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
        orders = _ENCODER.encode([(type(action).__name__, action) for action in actions])
        name = type(event).__name__.encode()
        self._write(b'{"event": ["%b", %b], "actions": %b}' % (name, fields, orders))

    @contextmanager
    def flushing_once(self) -> Iterator[None]:
        """Have what is recorded meanwhile reach the system together, at the end."""
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
class Replay:
    """The outcome of a replay."""

    num_events: int  #: that were replayed
    first_difference: str | None  #: None: every action was the same
    is_torn: bool  #: the last line was cut short, as by a crash


def replay(path: Path) -> Replay:
    """Run the events of a file through a new fleet, or that of its snapshot, until the first difference.

    Raises:
        DataDirError: it is no journal, or one of another version.
    """
    lines = _lines(path)
    fleet = _first_fleet(path, next(lines, b""))
    num_events = 0
    for line in lines:
        if not line.endswith(b"\n"):
            return Replay(num_events, None, is_torn=True)
        event, recorded = _parsed(line)
        actions = step(fleet, event)
        num_events += 1
        again = json.loads(_ENCODER.encode([(type(action).__name__, action) for action in actions]))
        if again != recorded:
            difference = f"event {num_events}, {event}: recorded {recorded}, now {again}"
            return Replay(num_events, difference, is_torn=False)
    return Replay(num_events, None, is_torn=False)


def previous(path: Path) -> Path:
    """Return where the file before lies: `events.1.jsonl` for `events.jsonl`."""
    return path.with_name(f"{path.stem}.1{path.suffix}")


def _next_file(path: Path, header: bytes) -> BinaryIO:
    """Begin a file, and only once its first line is on disk set the one aside that is there."""
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
    """Return the fleet that the first event of a file happened to."""
    try:
        header = json.loads(line)
        version = header["version"]
        if version == VERSION and "fleet" in header:
            return _restored(path, header["fleet"])
        if version == VERSION:
            return Fleet(msgspec.convert(header["config"], BrainConfig))
    except (ValueError, KeyError, TypeError) as error:
        raise DataDirError(
            f"no journal, its first line tells no version and configuration: {path}"
        ) from error
    raise DataDirError(f"the journal is of version {version}, this program replays: {VERSION}; file: {path}")


def _restored(path: Path, snapshot: str) -> Fleet:
    try:
        fleet = _FleetReader(io.BytesIO(base64.b64decode(snapshot))).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
        raise DataDirError(f"the snapshot in the first line is damaged: {error}; file: {path}") from error
    if not isinstance(fleet, Fleet):
        raise DataDirError(f"the snapshot is no fleet, but: {type(fleet).__name__}; file: {path}")
    return fleet


class _FleetReader(pickle.Unpickler):
    """Reads a snapshot. Makes nothing but records of the policy: a journal may come from anywhere."""

    def find_class(self, module: str, name: str) -> type:
        if module == "hearth.types" or module.startswith("hearth.policy."):
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"a fleet has no `{module}.{name}`")


def _parsed(line: bytes) -> tuple[Event, object]:
    entry = json.loads(line)
    name, fields = entry["event"]
    return msgspec.convert(fields, _EVENTS[name]), entry["actions"]


def _is_infinite(event: Event) -> bool:
    """True if an event holds an infinite number, which msgspec would write as null. No action ever does."""
    match event:
        case RequestArrived():
            return event.keep_alive_s == math.inf
        case ModelDeployed():
            return event.profile.keep_alive_s == math.inf
        case _:
            return False


def _infinite_json(value: object) -> bytes:
    """Return JSON in which infinite numbers survive; slower than msgspec."""
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode()
