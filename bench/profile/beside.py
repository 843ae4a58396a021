"""How long the host takes for a step while bytes of another model cross: threads of one process see to both.

It is told by the smallest model, whose steps wait for the host the soonest.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import torch

from bench.profile.scale import Scale
from bench.turns.beside import Part, measured

NUM_REQUESTS = 4
NUM_PROMPT_TOKENS = 128
NUM_NEW_TOKENS = 4000
SECONDS = 2.0
GIB = 1 << 30


def measure_beside_loads(scale: Scale, device: torch.device) -> float:
    """Return the least seconds of a step beside a load; 0 where no pages are mapped, and nothing waits.

    That is the mean: a few steps wait for long, and simulated ones are to take as long together.
    """
    if device.type != "cuda":
        return 0.0
    shape = scale.shapes[0]
    part = Part(
        *(replace(scale, host_bytes=6 * GIB), shape, shape),
        *(NUM_REQUESTS, NUM_PROMPT_TOKENS, NUM_NEW_TOKENS, SECONDS),
    )
    return fmean(measured(part, device).beside)
