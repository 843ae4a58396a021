"""How many steps a pipeline of stages has in flight. Pure.

With as many flights as devices, every device has a step to compute, unless hidden states and tokens are on
their way for long. One more flight fills that time, but each flight reads all weights again. Stages on the
same device share its bandwidth, so they compute one after the other.

    a step on its way     sum of stage_s + hops_s
    the slowest device    num_flights * device_s, the sum of its stages' times, for one step of each flight

More flights pay only while the second is the shorter one, so that the slowest device has time to spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageTimes:
    """How long usual decode steps take in a pipeline, as measured."""

    stage_s: Sequence[float]  #: of each stage on its device, first to last
    hops_s: float  #: of all ways between stages together, and of the tokens' way back
    devices: Sequence[int] = ()  #: of each stage, by number; empty: each has its own

    @property
    def slowest_s(self) -> float:
        """Time of the slowest device for one step."""
        pairs = list(zip(self.devices or range(len(self.stage_s)), self.stage_s, strict=True))
        return max(sum(stage_s for other, stage_s in pairs if other == device) for device, _ in pairs)


def choose_flights(times: StageTimes | None, fewest: int, most: int) -> int:
    """Return the number of flights, `fewest` with unknown times.

    With more than `fewest` flights, which is the number of devices, no token is later than with `fewest`.
    """
    slowest_s = 0.0 if times is None else times.slowest_s
    if times is None or slowest_s <= 0.0:
        return fewest
    num_busy = (sum(times.stage_s) + times.hops_s) / slowest_s
    return int(max(fewest, min(num_busy, most)))
