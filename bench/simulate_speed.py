"""How many seconds a simulation lets go by in one: the brain and every step of 1, 8 and 64 workers.

    python -m bench.simulate_speed [--save]

Each worker has as many models, requests and as much memory as in the smallest case: twice what fits together,
asked for at random, a quarter of what the device could compute. Only the simulation is timed, by the time of
its process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from random import Random

from bench.report import arguments, emit
from hearth.sim.arrivals import Lengths, draw_trace, steady
from hearth.sim.profile import Profile
from hearth.sim.run import simulate
from hearth.sim.setting import Policy, SimulationSetting, parse_models

NUM_WORKERS = (1, 8, 64)
SIMULATED_S = {1: 600.0, 8: 300.0, 64: 60.0}
MODELS_PER_WORKER = 4
SHAPE = "7B"
MEMORY_BYTES = 32 << 30
REQUESTS_PER_S = 1.0  #: of each worker
LENGTHS = Lengths.fixed(512, 128)


def measure(num_workers: int, policy: Policy, profile: Profile) -> Mapping[str, object]:
    shapes = parse_models(f"{SHAPE}*{MODELS_PER_WORKER * num_workers}")
    rates = {str(model): REQUESTS_PER_S / MODELS_PER_WORKER for model in shapes}
    trace = draw_trace("poisson", steady(rates, SIMULATED_S[num_workers]), LENGTHS, Random(num_workers))
    setting = SimulationSetting(shapes, MEMORY_BYTES, num_workers, policy=policy)
    begin_s = time.process_time()
    report = simulate(trace, setting, profile)
    took_s = time.process_time() - begin_s
    return {
        "measure": f"{num_workers} worker{'s' if num_workers > 1 else ''}, {policy}",
        "unit": "simulated s/s",
        "value": report.simulated_s / took_s,
        "num_requests": report.num_requests,
        "num_steps": report.num_steps,
        "steps_per_s": report.num_steps / took_s,
        "simulated_s": report.simulated_s,
        "took_s": took_s,
        "requests_on_time": report.requests_on_time,
    }


def main() -> None:
    options = arguments(__doc__).parse_args()
    profile = Profile.load("h200")
    rows = [measure(num, policy, profile) for num in NUM_WORKERS for policy in (Policy.TURNS, Policy.DRAIN)]
    setting = {
        "models_per_worker": MODELS_PER_WORKER,
        "shape": SHAPE,
        "memory_bytes": MEMORY_BYTES,
        "requests_per_s_per_worker": REQUESTS_PER_S,
    }
    emit("simulate_speed", {"setting": setting, "rows": rows}, save=options.save)


if __name__ == "__main__":
    main()
