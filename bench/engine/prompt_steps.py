"""What does a step with prompts cost the host, by part? On any machine, for nothing is run.

    python -m bench.engine.prompt_steps 60x128 2x3500 30x250+500 30x1000~900 [--profile]

So many prompts of so many tokens come with every step, beside so many rows that decode, and end all at once
after a few tokens. Those behind a `~` are the same in all of them, so that all but the first prompts find
their KV. All of KV was used before, so that blocks are those of prefixes that nobody needs. Prints how long
the steps with prompts and those without compute, in milliseconds, the medians of their parts, and the longest
step with its own, by the clock and computed. A part includes those that it calls. To add the prompts is no
part of a step, but nothing is launched meanwhile either: so how long that takes is told besides.
"""

from __future__ import annotations

import hearth  # noqa: F401 - before torch, so that threads wait as a worker's do

# isort: split

import cProfile
import gc
import io
import json
import math
import pstats
import statistics
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
import torch

from bench.engine.host_steps import GREEDY, NoGraphs
from bench.engine.host_trace import HostTrace, TracedStep
from bench.random_engine import new_engine
from bench.random_model import TINY
from bench.shape import Shape
from hearth.core.config import EngineConfig
from hearth.core.types import RequestId
from hearth.engine import inputs
from hearth.engine.engine import Engine
from hearth.policy.batch.plan import EngineRequest
from hearth.system.garbage import postponed

#: With a vocabulary whose ids are objects of their own, as most are: those of small numbers are shared.
VOCABULARY, MAX_CONTEXT = 32_000, 4096
SHAPE = Shape(
    "tiny",
    "a tiny Llama",
    {**TINY, "max_position_embeddings": MAX_CONTEXT, "vocab_size": VOCABULARY},
    "float32",
)
#: Blocks of KV as an 8B has them on a large device, and the bytes of one here: a layer of one head of 16.
NUM_BLOCKS, BLOCK_BYTES = 47_000, 16 * 2 * 16 * 4
NUM_WAVES, NUM_OUTPUT = 24, 5  #: steps with prompts, and tokens that each request samples


@dataclass(frozen=True, slots=True)
class Wave:
    """Prompts that come at once."""

    num_prompts: int
    num_tokens: int  #: of each
    num_beside: int  #: requests that decode meanwhile
    num_shared: int = 0  #: leading tokens that all prompts have in common

    @staticmethod
    def parse(text: str) -> Wave:
        text, _, shared = text.partition("~")
        prompts, _, beside = text.partition("+")
        num_prompts, _, num_tokens = prompts.partition("x")
        return Wave(int(num_prompts), int(num_tokens), int(beside or 0), int(shared or 0))

    def __str__(self) -> str:
        return f"{self.num_prompts}x{self.num_tokens}+{self.num_beside}~{self.num_shared}"


class PromptTraffic:
    """Waves of prompts through an engine, each with tokens of its own. Mutable; lives for one case."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(5)
        self._num_added = 0
        self._shared = self._rng.integers(1, VOCABULARY, MAX_CONTEXT).tolist()
        self.added_s: list[float] = []  #: to add each wave of prompts

    def add(self, num_prompts: int, num_tokens: int, max_tokens: int, num_shared: int = 0) -> None:
        """Have so many requests wait. To check them is the part of other threads."""
        params, requests = replace(GREEDY, max_tokens=max_tokens), list[EngineRequest]()
        for _ in range(num_prompts):
            own = self._rng.integers(1, VOCABULARY, num_tokens - num_shared).tolist()
            prompt = self._shared[:num_shared] + own
            requests.append(self._engine.request(RequestId(f"{self._num_added}"), prompt, params))
            self._num_added += 1
        began_s = time.thread_time()
        for request in requests:
            self._engine.add(request)
        self.added_s.append(time.thread_time() - began_s)

    def use_all_blocks(self) -> None:
        """Have nearly every block hold a prefix that nobody needs any more."""
        while self._engine.usage.kv_cached_blocks < self._engine.usage.kv_blocks - 1024:
            self.add(16, MAX_CONTEXT - 2, 1)
            self.finish()

    def finish(self) -> None:
        while self._engine.has_work:
            self._engine.step()

    def run(self, wave: Wave) -> None:
        """Step through waves of prompts."""
        for at in range(wave.num_beside):  # of different lengths, so that they fill blocks in different steps
            self.add(1, 16 + at % 16, NUM_WAVES)
        self.added_s.clear()
        for _ in range(NUM_WAVES):
            self.add(wave.num_prompts, wave.num_tokens, NUM_OUTPUT, wave.num_shared)
            self._engine.step()
        self.finish()


def _read_nothing(*_: object, **__: object) -> None:
    """Stand in for `read_step`, which is a device's part."""


