"""How many events per second the brain decides, and how the cost of one grows with the number of models.

A thousand workers, as `hearth.sim` simulates them: requests arrive at random, run or are cancelled, loads
take time and report their progress, workers are lost and replaced. Whenever a load ends, its worker reports
what lies in its memory: also what is left of models that were evicted, until others need their bytes, by the
worker's own policy. The number of models grows; workers and the rate of requests stay the same. Only `step`
is timed, by the processor time of its thread, so that other programs on the machine do not count.

Models are asked for by Zipf's law: a few are popular. Beside it all models are asked for alike, and more
often than they can be loaded and served: `overloaded` has a full queue, and in `starving` thousands of models
wait for room, for which busy ones are drained. Requests of `starving` begin when their model is loaded; those
of all other cases when they are dispatched, as in all figures before.
"""

from __future__ import annotations

import gc
import math
import random
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, count

from bench.fleet.costs import CostModel
from bench.fleet.simulator import Simulator
from bench.report import arguments, emit, percentiles
from hearth.core.types import ModelId, RequestId, Rung, WorkerId
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    Event,
    ModelDeployed,
    RequestArrived,
    WorkerJoined,
    WorkerLost,
)
from hearth.policy.fleet.fleet import Fleet
from hearth.policy.fleet.profile import Footprint, ModelProfile
from hearth.policy.fleet.residents import list_residents

NUM_MODELS = (100, 1_000, 10_000)
NUM_WORKERS = 1_000
WORKER_BYTES = 80 * 10**9
MAX_SEQS = 64
MODEL_BYTES = (2 * 10**9, 30 * 10**9)
REQUESTS_PER_S = 2_000.0
MEAN_RUN_S = 2.0
CANCELLED_SHARE = 0.05
LOAD_BYTES_PER_S = {Rung.HOST: 10e9, Rung.DISK: 3.3e9}
WORKERS_LOST_PER_S = 0.05
ZIPF = 1.0
UNIFORM = 0.0
OVERLOADED_MODELS, OVERLOADED_REQUESTS_PER_S = 10_000, 10_000.0
#: Requests that may wait where models starve: about 5,000 models then do.
STARVING_QUEUE = 7_500
NUM_WARM_UP = 60_000
NUM_EVENTS = 40_000
AIM_EVENTS_PER_S, AIM_STARVING_EVENTS_PER_S = 14_000, 9_000


@dataclass(frozen=True, slots=True)
class Timing:
    """What one event cost."""

    kind: str
    seconds: float


class TimedBrain:
    """The brain, with the time that each of its decisions took. Mutable; the simulator calls it."""

    def __init__(self, config: BrainConfig) -> None:
        self.fleet = Fleet(config)
        self.timings: list[Timing] = []

    def __call__(self, event: Event) -> list[Action]:
        begin = time.thread_time()
        actions = step(self.fleet, event)
        self.timings.append(Timing(type(event).__name__, time.thread_time() - begin))
        return actions

    def describe_state(self) -> dict[str, int]:
        """Return how full the service is."""
        fleet = self.fleet
        residents = list_residents(fleet, fleet.now_s)
        return {
            "resident": len(residents),
            "running": fleet.queues.num_running,
            "waiting": fleet.queues.num_waiting,
            "models_without_room": len(fleet.queues.for_room),
            "drains": len(fleet.drains),
        }


