"""When which fault strikes, and when attackers are there. Pure: one seed gives one schedule.

A run is made of rounds, and each round of two windows in which the same faults strike at the same moments:
one without attackers and one with them, so that what differs between the two is the attackers' doing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

#: The time from one fault to the next: many are still being repaired when the next one strikes.
MIN_GAP_S, MAX_GAP_S = 6.0, 16.0
ROUND_MINUTES = 2.0


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault at a moment of a window."""

    after_s: float  #: since the window began
    fault: str
    seed: int  #: for what the fault draws at random, such as which worker


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a run, with or without attackers."""

    has_attackers: bool
    seconds: float
    strikes: Sequence[Strike]


def windows(minutes: float, seed: int, faults: Sequence[str]) -> list[Window]:
    """Return the windows of a run. Every fault strikes before any strikes again."""
    random = Random(seed)
    num_rounds = max(1, round(minutes / ROUND_MINUTES))
    seconds = 60 * minutes / (2 * num_rounds)
    order = _in_turns(random, faults)
    found = []
    for _ in range(num_rounds):
        strikes = list(_strikes(random, seconds, order)) if faults else []
        found += [Window(has_attackers, seconds, strikes) for has_attackers in (False, True)]
    return found


def _in_turns(random: Random, faults: Sequence[str]) -> Iterator[str]:
    while True:
        yield from random.sample(faults, len(faults))


def _strikes(random: Random, seconds: float, order: Iterator[str]) -> Iterator[Strike]:
    after_s = random.uniform(MIN_GAP_S, MAX_GAP_S) / 2
    while after_s < seconds - MIN_GAP_S:
        yield Strike(after_s, next(order), random.getrandbits(32))
        after_s += random.uniform(MIN_GAP_S, MAX_GAP_S)
