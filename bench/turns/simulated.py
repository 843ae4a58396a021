"""The simulator on the same trace: how near it is to what was measured, and what cannot be measured in time.

Its answers are judged by the same code as those of a service. Reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from bench.report import tell
from bench.turns.outcome import Measures, Outcome, measures, outcome
from bench.turns.setting import GOOD_SHARE, MAX_DIFFERENCE, WARM_SPEED, Arm, Curve
from bench.turns.table import PERCENTILES, Aim, Judged, Line
from bench.turns.workload import Question
from hearth.sim.answers import SimulatedAnswer
from hearth.sim.arrivals import Lengths, draw_trace, steady
from hearth.sim.profile import Profile
from hearth.sim.service import SimulatedService
from hearth.sim.setting import Policy, SimulationSetting
from hearth.sim.traces import Trace, TracedRequest
from hearth.types import ModelId

#: Every model is asked before, as those of a service are: one after the other, in so many seconds each.
_WARM_S = 1.5
#: A search ends when what is good and what is not are nearer to each other than this.
_PRECISION = 1.05
_MAX_SPEED = 64.0
_AIM_SPEEDUP = 2.5  #: of the highest speed, over that with drains


@dataclass(frozen=True, slots=True)
class Simulated:
    """The figures of a run of the simulator."""

    outcomes: Sequence[Outcome]
    seen: Measures
    num_turns: int
    moved_bytes: int


class TraceSimulator:
    """Simulates a service whose models have these shapes, in so much memory."""

    def __init__(
        self, shapes: Mapping[str, str], memory_bytes: int, cutoff_s: float, profile: Profile
    ) -> None:
        """Tokens that come later than `cutoff_s` after the last arrival count as if they never came."""
        self._shapes = {ModelId(name): shape for name, shape in shapes.items()}
        self._memory_bytes, self._cutoff_s, self._profile = memory_bytes, cutoff_s, profile

    def start(self, arm: Arm) -> SimulatedArm:
        """Return a service of its own, in which each model has been asked."""
        setting = SimulationSetting(self._shapes, self._memory_bytes, policy=Policy(arm.value))
        return SimulatedArm(SimulatedService(setting, self._profile))

    def run(self, trace: Trace, arm: Arm) -> Simulated:
        return self.start(arm).run(trace, self._cutoff_s)

    def is_good(self, trace: Trace, arm: Arm) -> bool:
        """True if most requests have every token on time."""
        return self.run(trace, arm).seen.requests_on_time >= GOOD_SHARE


class SimulatedArm:
    """A simulated service that is asked one trace after another, as that of an arm is. Mutable."""

    def __init__(self, service: SimulatedService) -> None:
        """Have each model of a new service asked for the first time."""
        self._service = service
        self._shapes = service.setting.shapes
        self.replay(TracedRequest(at * _WARM_S, name, 16, 2) for at, name in enumerate(self._shapes))

    def replay(self, requests: Iterable[TracedRequest]) -> list[SimulatedAnswer]:
        """Have requests arrive when all before them have ended, and a while later; return their answers."""
        service, begin_s = self._service, self._begin_s
        num_before = len(service.answers)
        service.ask(replace(one, arrival_s=begin_s + one.arrival_s) for one in requests)
        service.run()
        service.check()
        return list(service.answers.values())[num_before:]

    def run(self, trace: Trace, cutoff_s: float) -> Simulated:
        """Replay a trace and return what came of it."""
        begin_s, num_turns, moved_bytes = self._begin_s, self._service.num_turns, self._moved_bytes
        answers = self.replay(trace.requests)
        return Simulated(
            outcomes := self._outcomes(answers, begin_s, cutoff_s),
            measures(outcomes, max(one.arrival_s + one.total_s for one in outcomes)),
            self._service.num_turns - num_turns,
            self._moved_bytes - moved_bytes,
        )

    @property
    def _begin_s(self) -> float:
        """When the next trace begins."""
        return 0.0 if not self._service.answers else self._service.now_s + _WARM_S

    @property
    def _moved_bytes(self) -> int:
        return sum(worker.bytes_moved for worker in self._service.workers.values())

    def _outcomes(self, answers: Sequence[SimulatedAnswer], begin_s: float, cutoff_s: float) -> list[Outcome]:
        """Return what clients would have seen until they are cut off."""
        until_s = answers[-1].arrived_s + cutoff_s
        found = []
        for answer in answers:
            asked = Question(
                *(answer.arrived_s - begin_s, answer.model, self._shapes[answer.model]),
                *(answer.num_prompt_tokens, answer.num_output_tokens),
                body=b"",
            )
            times_s = [at_s - answer.arrived_s for at_s in answer.token_s if at_s <= until_s]
            found.append(outcome(asked, times_s, until_s - answer.arrived_s, answer.why_not))
        return found


def simulated_runs(
    judged: Sequence[Judged], simulator: TraceSimulator, trace: Trace, warm_window_s: float
) -> list[tuple[Judged, Simulated]]:
    """Simulate what was measured, with what was there before: every arm had one service for all its runs.

    The traffic of `warm_window_s` behind the longest run warmed it up.
    """
    pairs = []
    for arm in Arm:
        runs = [each for each in judged if each.run.arm is arm]
        if runs:
            simulated = simulator.start(arm)
            warm = trace.window(max(each.run.traffic.window_s for each in runs), warm_window_s)
            simulated.replay(warm.at_speed(WARM_SPEED).requests)
            for each in runs:
                traffic = each.run.traffic
                part = trace.window(0.0, traffic.window_s).at_speed(traffic.speed)
                pairs.append((each, simulated.run(part, traffic.cutoff_s)))
    return pairs


def compared(
    judged: Sequence[Judged], simulator: TraceSimulator, trace: Trace, warm_window_s: float
) -> Iterator[Line]:
    """Yield how far the simulator is from each measured run that took turns, and the others beside it."""
    pairs = simulated_runs(judged, simulator, trace, warm_window_s)
    for speed in sorted({each.run.traffic.speed for each, _ in pairs}, reverse=True):
        by_arm = {
            each.run.arm: differences(each, run) for each, run in pairs if each.run.traffic.speed == speed
        }
        for what, difference in by_arm.get(Arm.TURNS, {}).items():
            others = {
                arm.title: found[what]
                for arm, found in by_arm.items()
                if arm is not Arm.TURNS and what in found
            }
            title = f"{what} at {speed:g}x, simulated, difference from measured"
            yield Line(title, "share", difference, others, Aim(MAX_DIFFERENCE))


def differences(measured: Judged, simulated: Simulated) -> dict[str, float]:
    """Return by what share figures of a simulation are beside those that were measured."""
    pairs: dict[str, tuple[float, float]] = {
        f"first token {p}": (simulated.seen.first_token_s[p], measured.seen.first_token_s[p])
        for p in PERCENTILES
    }
    if measured.run.arm is Arm.TURNS:
        pairs["turns"] = (simulated.num_turns, measured.run.doings.num_turns)
    pairs["bytes moved"] = (simulated.moved_bytes, measured.run.doings.moved_bytes)
    return {
        what: abs(here / there - 1) if there else float(here != there)
        for what, (here, there) in pairs.items()
    }


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
