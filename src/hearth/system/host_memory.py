"""How much host memory this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from hearth.system.cgroups import THIS_PROCESS, cgroups_of


def machine_bytes(proc: Path = THIS_PROCESS) -> int:
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for cgroup in cgroups_of("memory", proc):
        words = cgroup.words("memory.max" if cgroup.is_v2 else "memory.limit_in_bytes")
        limits += [int(word) for word in words[:1] if word.isdecimal()]  # `max`: no limit
    return min(limits)
