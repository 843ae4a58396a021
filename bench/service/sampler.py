"""Runs the `hearth` command and looks, many times a second, where its threads are. Asks it nothing.

python -m bench.service.sampler serve ...     `begin` and `end PATH` on standard input frame what counts

A look sees the whole interpreter at one moment, when the looking thread gets the lock: so it says where
threads are while they hold it or wait for it, not how long they compute without. Processor time per thread is
the kernel's own count.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType

from hearth.cli import main

INTERVAL_S = 0.005
EVER = 0.98  #: what is on a stack more often says nothing
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Sampler:
    """Looks at the process's threads. Mutable; written by its own thread, which also reads standard input."""

    def __init__(self) -> None:
        self._is_on = threading.Event()
        self._own: Counter[str] = Counter()
        self._within: Counter[str] = Counter()
        self._num_looks = 0
        self._cpu_s: dict[str, float] = {}

    def obey(self) -> None:
        """Carry out orders until standard input ends."""
        threading.Thread(target=self._look_on, name="bench-sampler", daemon=True).start()
        for line in sys.stdin:
            order, _, path = line.strip().partition(" ")
            if order == "begin":
                self._own, self._within, self._num_looks = Counter(), Counter(), 0
                self._cpu_s = thread_cpu_s()
                self._is_on.set()
            else:
                self._is_on.clear()
                Path(path).write_text(json.dumps(self._report()))

    def _look_on(self) -> None:
        while True:
            self._is_on.wait()
            time.sleep(INTERVAL_S)
            self._look()

    def _look(self) -> None:
        self._num_looks += 1
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            name = names.get(ident, "?")
            if name.startswith("bench-"):
                continue
            stack = _stack(frame)
            self._own[f"{name}: {stack[0]}"] += 1
            self._within.update({f"{name}: {place}" for place in stack})

    def _report(self) -> dict[str, object]:
        spent_s = {
            name: round(total_s - self._cpu_s.get(name, 0.0), 3) for name, total_s in thread_cpu_s().items()
        }
        looks = max(1, self._num_looks)
        return {
            "num_looks": self._num_looks,
            "thread_cpu_s": dict(sorted(spent_s.items(), key=lambda item: -item[1])[:10]),
            "innermost": {place: round(n / looks, 4) for place, n in self._own.most_common(40)},
            "within": {
                place: round(n / looks, 4) for place, n in self._within.most_common(100) if n < EVER * looks
            },
        }


def thread_cpu_s() -> dict[str, float]:
    """Return processor time by thread, of those Python does not know together; the kernel's apart."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    spent_s: defaultdict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        user_ticks, system_ticks = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
        name = names.get(int(task.name), "others")
        spent_s[f"{name}, user"] += int(user_ticks) / _TICKS_PER_S
        spent_s[f"{name}, kernel"] += int(system_ticks) / _TICKS_PER_S
    return dict(spent_s)


def _stack(frame: FrameType) -> list[str]:
    """Return the places of a stack from the innermost out."""
    places = []
    at: FrameType | None = frame
    while at is not None:
        code = at.f_code
        places.append(f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_qualname}")
        at = at.f_back
    return places


if __name__ == "__main__":
    threading.Thread(target=Sampler().obey, name="bench-orders", daemon=True).start()
    main()
