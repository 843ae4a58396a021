"""How long do people wait when requests come one by one? First tokens and gaps between tokens, by load.

Requests with ShareGPT lengths arrive at random (Poisson) at shares of the rate at which the engine is
saturated: that of a pass through all of the traffic at once. And some requests decode while long prompts
arrive.

The engine is stepped as a worker does it, by one thread. A token comes when the step returns that has it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from random import Random

from bench.engine.finding import Arm, Found
from bench.engine.rig import Rig
from bench.report import Row, percentiles
from bench.sharegpt import Lengths, conversations
from hearth.core.types import RequestId, SamplingParams
from hearth.engine.engine import Engine
from hearth.policy.batch.plan import EngineRequest

_SEED = 5
_AIM_SHARE = 0.8  #: of saturation, at which gaps should be even
_NUMBERS = itertools.count()


@dataclass(slots=True)
class Stream:
    """A request and when its tokens came, on the clock of its run. Mutable; written by `serve` alone."""

    due_s: float
    request: EngineRequest
    tokens_s: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        return self.tokens_s[0] - self.due_s

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Return the gaps that begin within a span of time."""
        return [after - before for before, after in pairwise(self.tokens_s) if begin_s <= before < end_s]


def arms(rig: Rig) -> Mapping[str, Arm]:
    shares = {
        f"poisson_{round(100 * share)}": partial(_poisson, rig, share) for share in rig.scale.arrivals.shares
    }
    return {**shares, "long_prompts": partial(_long_prompts, rig)}


def serve(engine: Engine, streams: Sequence[Stream], end_s: float, patience_s: float) -> None:
    """Step the engine while requests come, from 0 to `end_s`, and until all of them have a token.

    The engine's own thread, if it has one, sleeps meanwhile: nobody has posted anything. What still runs in
    the end is cancelled. If a first token takes `patience_s` longer, the run was for nothing.
    """
    by_id = {stream.request.request_id: stream for stream in streams}
    coming = sorted(streams, key=lambda stream: stream.due_s, reverse=True)
    num_silent = len(streams)
    began_s = time.perf_counter()
    now_s = 0.0
    while now_s < end_s or num_silent:
        if now_s >= end_s + patience_s:
            raise RuntimeError(f"{num_silent} requests have no token {patience_s:g} s after the last came")
        while coming and coming[-1].due_s <= now_s:
            engine.add(coming.pop().request)
        if engine.has_work:
            outcome = engine.step()
            now_s = time.perf_counter() - began_s
            for output in outcome.outputs:
                tokens_s = by_id[output.request_id].tokens_s
                num_silent -= not tokens_s
                tokens_s.append(now_s)
        else:
            next_s = coming[-1].due_s if coming else end_s
            time.sleep(max(0.0, next_s - now_s))
            now_s = time.perf_counter() - began_s
    for request_id in by_id:
        engine.cancel(request_id)
    while engine.has_work:
        engine.step()
    engine.flush()


def _saturated_per_s(rig: Rig) -> float:
    """Return the requests per second that end while all that came at once are served."""
    work = rig.scale.traffic["sharegpt"]
    if work.text not in rig.passes:  # else it was measured just now, by another part
        rig.run(work)
    return len(work.requests) / rig.passes[work.text].seconds


def _poisson(rig: Rig, share: float) -> Found:
    arrivals, saturated_per_s = rig.scale.arrivals, _saturated_per_s(rig)
    end_s = arrivals.ramp_s + arrivals.window_s
    lengths = iter(conversations()[len(rig.scale.traffic["sharegpt"].requests) :])
    streams = [
        _stream(rig, due_s, next(lengths).clipped(arrivals.max_lengths))
        for due_s in poisson(share * saturated_per_s, 0.0, end_s)
    ]
    rig.watch.take()
    serve(rig.engine, streams, end_s, arrivals.patience_s)
    steps = rig.watch.take()
    counted = [stream for stream in streams if stream.due_s >= arrivals.ramp_s]
    first_ms = _ms(stream.first_token_s for stream in counted)
    gap_ms = _ms(gap for stream in streams for gap in stream.gaps_s(arrivals.ramp_s, end_s))
    text = f"{rig.shape.model}: arrivals at {share:.0%} of saturation"
    aim = "p99 under 2 times p50" if share == _AIM_SHARE else None
    rows = [*_rows(f"{text}, first token", first_ms), *_rows(f"{text}, between tokens", gap_ms, aim)]
    details = {
        "saturated_per_s": saturated_per_s,
        "requests_per_s": share * saturated_per_s,
        "first_token_ms": first_ms,
        "between_tokens_ms": gap_ms,
        "output_tokens_per_s": gap_ms["n"] / arrivals.window_s,
        **steps,
    }
    return Found(rows, details)


def _long_prompts(rig: Rig) -> Found:
    arrivals = rig.scale.arrivals
    begin_s, end_s = arrivals.long_begin_s, arrivals.long_begin_s + arrivals.long_window_s
    running = [_stream(rig, 0.0, arrivals.running) for _ in range(arrivals.num_running)]
    long = [
        _stream(rig, due_s, arrivals.long_prompt)
        for due_s in poisson(1.0 / arrivals.long_every_s, begin_s, end_s)
    ]
    rig.watch.take()
    serve(rig.engine, [*running, *long], end_s, arrivals.patience_s)
    steps = rig.watch.take()
    before_ms = _ms(gap for stream in running for gap in stream.gaps_s(begin_s / 2, begin_s))
    gap_ms = _ms(gap for stream in running for gap in stream.gaps_s(begin_s, end_s))
    first_ms = _ms(stream.first_token_s for stream in long)
    text = f"{rig.shape.model}: {arrivals.num_running} run, prompts of {arrivals.long_prompt.prompt:,} come"
    rows = [
        *_rows(f"{text}, first token of these", first_ms),
        *_rows(f"{text}, between tokens of those", gap_ms, "p99 under `max_step`"),
    ]
    details = {
        "max_step": getattr(rig.scale.engine, "max_step", None),
        "first_token_ms": first_ms,
        "between_tokens_ms": gap_ms,
        "between_tokens_before_ms": before_ms,
        **steps,
    }
    return Found(rows, details)


def poisson(per_s: float, begin_s: float, end_s: float) -> Iterator[float]:
    """Yield the times of random arrivals within a span, the same in every run."""
    draw, at_s = Random(_SEED), begin_s
    while (at_s := at_s + draw.expovariate(per_s)) < end_s:
        yield at_s


def _stream(rig: Rig, due_s: float, lengths: Lengths) -> Stream:
    (prompt,) = rig.prompts.take(1, lengths.prompt)
    params = SamplingParams(temperature=0.0, max_tokens=lengths.new, ignore_eos=True)
    request_id = RequestId(f"arrival-{next(_NUMBERS)}")
    return Stream(due_s, rig.engine.request(request_id, prompt, params))


def _ms(seconds: Iterable[float]) -> dict[str, float]:
    return percentiles([1e3 * one for one in seconds])


def _rows(text: str, ms: Mapping[str, float], aim: str | None = None) -> list[Row]:
    return [Row(f"{text}, p50", "ms", ms["p50"]), Row(f"{text}, p99", "ms", ms["p99"], aim=aim)]
