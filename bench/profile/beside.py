"""How long the host takes for steps of a worker: while bytes of another model cross, and with prompts.

Threads of one process see to loads and steps, and a step with prompts has more to be prepared. Both is told
by the smallest model, whose steps wait for the host the soonest: by the clock, and by the engine's own timer,
by which prompts are cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch

from bench.profile.scale import Scale
from bench.report import tell
from bench.turns.beside import Gap, Part, Times, measured

NUM_REQUESTS = 4
NUM_PROMPT_TOKENS = 128
NUM_NEW_TOKENS = 4000
SECONDS = 2.0
GIB = 1 << 30
#: That come in pieces beside one request; the first ones count for nothing, for sizes are captured.
NUM_PROMPTS, LONG_PROMPT_TOKENS = 60, 600
SIZE_TOKENS = 64  #: between sizes of steps with prompts
MIN_STEPS = 30  #: of a size, that its times mean something


@dataclass(frozen=True, slots=True)
class HostTimes:
    """The least seconds of steps in a worker, which are those of the host; the names are a profile's."""

    beside_load_s: float = 0.0
    beside_load_told_s: float | None = None
    prompt_step_s: float = 0.0
    prompt_step_told_s: float | None = None


def measure_host_times(scale: Scale, device: torch.device) -> HostTimes:
    """Measure the least seconds of steps; nothing where no pages are mapped and no step waits for the host.

    Those are means: a few steps wait for long, and simulated ones are to take as long together.
    """
    if device.type != "cuda":
        return HostTimes()
    shape = scale.shapes[0]
    part = Part(
        *(replace(scale, host_bytes=6 * GIB), shape, shape),
        *(NUM_REQUESTS, NUM_PROMPT_TOKENS, NUM_NEW_TOKENS, SECONDS, NUM_PROMPTS, LONG_PROMPT_TOKENS),
    )
    return host_times(measured(part, device))


def host_times(times: Times) -> HostTimes:
    """Sum up what was measured: means of the clock, and what timers tell as a rule.

    With prompts only steps of the smallest size count that some steps had: larger ones wait for the device.
    """
    steps: dict[int, list[Gap]] = defaultdict(list)
    for gap in times.prompts:
        assert gap.told is not None, "the number of tokens is what a timer tells"
        steps[-(-(gap.told.num_prompt_tokens + 1) // SIZE_TOKENS) * SIZE_TOKENS].append(gap)
    means = {size: _sum_up(gaps) for size, gaps in sorted(steps.items()) if len(gaps) >= MIN_STEPS}
    assert means, f"few steps had prompts: { {size: len(gaps) for size, gaps in steps.items()} }"
    for size, (clock_s, told_s) in means.items():
        tell(f"  {len(steps[size])} steps of {size} tokens: {1e3 * clock_s:.3f} ms, told {1e3 * told_s:.3f}")
    beside_s, alone_s, told_s = fmean(times.beside), fmean(times.alone), median(times.beside_told)
    tell(f"  beside loads {1e3 * beside_s:.3f} ms, told {1e3 * told_s:.3f}; alone {1e3 * alone_s:.3f}")
    return HostTimes(beside_s, told_s, *means[min(means)])


def _sum_up(gaps: Sequence[Gap]) -> tuple[float, float]:
    return fmean(gap.seconds for gap in gaps), median(gap.told.seconds for gap in gaps if gap.told)
