"""The process whose place a worker takes, and which has the memory until it is gone. Ends no process."""

from __future__ import annotations

import os
import select
from contextlib import suppress


class Predecessor:
    """A process that is ending, by a descriptor of it; one that was gone before, or was none, is gone."""

    def __init__(self, pid: int | None) -> None:
        self._descriptor: int | None = None  #: None: it is gone
        if pid is not None:
            with suppress(ProcessLookupError):
                self._descriptor = os.pidfd_open(pid)

    @property
    def is_gone(self) -> bool:
        return self._is_gone(0)

    def wait(self) -> None:
        """Return when the process is gone."""
        self._is_gone(None)

    def _is_gone(self, wait_ms: int | None) -> bool:
        if self._descriptor is None:
            return True
        ends = select.poll()
        ends.register(self._descriptor, select.POLLIN)
        if not ends.poll(wait_ms):
            return False
        os.close(self._descriptor)
        self._descriptor = None
        return True
