"""Copies the standard error of the service's processes to its log file and to the gateway's standard error.

Containers and service managers read standard error, `hearth logs` reads the file. All processes write to one
pipe, which a thread of the gateway reads: only that thread blocks if a reader of standard error stalls.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from contextlib import suppress
from pathlib import Path

from hearth.core.log_format import json_line

#: What is read at once. A pipe that can be written to takes `select.PIPE_BUF` bytes without waiting.
_READ_BYTES = 64 << 10
#: How long standard error may take nothing before lines are left out of it; they are in the file.
MAX_WAIT_S = 1.0
#: Time for the last lines, when the processes have ended.
_CLOSING_S = 1.0
STDERR = 2


class ProcessLog:
    """The pipe that processes log to, and its reader. `fd` is for their standard error."""

    def __init__(self, path: Path, *, to_stderr: bool, stderr: int = STDERR, is_json: bool = False) -> None:
        """`path`: the log file, appended to. `to_stderr`: also write to `stderr`, unless that is the file.

        `is_json`: write an object per line.
        """
        self._is_json = is_json
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._stderr = stderr if to_stderr and not is_open_as(path, stderr) else None
        self._path = path
        self._file_fault: str | None = None  #: why the file did not take the last lines; None: it did
        self._num_left_out = 0  #: lines of standard error, in all
        self._rest = b""  #: of JSON, the beginning of a line whose end has not come
        self._reader, self.fd = os.pipe()
        self._thread = threading.Thread(target=self._copy_all, name="hearth-log", daemon=True)
        self._thread.start()

    @property
    def note(self) -> str | None:
        """Where lines are missing; None: nowhere. Any thread may ask."""
        if self._file_fault is not None:
            return f"the log `{self._path}` cannot be written: {self._file_fault}"
        if self._num_left_out:
            left_out = f"{self._num_left_out} lines of its processes were left out of standard error"
            return f"{left_out}, which took no more; `{self._path}` has them"
        return None

    def close(self) -> None:
        """Write what has come. Call it when the processes have ended."""
        os.close(self.fd)
        self._thread.join(_CLOSING_S)  # a process that outlives its parent may hold the pipe for longer

    def _copy_all(self) -> None:
        num_left_out = 0  # since standard error has taken something
        while text := self._read():
            try:
                _write(self._file, text)
                self._file_fault = None
            except OSError as error:  # a full disk, say, which only `note` can tell of
                self._file_fault = str(error)
            if self._stderr is None:
                continue
            if not _takes(self._stderr, 0.0 if num_left_out else MAX_WAIT_S):
                num_left_out += text.count(b"\n")
                self._num_left_out += text.count(b"\n")
                continue
            if num_left_out:
                left_out = f"log_lines_left_out lines={num_left_out} reason=`no room`"
                text = f"{json_line(left_out) if self._is_json else left_out}\n".encode() + text
            num_left_out = self._tell(self._stderr, text)
            self._num_left_out += num_left_out
        os.close(self._reader)
        os.close(self._file)

    def _read(self) -> bytes:
        """Return what was written since, of JSON whole lines; nothing: all processes have ended."""
        if not self._is_json:
            return os.read(self._reader, _READ_BYTES)
        end = 0
        while not end and (text := os.read(self._reader, _READ_BYTES)):
            self._rest += text
            end = self._rest.rfind(b"\n") + 1
            if len(self._rest) - end >= _READ_BYTES:  # a line that is longer is split
                end = len(self._rest)
        end = end or len(self._rest)
        whole, self._rest = self._rest[:end], self._rest[end:]
        lines = whole.decode(errors="replace").splitlines()
        return "".join(f"{json_line(line)}\n" for line in lines).encode()

    def _tell(self, stderr: int, text: bytes) -> int:
        for begin in range(0, len(text), select.PIPE_BUF):
            if not _takes(stderr, MAX_WAIT_S):
                return text.count(b"\n", begin)
            with suppress(OSError):  # closed, as a daemon's may be
                _write(stderr, text[begin : begin + select.PIPE_BUF])
        return 0


def logs_to_stderr() -> bool:
    handlers = (one for one in logging.getLogger().handlers if isinstance(one, logging.StreamHandler))
    return any(handler.stream is sys.stderr for handler in handlers)


def is_open_as(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except OSError:
        return False


def _takes(fd: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(1000 * wait_s))


def _write(fd: int, text: bytes) -> None:
    while text:
        text = text[os.write(fd, text) :]
