"""Waiting and fetching in kernels that start while the one before drains (programmatic dependent launch).

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


@triton.jit
def prefetch(address, num_bytes, MAX_BYTES: tl.constexpr, NUM_THREADS: tl.constexpr):
    """Have a run of memory brought into the L2 cache: `num_bytes`, at most MAX_BYTES, in multiples of 16.

    Nothing is read: a later load sees what was written by then, so this may precede the wait.
    """
    # One thread for each piece, and none twice.
    at = tl.arange(0, NUM_THREADS) * 2048
    size = tl.minimum(tl.minimum(num_bytes, MAX_BYTES) - at, 2048)
    tl.inline_asm_elementwise(
        """
        {
        .reg .pred inside;
        setp.gt.s32 inside, $2, 0;
        @inside cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }
        """,
        "=r,l,r",
        [address.to(tl.pointer_type(tl.int8), bitcast=True) + at, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
