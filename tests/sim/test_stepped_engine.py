"""How long requests wait for their next token while prompts of others come, on a measured H200."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise

from hearth.policy.batch.batcher import BatchLimits
from hearth.policy.memory.kv_range import KvRange
from hearth.sim.profile import Profile, ShapeProfile
from hearth.sim.report import Percentiles
from hearth.sim.setting import DEFAULT_MAX_STEP_S
from hearth.sim.stepped_engine import SteppedEngine
from hearth.types import RequestId

BLOCK_TOKENS, KV_TOKENS = 16, 190_000


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a simulated user."""

    arrived_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Waits:
    """Times that requests waited for their tokens, in seconds."""

    first_s: list[float]
    next_s: list[float]


def captured_7b() -> ShapeProfile:
    """Llama-2-7B whose steps are all graphs: the host's launch takes no time of its own."""
    shape = Profile.load("h200").shape("7B")
    return replace(shape, times=replace(shape.times, launch_s=0.0))


def serve(requests: list[Asked], max_step_s: float) -> Waits:
    """Serve requests, sorted by arrival, with the engine to themselves."""
    shape, num_blocks = captured_7b(), KV_TOKENS // BLOCK_TOKENS
    kv = KvRange(shape.kv_bytes_per_token * BLOCK_TOKENS, 16 << 20, num_blocks)
    limits = BatchLimits(max_batch_tokens=8192, max_seqs=1024, max_context=8192)
    engine = SteppedEngine(shape, limits, kv, BLOCK_TOKENS, num_blocks - 1, max_step_s)
    engine.grow(num_blocks - 1, free_bytes=KV_TOKENS * shape.kv_bytes_per_token)
    times_s: dict[RequestId, list[float]] = {}  # of the arrival, then of each token
    to_come, now_s, device_free_s = deque(requests), 0.0, 0.0
    while to_come or engine.has_work:
        if not engine.has_work:
            now_s = max(now_s, to_come[0].arrived_s)
        while to_come and to_come[0].arrived_s <= now_s:
            asked, request_id = to_come.popleft(), RequestId(str(len(to_come)))
            times_s[request_id] = [asked.arrived_s]
            engine.add(request_id, asked.num_prompt_tokens, asked.num_output_tokens, num_sent=0)
        call = engine.launch(max(now_s, device_free_s))
        device_free_s = device_free_s if call.launched is None else call.launched.end_s
        if call.awaited is not None:
            now_s = max(now_s, call.awaited.end_s)
            for request_id in engine.take_in(call.awaited).request_ids:
                times_s[request_id].append(now_s)
    waits_s = [[b - a for a, b in pairwise(one)] for one in times_s.values()]
    return Waits([one[0] for one in waits_s], [wait_s for one in waits_s for wait_s in one[1:]])


def percentiles(values: list[float]) -> Percentiles:
    found = Percentiles.of(values)
    assert found is not None
    return found


def test_tokens_come_within_the_longest_step_while_long_prompts_arrive() -> None:
    running = [Asked(0.0, 128, 400)] * 64
    long_prompts = [Asked(1.0 + 0.2 * number, 3500, 4) for number in range(12)]
    burst = [Asked(3.6, 3500, 4)] * 6
    requests = [*running, *long_prompts, *burst]
    held = serve(requests, DEFAULT_MAX_STEP_S)
    assert percentiles(held.next_s).p99 < DEFAULT_MAX_STEP_S
    assert max(held.next_s) < 1.25 * DEFAULT_MAX_STEP_S
    free = serve(requests, math.inf)
    assert percentiles(free.next_s).p99 > DEFAULT_MAX_STEP_S, "or nothing had to be held back"


def drawn(num_requests: int, per_s: float) -> list[Asked]:
    """Arrivals at random of conversations: many short prompts, few long ones."""
    rng, now_s, requests = random.Random(7), 0.0, list[Asked]()
    for _ in range(num_requests):
        now_s += rng.expovariate(per_s)
        num_prompt = min(2000, 4 + int(rng.lognormvariate(4.6, 1.3)))
        num_output = min(900, 2 + int(rng.lognormvariate(5.3, 1.0)))
        requests.append(Asked(now_s, num_prompt, num_output))
    return requests


def test_under_a_steady_load_hardly_a_token_takes_twice_as_long_as_most() -> None:
    """At about four fifths of what the device can serve."""
    requests = drawn(300, per_s=24.0)
    held = percentiles(serve(requests, DEFAULT_MAX_STEP_S).next_s)
    assert held.p99 < 2 * held.p50
    free = percentiles(serve(requests, math.inf).next_s)
    assert free.p99 > 2 * free.p50, "or nothing had to be held back"
