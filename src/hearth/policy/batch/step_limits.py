"""How large the steps of an engine may be, by kind of device, model and memory.

On CUDA, limits that are not set are the largest of a few whose workspace is a small share of the memory for
models. A CPU is so slow that requests beside a larger step would wait for seconds.
"""

from __future__ import annotations

from hearth.core.sizes import Dimensions, StepLimits, StepSize, WantedLimits, workspace_bytes

#: Largest share of a worker's memory for models that a derived workspace takes.
WORKSPACE_SHARE = 1 / 40
#: Tokens of a step and sequences that run at a time, ascending in both.
CUDA_LIMITS = ((2048, 256), (4096, 256), (4096, 512), (8192, 512), (8192, 1024))
CPU_LIMITS = ((512, 256),)


def step_limits(
    wanted: WantedLimits, dimensions: Dimensions, dtype: str, kind: str, budget_bytes: int | None
) -> StepLimits:
    """Return the limits of a model in `dtype` on a `kind` of device, "cpu" or "cuda".

    Limits that are set stay, and more memory never lowers one. `budget_bytes`: device memory for all models;
    None: unknown, so the limits are the smallest.
    """
    rungs = [_limits(wanted, *rung) for rung in (CUDA_LIMITS if kind == "cuda" else CPU_LIMITS)]
    allowed_bytes = int((budget_bytes or 0) * WORKSPACE_SHARE)
    fitting = [
        limits
        for limits in rungs
        if workspace_bytes(dimensions, dimensions.layers, dtype, StepSize.of(limits, kind)) <= allowed_bytes
    ]
    return fitting[-1] if fitting else rungs[0]


def _limits(wanted: WantedLimits, max_batch_tokens: int, max_seqs: int) -> StepLimits:
    max_batch_tokens = wanted.max_batch_tokens or max_batch_tokens
    return StepLimits(
        max_batch_tokens, wanted.max_seqs or min(max_seqs, max_batch_tokens), wanted.block_tokens
    )
