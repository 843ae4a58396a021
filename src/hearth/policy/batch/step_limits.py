"""How large the steps of an engine may be, by kind of device, model and memory. Takes no memory itself.

With more sequences each reading of the weights serves more of them, with more tokens fewer prompts are cut
into chunks. But the temporaries of the largest step that may come are set aside, in the workspace. So limits
that nobody has set are, on a CUDA device, the largest of a few round ones whose workspace is a small share of
the memory for models; where that is little, the least ones, whatever their share. A CPU computes so few
tokens in a second that whoever runs beside a larger step would wait for seconds.
"""

from __future__ import annotations

from hearth.core.sizes import Dimensions, StepLimits, StepSize, WantedLimits, workspace_bytes

#: The most of a worker's memory for models that the workspace of one takes, where the limits follow from it.
WORKSPACE_SHARE = 1 / 40
#: Tokens of a step and sequences that run at a time, ascending in both.
CUDA_LIMITS = ((2048, 256), (4096, 256), (4096, 512), (8192, 512), (8192, 1024))
CPU_LIMITS = ((512, 256),)


def step_limits(
    wanted: WantedLimits, dimensions: Dimensions, dtype: str, kind: str, budget_bytes: int | None
) -> StepLimits:
    """Return the limits of a model that is computed in `dtype` on a `kind` of device, "cpu" or "cuda".

    What is wanted stays as it is, and more memory never lowers a limit. `budget_bytes`: of device memory for
    all models; None: not known yet, so the limits are the least ones.
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
    """Return a rung with what is wanted in its place.

    Sequences beyond the tokens of a step would have no token in it.
    """
    max_batch_tokens = wanted.max_batch_tokens or max_batch_tokens
    return StepLimits(
        max_batch_tokens, wanted.max_seqs or min(max_seqs, max_batch_tokens), wanted.block_tokens
    )
