"""Runs chat templates in processes of their own (`renderer.py`), which are started when first needed."""

from __future__ import annotations

import atexit
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from queue import LifoQueue
from typing import Literal, TypeAlias

import msgspec

#: As many as the gateway has threads for prompts.
NUM_PROCESSES = 2
MAX_REPLY_BYTES = 128 << 20
#: -P: imports nothing from the directory of the script.
_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("renderer.py")))

#: text: the prompt; refused: by the template; unfit: the template cannot render these messages; unsafe: the
#: template left its sandbox; stopped: it exceeded a limit; broken: it does not compile.
Outcome: TypeAlias = Literal["text", "refused", "unfit", "unsafe", "stopped", "broken"]
Reply: TypeAlias = tuple[Outcome, str]

_reply_decoder = msgspec.json.Decoder(Reply)


class RenderPool:
    """Used by all threads; each render takes one process for itself."""

    def __init__(self, num_processes: int) -> None:
        #: None: not started yet. The one that was used last comes first.
        self._processes: LifoQueue[subprocess.Popen[bytes] | None] = LifoQueue()
        for _ in range(num_processes):
            self._processes.put(None)

    def render(self, source: str, variables: Mapping[str, object] | None, limit_s: float) -> Reply:
        """Render a template, or only compile it where there are no variables.

        Raises UnicodeEncodeError for text that UTF-8 cannot hold, and other ValueErrors, TypeErrors and
        RecursionErrors for variables that are not JSON.
        """
        request = msgspec.json.encode((source, variables, limit_s)) + b"\n"
        process = self._processes.get()
        try:
            if process is None or process.poll() is not None:
                process = _restarted(process)
            line = _ask(process, request)
            if line.endswith(b"\n"):
                reply: Reply = _reply_decoder.decode(line)
            elif len(line) == MAX_REPLY_BYTES:
                reply = "stopped", f"it makes more text than the limit: {MAX_REPLY_BYTES >> 20} MiB"
            else:
                reply = "stopped", _why_ended(_end(process), limit_s)
            if reply[0] == "stopped":  # its memory is not given back while it lives
                _end(process)
            return reply
        except BaseException:  # the process may still owe a reply
            if process is not None:
                _end(process)
            raise
        finally:
            self._processes.put(process)

    def close(self) -> None:
        """End the processes; a later render starts new ones."""
        for process in [self._processes.get() for _ in range(self._processes.qsize())]:
            if process is not None:
                _end(process)
            self._processes.put(None)


def _restarted(ended: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes]:
    if ended is not None:
        _end(ended)
    return subprocess.Popen(
        _COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the gateway, which finishes its requests
    )


def _ask(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    assert process.stdin is not None, "asked for as a pipe"
    assert process.stdout is not None, "asked for as a pipe"
    try:
        process.stdin.write(request)
        process.stdin.flush()
    except BrokenPipeError:
        return b""
    return process.stdout.readline(MAX_REPLY_BYTES)


def _end(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    process.communicate()
    return process.returncode


def _why_ended(returncode: int, limit_s: float) -> str:
    if returncode == -signal.SIGALRM:
        return f"it takes longer than the limit: {limit_s:g} s"
    return f"the process that rendered it ended with status {returncode}"


POOL = RenderPool(NUM_PROCESSES)
atexit.register(POOL.close)
