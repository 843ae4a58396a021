"""How many events per second the brain decides, and how the cost of one grows with the number of models.

A thousand workers, as a simulation drives them: requests arrive at random, run or are cancelled, loads take
time and report their progress, workers are lost and replaced. Whenever a load ends, its worker reports what
lies in its memory: also what is left of models that were evicted, until others need their bytes. The number
of models grows; workers and the rate of requests stay the same. Only `step` is timed, by the processor time
of its thread, so that other programs on the machine do not count.

Models are asked for by Zipf's law: a few are popular. The aims are for that. Beside it stands `overloaded`:
all models are asked for alike and more often than they can be loaded and served, so that the queue is full.
"""

from __future__ import annotations

import gc
import heapq
import math
import random
import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from bench.report import arguments, emit, percentiles
from hearth.policy.fleet.brain import step
from hearth.policy.fleet.events import (
    Action,
    BrainConfig,
    DeviceReported,
    Dispatch,
    Event,
    Footprint,
    LoadModel,
    LoadProgressed,
    ModelDeployed,
    ModelProfile,
    ModelReady,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    ResidencyReported,
    RungUse,
    SetTimer,
    TimerFired,
    WorkerJoined,
    WorkerLost,
)
from hearth.policy.fleet.fleet import Fleet
from hearth.types import ModelId, RequestId, Rung, WorkerId

NUM_MODELS = (100, 1_000, 10_000)
NUM_WORKERS = 1_000
WORKER_BYTES = 80 * 10**9
MAX_SEQS = 64
MODEL_BYTES = (2 * 10**9, 30 * 10**9)
REQUESTS_PER_S = 2_000.0
MEAN_RUN_S = 2.0
CANCELLED_SHARE = 0.05
LOAD_BYTES_PER_S = 5e9
WORKERS_LOST_PER_S = 0.05
ZIPF = 1.0
UNIFORM = 0.0
OVERLOADED_MODELS, OVERLOADED_REQUESTS_PER_S = 10_000, 10_000.0
NUM_WARM_UP = 60_000
NUM_EVENTS = 100_000
AIM_EVENTS_PER_S = 5_000


@dataclass(frozen=True, slots=True)
class Timing:
    """What one event cost."""

    kind: str
    seconds: float


