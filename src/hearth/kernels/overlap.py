"""Waiting, in kernels that start while the one before them drains (programmatic dependent launch).

`jit.launch` launches a kernel that takes the constexpr `OVERLAPS` in this way, where the device supports it.
Its programs may run before the previous kernel has ended, so each of them calls `wait_for_inputs` before it
reads what other kernels of the step write, and before it writes. As every program waits, a kernel ends only
when all kernels before it have ended.

Inputs that do not change during a step may be read before that: weights, rotary angles, positions, slots,
block tables, and the lists of adapters. A step begins with launches that do not overlap, tokens and their
embedding; its other kernels start after those have begun, and so after all earlier work has ended. While
weights are loaded the stream waits for them, so no later kernel starts before they are there.
"""

from __future__ import annotations

from hearth.kernels.jit import tl, triton


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Let the next kernel start, and wait until all earlier ones have ended and their writes are visible."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
