"""How long steps of one engine take: decode rows alone, prompts alone, and prompts beside decode rows.

The engine is stepped as a worker does it, one step ahead of the device, over KV that was computed. No two
rows have the same prompt, so no two read the same blocks. On a CPU the time counts that the stepping thread
had on its core: it has its share in everything, and what others on the machine do does not matter.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from random import Random
from statistics import median

import torch

from bench.profile.scale import Scale
from bench.random_engine import new_engine
from bench.shape import Shape
from hearth.core.config import EngineConfig
from hearth.core.sizes import padded_size
from hearth.core.types import RequestId, SamplingParams
from hearth.engine.engine import Engine
from hearth.engine.step_times import TimedStep
from hearth.snapshot.cost_profile import MeasuredStep

#: Steps after a change of rows that are not counted: one is under way, one may capture a graph.
NUM_WARM_STEPS = 3
#: Sizes of prompts that tell how long steps take without a graph.
NUM_SIZES = 5
#: Steps with a prompt that follow each other, as they do where many prompts come.
NUM_TRAIN_STEPS = 4


@dataclass(frozen=True, slots=True)
class GraphTimes:
    """The seconds of steps that have no graph yet; 0 where steps never have one."""

    capture_s: float
    eager_s: float


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """The seconds of steps of a model."""

    steps: list[MeasuredStep]
    graphs: GraphTimes


def measure_steps(shape: Shape, scale: Scale, device: torch.device) -> ShapeTimes:
    """Return the times of all kinds of steps."""
    with _rig(shape, scale, device) as rig:
        graphs = rig.time_without_graphs(scale.prompts)
        decodes = [step for context in scale.contexts for step in rig.time_decodes(context)]
        return ShapeTimes([*decodes, *_with_prompts(rig, scale)], graphs)


def _with_prompts(rig: EngineRig, scale: Scale) -> Iterator[MeasuredStep]:
    """Yield steps with prompts. Small ones wait for the host, whose speed drifts: they come in rounds."""
    several = [(scale.num_prompts, tokens // scale.num_prompts) for tokens in scale.prompts[-2:]]
    alone = [(1, tokens) for tokens in scale.prompts] + several
    rounds: dict[object, list[MeasuredStep]] = defaultdict(list)
    for _ in range(scale.num_rounds):
        for num_prompts, num_tokens in alone:
            rounds[num_prompts, num_tokens].append(rig.time_prompts(num_prompts, num_tokens))
        for num_rows in scale.busy_rows:
            rig.fill(num_rows, scale.busy_context, scale.num_busy_tokens)
            for num_tokens in scale.prompts[:-1]:
                rounds[num_rows, num_tokens, "beside"].append(rig.time_prompts_beside_rows(num_tokens))
            rig.keep(0)
    for steps in rounds.values():
        yield sorted(steps, key=lambda one: one.seconds)[int(scale.quantile * len(steps))]


class EngineRig:
    """An engine with rows that a benchmark adds and takes away. Mutable; one thread calls it."""

    def __init__(self, engine: Engine, scale: Scale, vocab_size: int, max_live_tokens: int) -> None:
        self.engine = engine
        self._clock_s = time.perf_counter if engine.runner.layers.kv.is_cuda else time.thread_time
        self._scale, self._vocab_size, self._max_live_tokens = scale, vocab_size, max_live_tokens
        self._draw = Random(0)
        self._numbers = itertools.count()
        #: By request that has a token: its prompt's tokens and those that it has said.
        self._contexts: dict[RequestId, int] = {}
        self._prompts: dict[RequestId, int] = {}
        #: The steps that were taken in, as the engine's own timer tells them, since they were last forgotten.
        self._taken: list[TimedStep] = []

    def time_prompts(self, num_prompts: int, num_tokens: int) -> MeasuredStep:
        """Time a step that computes whole prompts and nothing else, from nothing to its tokens."""
        total, times, device_times = num_prompts * num_tokens, list[float](), list[float]()
        for _ in range(self._scale.num_steps + 1):
            times.append(self._prompts_s(num_prompts, num_tokens))
            device_times += [one.seconds for one in self._taken if one.num_tokens == total]
        return MeasuredStep(
            *(total, num_prompts, total), self._scale.typical(times[1:]), self._typical(device_times)
        )

    def time_without_graphs(self, sizes: Sequence[int]) -> GraphTimes:
        """Time the first prompts of each size, and then some without graphs. The first of all does not count.

        Small ones tell it, for the host is busy longer than the device with those.
        """
        runner = self.engine.runner
        if runner.layers.graphs is None:
            return GraphTimes(0.0, 0.0)
        padded = sorted({padded_size(runner.layers.sizes.mixed, size) for size in sizes})[:NUM_SIZES]
        first = [self._prompts_s(1, size) - self._prompts_s(1, size) for size in padded]
        runner.layers.graphs, graphs = None, runner.layers.graphs
        eager = [self._prompts_s(1, size) for size in [*padded, *padded]]
        runner.layers.graphs = graphs
        return GraphTimes(max(0.0, median(first[1:])), median(eager[len(padded) :]))

    def _prompts_s(self, num_prompts: int, num_tokens: int) -> float:
        """Return the seconds from nothing to the tokens of so many prompts."""
        for _ in range(num_prompts):
            self._add(num_tokens, max_tokens=1)
        self._taken.clear()
        began_s = self._clock_s()
        while self.engine.has_work:
            self._step()
        return self._clock_s() - began_s

    def time_decodes(self, context: int) -> Iterator[MeasuredStep]:
        """Time decode steps, first with as many rows as there may be, then with fewer and fewer."""
        scale = self._scale
        room = min(self._max_live_tokens, scale.max_prefill_tokens) // (context + scale.num_decode_tokens)
        batches = [size for size in sorted(scale.batches, reverse=True) if size <= max(1, room)]
        self.fill(batches[0], context, scale.num_decode_tokens)
        for size in batches:
            self.keep(size)
            yield self._time_decode()
        self.keep(0)

    def time_prompts_beside_rows(self, num_tokens: int) -> MeasuredStep:
        """Time steps that compute a prompt and one token of each row, some of them in a row."""
        num_rows = len(self._contexts)
        num_tokens = min(num_tokens, self._scale.limits.max_batch_tokens - num_rows)
        times, contexts, device_times = [], [], list[float]()
        for _ in range(self._scale.num_steps):
            alone = self._time_decode(num_steps=2)
            self._taken.clear()
            began_s = self._clock_s()
            for _ in range(NUM_TRAIN_STEPS):
                self._add(num_tokens, max_tokens=1)
                self._step()
            while len(self._prompts) > num_rows:
                self._step()
            # The first call has waited for a step of rows alone, the last one for no step of them.
            times.append(max(0.0, self._clock_s() - began_s - alone.seconds) / NUM_TRAIN_STEPS)
            contexts.append(sum(self._contexts.values()) + num_tokens)
            device_times += [one.seconds for one in self._taken if one.num_tokens == num_rows + num_tokens]
        return MeasuredStep(
            *(num_rows + num_tokens, num_rows + 1, int(median(contexts))),
            *(self._scale.typical(times), self._typical(device_times)),
        )

    def _time_decode(self, num_steps: int | None = None) -> MeasuredStep:
        num_rows = len(self._contexts)
        for _ in range(NUM_WARM_STEPS):
            self._step()
        times = []
        self._taken.clear()
        for _ in range(num_steps or self._scale.num_steps):
            began_s = self._clock_s()
            self._step()
            times.append(self._clock_s() - began_s)
        device_times = [one.seconds for one in self._taken]
        context_tokens = sum(self._contexts.values())
        return MeasuredStep(
            *(num_rows, num_rows, context_tokens, self._scale.typical(times)), self._typical(device_times)
        )

    def _typical(self, device_times: Sequence[float]) -> float | None:
        """Return what the engine's timer tells of some steps as a rule; None: it was silent."""
        return self._scale.typical(device_times) if device_times else None

    def fill(self, num_rows: int, context: int, max_tokens: int) -> None:
        """Have so many rows decode, each with so much context at least."""
        for _ in range(num_rows):
            self._add(context, max_tokens)
        while len(self._contexts) < num_rows:
            self._step()

    def keep(self, num_rows: int) -> None:
        """End all rows but the first ones, and what they have under way."""
        for request_id in list(self._contexts)[num_rows:]:
            self.engine.cancel(request_id)
            del self._contexts[request_id], self._prompts[request_id]
        while not num_rows and self.engine.has_work:
            self._step()

    def _add(self, num_tokens: int, max_tokens: int) -> None:
        request_id = RequestId(str(next(self._numbers)))
        prompt = [self._draw.randrange(self._vocab_size) for _ in range(num_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._prompts[request_id] = num_tokens
        self.engine.add(self.engine.request(request_id, prompt, params))

    def _step(self) -> None:
        last = self.engine.samples.last
        outcome = self.engine.step()
        if (taken := self.engine.samples.last) is not None and taken is not last:
            self._taken.append(taken)
        assert not outcome.preempted, f"KV is too small for what is measured: {self.engine.usage}"
        assert not outcome.failures, f"{outcome.failures}"
        for output in outcome.outputs:
            one = output.request_id
            if output.finish_reason is None:
                self._contexts[one] = self._contexts.get(one, self._prompts[one]) + 1
            else:
                self._contexts.pop(one, None)
                del self._prompts[one]


@contextmanager
def _rig(shape: Shape, scale: Scale, device: torch.device) -> Iterator[EngineRig]:
    """Have an engine over random weights."""
    kv_bytes = min(scale.max_kv_bytes, 2 * scale.max_prefill_tokens * shape.kv_bytes_per_token)
    limits = scale.limits
    # A prompt is to be computed by one step, however long that takes.
    config = EngineConfig(**asdict(limits), kv_bytes=kv_bytes, max_step=math.inf)
    engine = new_engine(shape, config, device, seed=1, max_context=scale.max_context)
    # Each row may have begun a block, and the sink is nobody's.
    live_tokens = kv_bytes // shape.kv_bytes_per_token - 2 * limits.block_tokens * limits.max_seqs
    try:
        yield EngineRig(engine, scale, shape.arch.vocab_size, live_tokens)
    finally:
        engine.close()
