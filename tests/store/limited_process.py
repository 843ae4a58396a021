"""Converts the models that its arguments name in little memory and little time, and prints what came of each.

A process of its own, because a limit of memory is one of a process. The first argument is a sound model, so
that all that is loaded at the first use is loaded before the limit is set.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import tempfile
from pathlib import Path

from hearth.store.format.convert import convert
from hearth.text.tokenizer import Tokenizer

#: What one model may take, besides what the libraries have taken.
MAX_BYTES = 200 << 20
#: Far more than any of them needs, in seconds of the processor: other processes do not count.
MAX_CPU_S = 5.0


def main(sound: Path, others: list[Path]) -> None:
    outcome_of(sound)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit_bytes = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    signal.signal(signal.SIGPROF, _give_up)
    for path in others:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        outcome = outcome_of(path)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps([str(path), *outcome]), flush=True)


def outcome_of(path: Path) -> tuple[str, str]:
    """Return the kind of an error and its message; nothing where the model could be converted."""
    try:
        if path.is_dir():
            Tokenizer.load(path).check()
        with tempfile.TemporaryDirectory() as folder:
            convert(path, Path(folder) / "model")
            Tokenizer.load(Path(folder) / "model").check()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", ""


def _give_up(*_: object) -> None:
    raise TimeoutError(f"it took more than {MAX_CPU_S} s of the processor")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
