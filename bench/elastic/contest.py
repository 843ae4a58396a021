"""Elastic and reserved KV on the same load, in turns. Chooses no load and judges nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from bench.elastic.load import Drive, Load, Prompts, Run
from bench.elastic.pages import Maps
from bench.elastic.stage import Arm, Stage


@dataclass(frozen=True, slots=True)
class Measured:
    run: Run
    maps: Maps
    taken_bytes: int  #: weights of others that had to go, where memory was full of them

    def as_json(self) -> dict[str, object]:
        run = self.run
        return {
            "tokens_per_s": run.tokens_per_s,
            "elapsed_s": run.elapsed_s,
            "num_preempted": run.num_preempted,
            "num_grown": run.num_grown,
            "num_shrunk": run.num_shrunk,
            "peak_blocks": run.peak_blocks,
            "taken_bytes": self.taken_bytes,
            **asdict(self.maps),
        }


@dataclass(frozen=True, slots=True)
class Contest:
    """A stage on which arms run the same load, and the prompts for it."""

    stage: Stage
    prompts: Prompts
    maps: Callable[[], Maps]  #: so far

    def measure(self, arm: Arm, load: Load, *, is_pressed: bool = False) -> Measured:
        """Run a load once, from KV as the arm begins with it."""
        stage = self.stage
        stage.set_up(arm)
        engine = stage.engine_of(arm)
        waves = self.prompts.requests(engine, load)
        outside, taken_bytes = Maps(), 0

        def between() -> None:
            """Let other models come, which is no part of what is measured."""
            nonlocal outside, taken_bytes
            before, left_bytes = self.maps(), stage.filler_bytes
            if is_pressed and arm is Arm.ELASTIC:
                stage.fill_with_weights()
            stage.synchronize()
            outside += self.maps() - before
            taken_bytes += stage.filler_bytes - left_bytes

        before = self.maps()
        run = Drive(engine, stage.step_of(arm)).run(waves, load.left_share, between)
        return Measured(run, self.maps() - before - outside, taken_bytes - stage.filler_bytes)

    def turns(
        self, arms: Sequence[Arm], load: Load, num_rounds: int, *, is_pressed: bool = False
    ) -> dict[Arm, list[Measured]]:
        results: dict[Arm, list[Measured]] = {arm: [] for arm in arms}
        for arm in in_turns(arms, num_rounds):
            results[arm].append(self.measure(arm, load, is_pressed=is_pressed))
        return results


def in_turns(arms: Sequence[Arm], num_rounds: int) -> Iterator[Arm]:
    """Yield the arms round by round, every other round backwards, so that no drift favours one of them."""
    for number in range(num_rounds):
        yield from arms if number % 2 == 0 else reversed(arms)


Rate = Callable[[Run], float]  #: tokens per second


def of_all(run: Run) -> float:
    """Return the throughput from the first request to the last token."""
    return run.tokens_per_s


def of_decode(num_requests: int) -> Rate:
    """Return a rate that counts only while all requests decode."""
    return lambda run: run.decode_tokens_per_s(num_requests)


def paired_ratio(results: Mapping[Arm, Sequence[Measured]], base: Arm, rate: Rate) -> float:
    """Return the median over the rounds of elastic throughput over the base's in the same round."""
    pairs = zip(results[Arm.ELASTIC], results[base], strict=True)
    return median(rate(ours.run) / rate(theirs.run) for ours, theirs in pairs)


def compared(results: Mapping[Arm, Sequence[Measured]], rates: Mapping[str, Rate]) -> dict[str, object]:
    """Return the arms' runs as JSON, with the ratio of each rate to that of every other arm."""
    others = [arm for arm in results if arm is not Arm.ELASTIC]
    return {
        **{
            f"{name}_ratio_to_{arm}": paired_ratio(results, arm, rate)
            for name, rate in rates.items()
            for arm in others
        },
        **{arm: [measured.as_json() for measured in runs] for arm, runs in results.items()},
    }
