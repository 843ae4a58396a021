"""How long a switch takes besides what it must: from the end of one model's turn to another's first token.

It must take the missing bytes over the rate to the device, and the prefill of whoever waits. Models that stay
in turn make their steps in between; that counts as time that it need not take. Reads no clock.

    other's turn ends        load begins                last byte          first token
    |------- start_s --------|-- bytes --|- load_s -----|-- prefill --|- step_s --|      the rest is bound_s

A load begins before the other's last step has ended, so `start_s` may be negative.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

from bench.report import percentiles
from bench.turns.journal import Entry
from bench.turns.setting import MAX_SWITCH_S
from hearth.core.types import ModelId, TurnEnd
from hearth.policy.fleet import events


@dataclass(frozen=True, slots=True)
class Calibration:
    """The best that a device can do, measured while nobody else used it."""

    bytes_per_s: float  #: to the device
    #: Seconds to the first token by tokens of the prompt, ascending, by shape of a model that was there.
    first_token_s: Mapping[str, Mapping[int, float]]

    def bound_s(self, shape: str, num_bytes: int, num_tokens: int) -> float:
        """Return what it takes at best until a model with missing bytes and a prompt has a first token."""
        return num_bytes / self.bytes_per_s + self._prefill_s(shape, num_tokens)

    def _prefill_s(self, shape: str, num_tokens: int) -> float:
        """Return a time on the line through the measured ones; beyond the last it goes on as it was."""
        points = sorted(self.first_token_s[shape].items())
        for (low, low_s), (high, high_s) in pairwise(points):
            if num_tokens <= high or high == points[-1][0]:
                slope = max(0.0, high_s - low_s) / (high - low)
                return low_s + slope * max(0, num_tokens - low)
        return points[0][1]


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as its client saw it, by the clock of the journal."""

    model: ModelId
    shape: str
    arrived_s: float
    num_prompt_tokens: int
    token_times_s: Sequence[float]  #: ascending

    def waits_at(self, now_s: float) -> bool:
        """True if it has arrived and has no token yet."""
        return self.arrived_s <= now_s and (not self.token_times_s or self.token_times_s[0] > now_s)

    def first_token_after(self, now_s: float) -> float:
        """Return when its next token came; infinite: none did."""
        at = bisect_right(self.token_times_s, now_s)
        return self.token_times_s[at] if at < len(self.token_times_s) else math.inf


@dataclass(frozen=True, slots=True)
class SwitchParts:
    """Where the time goes that a switch need not take, in seconds; see above."""

    start_s: float
    load_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Switch:
    """A turn that began because another had to end for it."""

    model: ModelId
    took_s: float  #: from the end of the other one to the first token, as a client saw it
    bound_s: float  #: what that takes at best
    missing_bytes: int
    num_prompt_tokens: int  #: of requests that had no token yet, all together
    parts: SwitchParts | None  #: None: nothing was loaded

    @property
    def beyond_s(self) -> float:
        return self.took_s - self.bound_s


def switches(journal: Sequence[Entry], seen: Sequence[SeenRequest], calibration: Calibration) -> list[Switch]:
    """Return the switches of a run; a turn that brought no token is left out."""
    found: list[Switch] = []
    gave_way_s: float | None = None
    for at, entry in enumerate(journal):
        match entry.event:
            case events.TurnEnded(now_s=now_s, why=why) if why is not TurnEnd.IDLE:
                gave_way_s = now_s
            case events.TurnBegan(now_s=now_s, model=model) if gave_way_s is not None:
                turn = _turn(journal[at:], model)
                requests = [one for one in seen if one.model == model and one.arrived_s <= turn.end_s]
                first_s = min((one.first_token_after(now_s) for one in requests), default=math.inf)
                if first_s <= turn.end_s:
                    num_tokens = sum(one.num_prompt_tokens for one in requests if one.waits_at(now_s))
                    bound_s = calibration.bound_s(requests[0].shape, turn.loaded_bytes, num_tokens)
                    prefill_s = calibration.bound_s(requests[0].shape, 0, num_tokens)
                    parts = _parts(turn, gave_way_s, first_s, bound_s - prefill_s, prefill_s)
                    switch = (model, first_s - gave_way_s, bound_s, turn.loaded_bytes, num_tokens, parts)
                    found.append(Switch(*switch))
                gave_way_s = None
    return found


@dataclass(frozen=True, slots=True)
class _Turn:
    end_s: float  #: infinite: it has not ended
    loaded_bytes: int  #: in the turn, not ahead of it
    load: events.ModelReady | None  #: the one by which all of it was there


def _turn(rest: Sequence[Entry], model: ModelId) -> _Turn:
    """Return what came of a turn of a model, from when it began."""
    loaded_bytes, load = 0, None
    for entry in rest:
        match entry.event:
            case events.ModelReady(model=ready) as event if ready == model:
                loaded_bytes += sum(use.num_bytes for use in event.rungs) - event.ahead_bytes
                load = load or event
            case events.TurnEnded(now_s=now_s, model=ended) if ended == model:
                return _Turn(now_s, loaded_bytes, load)
    return _Turn(math.inf, loaded_bytes, load)


def _parts(
    turn: _Turn, gave_way_s: float, first_s: float, bytes_s: float, prefill_s: float
) -> SwitchParts | None:
    load = turn.load
    if load is None or not turn.loaded_bytes:
        return None
    return SwitchParts(
        start_s=load.now_s - load.total_s - gave_way_s,
        load_s=load.total_s - bytes_s,
        step_s=first_s - load.now_s - prefill_s,
    )


@dataclass(frozen=True, slots=True)
class Switching:
    """All switches of a run, in seconds."""

    num_switches: int
    took_s: Mapping[str, float]
    beyond_s: Mapping[str, float]  #: the bytes and the prefill
    within_aim: float  #: the share of switches
    missing_bytes: float  #: in the mean
    parts_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  #: of `beyond_s`, by name


def summed_up(found: Sequence[Switch]) -> Switching | None:
    """Sum up the switches of a run; None: there was none."""
    if not found:
        return None
    return Switching(
        num_switches=len(found),
        took_s=percentiles([each.took_s for each in found]),
        beyond_s=percentiles([each.beyond_s for each in found]),
        within_aim=sum(each.beyond_s <= MAX_SWITCH_S for each in found) / len(found),
        missing_bytes=sum(each.missing_bytes for each in found) / len(found),
        parts_s=_parts_s([each.parts for each in found if each.parts is not None]),
    )


def _parts_s(parts: Sequence[SwitchParts]) -> dict[str, Mapping[str, float]]:
    if not parts:
        return {}
    return {
        each.name: percentiles([getattr(one, each.name) for one in parts]) for each in fields(SwitchParts)
    }
