"""What does a decode step cost the host, by part? The same rows step after step, each one token further.

    python -m bench.engine.host_steps [--shapes 0.5B] [--rows 1 64 256 1024] [--profile]

On a GPU these are engines of random weights. Without one, a tiny model on the CPU of which nothing is run:
its logits stay what they are, so that all that is left is the host's, but for what CUDA's own calls take.
Prints a JSON line per number of rows, greedy and sampled, in microseconds per step. A part includes those
that it calls, the host's time is all but `wait`. `llm` is the same through `LLM.generate`, text included.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import cProfile
import io
import json
import pstats
import statistics
import time
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from bench.engine.host_trace import step_parts
from bench.engine.scale import GPU
from bench.random_engine import new_engine, new_tokenizer
from bench.random_model import TINY
from bench.shape import Shape
from hearth import LLM, SamplingParams
from hearth.core.config import EngineConfig
from hearth.core.types import RequestId
from hearth.engine.engine import Engine
from hearth.engine.graphs import Work
from hearth.engine.pending_step import PendingStep
from hearth.engine.step_shape import GraphKey

PROMPT_TOKENS, NUM_STEPS, NUM_WARM_STEPS = 16, 160, 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
KINDS = {"greedy": GREEDY, "sampled": replace(GREEDY, temperature=0.8, top_p=0.95)}

TINY_SHAPE = Shape("tiny", "a tiny Llama", {**TINY, "max_position_embeddings": 2048}, "float32")


class NoGraphs:
    """Graphs that do nothing when they are replayed, which leaves the host's part of a step."""

    def __contains__(self, key: GraphKey) -> bool:
        return True

    def run(self, key: GraphKey, work: Work) -> None:
        pass

    def begin_trial(self, keys: Collection[GraphKey]) -> None:
        pass

    def stop_restoring(self) -> None:
        pass

    def drop_restored(self) -> None:
        pass


class PartTimes:
    """The time of some calls, by name. Mutable; written by the calls that it wraps."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def wrap(self, owner: object, method: str, name: str | None = None) -> None:
        """Have all calls of a method timed, on one object or, of a class, on all."""
        called: Callable[..., object] = getattr(owner, method)
        key = name or method

        def timed(*args: object, **kwargs: object) -> object:
            began_s = time.perf_counter()
            try:
                return called(*args, **kwargs)
            finally:
                self.seconds[key] += time.perf_counter() - began_s

        setattr(owner, method, timed)


def opened(shape: Shape, device: torch.device, num_rows: int) -> Engine:
    """Return an engine for so many requests at once."""
    gigabytes = 24 if device.type == "cuda" else 1
    config = EngineConfig(max_seqs=max(num_rows, 16), max_batch_tokens=8192, kv_bytes=gigabytes << 30)
    engine = new_engine(shape, config, device, seed=1, max_context=1024)
    if device.type != "cuda":
        engine.runner.layers.graphs = NoGraphs()  # type: ignore[assignment] # stands in for graphs of a device
    return engine


def add_all(engine: Engine, num_rows: int, params: SamplingParams) -> None:
    for at in range(num_rows):
        prompt = [(at + token) % 200 + 1 for token in range(PROMPT_TOKENS)]
        engine.add(engine.request(RequestId(f"{at}"), prompt, replace(params, seed=at)))


def begun(engine: Engine, num_rows: int, params: SamplingParams) -> None:
    """Bring so many requests to where all of them decode."""
    add_all(engine, num_rows, params)
    while engine.batcher.num_waiting or engine.batcher.has_newcomer:
        engine.step()
    for _ in range(NUM_WARM_STEPS):
        engine.step()


def end(engine: Engine, num_rows: int) -> None:
    for at in range(num_rows):
        engine.cancel(RequestId(f"{at}"))
    engine.flush()


def median_us(engine: Engine) -> dict[str, float]:
    """Time whole steps and the wait in them, without looking at parts."""
    parts, wait = PartTimes(), PendingStep.wait
    parts.wrap(PendingStep, "wait")
    steps, hosts = [], []
    for _ in range(NUM_STEPS):
        waited_s, began_s = parts.seconds["wait"], time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - began_s
        steps.append(1e6 * seconds)
        hosts.append(1e6 * (seconds - parts.seconds["wait"] + waited_s))
    PendingStep.wait = wait  # type: ignore[method-assign] # as it was
    return {"step": statistics.median(steps), "host": statistics.median(hosts)}


def parts_us(engine: Engine) -> dict[str, float]:
    """Time the parts of steps."""
    parts, wait, wrapped = PartTimes(), PendingStep.wait, step_parts(engine)
    for owner, method in wrapped:
        parts.wrap(owner, method)
    parts.wrap(PendingStep, "wait")
    began_s = time.perf_counter()
    for _ in range(NUM_STEPS):
        engine.step()
    parts.seconds["all, timed"] = time.perf_counter() - began_s
    for owner, method in wrapped:
        delattr(owner, method)
    PendingStep.wait = wait  # type: ignore[method-assign] # as it was
    return {name: 1e6 * seconds / NUM_STEPS for name, seconds in parts.seconds.items()}


def profile(engine: Engine) -> str:
    """Return where Python spends its time in steps."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(NUM_STEPS):
        engine.step()
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(32)
    return "\n".join(line for line in text.getvalue().splitlines() if line.strip())


