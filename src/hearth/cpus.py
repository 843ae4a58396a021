"""How many cores this process may use, and how its threads wait. Starts no thread.

Between two parallel regions OpenMP's threads spin for a while, in the hope that the next one is near. Alone
on a machine that gains next to nothing; beside a busy process it takes cores from those that work, and then
decoding is many times slower. So threads are told to sleep instead, unless the user has chosen. OpenMP reads
its environment once, when torch loads it: `hearth/__init__.py` sees to it that this comes first.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

#: Settings that make threads sleep as soon as they wait; the second is for Intel's OpenMP.
_SLEEP = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
#: Settings by which a user chooses how threads wait, each with the value that makes them sleep.
_CHOICES = {**_SLEEP, "GOMP_SPINCOUNT": "0"}
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
    """Change `environment` unless a user has chosen there; `modules` are those that are imported already."""
    for name, asleep in _CHOICES.items():
        if (value := environment.get(name)) is not None:
            if value.strip().upper() == asleep:
                return WaitPolicy(None, is_chosen=True)
            return WaitPolicy(f"`{name}={value}` is set; unset it, or set {_REMEDY}", is_chosen=True)
    environment.update(_SLEEP)
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


@dataclass(frozen=True, slots=True)
class _Limit:
    """Processor time that a cgroup may take in each period."""

    quota_us: int
    period_us: int


def _limits(proc: Path) -> Iterator[_Limit]:
    """Yield the limits of the process's cgroups and of all above them: each of them applies."""
    memberships = _memberships(proc)
    for mount in _mounts(proc):
        own = memberships.get(mount.controller)
        if own is not None:
            for directory in mount.directories(own):
                limit = _limit_v2(directory) if mount.controller == "" else _limit_v1(directory)
                if limit is not None:
                    yield limit


@dataclass(frozen=True, slots=True)
class _Mount:
    """A hierarchy of cgroups as this process sees it."""

    controller: str  #: `cpu`; empty in version 2, where one hierarchy has all of them
    root: PurePosixPath  #: the cgroup that is seen at `point`: in a container usually the container's own
    point: Path

    def directories(self, cgroup: PurePosixPath) -> Iterator[Path]:
        """Yield the directory of a cgroup and of all above it, as far as they are seen from here."""
        inside = cgroup.relative_to(self.root) if cgroup.is_relative_to(self.root) else PurePosixPath()
        at = inside if ".." not in inside.parts else PurePosixPath()
        yield self.point / at
        yield from (self.point / parent for parent in at.parents)


def _memberships(proc: Path) -> dict[str, PurePosixPath]:
    """Return the process's cgroup by controller; lines of the file read `4:cpu,cpuacct:/a/b` or `0::/a/b`."""
    found: dict[str, PurePosixPath] = {}
    for line in _lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        found.update((controller, PurePosixPath(path)) for controller in controllers.split(","))
    return found


def _mounts(proc: Path) -> Iterator[_Mount]:
    """Yield the hierarchies that may limit processor time; see proc_pid_mountinfo(5) for the fields."""
    for line in _lines(proc / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        root, point = PurePosixPath(fields[3]), Path(fields[4])
        if kind == "cgroup2":
            yield _Mount("", root, point)
        elif kind == "cgroup" and "cpu" in options.split(","):
            yield _Mount("cpu", root, point)


def _limit_v2(directory: Path) -> _Limit | None:
    words = " ".join(_lines(directory / "cpu.max")).split()
    return None if len(words) < 2 or words[0] == "max" else _Limit(int(words[0]), int(words[1]))


def _limit_v1(directory: Path) -> _Limit | None:
    quota, period = (_lines(directory / f"cpu.cfs_{what}_us") for what in ("quota", "period"))
    return None if not quota or not period or int(quota[0]) < 0 else _Limit(int(quota[0]), int(period[0]))


def _lines(path: Path) -> list[str]:
    """Return the lines of a file of the kernel's; none where it has no such file."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
