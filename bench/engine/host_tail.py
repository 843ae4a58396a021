"""Which steps of traffic keep the host the longest, and with what? Its worst steps, by part.

    python -m bench.engine.host_tail [--shapes 7B] [--works sharegpt long_prompts] [--switch MS ...] [--tiny]

Requests are asked through `LLM.generate`, text included, as the part `traffic` of `bench.engine` asks them.
For each pass a line tells the host's time of a step, all of it but for waiting, and how much of that its
thread computed: the rest it waited for the interpreter, which another thread had, for the driver, or for a
core. Then the longest steps with what was in them: parts of a step in ms, by the clock and computed, and
collections of garbage. `--switch` says after how many ms a thread hands on the interpreter; Python's are 5.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from itertools import product

import torch

from bench.engine.host_trace import HostTrace
from bench.engine.rig import Rig, opened
from bench.engine.scale import GPU, TINY
from bench.report import percentiles

_NUM_TOLD = 8  #: of the longest steps


def tell_pass(rig: Rig, trace: HostTrace, name: str, text: str) -> None:
    trace.steps.clear()
    done = rig.run(rig.scale.traffic[name])
    steps = [step for step in trace.steps if step.plan is not None]
    shown = {
        "shape": rig.shape.name,
        "work": name,
        "pass": text,
        "tokens_per_s": round(done.tokens_per_s),
        "steps": len(steps),
        "steps_over_2_ms": sum(step.host_s > 2e-3 for step in steps),
        "computed_over_2_ms": sum(step.cpu_s > 2e-3 for step in steps),
        "host_ms": _spread([step.host_s for step in steps]),
        "computed_ms": _spread([step.cpu_s for step in steps]),
    }
    print(json.dumps(shown), flush=True)
    for step in sorted(steps, key=lambda step: -step.host_s)[:_NUM_TOLD]:
        print(f"    {step.line()}", flush=True)


def _spread(seconds: list[float]) -> dict[str, float]:
    spread = percentiles([1e3 * one for one in seconds])
    return {name: round(spread[name], 2) for name in ("p50", "p90", "p99", "max")}


def main() -> None:
    parser = ArgumentParser(
        "python -m bench.engine.host_tail", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", help="as in the part `traffic` of bench.engine")
    parser.add_argument("--works", nargs="+", default=list(GPU.traffic), choices=GPU.traffic)
    parser.add_argument("--switch", nargs="+", type=float, default=[1e3 * sys.getswitchinterval()])
    parser.add_argument("--tiny", action="store_true", help="see only that everything runs, on any device")
    given = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    scale = TINY if given.tiny else GPU
    shapes = {shape.name: shape for shape in scale.shapes_by_part["traffic"]}
    for shape in [shapes[name] for name in given.shapes or shapes]:
        with opened(shape, scale, device) as rig:
            trace = HostTrace(rig.engine)
            for name, (number, switch_ms) in product(given.works, enumerate(given.switch)):
                sys.setswitchinterval(1e-3 * switch_ms)
                tell_pass(rig, trace, name, f"{number}, interpreter handed on after {switch_ms:g} ms")
            trace.close()


if __name__ == "__main__":
    main()
