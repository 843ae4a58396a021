"""A disk that fails every write, for chosen processes and for a while. Needs no rights and mounts nothing.

It is made by `RLIMIT_FSIZE` of running processes: a write to a file, or making one longer, fails with EFBIG,
as it would with ENOSPC on a full disk or EDQUOT beyond a quota. Mounting a small disk takes rights that few
have, and permissions mean nothing to files that are open, or to root. Pipes and sockets go on.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress


@contextmanager
def failing_writes(pids: Sequence[int]) -> Iterator[None]:
    """Let every write of these processes to a file fail until the context ends, and of those they start."""
    for pid in pids:
        _limit_files(pid, 0)
    try:
        yield
    finally:
        allow_writes(pids)


def allow_writes(pids: Iterable[int]) -> None:
    """Let processes write again, such as those that were started by one whose writes failed."""
    for pid in pids:
        _limit_files(pid, None)


def _limit_files(pid: int, max_bytes: int | None) -> None:
    """Limit the size of files that a process may write; None: as far as it was ever allowed."""
    with suppress(ProcessLookupError):
        hard_bytes = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        soft_bytes = hard_bytes if max_bytes is None else max_bytes
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft_bytes, hard_bytes))
