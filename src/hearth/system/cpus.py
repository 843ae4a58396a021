"""How many cores this process may use, and how its OpenMP threads wait.

Between two parallel regions OpenMP's threads spin for a while. On an idle machine that gains a few percent;
beside a busy process it takes cores from threads that work, and decoding becomes many times slower. So they
sleep instead, unless the user has chosen. OpenMP reads its environment once, when torch loads it:
`hearth/__init__.py` sets it before that.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, MutableMapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hearth.system.cgroups import cgroups_of, lines_of

#: Settings that make waiting threads sleep at once: of GNU's OpenMP, which torch ships, and Intel's.
_SLEEP = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
#: Settings of GNU's OpenMP that a user may choose, each with the value that makes threads sleep.
_CHOICES = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
_REMEDY = "`" + " ".join(f"{name}={value}" for name, value in _SLEEP.items()) + "`"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    spin_reason: str | None  #: why threads may spin, and the remedy; None: they sleep
    is_chosen: bool = False  #: by the user, through the environment


@cache
def wait_policy() -> WaitPolicy:
    """Make waiting threads of this process and its children sleep; later calls return the result."""
    return set_wait_policy(os.environ, sys.modules)


def set_wait_policy(environment: MutableMapping[str, str], modules: Collection[str]) -> WaitPolicy:
    """Set what the user has not set in `environment`; `modules` are those already imported."""
    chosen = {name: environment[name].strip() for name in _CHOICES if environment.get(name, "").strip()}
    if not environment.get("KMP_BLOCKTIME", "").strip():
        environment["KMP_BLOCKTIME"] = _SLEEP["KMP_BLOCKTIME"]
    if chosen:
        awake = [f"`{name}={value}`" for name, value in chosen.items() if value.upper() != _CHOICES[name]]
        reason = f"{awake[0]} is set; unset it, or set {_REMEDY}" if awake else None
        return WaitPolicy(reason, is_chosen=True)
    environment["OMP_WAIT_POLICY"] = _SLEEP["OMP_WAIT_POLICY"]
    if "torch" in modules:
        return WaitPolicy(f"torch was imported before hearth; import hearth first, or set {_REMEDY}")
    return WaitPolicy(None)


@cache
def log_if_threads_spin() -> None:
    policy = wait_policy()
    if policy.spin_reason is not None and not policy.is_chosen:
        log.warning("fallback threads=spinning reason=`%s`", policy.spin_reason.replace("`", ""))


def num_usable_cores(proc: Path = Path("/proc/self")) -> int:
    """Return how many cores this process may use, by its affinity and cgroups; a fraction counts as one."""
    limits = [len(os.sched_getaffinity(0))]
    for cgroup in cgroups_of("cpu", proc):
        names = ("cpu.max",) if cgroup.is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [word for name in names for word in cgroup.words(name)][:2]
        if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
            quota_us, period_us = map(int, words)
            limits.append(-(-quota_us // period_us))
    return max(1, min(limits))


def queued_s(pid: int) -> float | None:
    """Return how long a process's main thread has waited for a core; None: it ended, or is not counted."""
    words = " ".join(lines_of(Path(f"/proc/{pid}/schedstat"))).split()
    return int(words[1]) / 1e9 if len(words) == 3 and words[1].isdecimal() else None
