"""The descriptors that a process has open. Opens none."""

from __future__ import annotations

import os
from collections.abc import Container
from contextlib import suppress


def close_all_but(kept: Container[int | None]) -> None:
    """Close all descriptors but some, however this process came to have them. None is none of them."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # that of the list itself
                os.close(int(name))
