"""How many cores this process may use, how its threads wait, and how long for a core. Starts no thread.

Between two parallel regions OpenMP's threads spin for a while, in the hope that the next one is near. Alone
on a machine that gains a few percent; beside a busy process it takes cores from those that work, and then
decoding is many times slower. So threads are told to sleep instead, unless the user has chosen. OpenMP reads
its environment once, when torch loads it: `hearth/__init__.py` sees to it that this comes first.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

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
    words = " ".join(_lines(Path(f"/proc/{pid}/schedstat"))).split()
    return int(words[1]) / 1e9 if len(words) == 3 and words[1].isdecimal() else None


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
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon:
            continue
        found.update((controller, PurePosixPath(path)) for controller in controllers.split(","))
    return found


def _mounts(proc: Path) -> Iterator[_Mount]:
    """Yield the hierarchies that may limit processor time; see proc_pid_mountinfo(5) for the fields."""
    for line in _lines(proc / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (kind, *rest) = before.split(), after.split() or [""]
        if len(fields) < 5:
            continue
        options = rest[1] if len(rest) > 1 else ""
        root, point = PurePosixPath(_unescaped(fields[3])), Path(_unescaped(fields[4]))
        if kind == "cgroup2":
            yield _Mount("", root, point)
        elif kind == "cgroup" and "cpu" in options.split(","):
            yield _Mount("cpu", root, point)


def _unescaped(path: str) -> str:
    """Return a path of the kernel's with its blanks, which are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _limit_v2(directory: Path) -> _Limit | None:
    return _limit(" ".join(_lines(directory / "cpu.max")).split())


def _limit_v1(directory: Path) -> _Limit | None:
    return _limit([*_lines(directory / "cpu.cfs_quota_us"), *_lines(directory / "cpu.cfs_period_us")])


def _limit(words: Sequence[str]) -> _Limit | None:
    """Return a limit of quota and period; None where there is none, or the words are no such numbers."""
    if len(words) < 2 or not all(word.isdecimal() and int(word) > 0 for word in words[:2]):
        return None
    return _Limit(int(words[0]), int(words[1]))


def _lines(path: Path) -> list[str]:
    """Return the lines of a file of the kernel's; none where it has no such file."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
