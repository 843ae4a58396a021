"""Waiting, in kernels that start while the one before them drains (programmatic dependent launch).

A kernel that takes the constexpr `OVERLAPS` is launched so by `jit.launch`, which knows the device. Its
programs may run before the kernel in front of it has ended, so each of them calls `wait_for_inputs`: before
it reads what any kernel writes, and before it writes. As every program waits, a kernel ends only when all
kernels in front of it have ended, not just the last one.

What was written before the step began may be read without waiting, as the lists of adapters are. Between it
and the kernels of layers there is always one that waits for all others by itself: the embedding, which torch
launches without overlap, or the beginning of a graph.
"""

from __future__ import annotations

from hearth.kernels.jit import tl, triton


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Let the next kernel start, and wait until all earlier ones have ended and their writes are visible."""
    let_next_start(OVERLAPS)
    wait_for_earlier(OVERLAPS)


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """Let the next kernel start, once every program of this one has said so."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(OVERLAPS: tl.constexpr):
    """Wait until all earlier kernels have ended and their writes are visible."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
