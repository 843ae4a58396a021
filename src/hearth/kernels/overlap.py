"""Waiting, in kernels that start while the one before them drains (programmatic dependent launch).

A kernel that takes the constexpr `OVERLAPS` is launched so by `jit.launch`, which knows the device. Its
programs may run before the kernel in front of it has ended, so each of them calls `wait_for_inputs`: before
it reads what other kernels of the step write, and before it writes. As every program waits, a kernel ends
only when all kernels in front of it have ended, not just the last one.

What is the same in all of a step may be read before that: weights, rotary angles, positions, slots, block
tables, and which rows have which adapter. A step begins with launches that do not overlap, tokens and their
embedding, and none of its kernels starts before those have begun, and so before all that was queued in front
of them has ended. For weights that still arrive the stream waits, and so no kernel behind is started before
they are there.
"""

from __future__ import annotations

from hearth.kernels.jit import tl, triton


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Let the next kernel start, and wait until all earlier ones have ended and their writes are visible."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
