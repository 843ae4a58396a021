"""Requests under all disturbances at once, each against itself alone in a new engine (DESIGN: same output b).

Memory that is nobody's holds NaN throughout, so whatever is read there shows.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch

from hearth.core.types import Pooling, PromptReading, RequestId, SamplingParams, TokenLogprobs
from hearth.engine.engine import Engine, Output, StepOutcome
from hearth.policy.batch.plan import EngineRequest
from tests.engine.harness import MAX_IDLE_STEPS, ROOMY, TIE, TIES, engine_for
from tests.engine.pipeline_rig import LATER_EXTENTS, LocalStages, pipeline_for
from tests.engine.test_adapters import add
from tests.engine.test_elastic import EXTENTS, elastic_engine, elastic_memory
from tests.models.adapters import RandomAdapter, random_adapter
from tests.models.zoo import build

NUM_REQUESTS, MAX_PROMPT, FLOOR_BLOCKS = 24, 44, 18


@dataclass(frozen=True, slots=True)
class Wish:
    prompt: list[int]
    params: SamplingParams
    salt: bytes
    adapter: RandomAdapter | None
    pooling: Pooling | None

    def request(self, engine: Engine, request_id: RequestId, output: tuple[int, ...] = ()) -> EngineRequest:
        own = None if self.adapter is None else self.adapter.adapter
        return engine.request(
            request_id, self.prompt, self.params, self.salt, output, pooling=self.pooling, adapter=own
        )


@dataclass(slots=True)
class Asked:
    """A request on its way, and its outputs when it was alone."""

    wish: Wish
    expected: list[Output]  #: that are still to come
    outputs: list[Output] = field(default_factory=list)


def random_wish(chance: random.Random, name: str, texts: list[list[int]]) -> Wish:
    """A request that has the beginning of its prompt in common with others, or all of it."""
    pick, vocab_size = chance.choice, build(name).model.config.vocab_size
    known = pick(texts) if texts else []
    tail = [chance.randrange(3, vocab_size) for _ in range(pick([0, 1, 3, 9, 30]))]
    prompt = (known[: pick([len(known), chance.randrange(len(known) + 1)])] + tail)[:MAX_PROMPT] or [7]
    texts.append(prompt)
    params: Mapping[str, object] = {
        "seed": chance.randrange(99),
        "temperature": pick([0.0, 0.8, 1.5]),
        "max_tokens": pick([1, 6, 14, 20]),
        "min_tokens": pick([0, 0, 1]),
        "top_k": pick([0, 0, 5]),
        "top_p": pick([1.0, 0.9]),
        "frequency_penalty": pick([0.0, 0.0, 0.8]),
        "repetition_penalty": pick([1.0, 1.0, 1.3]),
        "logit_bias": pick([{}, {}, {7: 3.0, 9: -100.0}]),
        "logprobs": pick([None, 3]),
        "stop_token_ids": chance.sample(range(vocab_size), pick([0, 12])),
        "prompt_logprobs": pick([None] * 5 + [2]),
    }
    adapter = random_adapter(name, "all") if chance.random() < 0.2 else None
    pooling = pick([None] * 6 + list(Pooling))
    return Wish(prompt, SamplingParams(**params), pick([b""] * 4 + [b"other"]), adapter, pooling)  # type: ignore[arg-type] # of any field


def alone(name: str, wish: Wish) -> list[Output]:
    engine = engine_for(name)
    add(engine, wish.adapter)
    engine.add(wish.request(engine, RequestId("alone")))
    outputs: list[Output] = []
    while engine.has_work:
        outputs.extend(engine.step().outputs)
    return outputs


class Disturbed:
    """An engine, its requests, and whatever happens to them. `counts` says how often."""

    def __init__(self, name: str, seed: int, cuts: Sequence[int] = (), num_flights: int = 1) -> None:
        """`cuts`: where stages begin, in a pipeline with so many steps in flight."""
        self.chance, self.name, self.counts = random.Random(seed), name, Counter[str]()
        config = replace(
            ROOMY,
            max_batch_tokens=self.chance.choice([5, 16, 64]),
            max_seqs=6,
            max_step=math.inf,  # else measured times change what steps have
        )
        if cuts:
            memory = partial(elastic_memory, floor_blocks=FLOOR_BLOCKS)
            self.engine, self.runners = pipeline_for(name, cuts, num_flights, config, memory=memory)
        else:
            self.engine = elastic_engine(name, config, FLOOR_BLOCKS)
            self.runners = [self.engine.runner]
        self.engine.settles_later = self.chance.random() < 0.7
        self.absent, self.present = list(EXTENTS[:4]), list[range]()
        self.adapter = random_adapter(name, "all")
        self.add_adapter()
        self.texts, self.ids = list[list[int]](), count()
        self.asked: dict[RequestId, Asked] = {}

    def run(self) -> None:
        """Have all requests come and end, with something happening between all steps."""
        num_idle = 0
        while self.engine.has_work or self.counts["requests"] < NUM_REQUESTS:
            if self.counts["requests"] < NUM_REQUESTS and self.happens(0.4):
                self.ask(RequestId(f"{next(self.ids)}"))
            self.give_blocks()
            outcome = self.engine.step()
            num_idle = 0 if outcome.outputs else num_idle + 1
            assert num_idle < MAX_IDLE_STEPS, f"{num_idle} steps gave nobody anything: {self.asked.keys()}"
            self.take_in(outcome)
            self.disturb()
        self.take_in(self.engine.flush())
        self.engine.batcher.check()
        assert not self.asked, f"never ended: {self.asked.keys()}"
        usage = self.engine.usage
        assert (usage.num_running, usage.num_waiting, usage.kv_used_blocks) == (0, 0, 0)
        assert not self.engine.tables.needed_bytes()
        assert len(self.engine.reading) == 0

    def add_adapter(self) -> None:
        own = self.adapter
        self.engine.add_adapter(own.adapter, own.layout(), own.pieces())
        for runner in self.runners[1:]:
            runner.add_adapter(own.adapter, own.layout(), own.pieces())

    def check_counts(self) -> None:
        for what in ("preempted", "found prefixes", "cancelled", "extents taken"):
            assert self.counts[what], f"nothing was disturbed: {self.counts}"

    def happens(self, probability: float) -> bool:
        return self.chance.random() < probability

    def ask(self, request_id: RequestId) -> None:
        """Add a request, at some place in line; some have begun in another engine."""
        wish = random_wish(self.chance, self.name, self.texts)
        expected, num_known = alone(self.name, wish), 0
        if expected[0].reading is None and len(expected) > 1 and self.happens(0.2):
            num_known = self.chance.randrange(1, len(expected))
        self.texts.append((wish.prompt + [one.token for one in expected])[: MAX_PROMPT - 1])
        request = wish.request(self.engine, request_id, tuple(one.token for one in expected[:num_known]))
        place = self.chance.choice([0.0, 0.0, 0.0, -1.0, 5.0])
        self.engine.add(replace(request, line_s=place, is_batch=place > 0, is_streamed=self.happens(0.7)))
        self.asked[request_id] = Asked(wish, expected[num_known:])
        self.counts["requests"] += 1

    def take_in(self, outcome: StepOutcome) -> None:
        assert not outcome.failures
        self.counts["found prefixes"] += sum(one.num_cached_tokens > 0 for one in outcome.admitted)
        self.counts["preempted"] += len(outcome.preempted)
        for output in outcome.outputs:
            asked = self.asked[output.request_id]
            asked.outputs.append(output)
            if output.finish_reason is not None:
                del self.asked[output.request_id]
                assert_same(asked, is_whole=True)

    def give_blocks(self) -> None:
        lacks_floor = self.engine.batcher.blocks.num_blocks < FLOOR_BLOCKS
        while self.absent and (lacks_floor or self.happens(0.1)):
            self.present.append(self.absent.pop())
            self.engine.add_blocks(self.present[-1])
            lacks_floor = self.engine.batcher.blocks.num_blocks < FLOOR_BLOCKS

    def disturb(self) -> None:
        engine = self.engine
        if self.happens(0.1):
            self.take_in(engine.flush())
        if self.happens(0.2):
            engine.settle()
        if self.happens(0.3) and self.present:
            extent = self.chance.choice(self.present)
            if engine.clear(extent, may_move=self.happens(0.7), may_preempt=self.happens(0.5)):
                self.overwrite(list(extent))
                self.present.remove(extent)
                self.absent.append(extent)
                self.counts["extents taken"] += 1
        if self.happens(0.3) and len(self.runners) > 1:
            self.replace_blocks_of_a_later_stage()
        if self.happens(0.05) and self.asked:
            request_id = self.chance.choice(list(self.asked))
            assert engine.cancel(request_id)
            assert_same(self.asked.pop(request_id), is_whole=False)
            self.counts["cancelled"] += 1
            if self.happens(0.5):
                self.ask(request_id)
        if self.happens(0.2):
            engine.settle()
            self.overwrite(list(engine.batcher.blocks.free))
        if self.happens(0.1):
            tables = self.runners[-1].sampler.tables
            for table, num_bytes in engine.tables.needed_bytes().items():
                if not tables.has(table):
                    memory = torch.full((num_bytes,), 0xFF, dtype=torch.uint8)
                    self.runners[-1].place_table(table, memory)
        if self.happens(0.1):
            for runner in self.runners:
                runner.remove_adapter(self.adapter.adapter)
            self.add_adapter()

    def replace_blocks_of_a_later_stage(self) -> None:
        later = self.engine.runner._later  # type: ignore[attr-defined] # of a pipeline
        assert isinstance(later, LocalStages)
        number = self.chance.randrange(len(later.runners))
        extent = self.chance.choice(LATER_EXTENTS[:5])  # which are used first
        self.counts["later blocks moved"] += len(later.books[number].live_in(extent))
        later.replace_blocks(number, extent)

    def overwrite(self, blocks: list[int]) -> None:
        for runner in self.runners:
            runner.layers.kv[blocks] = math.nan


def assert_same(asked: Asked, *, is_whole: bool) -> None:
    """Raise unless a request was told what it is told alone, or the first of it where it was cancelled."""
    outputs, expected = asked.outputs, asked.expected
    for own, other in zip(outputs, expected, strict=False):
        TIES.update(tokens=1)
        if own.token != other.token and asked.wish.params.is_greedy and is_tie(own.logprobs):
            TIES.update(ties=1)
            return
        assert own.token == other.token, f"{asked.wish}: {outputs} in place of {expected}"
        assert own.finish_reason is other.finish_reason
        assert_close(numbers(own.logprobs, own.reading), numbers(other.logprobs, other.reading))
    assert len(outputs) == len(expected) if is_whole else len(outputs) <= len(expected), f"{asked}"


def is_tie(logprobs: TokenLogprobs | None) -> bool:
    return logprobs is not None and logprobs.top[0].logprob - logprobs.top[1].logprob < TIE


def numbers(logprobs: TokenLogprobs | None, reading: PromptReading | None) -> list[float]:
    """All that comes with a token, in one list."""
    found: list[float] = []
    if logprobs is not None:
        found += [logprobs.logprob, *(one.logprob for one in logprobs.top)]
    if reading is not None and reading.embedding is not None:
        found += np.frombuffer(reading.embedding, np.float32).tolist()
    if reading is not None and reading.logprobs is not None:
        found += np.frombuffer(reading.logprobs.logprobs + reading.logprobs.top_logprobs, np.float32).tolist()
    return found


def assert_close(own: list[float], other: list[float]) -> None:
    assert own == pytest.approx(other, abs=TIE)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [("llama-gqa", 6), ("mistral-window", 0), ("opt-350m", 5)])
def test_nobody_is_told_anything_else_than_alone(name: str, seed: int) -> None:
    disturbed = Disturbed(name, seed)
    disturbed.run()
    disturbed.check_counts()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed", "cuts", "num_flights"),
    [
        ("llama-gqa", 5, [1], 2),
        ("mistral-window", 0, [1, 2], 3),
        ("opt-350m", 5, [2], 1),
        ("neox-parallel", 3, [2], 4),
    ],
)
def test_nobody_is_told_anything_else_by_stages(
    name: str, seed: int, cuts: list[int], num_flights: int
) -> None:
    disturbed = Disturbed(name, seed, cuts, num_flights)
    disturbed.run()
    disturbed.check_counts()
    assert disturbed.counts["later blocks moved"]