class Simulation:
    """Mutable. Turns actions into later events; `run` times the brain."""

    def __init__(self, num_models: int, zipf: float, requests_per_s: float) -> None:
        self._requests_per_s = requests_per_s
        self._random = random.Random(num_models)
        self._fleet = Fleet(BrainConfig())
        self._names = [ModelId(f"model-{n}") for n in range(num_models)]
        self._popularity = list(accumulate(1 / (n + 1) ** zipf for n in range(num_models)))
        self._bytes_by_model = {name: self._random.randrange(*MODEL_BYTES) for name in self._names}
        self._footprints = {
            n: Footprint(b + 10**9, 10**9, b // 4 + 10**9) for n, b in self._bytes_by_model.items()
        }
        #: By worker: bytes of models on its device, those first that have been there longest.
        self._devices: dict[WorkerId, dict[ModelId, int]] = defaultdict(dict)
        self._timer_s: float | None = None
        #: (time, number, event); equal times go by number.
        self._events: list[tuple[float, int, Event]] = []
        self._num_events = self._num_requests = self._num_workers = 0
        for name in self._names:
            footprints = {"cuda": self._footprints[name]}
            keep_alive_s = self._random.choice((5.0, 60.0, 300.0))
            profile = ModelProfile(name, self._bytes_by_model[name], footprints, keep_alive_s)
            self._post(ModelDeployed(0.0, profile))
        for _ in range(NUM_WORKERS):
            self._join(0.0)
        self._post(self._arrival(0.0))
        self._post(self._loss(0.0))

    def run(self, num_events: int) -> list[Timing]:
        timings: list[Timing] = []
        while len(timings) < num_events:
            now_s, _, event = heapq.heappop(self._events)
            if isinstance(event, TimerFired) and now_s != self._timer_s:
                continue  # A later order has replaced it.
            begin = time.thread_time()
            actions = step(self._fleet, event)
            timings.append(Timing(type(event).__name__, time.thread_time() - begin))
            self._go_on(now_s, event, actions)
        return timings

    def state(self) -> dict[str, int]:
        fleet = self._fleet
        residents = fleet.residents(fleet.now_s)
        return {
            "resident": len(residents),
            "running": fleet.queues.num_running,
            "waiting": fleet.queues.num_waiting,
        }

    def _go_on(self, now_s: float, event: Event, actions: Sequence[Action]) -> None:
        match event:
            case RequestArrived():
                self._post(self._arrival(now_s))
            case WorkerLost():
                self._join(now_s)
                self._post(self._loss(now_s))
            case _:
                pass
        for action in actions:
            match action:
                case Dispatch(request_id):
                    self._post(self._end(now_s, request_id))
                case LoadModel(model, worker):
                    self._load(now_s, model, worker)
                case SetTimer(at_s):
                    self._timer_s = at_s
                    self._post(TimerFired(at_s))
                case _:
                    pass

    def _arrival(self, now_s: float) -> RequestArrived:
        self._num_requests += 1
        at = bisect(self._popularity, self._random.random() * self._popularity[-1])
        at_s = now_s + self._random.expovariate(self._requests_per_s)
        return RequestArrived(at_s, RequestId(f"request-{self._num_requests}"), self._names[at], 500, 200)

    def _end(self, now_s: float, request_id: RequestId) -> Event:
        at_s = now_s + self._random.expovariate(1 / MEAN_RUN_S)
        if self._random.random() < CANCELLED_SHARE:
            return RequestCancelled(at_s, request_id)
        return RequestFinished(at_s, request_id, 100)

    def _load(self, now_s: float, model: ModelId, worker: WorkerId) -> None:
        num_bytes = self._bytes_by_model[model]
        load_s = num_bytes / LOAD_BYTES_PER_S
        use = RungUse(self._random.choice((Rung.HOST, Rung.DISK)), num_bytes, load_s)
        self._post(LoadProgressed(now_s + load_s / 2, worker, model, num_bytes // 2))
        self._post(ModelReady(now_s + load_s, worker, model, (use,), load_s))
        self._post(
            ResidencyReported(now_s + load_s, model, {Rung.HOST: num_bytes // 2, Rung.DISK: num_bytes})
        )
        self._post(DeviceReported(now_s + load_s, worker, self._fill_device(worker, model, num_bytes)))

    def _fill_device(self, worker: WorkerId, model: ModelId, num_bytes: int) -> Mapping[ModelId, int]:
        """All of the model is on the device; what does not fit beside it leaves, the oldest first."""
        there = self._devices[worker]
        there.pop(model, None)
        there[model] = num_bytes
        lacking_bytes = sum(there.values()) - WORKER_BYTES
        for oldest in list(there):
            taken_bytes = max(0, min(lacking_bytes, there[oldest]))
            lacking_bytes -= taken_bytes
            there[oldest] -= taken_bytes
            if not there[oldest]:
                del there[oldest]
        return dict(there)

    def _join(self, now_s: float) -> None:
        self._num_workers += 1
        worker = WorkerId(f"worker-{self._num_workers}")
        self._post(WorkerJoined(now_s, worker, "cuda", WORKER_BYTES, MAX_SEQS))

    def _loss(self, now_s: float) -> WorkerLost:
        number = 1 + self._random.randrange(self._num_workers)
        at_s = now_s + self._random.expovariate(WORKERS_LOST_PER_S)
        return WorkerLost(at_s, WorkerId(f"worker-{number}"))

    def _post(self, event: Event) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (event.now_s, self._num_events, event))


def main() -> None:
    args = arguments(__doc__).parse_args()
    results = {
        f"models_{num_models}": measured(num_models, ZIPF, REQUESTS_PER_S) for num_models in NUM_MODELS
    }
    overloaded = measured(OVERLOADED_MODELS, UNIFORM, OVERLOADED_REQUESTS_PER_S)
    rows = [
        {"measure": name, "unit": "events/s", "value": result["events_per_s"], "aim": AIM_EVENTS_PER_S}
        for name, result in [
            *((f"{num_models:,} models", results[f"models_{num_models}"]) for num_models in NUM_MODELS),
            (f"{OVERLOADED_MODELS:,} models, all equally popular, more requests than fit", overloaded),
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
        "num_events": NUM_EVENTS,
        "aim_events_per_s": AIM_EVENTS_PER_S,
    }
    emit(
        "brain",
        {
            "setting": setting,
            "rows": rows,
            "growth": {
                "factor": round(growth, 3),
                "logarithm_allows": allowed,
                "meets_aim": growth <= allowed,
            },
            **results,
            "overloaded": overloaded,
        },
        save=args.save,
    )


def measured(num_models: int, zipf: float, requests_per_s: float) -> dict[str, object]:
    simulation = Simulation(num_models, zipf, requests_per_s)
    simulation.run(num_models + NUM_WORKERS + NUM_WARM_UP)
    # The collector would walk over the simulation's own millions of objects, which a gateway does not have.
    gc.collect()
    gc.freeze()
    timings = simulation.run(NUM_EVENTS)
    gc.unfreeze()
    total_s = sum(timing.seconds for timing in timings)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for timing in timings:
        by_kind[timing.kind].append(timing.seconds)
    return {
        "events_per_s": round(len(timings) / total_s),
        "meets_aim": len(timings) / total_s >= AIM_EVENTS_PER_S,
        "mean_us": total_s / len(timings) * 1e6,
        "us": _in_us(percentiles([timing.seconds for timing in timings])),
        "state": simulation.state(),
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
