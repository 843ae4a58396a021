"""Work side by side in captured graphs. Knows no kernel.

A graph keeps which launch waits for which. Work that is captured on a second stream waits only for what came
before it, and whoever comes behind waits for both, so that the device may compute them at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


def run_beside(device: torch.device, main: Callable[[], object], branch: Callable[[], object]) -> None:
    """Queue two pieces of work, neither of which writes what the other reads or writes.

    The device places `main` first, and `branch` where that leaves room. Outside of a capture one runs behind
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
    """The second stream of all captures on a device, of which there is one at a time."""
    return torch.cuda.Stream(device)