@dataclass(frozen=True, slots=True)
class Workload:
    """What arrives: models once, requests and losses of workers at random."""

    chooser: random.Random
    num_models: int
    zipf: float
    requests_per_s: float

    def deploy(self) -> Iterator[Event]:
        """Yield models of random sizes, then workers."""
        for number in range(self.num_models):
            num_bytes = self.chooser.randrange(*MODEL_BYTES)
            footprint = Footprint(num_bytes + 10**9, 10**9, num_bytes // 4 + 10**9, max_seqs=MAX_SEQS)
            keep_alive_s = self.chooser.choice((5.0, 60.0, 300.0))
            profile = ModelProfile(_model(number), num_bytes, {"cuda": footprint}, keep_alive_s)
            yield ModelDeployed(0.0, profile)
        for number in range(NUM_WORKERS):
            yield WorkerJoined(0.0, _worker(number), "cuda", WORKER_BYTES)

    def arrive(self) -> Iterator[Event]:
        """Yield requests for ever."""
        popularity = list(accumulate(1 / (number + 1) ** self.zipf for number in range(self.num_models)))
        now_s = 0.0
        for number in count():
            now_s += self.chooser.expovariate(self.requests_per_s)
            model = _model(bisect(popularity, self.chooser.random() * popularity[-1]))
            yield RequestArrived(now_s, RequestId(f"request-{number}"), model, 500, 200)

    def lose(self) -> Iterator[Event]:
        """Yield losses of workers, each of which is replaced at once."""
        now_s, names = 0.0, [_worker(number) for number in range(NUM_WORKERS)]
        for number in count(NUM_WORKERS):
            now_s += self.chooser.expovariate(WORKERS_LOST_PER_S)
            at = self.chooser.randrange(len(names))
            yield WorkerLost(now_s, names[at])
            names[at] = _worker(number)
            yield WorkerJoined(now_s, names[at], "cuda", WORKER_BYTES)


def _model(number: int) -> ModelId:
    return ModelId(f"model-{number}")


def _worker(number: int) -> WorkerId:
    return WorkerId(f"worker-{number}")


def main() -> None:
    args = arguments(__doc__).parse_args()
    results = {
        f"models_{num_models}": measured(
            Workload(random.Random(num_models), num_models, ZIPF, REQUESTS_PER_S)
        )
        for num_models in NUM_MODELS
    }
    overloaded, starving = (
        measured(
            Workload(random.Random(OVERLOADED_MODELS), OVERLOADED_MODELS, UNIFORM, OVERLOADED_REQUESTS_PER_S),
            config,
            runs_from_dispatch=runs_from_dispatch,
        )
        for config, runs_from_dispatch in (
            (BrainConfig(), True),
            (BrainConfig(max_queue=STARVING_QUEUE), False),
        )
    )
    rows = [
        {"measure": name, "unit": "events/s", "value": result["events_per_s"], "aim": aim}
        for name, result, aim in [
            *(
                (f"{num_models:,} models", results[f"models_{num_models}"], AIM_EVENTS_PER_S)
                for num_models in NUM_MODELS
            ),
            (f"{OVERLOADED_MODELS:,} models, all equally popular, more requests than fit", overloaded, None),
            (
                f"{OVERLOADED_MODELS:,} models, half of them without room",
                starving,
                AIM_STARVING_EVENTS_PER_S,
            ),
        ]
    ]
    means = [_mean_us(results[f"models_{num_models}"]) for num_models in (NUM_MODELS[0], NUM_MODELS[-1])]
    growth = means[1] / means[0]
    allowed = math.log(NUM_MODELS[-1]) / math.log(NUM_MODELS[0])
    setting = {
        "num_workers": NUM_WORKERS,
        "requests_per_s": REQUESTS_PER_S,
        "mean_run_s": MEAN_RUN_S,
        "max_seqs": MAX_SEQS,
        "zipf": ZIPF,
        "overloaded_requests_per_s": OVERLOADED_REQUESTS_PER_S,
        "starving_queue": STARVING_QUEUE,
        "num_events": NUM_EVENTS,
    }
    emit(
        "brain",
        {
            "setting": setting,
            "rows": rows,
            "growth": {
                "factor": round(growth, 3),
                "logarithm_allows": allowed,
            },
            **results,
            "overloaded": overloaded,
            "starving": starving,
        },
        save=args.save,
    )


def measured(
    workload: Workload, config: BrainConfig | None = None, *, runs_from_dispatch: bool = True
) -> dict[str, object]:
    brain = TimedBrain(config or BrainConfig())
    costs = CostModel(workload.chooser, LOAD_BYTES_PER_S, MEAN_RUN_S, CANCELLED_SHARE, runs_from_dispatch)
    simulator = Simulator(brain, costs)
    for events in (workload.deploy(), workload.arrive(), workload.lose()):
        simulator.feed(events)
    simulator.run(workload.num_models + NUM_WORKERS + NUM_WARM_UP)
    brain.timings.clear()
    # The collector would walk over the simulation's own millions of objects, which a gateway does not have.
    gc.collect()
    gc.freeze()
    simulator.run(NUM_EVENTS)
    gc.unfreeze()
    timings = brain.timings
    total_s = sum(timing.seconds for timing in timings)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for timing in timings:
        by_kind[timing.kind].append(timing.seconds)
    return {
        "events_per_s": round(len(timings) / total_s),
        "mean_us": total_s / len(timings) * 1e6,
        "us": _in_us(percentiles([timing.seconds for timing in timings])),
        "state": brain.describe_state(),
        "us_by_kind": {kind: _in_us(percentiles(seconds)) for kind, seconds in sorted(by_kind.items())},
    }


def _mean_us(result: Mapping[str, object]) -> float:
    mean_us = result["mean_us"]
    assert isinstance(mean_us, float), f"{mean_us=}"
    return mean_us


def _in_us(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: value if name == "n" else round(value * 1e6, 1) for name, value in figures.items()}


if __name__ == "__main__":
    main()
