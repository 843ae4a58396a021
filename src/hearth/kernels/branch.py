"""Parallel branches in captured graphs.

A graph keeps the dependencies between launches. Work that is captured on a second stream depends only on what
came before, and later launches depend on both streams, so the device may run the two branches at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def run_beside(device: torch.device, main: Callable[[], object], branch: Callable[[], object]) -> None:
    """Queue two pieces of work, neither of which writes what the other reads or writes.

    The device schedules `main` first, and `branch` where there is room. Outside of a capture one runs after
    the other: events would cost the host more than they gain. `branch` must not use cuBLAS, whose workspaces
    belong to streams.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        main()
        branch()
        return
    stream, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(stream)
    main()
    with torch.cuda.stream(side):
        branch()
    stream.wait_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
