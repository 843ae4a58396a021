"""Waiting, in kernels that start while the one before them drains (programmatic dependent launch).

A kernel that takes the constexpr `OVERLAPS` is launched so by `jit.launch`, which knows the device. Its
programs may run before the kernel in front of it has ended, so each of them calls `wait_for_inputs`: before
it reads what any kernel writes, and before it writes. As every program waits, a kernel ends only when all
kernels in front of it have ended, not just the last one.
"""

from __future__ import annotations

from hearth.kernels.jit import tl, triton


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Let the next kernel start, and wait until all earlier ones have ended and their writes are visible."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