@contextmanager
def opened(max_seqs: int, num_blocks: int) -> Iterator[Engine]:
    """Have an engine that computes nothing, without garbage of others to collect."""
    kv_bytes = num_blocks * BLOCK_BYTES
    config = EngineConfig(max_seqs=max_seqs, max_batch_tokens=8192, kv_bytes=kv_bytes, max_step=math.inf)
    engine = new_engine(SHAPE, config, torch.device("cpu"), seed=1, max_context=MAX_CONTEXT)
    engine.runner.layers.graphs = NoGraphs()  # type: ignore[assignment] # stands in for graphs of a device
    with patch.object(inputs, "read_step", _read_nothing), postponed():
        try:
            PromptTraffic(engine).use_all_blocks()
            gc.collect()
            gc.freeze()  # a collection takes as long as there are objects, most of them torch's
            yield engine
        finally:
            gc.unfreeze()
            engine.close()


@dataclass(frozen=True, slots=True)
class TracedWaves:
    """Where the host's time went."""

    with_prompts: list[TracedStep]
    without: list[TracedStep]
    added_s: list[float]  #: to add the prompts of each wave


def traced(wave: Wave, max_seqs: int = 1024, num_blocks: int = NUM_BLOCKS) -> TracedWaves:
    """Return the steps of waves, with their parts."""
    with opened(max_seqs, num_blocks) as engine:
        trace, traffic = HostTrace(engine), PromptTraffic(engine)
        traffic.run(wave)
        trace.close()
    steps = [(step, step.plan) for step in trace.steps]
    return TracedWaves(
        [step for step, plan in steps if plan is not None and plan.prompts],
        [step for step, plan in steps if plan is not None and not plan.prompts],
        traffic.added_s,
    )


def profiled(wave: Wave) -> str:
    """Return where Python spends its time in waves."""
    profiler, text = cProfile.Profile(), io.StringIO()
    with opened(1024, NUM_BLOCKS) as engine:
        profiler.enable()
        PromptTraffic(engine).run(wave)
        profiler.disable()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(32)
    return "\n".join(line for line in text.getvalue().splitlines() if line.strip())


def tell(wave: Wave, name: str, steps: list[TracedStep], **more: float) -> None:
    by_time = sorted(steps, key=lambda step: step.cpu_s)
    computed = [1e3 * step.cpu_s for step in by_time]
    names = {part for step in steps for part in step.parts}
    parts = {part: statistics.median(step.parts[part].cpu_s for step in steps) for part in names}
    shown = {
        "prompts": str(wave),
        "steps": name,
        "n": len(steps),
        "over_2_ms": sum(one > 2 for one in computed),
    }
    spread = {"least": computed[0], "median": statistics.median(computed), "longest": computed[-1], **more}
    print(json.dumps({**shown, **{key: round(value, 2) for key, value in spread.items()}}))
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    print("    medians: " + " ".join(f"{part} {1e3 * part_s:.2f}" for part, part_s in ordered))
    print(f"    {by_time[-1].line()}", flush=True)


def main() -> None:
    parser = ArgumentParser("python -m bench.engine.prompt_steps")
    parser.add_argument(
        "waves", nargs="+", type=Wave.parse, help="as 60x128, or 30x250+500 with rows beside, or 30x1000~900"
    )
    parser.add_argument("--profile", action="store_true", help="show where Python spends its time")
    given = parser.parse_args()
    for wave in given.waves:
        if given.profile:
            print(profiled(wave), flush=True)
            continue
        waves = traced(wave)
        tell(wave, "with prompts", waves.with_prompts, added=1e3 * statistics.median(waves.added_s))
        tell(wave, "without", waves.without)


if __name__ == "__main__":
    main()
