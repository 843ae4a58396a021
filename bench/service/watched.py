"""The same streams asked of two services at once, one of which writes an access log and traces.

Starts no service and no collector.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop

from bench.service.client import Reply, ask_all, completion
from bench.service.process import Service, machine_cpu_s
from bench.service.streams import good


@dataclass(frozen=True, slots=True)
class WatchedRound:
    """The processor time of two gateways until the last span was sent."""

    without_s: float
    watched_s: float
    without_events: int  #: of all streams; the fewer, the more tokens came as one
    watched_events: int
    others_cores: float  #: that processes besides both services and their client kept busy


def watched_round(
    plain: Service,
    watched: Service,
    prompts: Sequence[list[int]],
    num_tokens: int,
    wait_for_spans: Callable[[], None],
) -> WatchedRound:
    """Ask both services for the continuations of all prompts at once. Raises RuntimeError unless all come."""
    requests = [completion("tiny", prompt, num_tokens) for prompt in prompts]

    async def ask_both() -> tuple[list[Reply], list[Reply]]:
        return await asyncio.gather(ask_all(plain.port, requests), ask_all(watched.port, requests))

    before = [plain.cpu_s(), watched.cpu_s()]
    machine_s, client_s, began_s = machine_cpu_s(), time.process_time(), time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        replies = runner.run(ask_both())
    wait_for_spans()
    machine_s, client_s = machine_cpu_s() - machine_s, time.process_time() - client_s
    took_s = time.perf_counter() - began_s
    spent = [
        {name: now_s - then.get(name, 0.0) for name, now_s in service.cpu_s().items()}
        for service, then in zip((plain, watched), before, strict=True)
    ]
    without_events, watched_events = (sum(len(good(one).events) for one in each) for each in replies)
    others_s = machine_s - client_s - sum(sum(each.values()) for each in spent)
    return WatchedRound(
        *(spent[0]["gateway"], spent[1]["gateway"], without_events, watched_events),
        others_cores=round(max(0.0, others_s) / took_s, 2),
    )
