"""Why a worker's process has ended, in words for people. Starts and ends none."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import msgspec

from hearth.core.errors import ConfigError
from hearth.core.messages import WorkerFarewell

#: The longest farewell that is read, and the longest reason that is told, in characters.
MAX_FAREWELL_BYTES, MAX_REASON = 64 << 10, 500


@dataclass(frozen=True, slots=True)
class WorkerEnding:
    """The end of one worker."""

    reason: str
    is_final: bool = False  #: a setting is wrong, and the next worker would end in the same way


def ending_of(code: int, farewell: bytes, killed_for: str | None) -> WorkerEnding:
    """Return why a worker ended: of its exit code, of what it said and of why this process killed it."""
    if killed_for is not None:
        return WorkerEnding(killed_for)
    try:
        said = msgspec.json.decode(farewell, type=WorkerFarewell)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # it said nothing, or something else was printed
        return WorkerEnding(_by_signal(-code) if code < 0 else f"exit code {code}, the log says more")
    return WorkerEnding(_in_one_line(said.reason), is_final=said.error == ConfigError.label)


def _by_signal(number: int) -> str:
    name = signal.Signals(number).name if number in list(signal.Signals) else f"signal {number}"
    return f"{name}, as if memory was short" if number == signal.SIGKILL else name


def _in_one_line(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]} ..."
