"""The result of all runs: figures of each, rows for the documents, and the aims that are missed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.report import Row
from bench.turns.arms import Run
from bench.turns.outcome import Measures, measures
from bench.turns.setting import AIM_SPEED, GOOD_SHARE, MAX_SWITCH_S, Arm

PERCENTILES = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Aim:
    """A limit that a value is to keep."""

    limit: float
    is_least: bool = False  #: rather than the most

    def __str__(self) -> str:
        return f"at {'least' if self.is_least else 'most'} {self.limit:g}"

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.is_least else value <= self.limit


@dataclass(frozen=True, slots=True)
class Line:
    """A measure of turns, what the other arms had, and what was aimed at."""

    measure: str
    unit: str
    value: float
    others: Mapping[str, float]
    aim: Aim | None = None

    @property
    def row(self) -> Row:
        aim = None if self.aim is None else str(self.aim)
        # What the other arms had is not always better when it is less.
        return Row(self.measure, self.unit, self.value, None, aim, self.others, is_comparable=False)

    @property
    def is_missed(self) -> bool:
        return self.aim is not None and not self.aim.is_met(self.value)


@dataclass(frozen=True, slots=True)
class Judged:
    """A run and what its clients saw."""

    run: Run
    seen: Measures

    @staticmethod
    def of(run: Run) -> Judged:
        return Judged(run, measures(run.outcomes, run.seconds))

    def as_json(self) -> dict[str, object]:
        run = self.run
        return {
            "arm": run.arm,
            **asdict(run.traffic),
            "seconds": run.seconds,
            **asdict(self.seen),
            "doings": asdict(run.doings),
            "bus_share": run.doings.bus_s / run.seconds,
            "switching": None if run.switching is None else asdict(run.switching),
            "calibration": asdict(run.calibration),
            "metrics": run.metrics,
            "explained": run.explained,
            "environment": run.environment,
        }


def judge(runs: Sequence[Run]) -> list[Judged]:
    return [Judged.of(run) for run in runs]


def document(judged: Sequence[Judged], lines: Sequence[Line]) -> dict[str, object]:
    """Return the result of all runs. Its environment is that of the last one, wherever it was measured.

    But where they are of several commits, it names those of each arm.
    """
    return {
        **({"environment": environment_of(judged)} if judged else {}),
        "rows": [asdict(line.row) for line in lines],
        "missed": [line.measure for line in lines if line.is_missed],
        "runs": [each.as_json() for each in judged],
    }


def environment_of(judged: Sequence[Judged]) -> Mapping[str, object]:
    """Return where the last run was made, and the commits of all of them."""
    last = judged[-1].run.environment
    commits: dict[Arm, dict[object, None]] = {}
    for run in (each.run for each in judged):
        commits.setdefault(run.arm, {})[run.environment.get("commit")] = None
    if len({commit for found in commits.values() for commit in found}) == 1:
        return last
    named = [f"{arm.title} {' and '.join(map(str, found))}" for arm, found in commits.items()]
    return {**last, "commit": ", ".join(named)}


def by_arm(judged: Sequence[Judged]) -> list[dict[Arm, Judged]]:
    """Return the runs of each traffic by arm, the fastest traffic first; repeated runs come apart, behind."""
    found: dict[tuple[float, int], dict[Arm, Judged]] = {}
    counts = Counter[tuple[Arm, float]]()
    for each in judged:
        arm, speed = each.run.arm, each.run.traffic.speed
        found.setdefault((-speed, counts[arm, speed]), {})[arm] = each
        counts[arm, speed] += 1
    return [found[key] for key in sorted(found)]


def measured_lines(judged: Sequence[Judged]) -> Iterator[Line]:
    """Yield the lines of all speeds at which turns were taken, the highest first, and those over all."""
    first: dict[float, Judged] = {}
    for arms in by_arm(judged):
        if (turns := arms.get(Arm.TURNS)) is None:
            continue
        speed = turns.run.traffic.speed
        if speed not in first:
            first[speed] = turns
            yield from speed_lines(speed, arms)
        else:
            yield from again_lines(first[speed], turns)
    yield from search_lines(judged)


def again_lines(first: Judged, again: Judged) -> Iterator[Line]:
    """Yield what a service took that was asked the same once more, and how far that is from the first run."""
    speed = again.run.traffic.speed
    for p in PERCENTILES:
        one_s, other_s = first.seen.first_token_s[p], again.seen.first_token_s[p]
        yield Line(f"first token {p} at {speed:g}x, asked again", "s", other_s, {})
        title = f"first token {p} at {speed:g}x, asked again, difference from the first run"
        yield Line(title, "share", abs(other_s / one_s - 1), {})


def speed_lines(speed: float, arms: Mapping[Arm, Judged]) -> Iterator[Line]:
    """Yield the lines of one speed; the aims for what users see are those of one speed alone."""

    def line(
        what: str,
        unit: str,
        value_of: Callable[[Judged], float],
        aim: Aim | None = None,
        any_speed: bool = False,
    ) -> Line:
        values = {arm: value_of(each) for arm, each in arms.items()}
        others = {arm.title: value for arm, value in values.items() if arm is not Arm.TURNS}
        aimed = aim if any_speed or speed == AIM_SPEED else None
        return Line(f"{what} at {speed:g}x", unit, values[Arm.TURNS], others, aimed)

    first_aims = dict(zip(PERCENTILES, (Aim(0.06), Aim(0.4), Aim(1.0)), strict=True))
    for p in PERCENTILES:
        yield line(f"first token {p}", "s", lambda each, p=p: each.seen.first_token_s[p], first_aims[p])
    yield line(
        "requests with every token on time",
        "share",
        lambda each: each.seen.requests_on_time,
        Aim(0.97, is_least=True),
    )
    yield line("tokens on time", "share", lambda each: each.seen.tokens_on_time, Aim(0.995, is_least=True))
    for p in PERCENTILES:
        aim = Aim(2.0) if p == "p99" else None
        yield line(
            f"longest pause in an answer {p}", "s", lambda each, p=p: each.seen.longest_pause_s[p], aim
        )
    for p in PERCENTILES:
        yield line(f"completion {p}", "s", lambda each, p=p: each.seen.completion_s[p])
    yield line("output", "tokens/s", lambda each: each.seen.tokens_per_s)
    yield line("moved to the device", "GB", lambda each: each.run.doings.moved_bytes / 1e9)
    yield line("pauses per request", "count", lambda each: each.run.doings.pauses_per_request)
    if Arm.DRAIN in arms:
        drain = arms[Arm.DRAIN].seen
        for p in PERCENTILES:
            yield line(
                f"completion {p} over that with drains",
                "times",
                lambda each, p=p: each.seen.completion_s[p] / drain.completion_s[p],
                None if p == "p99" else Aim(1.1),
                any_speed=True,
            )
        yield line(
            "output over that with drains",
            "times",
            lambda each: each.seen.tokens_per_s / drain.tokens_per_s,
            Aim(0.97, is_least=True),
        )
    switching = arms[Arm.TURNS].run.switching
    if switching is not None:
        for p in ("p50", "p90"):
            what = f"pause to the other model's first token, beyond bytes and prefill, {p} at {speed:g}x"
            aim = Aim(1e3 * MAX_SWITCH_S) if p == "p50" else None
            yield Line(what, "ms", 1e3 * switching.beyond_s[p], {}, aim)


def search_lines(judged: Sequence[Judged]) -> Iterator[Line]:
    """Yield the highest speeds of those measured at which most requests have every token on time."""
    best = {arm: highest_speed(judged, arm) for arm in Arm}
    others = {arm.title: speed for arm, speed in best.items() if arm is not Arm.TURNS and speed is not None}
    turns = best[Arm.TURNS]
    if turns is not None:
        yield Line(f"highest measured speed with {GOOD_SHARE:.0%} of requests on time", "x", turns, others)


def highest_speed(judged: Sequence[Judged], arm: Arm) -> float | None:
    """Return the highest measured speed at which an arm is good; None: it is good at none of them."""
    good = [
        each.run.traffic.speed
        for each in judged
        if each.run.arm is arm and each.seen.requests_on_time >= GOOD_SHARE
    ]
    return max(good, default=None)
