"""An engine over random weights that benchmarks ask, all of it on one device. Judges nothing."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bench.device_clock import ClockWatch
from bench.engine.scale import Scale, Work
from bench.engine.step_watch import StepWatch
from bench.random_engine import new_engine, new_tokenizer
from bench.report import step
from bench.shape import Shape
from hearth import LLM, SamplingParams
from hearth.engine.engine import Engine
from hearth.engine.graph_capture import capture_sizes


class Prompts:
    """Random token ids, never the same prompt twice: only what a `Work` shares is ever found. Mutable."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._generator = torch.Generator().manual_seed(0)

    def take(self, count: int, length: int) -> list[list[int]]:
        return torch.randint(0, self._vocab_size, (count, length), generator=self._generator).tolist()


@dataclass(frozen=True, slots=True)
class Pass:
    """One time through some work."""

    seconds: float
    tokens_per_s: float
    steps: dict[str, object]
    clock: dict[str, float] | None  #: of the device; None: nobody can say


@dataclass(frozen=True, slots=True)
class Rig:
    """A shape that is open for questions. Mutable in what it remembers; one thread asks."""

    shape: Shape
    scale: Scale
    engine: Engine
    llm: LLM
    watch: StepWatch
    clock: ClockWatch
    prompts: Prompts
    device: torch.device
    passes: dict[str, Pass]  #: the last one through each work, by its text
    opened_s: float  #: that opening took: weights, buffers, graphs where they are captured at start

    def run(self, work: Work, temperature: float = 0.0) -> Pass:
        """Submit all requests at once and time their answers, text included; 0 is greedy."""
        (shared,) = self.prompts.take(1, work.shared)
        own = [[self.prompts.take(1, one.prompt)[0] for one in work.requests] for _ in range(work.turns)]
        top_p = 0.95 if temperature else 1.0
        params = [
            SamplingParams(temperature=temperature, top_p=top_p, max_tokens=one.new, ignore_eos=True)
            for one in work.requests
        ]
        texts = [shared] * len(work.requests)
        self.watch.take()
        self.clock.take()
        began_s = time.perf_counter()
        for said in own:
            asked = [text + more for text, more in zip(texts, said, strict=True)]
            completions = [output.outputs[0] for output in self.llm.generate(asked, params)]
            texts = [text + list(one.token_ids) for text, one in zip(asked, completions, strict=True)]
            assert [len(one.token_ids) for one in completions] == [one.new for one in work.requests]
        seconds = time.perf_counter() - began_s
        rate, steps = work.num_tokens / seconds, self.watch.take()
        self.passes[work.text] = Pass(seconds, rate, steps, self.clock.take())
        return self.passes[work.text]

    def describe(self) -> dict[str, object]:
        """Return what the engine was opened with."""
        limits = self.engine.batcher.limits
        return {
            "opened_s": self.opened_s,
            "max_batch_tokens": limits.max_batch_tokens,
            "max_seqs": limits.max_seqs,
            "kv_blocks": self.engine.usage.kv_blocks,
        }

    def first_tokens_ms(self, length: int, num_runs: int, rest_s: float = 0.0) -> list[float]:
        """Time one prompt after the other to its first token, after two that warm up.

        `rest_s`: between them. A device that computes without end has less power for each product.
        """
        times = []
        for asked in self.prompts.take(num_runs + 2, length):
            time.sleep(rest_s)
            began_s = time.perf_counter()
            next(iter(self.llm.stream(asked, SamplingParams(temperature=0.0, max_tokens=1))))
            times.append(1e3 * (time.perf_counter() - began_s))
        return times[2:]

    def rates(self, work: Work, num_runs: int, temperature: float = 0.0) -> list[float]:
        """Return the tokens per second of some passes, after one that warms up."""
        return [self.run(work, temperature).tokens_per_s for _ in range(num_runs + 1)][1:]


@contextmanager
def opened(shape: Shape, scale: Scale, device: torch.device) -> Iterator[Rig]:
    """Make weights and open an engine over them; the memory of one before, which is gone, is given back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    began_s = time.perf_counter()
    with step(f"opening {shape.name}"):
        engine = new_engine(shape, scale.engine, device, seed=1)
        capture_sizes(engine.runner.layers)  # as `LLM` does while weights come, which are here in a moment
        watch = StepWatch(engine)
        llm = LLM.over(engine, new_tokenizer(shape.arch.vocab_size))
    clock = ClockWatch(device)
    try:
        prompts, opened_s = Prompts(shape.arch.vocab_size), time.perf_counter() - began_s
        yield Rig(shape, scale, engine, llm, watch, clock, prompts, device, {}, opened_s)
    finally:
        clock.close()
        llm.close()


def fill_cache(rig: Rig) -> None:
    """Have all kernels compiled that a model needs, so that a later process finds them on disk."""
    for work in rig.scale.fill:
        rig.run(work)
    for length in rig.scale.prompts:
        rig.first_tokens_ms(length, num_runs=1)
