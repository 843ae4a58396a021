"""The cgroups that limit this process: its own and their ancestors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

THIS_PROCESS = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Cgroup:
    directory: Path
    is_v2: bool  #: one hierarchy for all controllers, and other file names

    def words(self, name: str) -> list[str]:
        return " ".join(lines_of(self.directory / name)).split()


def cgroups_of(controller: str, proc: Path = THIS_PROCESS) -> Iterator[Cgroup]:
    """Yield the cgroups that `controller` may limit a process by. `proc`: the process's folder in /proc."""
    memberships = _memberships(proc)
    for mount in _mounts(controller, proc):
        own = memberships.get(mount.controller)
        if own is not None:
            yield from (Cgroup(path, is_v2=mount.controller == "") for path in mount.directories(own))


def lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class _Mount:
    controller: str  #: empty in version 2
    root: PurePosixPath  #: the cgroup at `point`: in a container usually the container's own
    point: Path

    def directories(self, cgroup: PurePosixPath) -> Iterator[Path]:
        inside = cgroup.relative_to(self.root) if cgroup.is_relative_to(self.root) else PurePosixPath()
        at = inside if ".." not in inside.parts else PurePosixPath()
        yield self.point / at
        yield from (self.point / parent for parent in at.parents)


def _memberships(proc: Path) -> dict[str, PurePosixPath]:
    """Return the process's cgroup by controller; lines are like `4:cpu,cpuacct:/a/b` or `0::/a/b`."""
    found: dict[str, PurePosixPath] = {}
    for line in lines_of(proc / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon:
            continue
        found.update((controller, PurePosixPath(path)) for controller in controllers.split(","))
    return found


def _mounts(controller: str, proc: Path) -> Iterator[_Mount]:
    """Yield the hierarchies that a controller may be in; see proc_pid_mountinfo(5) for the fields."""
    for line in lines_of(proc / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, (kind, *rest) = before.split(), after.split() or [""]
        if len(fields) < 5:
            continue
        options = rest[1] if len(rest) > 1 else ""
        root, point = PurePosixPath(_unescaped(fields[3])), Path(_unescaped(fields[4]))
        if kind == "cgroup2":
            yield _Mount("", root, point)
        elif kind == "cgroup" and controller in options.split(","):
            yield _Mount(controller, root, point)


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)
