"""How many cores this process may use, how its threads wait, and how long for a core. Starts no thread.

Between two parallel regions OpenMP's threads spin for a while, in the hope that the next one is near. Alone
on a machine that gains a few percent; beside a busy process it takes cores from those that work, and then
decoding is many times slower. So threads are told to sleep instead, unless the user has chosen. OpenMP reads
its environment once, when torch loads it: `hearth/__init__.py` sees to it that this comes first.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hearth.system.cgroups import cgroups_of, lines_of

#: Settings that make threads sleep as soon as they wait: GNU's OpenMP, which torch brings, and Intel's.
_SLEEP = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
#: Settings by which a user chooses how GNU's threads wait, each with the value that makes them sleep.
_CHOICES = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
_REMEDY = "`" + " ".join(f"{name}={value}" for name, value in _SLEEP.items()) + "`"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """How OpenMP's threads wait in this process."""

    spin_reason: str | None  #: why threads may spin, and the remedy; None: they sleep
    is_chosen: bool = False  #: by the user, through the environment


@cache
def wait_policy() -> WaitPolicy:
    """Have the threads of this process and of its children sleep while they wait; later calls only answer."""
    return set_wait_policy(os.environ, sys.modules)


def set_wait_policy(environment: MutableMapping[str, str], modules: Collection[str]) -> WaitPolicy:
    """Set in `environment` what a user has not set there; `modules` are those that are imported already."""
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
    """Log, once in this process, that threads spin although no user has chosen it."""
    policy = wait_policy()
    if policy.spin_reason is not None and not policy.is_chosen:
        log.warning("fallback threads=spinning reason=`%s`", policy.spin_reason.replace("`", ""))


def num_usable_cores(proc: Path = Path("/proc/self")) -> int:
    """Return how many cores this process may keep busy: by its affinity and by the limits of its cgroups.

    A share of a core counts as a whole one. `proc` holds the files `cgroup` and `mountinfo` of the process.
    """
    limits = [-(-limit.quota_us // limit.period_us) for limit in _limits(proc)]
    return max(1, min([len(os.sched_getaffinity(0)), *limits]))


def queued_s(pid: int) -> float | None:
    """Return how long the main thread of a process has been ready to run without a core to run on, so far.

    None for a process that is gone, and where the kernel does not count it.
    """
    words = " ".join(lines_of(Path(f"/proc/{pid}/schedstat"))).split()
    return int(words[1]) / 1e9 if len(words) == 3 and words[1].isdecimal() else None


@dataclass(frozen=True, slots=True)
class _Limit:
    """Processor time that a cgroup may take in each period."""

    quota_us: int
    period_us: int


def _limits(proc: Path) -> Iterator[_Limit]:
    """Yield the limits of the process's cgroups and of all above them: each of them applies."""
    for cgroup in cgroups_of("cpu", proc):
        names = ("cpu.max",) if cgroup.is_v2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        limit = _limit([word for name in names for word in cgroup.words(name)])
        if limit is not None:
            yield limit


def _limit(words: Sequence[str]) -> _Limit | None:
    """Return a limit of quota and period; None where there is none, or the words are no such numbers."""
    if len(words) < 2 or not all(word.isdecimal() and int(word) > 0 for word in words[:2]):
        return None
    return _Limit(int(words[0]), int(words[1]))
