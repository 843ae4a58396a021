"""The simulator on the same trace: how near it is to what was measured, and what cannot be measured in time.

Its answers are judged by the same code as those of a service. Reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median

from bench.report import tell
from bench.turns.first_tokens import FirstTokenParts, SimulatedMoments, summed_up
from bench.turns.outcome import Measures, Outcome, measures, outcome
from bench.turns.setting import GOOD_SHARE, MAX_DIFFERENCE, WARM_SPEED, Arm, Curve
from bench.turns.table import PERCENTILES, Aim, Judged, Line, by_arm
from bench.turns.workload import Question
from hearth.core.types import ModelId
from hearth.sim.arrivals import Lengths, draw_trace, steady
from hearth.sim.profile import Profile
from hearth.sim.service import SimulatedAnswer, SimulatedService
from hearth.sim.setting import Policy, SimulationSetting
from hearth.sim.traces import Trace, TracedRequest

#: Between the end of all requests and the next ones, while a service is warmed up and before each run.
_WARM_S = 1.5
#: Simulations of each measured run, and how late each arrival may be in them.
_NUM_DRAWS = 5
_MAX_DELAY_S = 0.001
#: A search ends when what is good and what is not are nearer to each other than this.
_PRECISION = 1.05
_MAX_SPEED = 64.0
_AIM_SPEEDUP = 2.5  #: of the highest speed, over that with drains


@dataclass(frozen=True, slots=True)
class Simulated:
    """The figures of a run of the simulator."""

    seen: Measures
    num_turns: int
    moved_bytes: int
    parts: Sequence[FirstTokenParts | None] = ()  #: what each request waited for

    def figures(self) -> dict[str, float]:
        return figures(self.seen, self.num_turns, self.moved_bytes)


class TraceSimulator:
    """Simulates a service whose models have these shapes, in so much memory."""

    def __init__(
        self,
        shapes: Mapping[str, str],
        memory_bytes: int,
        cutoff_s: float,
        profile: Profile,
        warm: Iterable[Sequence[TracedRequest]] | None = None,
    ) -> None:
        """Tokens that come later than `cutoff_s` after the last arrival count as if they never came.

        `warm`: requests that a new service is asked first, batch by batch; by default each model once.
        """
        self._shapes = {ModelId(name): shape for name, shape in shapes.items()}
        self._memory_bytes, self._cutoff_s, self._profile = memory_bytes, cutoff_s, profile
        once = [[TracedRequest(0.0, name, 16, 2)] for name in self._shapes]
        self._warm = once if warm is None else list(warm)

    def start(self, arm: Arm) -> SimulatedArm:
        """Return a service of its own, in which each model has been asked."""
        setting = SimulationSetting(self._shapes, self._memory_bytes, policy=Policy(arm.value))
        moments = SimulatedMoments()
        started = SimulatedArm(SimulatedService(setting, self._profile, moments.note), moments)
        for batch in self._warm:
            started.replay(batch)
        return started

    def run(self, trace: Trace, arm: Arm) -> Simulated:
        return self.start(arm).run(trace.requests, self._cutoff_s)

    def is_good(self, trace: Trace, arm: Arm) -> bool:
        """True if most requests have every token on time."""
        return self.run(trace, arm).seen.requests_on_time >= GOOD_SHARE


class SimulatedArm:
    """A simulated service that is asked one trace after another, as that of an arm is. Mutable."""

    def __init__(self, service: SimulatedService, moments: SimulatedMoments) -> None:
        """Take a new service, which tells `moments` all that happens."""
        self._service, self._moments = service, moments
        self._shapes = service.setting.shapes

    def replay(self, requests: Iterable[TracedRequest]) -> list[SimulatedAnswer]:
        """Have requests arrive when all before them have ended, and a while later; return their answers."""
        service, begin_s = self._service, self._begin_s
        num_before = len(service.answers)
        service.ask(replace(one, arrival_s=begin_s + one.arrival_s) for one in requests)
        service.run()
        service.check()
        return list(service.answers.values())[num_before:]

    def run(
        self, requests: Sequence[TracedRequest], cutoff_s: float, late_s: Sequence[float] = ()
    ) -> Simulated:
        """Replay requests and return what came of them.

        `late_s`: how much later than it arrives each is asked by its client, all of whose times count from
        the arrival; none: no later.
        """
        late_s = late_s or [0.0] * len(requests)
        begin_s, num_turns, moved_bytes = self._begin_s, len(self._service.turns_s), self._moved_bytes
        pairs = list(zip(requests, late_s, strict=True))
        answers = self.replay(replace(one, arrival_s=one.arrival_s + late) for one, late in pairs)
        outcomes = self._outcomes(answers, begin_s, cutoff_s, late_s)
        request_s = self._service.profile.request_s
        parts = [self._moments.parts(one, request_s, late) for one, late in zip(answers, late_s, strict=True)]
        return Simulated(
            measures(outcomes, max(one.arrival_s + one.total_s for one in outcomes)),
            len(self._service.turns_s) - num_turns,
            self._moved_bytes - moved_bytes,
            parts,
        )

    @property
    def num_asked(self) -> int:
        """Requests of all traces so far."""
        return len(self._service.answers)

    @property
    def _begin_s(self) -> float:
        """When the next trace begins."""
        return 0.0 if not self._service.answers else self._service.now_s + _WARM_S

    @property
    def _moved_bytes(self) -> int:
        return sum(worker.loads.bytes_moved for worker in self._service.workers.values())

    def _outcomes(
        self, answers: Sequence[SimulatedAnswer], begin_s: float, cutoff_s: float, late_s: Sequence[float]
    ) -> list[Outcome]:
        """Return what clients would have seen until they are cut off."""
        until_s = answers[-1].arrived_s - late_s[-1] + cutoff_s
        found = []
        for answer, late in zip(answers, late_s, strict=True):
            arrived_s = answer.arrived_s - late
            asked = Question(
                *(arrived_s - begin_s, answer.model, self._shapes[answer.model]),
                *(answer.num_prompt_tokens, answer.num_output_tokens),
                body=b"",
            )
            times_s = [at_s - arrived_s for at_s in answer.token_s if at_s <= until_s]
            found.append(outcome(asked, times_s, until_s - arrived_s, answer.why_not))
        return found


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """A measured run, and simulations of it that differ by a moment here and there."""

    measured: Judged
    draws: Sequence[Simulated]

    def differences(self) -> dict[str, float]:
        """Return by what share the figures of a typical simulation are beside those that were measured."""
        found = {}
        for what, there in self._measured_figures().items():
            here = median(draw.figures()[what] for draw in self.draws)
            found[what] = abs(here / there - 1) if there else float(here != there)
        return found

    def as_json(self) -> dict[str, object]:
        drawn = [draw.figures() for draw in self.draws]
        return {
            "arm": self.measured.run.arm,
            "speed": self.measured.run.traffic.speed,
            "measured": self._measured_figures(),
            "simulated": {what: [each[what] for each in drawn] for what in self._measured_figures()},
            "parts": {
                "measured": summed_up(self.measured.run.parts),
                "simulated": summed_up([one for draw in self.draws for one in draw.parts]),
            },
        }

    def _measured_figures(self) -> dict[str, float]:
        doings = self.measured.run.doings
        return figures(self.measured.seen, doings.num_turns, doings.moved_bytes)


def figures(seen: Measures, num_turns: int, moved_bytes: int) -> dict[str, float]:
    """Return what simulations are compared by."""
    first_tokens = {f"first token {p}": seen.first_token_s[p] for p in PERCENTILES}
    return {**first_tokens, "turns": num_turns, "bytes moved": moved_bytes}


def simulated_runs(
    judged: Sequence[Judged], simulator: TraceSimulator, trace: Trace, warm_window_s: float
) -> list[SimulatedRun]:
    """Simulate what was measured, each run behind those that its service had before.

    The traffic of `warm_window_s` behind the longest run warmed it up. A busy device makes a different turn
    of a millisecond more or less, and everybody behind it has another wait. So there are several draws.
    """
    simulated = []
    for runs in services(judged):
        arm = runs[0].run.arm
        drawn = [_draw(runs, simulator.start(arm), trace, warm_window_s, seed) for seed in range(_NUM_DRAWS)]
        simulated += [SimulatedRun(each, draws) for each, *draws in zip(runs, *drawn, strict=True)]
    return simulated


def services(judged: Sequence[Judged]) -> list[list[Judged]]:
    """Return the runs of each service, in their order; one is told from others by how it was calibrated."""
    found: list[list[Judged]] = []
    for each in judged:
        for runs in found:
            if (runs[0].run.arm, runs[0].run.calibration) == (each.run.arm, each.run.calibration):
                runs.append(each)
                break
        else:
            found.append([each])
    return found


def _draw(
    runs: Sequence[Judged], arm: SimulatedArm, trace: Trace, warm_window_s: float, seed: int
) -> list[Simulated]:
    """Simulate the runs of one arm, one after the other, with arrivals that are a moment late at random."""
    chooser = Random(seed)
    warm = trace.window(max(each.run.traffic.window_s for each in runs), warm_window_s)
    arm.replay(_delayed(warm.at_speed(WARM_SPEED), chooser))
    drawn = []
    for run in (each.run for each in runs):
        traffic = run.traffic
        requests = _delayed(trace.window(0.0, traffic.window_s).at_speed(traffic.speed), chooser)
        # One model at a time waits at the client, and so it does in the simulation.
        late_s = () if run.arm is Arm.ONE_AT_A_TIME else [one.asked_s for one in run.outcomes]
        drawn.append(arm.run(requests, traffic.cutoff_s, late_s))
    return drawn


def _delayed(trace: Trace, chooser: Random) -> list[TracedRequest]:
    """Return the requests of a trace, each a moment late, in their order."""
    return [
        replace(one, arrival_s=one.arrival_s + chooser.uniform(0.0, _MAX_DELAY_S)) for one in trace.requests
    ]


def compared(simulated: Sequence[SimulatedRun]) -> Iterator[Line]:
    """Yield how far the simulator is from each measured run that took turns, and the others beside it."""
    differences = {id(each.measured): each.differences() for each in simulated}
    told = set[float]()
    for arms in by_arm([each.measured for each in simulated]):
        if (turns := arms.get(Arm.TURNS)) is None:
            continue
        speed = turns.run.traffic.speed
        again = ", asked again" if speed in told else ""
        told.add(speed)
        found = {arm: differences[id(each)] for arm, each in arms.items()}
        for what, difference in found[Arm.TURNS].items():
            others = {arm.title: each[what] for arm, each in found.items() if arm is not Arm.TURNS}
            title = f"{what} at {speed:g}x{again}, simulated, difference from measured"
            yield Line(title, "share", difference, {} if what == "turns" else others, Aim(MAX_DIFFERENCE))


def fastest(simulator: TraceSimulator, trace: Trace) -> Iterator[Line]:
    """Yield the highest speed of a trace that each arm serves well, and how much more that is than today."""
    best = {}
    for arm in Arm:
        best[arm] = highest(
            lambda speed, arm=arm: simulator.is_good(trace.at_speed(speed), arm), 0.125, _MAX_SPEED
        )
        tell(f"simulated: {arm} serves the trace at {best[arm]:.2f}x")
    others = {arm.title: speed for arm, speed in best.items() if arm is not Arm.TURNS}
    title = f"highest simulated speed with {GOOD_SHARE:.0%} of requests on time"
    yield Line(title, "x", best[Arm.TURNS], others)
    if best[Arm.DRAIN]:
        over = {arm.title: speed / best[Arm.DRAIN] for arm, speed in best.items() if arm is not Arm.TURNS}
        value = best[Arm.TURNS] / best[Arm.DRAIN]
        yield Line(f"{title}, over that with drains", "times", value, over, Aim(_AIM_SPEEDUP, is_least=True))


def curve_lines(curve: Curve, lengths: Lengths, cutoff_s: float, profile: Profile) -> Iterator[Line]:
    """Yield how many models one device serves well, by the rate of requests for each of them."""
    for rate_per_s in curve.rates_per_s:

        def is_good(num_models: float, rate_per_s: float = rate_per_s) -> bool:
            names = [f"m{number}" for number in range(round(num_models))]
            periods = steady(dict.fromkeys(names, rate_per_s), curve.window_s)
            trace = draw_trace("poisson", periods, lengths, Random(1))
            simulator = TraceSimulator(
                dict.fromkeys(names, curve.shape), curve.memory_bytes, cutoff_s, profile
            )
            return not trace.requests or simulator.is_good(trace, Arm.TURNS)

        num_models = round(highest(is_good, 1.0, curve.max_models))
        tell(f"simulated: {num_models} models of {curve.shape} at {rate_per_s:g} requests/s each")
        title = f"{curve.shape} models on one device, simulated, {rate_per_s:g} requests/s each"
        yield Line(title, "models", num_models, {})


def highest(is_good: Callable[[float], bool], least: float, most: float) -> float:
    """Return about the highest value that is good, if all below one are and none above; 0: not the least."""
    if not is_good(least):
        return 0.0
    low = least
    while (high := 2 * low) <= most and is_good(high):
        low = high
    high = min(high, most)
    while high > _PRECISION * low:
        middle = (low * high) ** 0.5
        if is_good(middle):
            low = middle
        else:
            high = middle
    return low
