"""What requests waited for before their first tokens, measured and simulated. Asks nobody.

    arrival in the trace -> the gateway hears of it -> its turn -> its bytes -> its first step -> its token

A service tells it by the timelines of its requests, a simulation by the facts of its worker.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from statistics import fmean

from hearth.control.observe.views import Explanation
from hearth.core.types import ModelId
from hearth.policy.fleet.events import ModelReady, TurnBegan, TurnEnded
from hearth.sim.service import SimulatedAnswer
from hearth.sim.stepped_model import WorkerFact

#: A model counts as there if its requests waited no longer than this for its turn and its bytes.
_THERE_S = 0.002


@dataclass(frozen=True, slots=True)
class FirstTokenParts:
    """The seconds from a request's arrival in the trace to its first token, part by part.

    A service tells the way from the gateway to the worker with `start_s`; simulated, it is part of `way_s`.
    """

    way_s: float  #: of client and gateway, there and back
    turn_s: float  #: until its model was in turn
    load_s: float  #: until all of its model was there
    start_s: float  #: until the step began that had its first tokens
    steps_s: float  #: until its token was there


def split(
    way_s: float,
    token_s: float,
    turn_s: float | None = None,
    loaded_s: float | None = None,
    started_s: float | None = None,
) -> FirstTokenParts:
    """Return the parts by moments since the gateway heard of a request; None: that was not waited for.

    A load may be over just behind the token, whose step followed it; then all of the time was the load's.
    """
    moments = [0.0]
    for at_s in (turn_s, loaded_s, started_s):
        moments.append(moments[-1] if at_s is None else min(token_s, max(moments[-1], at_s)))
    moments.append(token_s)
    return FirstTokenParts(way_s, *(after - before for before, after in pairwise(moments)))


def told_parts(told: Explanation, first_s: float) -> FirstTokenParts | None:
    """Return the parts by a request's timeline; its client had a token after `first_s`. None: it had none."""
    at_s: dict[str, float] = {}
    for mark in told.marks:
        at_s.setdefault(mark.what, mark.at_s)
    if (token_s := at_s.get("first_token")) is None:
        return None
    turn_s = at_s.get("turn")
    if turn_s is not None and turn_s > token_s:  # it was there, and paused later
        turn_s = None
    return split(first_s - token_s, token_s, turn_s, at_s.get("loaded"), at_s.get("started"))


class SimulatedMoments:
    """When models of a simulation were in turn, and there. Mutable; told every fact of its worker."""

    def __init__(self) -> None:
        self._turns: dict[ModelId, list[tuple[float, bool]]] = defaultdict(list)  #: began; else ended
        self._ready_s: dict[ModelId, list[float]] = defaultdict(list)

    def note(self, fact: WorkerFact) -> None:
        match fact:
            case TurnBegan(now_s, _, model):
                self._turns[model].append((now_s, True))
            case TurnEnded(now_s, _, model):
                self._turns[model].append((now_s, False))
            case ModelReady(now_s, _, model):
                self._ready_s[model].append(now_s)
            case _:
                pass

    def parts(self, answer: SimulatedAnswer, request_s: float, late_s: float) -> FirstTokenParts | None:
        """Return the parts of a request that its client asked `late_s` after its arrival; None: no token."""
        if not answer.token_s:
            return None
        heard_s, token_s = answer.arrived_s + request_s, answer.token_s[0]
        turns, ready_s = self._turns[answer.model], self._ready_s[answer.model]
        at = bisect_left(turns, (heard_s, True))
        is_in_turn = at > 0 and turns[at - 1][1]
        turn_s = None if is_in_turn else next((when_s for when_s, began in turns[at:] if began), None)
        loads_s = ready_s[bisect_right(ready_s, heard_s) : bisect_right(ready_s, token_s)]
        moments = (turn_s, loads_s[-1] if loads_s else None, answer.started_s)
        return split(
            late_s + request_s,
            token_s - heard_s,
            *(None if moment is None else moment - heard_s for moment in moments),
        )


def summed_up(parts: Sequence[FirstTokenParts | None]) -> Mapping[str, Mapping[str, float]]:
    """Return the mean of each part over all requests, and over those that found their model there."""
    known = [one for one in parts if one is not None]
    there = [one for one in known if one.turn_s + one.load_s <= _THERE_S]
    return {
        name: {"requests": len(some), **_means(some)}
        for name, some in (("all", known), ("there", there))
        if some
    }


def _means(parts: Sequence[FirstTokenParts]) -> dict[str, float]:
    rows = [asdict(one) for one in parts]
    return {field.name: fmean(row[field.name] for row in rows) for field in fields(FirstTokenParts)}
