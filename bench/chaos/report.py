"""Figures of a run: endings, and how honest clients fared with and without attackers. Measures nothing."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.chaos.clients import Asked, Probe
from bench.chaos.faults import Struck
from bench.chaos.outcome import Ending
from bench.report import Row, percentiles

#: How much worse honest clients may fare beside attackers.
AIM = "at most 1.5 times"
#: A fault is felt for so long after it has passed.
FELT_S = 4.0


@dataclass(frozen=True, slots=True)
class Span:
    """A window as it was, on the clock of `time.perf_counter`."""

    has_attackers: bool
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Compared:
    """A measure of honest clients without and with attackers, in seconds; None: no such answers."""

    without: Mapping[str, float] | None
    beside: Mapping[str, float] | None

    @property
    def ratio(self) -> float | None:
        """How many times as long the 99th percentile takes beside attackers."""
        if not self.without or not self.beside or not self.without["p99"]:
            return None
        return self.beside["p99"] / self.without["p99"]


def endings(asked: Sequence[Asked]) -> dict[str, int]:
    """Count each way in which a request can end, also those that none did."""
    counts = Counter(each.verdict.ending for each in asked)
    return {"asked": len(asked), **{ending.value: counts[ending] for ending in Ending}}


def errors(asked: Sequence[Asked]) -> dict[str, dict[str, object]]:
    """Count honest errors by their code, each with an example of what it says."""
    found: dict[str, dict[str, object]] = {}
    honest = [each.verdict.detail for each in asked if each.verdict.ending is Ending.HONEST_ERROR]
    for code, details in itertools.groupby(sorted(honest), lambda detail: detail.partition(": ")[0]):
        told = list(details)
        found[code] = {"count": len(told), "example": told[0].partition(": ")[2]}
    return found


def compared(
    asked: Sequence[Asked], probes: Sequence[Probe], struck: Sequence[Struck], spans: Sequence[Span]
) -> dict[str, Compared]:
    """Compare first tokens, pace and /health; "clear" are requests that no fault was felt by."""
    clear = [each for each in asked if not _is_struck(each, struck)]
    answered = [(probe.asked_s, probe.took_s) for probe in probes if probe.is_answered]
    return {
        "first_token": _split([(each.asked_s, each.verdict.first_s) for each in asked], spans),
        "pace": _split([(each.asked_s, each.verdict.pace_s) for each in asked], spans),
        "first_token_clear": _split([(each.asked_s, each.verdict.first_s) for each in clear], spans),
        "pace_clear": _split([(each.asked_s, each.verdict.pace_s) for each in clear], spans),
        "health": _split(answered, spans),
    }


def rows(ended: Mapping[str, int], found: Mapping[str, Compared]) -> list[Row]:
    counted = [Row(name.replace("_", " "), "requests", count) for name, count in ended.items()]
    titles = {
        "first_token": "first token p99",
        "pace": "time per token p99",
        "first_token_clear": "first token p99, no fault near",
        "pace_clear": "time per token p99, no fault near",
        "health": "/health p99",
    }
    timed = [
        Row(
            f"{title}, beside attackers",
            "ms",
            1e3 * each.beside["p99"],
            aim=AIM,
            peers={"without attackers": 1e3 * each.without["p99"]},
            is_comparable=False,
        )
        for name, title in titles.items()
        if (each := found[name]).beside and each.without
    ]
    return counted + timed


def as_json(found: Mapping[str, Compared]) -> dict[str, object]:
    return {name: {**asdict(each), "ratio_p99": each.ratio} for name, each in found.items()}


def _split(values: Sequence[tuple[float, float | None]], spans: Sequence[Span]) -> Compared:
    def within(has_attackers: bool) -> Mapping[str, float] | None:
        chosen = [
            value
            for at_s, value in values
            if value is not None
            and any(
                span.has_attackers is has_attackers and span.began_s <= at_s < span.ended_s for span in spans
            )
        ]
        return percentiles(chosen) if chosen else None

    return Compared(within(False), within(True))


def _is_struck(asked: Asked, struck: Sequence[Struck]) -> bool:
    return any(one.began_s <= asked.ended_s and asked.asked_s <= one.ended_s + FELT_S for one in struck)
