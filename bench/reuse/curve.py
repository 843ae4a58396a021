"""Tangram's workloads on several kinds of pools: load time with and without reuse, beside the bound.

Arms with reuse run side by side, each in a pool of its own: every request is made in all of them before the
next one, in an order that changes, so that no drift of the machine favours one. Without reuse a request finds
an empty device whatever the budget, so that arm runs once for each level, in the smallest budget, and stands
beside both. A request that lacks nothing counts as well, with what it takes
to see that. Judges no outputs: bytes on the device are compared with the host's instead.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from bench.report import Row, step
from bench.reuse.models import Library
from bench.reuse.replay import Loaded, Replay, ReplayTerms
from bench.reuse.setting import ARMS, PRESSURES, Aim, Part, Setting
from bench.reuse.workload import LEVELS, run_lengths, workload

MAX_OVER_BOUND = 1.10
#: How many times its memory Tangram's models were where its figures are from.
TANGRAM_PRESSURE = 4.4


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over all requests that count, of one workload in one arm."""

    num_requests: int
    num_loads: int  #: those that lacked something
    num_verified: int  #: loads, those of the warm-up included, whose bytes were compared
    load_s: float
    room_s: float
    place_s: float
    moves_s: float
    missing_bytes: int
    moved_bytes: int
    kv_moved_bytes: int

    @staticmethod
    def of(loads: Sequence[Loaded], num_verified: int) -> Sums:
        return Sums(
            num_requests=len(loads),
            num_loads=sum(one.missing_bytes > 0 for one in loads),
            num_verified=num_verified,
            load_s=sum(one.load_s for one in loads),
            room_s=sum(one.room_s for one in loads),
            place_s=sum(one.place_s for one in loads),
            moves_s=sum(one.moves_s for one in loads if one.moved_bytes),
            missing_bytes=sum(one.missing_bytes for one in loads),
            moved_bytes=sum(one.moved_bytes for one in loads),
            kv_moved_bytes=sum(one.kv_moved_bytes for one in loads),
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One workload under one budget; all arms ran the same sequence."""

    level: str
    pressure: float
    budget_bytes: int
    arms: Mapping[str, Sums]

    @property
    def name(self) -> str:
        return f"{self.level}, models {self.pressure:g} times the budget"

    def ratio(self, arm: str) -> float:
        """Return the arm's load time over that without reuse."""
        return self.arms[arm].load_s / self.arms["no_reuse"].load_s


@dataclass(frozen=True, slots=True)
class Curve:
    model_bytes: Mapping[str, int]
    points: Sequence[Point]
    rates: tuple[float, ...]  #: to the device in bytes per second, before and after

    @property
    def bytes_per_s(self) -> float:
        """Return the faster of the two rates, which makes the bounds."""
        return max(self.rates)

    def over_bound(self, sums: Sums) -> float:
        """Return the load time over what the missing bytes take at the rate of plain copies."""
        return sums.load_s * self.bytes_per_s / max(1, sums.missing_bytes)


def measure_curve(setting: Setting) -> Curve:
    kinds = setting.kinds()
    with setting.library({kind.name: kind.arch(setting.scale.depth) for kind in kinds}) as shelf:
        before = setting.bytes_per_s(shelf.segment)
        sizes = {str(model.id): model.manifest.num_bytes for model in shelf.models}
        points = list(_points(setting, shelf, sum(sizes.values())))
        return Curve(sizes, points, (before, setting.bytes_per_s(shelf.segment)))


def _points(setting: Setting, shelf: Library, total_bytes: int) -> Iterator[Point]:
    least_bytes = setting.budget_bytes(total_bytes, max(PRESSURES))
    for level in setting.scale.levels:
        with step(f"workloads: {level}, no reuse"):
            without = _replay(setting, shelf, level, ["no_reuse"], least_bytes)
        for pressure in PRESSURES:
            budget_bytes = setting.budget_bytes(total_bytes, pressure)
            with step(f"workloads: {level}, {pressure}"):
                others = [arm for arm in ARMS if arm != "no_reuse"]
                arms = _replay(setting, shelf, level, others, budget_bytes)
            yield Point(level, pressure, budget_bytes, {**arms, **without})


def _replay(
    setting: Setting, shelf: Library, level: str, arms: Sequence[str], budget_bytes: int
) -> dict[str, Sums]:
    """Return the sums by arm; all arms have the same requests."""
    scale, is_without = setting.scale, "no_reuse" in arms
    num_warm = scale.num_warm_runs
    asked = workload(LEVELS[level], run_lengths(), num_warm + scale.num_runs, seed=1)
    draw = random.Random(2)
    kv_bytes = [draw.randint(scale.min_kv_bytes, scale.max_kv_bytes) for _ in asked]
    if is_without:  # there is nothing to warm up, but a request or two
        first = next(at for at, one in enumerate(asked) if one.run == num_warm) - 1
        asked, kv_bytes = asked[first:], kv_bytes[first:]
    loads: dict[str, list[Loaded]] = {arm: [] for arm in arms}
    with ExitStack() as pools:
        replays, runs = {}, {}
        for arm in arms:
            terms = ReplayTerms()
            pool = pools.enter_context(setting.pool(arm, budget_bytes, terms))
            replays[arm] = Replay(pool, terms, shelf, setting.loader, is_without, scale.verify_every)
            runs[arm] = replays[arm].run(asked, kv_bytes)
        for at in range(len(asked)):
            for arm in arms if at % 2 == 0 else reversed(arms):
                loads[arm].append(next(runs[arm]))
    return {
        arm: Sums.of([one for one in loads[arm] if one.run >= num_warm], replays[arm].num_verified)
        for arm in arms
    }


def workloads(setting: Setting, curve: Curve) -> Part:
    tangram = setting.peers.get("Tangram", {})
    pair = {"Tangram, best": tangram.get("best", 0.0), "Tangram, worst": tangram.get("worst", 0.0)}
    rows = [
        Row(
            f"{point.name}: load time with reuse over without",
            "ratio",
            point.ratio("mapped"),
            point.ratio("mapped") / curve.over_bound(point.arms["mapped"]),
            f"within {MAX_OVER_BOUND - 1:.0%} of the bound",
            pair if tangram and point.pressure == TANGRAM_PRESSURE else {},
            is_comparable=False,  # another machine, and other models
        )
        for point in curve.points
    ]
    aims = []
    for point in curve.points:
        mapped = point.arms["mapped"]
        aims.append(
            Aim.most(
                f"{point.name}: load time over missing bytes / bandwidth",
                curve.over_bound(mapped),
                MAX_OVER_BOUND,
            )
        )
        slower = mapped.load_s / point.arms["arena"].load_s
        aims.append(Aim.most(f"{point.name}: load time over our arena's", slower, 1.0))
    return Part(rows, aims, _details(curve))


def _details(curve: Curve) -> dict[str, object]:
    return {
        "model_bytes": curve.model_bytes,
        "levels": {name: asdict(level) for name, level in LEVELS.items()},
        "to_device_bytes_per_s": curve.rates,
        "points": [
            {
                "level": point.level,
                "pressure": point.pressure,
                "budget_bytes": point.budget_bytes,
                "arms": {
                    arm: {
                        **asdict(sums),
                        "bound_s": sums.missing_bytes / curve.bytes_per_s,
                        "over_bound": curve.over_bound(sums),
                        "ratio_to_no_reuse": point.ratio(arm),
                        "times_faster": 1 / point.ratio(arm),
                    }
                    for arm, sums in point.arms.items()
                },
            }
            for point in curve.points
        ],
    }