def rates(llm: LLM, num_rows: int, params: SamplingParams) -> dict[str, float]:
    """Ask through the offline API, text included, and return what a step takes and the tokens per second."""
    prompts = [[(at + token) % 200 + 1 for token in range(PROMPT_TOKENS)] for at in range(num_rows)]
    times, cpu_times = [], []
    for _ in range(4):
        began_s, cpu_began_s = time.perf_counter(), time.process_time()
        llm.generate(prompts, replace(params, max_tokens=NUM_STEPS))
        times.append(time.perf_counter() - began_s)
        cpu_times.append(time.process_time() - cpu_began_s)
    return {
        "step": 1e6 * min(times) / NUM_STEPS,
        "cpu": 1e6 * min(cpu_times) / NUM_STEPS,  # of all threads
        "tokens_per_s": num_rows * NUM_STEPS / min(times),
    }


def measure(engine: Engine, num_rows: int, params: SamplingParams) -> dict[str, object]:
    begun(engine, num_rows, params)
    found: dict[str, object] = {**median_us(engine), "parts": parts_us(engine)}
    end(engine, num_rows)
    return found


def profiled(engine: Engine, num_rows: int, params: SamplingParams) -> str:
    begun(engine, num_rows, params)
    found = profile(engine)
    end(engine, num_rows)
    return found


def _rounded(values: dict[str, object]) -> dict[str, object]:
    return {
        name: _rounded(value) if isinstance(value, dict) else round(value, 1)  # type: ignore[call-overload]
        for name, value in values.items()
    }


def _tell(shape: Shape, num_rows: int, kind: str, found: dict[str, object]) -> None:
    print(json.dumps({"shape": shape.name, "rows": num_rows, "kind": kind, **_rounded(found)}), flush=True)


def main() -> None:
    parser = ArgumentParser("python -m bench.engine.host_steps")
    parser.add_argument("--shapes", nargs="+", default=["0.5B"], help="on a GPU, as in bench.engine")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64, 256, 1024])
    parser.add_argument("--profile", action="store_true", help="show where Python spends its time")
    given = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")
    shapes = [GPU.shapes[name] for name in given.shapes] if is_cuda else [TINY_SHAPE]
    for shape in shapes:
        engine = opened(shape, device, max(given.rows))
        cases = [(rows, kind) for rows in given.rows for kind in KINDS]
        for num_rows, kind in cases:
            _tell(shape, num_rows, kind, measure(engine, num_rows, KINDS[kind]))
            if given.profile:
                print(profiled(engine, num_rows, KINDS[kind]), flush=True)
        with LLM.over(engine, new_tokenizer(shape.arch.vocab_size)) as llm:
            for num_rows, kind in cases:
                _tell(shape, num_rows, kind, {"llm": rates(llm, num_rows, KINDS[kind])})


if __name__ == "__main__":
    main()
