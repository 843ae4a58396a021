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
def prefetch(addresses, inside, OVERLAPS: tl.constexpr):
    """Have the cache lines at these addresses brought into the L2 cache, where `inside`.

    Nothing is read: a later load sees what was written by then, so this may precede the wait.
    """
    if OVERLAPS:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred inside;
            setp.ne.s32 inside, $2, 0;
            @inside prefetch.global.L2 [$1];
            mov.u32 $0, 0;
            }
            """,
            "=r,l,r",
            [addresses, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
