"""Waves of requests for a benchmark of KV, and what became of a run of them. Sizes no memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from hearth.core.types import RequestId, SamplingParams
from hearth.engine.engine import Engine, StepOutcome
from hearth.policy.batch.plan import EngineRequest


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in waves: all of one arrive at once, and the next when nearly all of it is done."""

    waves: tuple[int, ...]  #: requests of each
    prompt_tokens: range  #: lengths are drawn from these two, the same ones for every run
    new_tokens: range
    left_share: float = 0.1  #: of a wave is unfinished when the next one comes

    @staticmethod
    def alike(num_requests: int, prompt_tokens: int, new_tokens: int) -> Load:
        """Return one wave of requests that are all of one length."""
        return Load((num_requests,), _only(prompt_tokens), _only(new_tokens))


@dataclass(frozen=True, slots=True)
class Mark:
    """The beginning of a wave, or the end of a step."""

    at_s: float
    num_tokens: int  #: that came out of the step
    kv_blocks: int


@dataclass(frozen=True, slots=True)
class Run:
    elapsed_s: float
    num_tokens: int
    num_preempted: int
    marks: tuple[Mark, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s

    @property
    def num_grown(self) -> int:
        """Count the steps before which KV grew."""
        return sum(later.kv_blocks > mark.kv_blocks for mark, later in pairwise(self.marks))

    @property
    def num_shrunk(self) -> int:
        return sum(later.kv_blocks < mark.kv_blocks for mark, later in pairwise(self.marks))

    @property
    def peak_blocks(self) -> int:
        return max(mark.kv_blocks for mark in self.marks)

    def decode_tokens_per_s(self, num_requests: int) -> float:
        """Return the throughput while all requests decode and nobody's prompt is computed."""
        gaps_ms = self.decode_gaps_ms(num_requests)
        return 1e3 * num_requests * len(gaps_ms) / sum(gaps_ms)

    def decode_gaps_ms(self, num_requests: int) -> list[float]:
        """Return the gaps between tokens of one request while all decode and nobody's prompt is computed."""
        full = [mark.num_tokens == num_requests for mark in self.marks]
        pairs = zip(pairwise(self.marks), pairwise(full), strict=True)
        return [1e3 * (later.at_s - mark.at_s) for (mark, later), are_full in pairs if all(are_full)]


class Prompts:
    """Random token ids, never the same prompt twice, so that no prefix is ever found."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._random, self._num_taken = vocab_size, Random(1), 0

    def requests(self, engine: Engine, load: Load) -> list[list[EngineRequest]]:
        """Return the requests of each wave; their lengths depend on the load alone."""
        lengths = Random(0)
        return [[self._request(engine, load, lengths) for _ in range(size)] for size in load.waves]

    def _request(self, engine: Engine, load: Load, lengths: Random) -> EngineRequest:
        self._num_taken += 1
        prompt = self._random.choices(range(self._vocab_size), k=lengths.choice(load.prompt_tokens))
        num_new = lengths.choice(load.new_tokens)
        params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, seed=0)
        return engine.request(RequestId(f"r{self._num_taken}"), prompt, params)


class Drive:
    """One run: requests go in, tokens come out. Mutable; used once."""

    def __init__(self, engine: Engine, step: Callable[[], StepOutcome]) -> None:
        """`step` makes one step of the engine and whatever belongs to it."""
        self._engine, self._step = engine, step
        self._unfinished: set[RequestId] = set()
        self._marks: list[Mark] = []
        self._num_tokens = self._num_preempted = 0

    def run(
        self,
        waves: Sequence[Sequence[EngineRequest]],
        left_share: float = 0.0,
        between: Callable[[], None] | None = None,
        watch: Callable[[Mark], None] | None = None,
    ) -> Run:
        """Have all requests answered. `between` comes before each wave and `watch` after each step; what the
        former takes does not count."""
        elapsed_s = 0.0
        for wave, is_last in zip(waves, [*[False] * (len(waves) - 1), True], strict=True):
            if between is not None:
                between()
            began_s = self._mark(0).at_s
            self._unfinished.update(request.request_id for request in wave)
            for request in wave:
                self._engine.add(request)
            most_left = 0 if is_last else int(len(wave) * left_share)
            while len(self._unfinished) > most_left:
                mark = self._step_once()
                if watch is not None:
                    watch(mark)
            elapsed_s += time.perf_counter() - began_s
            if not most_left:
                self._land()
        asked = sum(request.sampling.max_tokens or 0 for wave in waves for request in wave)
        assert self._num_tokens == asked, f"{asked} tokens were asked for, {self._num_tokens} came"
        return Run(elapsed_s, self._num_tokens, self._num_preempted, tuple(self._marks))

    def _step_once(self) -> Mark:
        outcome = self._step()
        assert not outcome.failures, f"{outcome.failures}"
        self._num_tokens += len(outcome.outputs)
        self._num_preempted += len(outcome.preempted)
        for output in outcome.outputs:
            if output.finish_reason is not None:
                self._unfinished.remove(output.request_id)
        return self._mark(len(outcome.outputs))

    def _mark(self, num_tokens: int) -> Mark:
        kv_blocks = self._engine.usage.kv_blocks
        self._marks.append(Mark(time.perf_counter(), num_tokens, kv_blocks))
        return self._marks[-1]

    def _land(self) -> None:
        """Take in the step that was launched before the last token was known."""
        while self._engine.has_work:
            self._step()


def _only(value: int) -> range:
    return range(value, value + 1)
