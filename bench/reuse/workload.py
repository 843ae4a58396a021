"""Tangram's workloads L1-L4 (its section 5.1): which model is asked for when. Runs nothing.

Every model gets runs of consecutive requests. Runs begin with Gamma distributed intervals; how many a model
has, and how long they are, comes from the Azure Functions trace (bench/data/azure_functions). The less
locality a level has, the more evenly runs come and the shorter they are:

    level   CV of the intervals   run lengths
    L1      0.25                  1, and never the same model twice in a row
    L2      0.5                   half of the trace's, rounded up
    L3      1                     the trace's
    L4      2                     the trace's

Where the paper is silent, we chose: that each model has a Gamma process of its own, with the mean interval
that the function has in the trace, and that half of an odd length is rounded up.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.report import HERE

#: What the trace covers.
DAY_S = 86_400.0
#: Between two requests of a run: about what an answer takes.
IN_RUN_S = 1.0


@dataclass(frozen=True, slots=True)
class Level:
    cv: float
    length_share: float  #: of the trace's run lengths; 0: no consecutive requests at all


LEVELS: Mapping[str, Level] = {
    "L1": Level(0.25, 0.0),
    "L2": Level(0.5, 0.5),
    "L3": Level(1.0, 1.0),
    "L4": Level(2.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a model; its time is that of the workload, not of a clock."""

    at_s: float
    model: int  #: a number from 0 on
    run: int  #: likewise: of the sequence of runs it belongs to


def run_lengths() -> list[list[int]]:
    """Return the run lengths of each function of the trace, in the order of the day."""
    document = json.loads((HERE / "data" / "azure_functions" / "runs.json").read_text(encoding="utf-8"))
    return list(document["runs"].values())


def workload(level: Level, lengths: Sequence[Sequence[int]], num_runs: int, seed: int) -> list[Asked]:
    """Draw so many runs of requests; model `i` behaves as function `i` of the trace."""
    draw = random.Random(seed)
    intervals_s = [DAY_S / len(own) for own in lengths]
    # A process that has been going on for long is found anywhere between two of its events.
    starts = [(draw.random() * _gap_s(draw, level.cv, mean_s), at) for at, mean_s in enumerate(intervals_s)]
    heapq.heapify(starts)
    asked: list[Asked] = []
    run, now_s = 0, 0.0
    while run < num_runs:
        at_s, model = heapq.heappop(starts)
        heapq.heappush(starts, (at_s + _gap_s(draw, level.cv, intervals_s[model]), model))
        if level.length_share == 0 and asked and asked[-1].model == model:
            continue
        now_s = max(at_s, now_s + IN_RUN_S)  # one after the other: there is one device
        for place in range(_cut(draw.choice(lengths[model]), level)):
            asked.append(Asked(now_s + place * IN_RUN_S, model, run))
        now_s = asked[-1].at_s
        run += 1
    return asked


def _cut(length: int, level: Level) -> int:
    return max(1, -int(-length * level.length_share // 1))


def _gap_s(draw: random.Random, cv: float, mean_s: float) -> float:
    shape = 1 / cv**2
    return draw.gammavariate(shape, mean_s / shape)
