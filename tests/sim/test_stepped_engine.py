"""How long requests wait for their next token while prompts of others come, on a measured H200."""

from __future__ import annotations

import math
from random import Random

from bench.max_step import Asked, percentiles, serve
from hearth.sim.profile import Profile
from hearth.sim.setting import DEFAULT_MAX_STEP_S

SHAPE = Profile.load("h200").shape("7B")


def test_tokens_come_within_the_longest_step_while_long_prompts_arrive() -> None:
    running = [Asked(0.0, 128, 400)] * 64
    long_prompts = [Asked(1.0 + 0.2 * number, 3500, 4) for number in range(12)]
    burst = [Asked(3.6, 3500, 4)] * 6
    requests = [*running, *long_prompts, *burst]
    held = serve(SHAPE, requests, DEFAULT_MAX_STEP_S)
    assert percentiles(held.next_s).p99 < DEFAULT_MAX_STEP_S
    assert max(held.next_s) < 1.25 * DEFAULT_MAX_STEP_S
    free = serve(SHAPE, requests, math.inf)
    assert max(free.next_s) > 1.25 * DEFAULT_MAX_STEP_S, "or nothing had to be held back"


def drawn(num_requests: int, per_s: float) -> list[Asked]:
    """Arrivals at random of conversations: many short prompts, few long ones."""
    rng, now_s, requests = Random(7), 0.0, list[Asked]()
    for _ in range(num_requests):
        now_s += rng.expovariate(per_s)
        num_prompt = min(2000, 4 + int(rng.lognormvariate(4.6, 1.3)))
        num_output = min(900, 2 + int(rng.lognormvariate(5.3, 1.0)))
        requests.append(Asked(now_s, num_prompt, num_output))
    return requests


def test_under_a_steady_load_hardly_a_token_takes_twice_as_long_as_most() -> None:
    """At about four fifths of what the device can serve."""
    requests = drawn(300, per_s=24.0)
    held = percentiles(serve(SHAPE, requests, DEFAULT_MAX_STEP_S).next_s)
    assert held.p99 < 2 * held.p50
    free = percentiles(serve(SHAPE, requests, math.inf).next_s)
    assert free.p99 > 2 * free.p50, "or nothing had to be held back"
