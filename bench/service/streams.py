"""Streams asked of a service all at once, and what came of them. Starts no service."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import uvloop

from bench.report import percentiles
from bench.service.bare_engine import Done
from bench.service.client import Answer, Connection, Reply, ask_all, completion, read, uncollected
from bench.service.process import Service, machine_cpu_s

#: Cores that others may keep busy in a round that counts as undisturbed.
QUIET_CORES = 0.1


@dataclass(frozen=True, slots=True)
class Run:
    """Streams that were asked for at once."""

    seconds: float  #: from the first question to the last event
    tokens_per_s: float  #: while all of them ran
    events_per_s: float  #: likewise
    shared_events: float  #: the share of events with more than one token
    cpu_s_per_1000_tokens: Mapping[str, float]  #: by process
    others_cores: float  #: that processes which are none of these kept busy: should be next to nothing
    first_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Round:
    """The engine alone, then the service, with the same questions."""

    alone: Done
    served: Run

    @property
    def is_quiet(self) -> bool:
        """True if nobody else used the machine."""
        return max(self.alone.others_cores, self.served.others_cores) < QUIET_CORES


def rounds(num_rounds: int, play: Callable[[], Round]) -> list[Round]:
    """Play so many quiet rounds; if others use the machine, up to twice as many, and keep the quietest."""
    played: list[Round] = []
    while sum(each.is_quiet for each in played) < num_rounds and len(played) < 2 * num_rounds:
        played.append(play())
    noise = sorted(played, key=lambda each: max(each.alone.others_cores, each.served.others_cores))
    return noise[:num_rounds]


class Prompts:
    """Random token ids; no prompt comes twice, or the prefix cache would find it. Mutable."""

    def __init__(self, vocab_size: int, num_tokens: int) -> None:
        self._random = random.Random(7)
        self._vocab_size, self._num_tokens = vocab_size, num_tokens

    def take(self, num_prompts: int) -> list[list[int]]:
        def prompt() -> list[int]:
            return [self._random.randrange(self._vocab_size) for _ in range(self._num_tokens)]

        return [prompt() for _ in range(num_prompts)]


def stream_all(service: Service, model: str, prompts: Sequence[list[int]], num_tokens: int) -> Run:
    requests = [completion(model, prompt, num_tokens) for prompt in prompts]
    with uncollected():
        before, client_s = service.cpu_s(), time.process_time()
        began_s, machine_s = time.perf_counter(), machine_cpu_s()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            replies = runner.run(ask_all(service.port, requests))
        took_s, machine_s = time.perf_counter() - began_s, machine_cpu_s() - machine_s
        client_s = time.process_time() - client_s
        after = service.cpu_s()
    answers = [read(reply) for reply in replies]
    wrong = [answer for answer in answers if answer.num_tokens != num_tokens]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(answers)} streams went wrong: {told(wrong[0])}")
    total = num_tokens * len(prompts)
    spent_s = {"client": client_s, **{name: after[name] - before.get(name, 0.0) for name in after}}
    return Run(
        seconds=max(a.events[-1].at_s for a in answers) - min(a.reply.asked_s for a in answers),
        **asdict(steady(answers, num_tokens)),
        cpu_s_per_1000_tokens={name: round(1000 * s / total, 4) for name, s in spent_s.items()},
        others_cores=round(max(0.0, machine_s - sum(spent_s.values())) / took_s, 2),
        first_s=percentiles([answer.first_s for answer in answers]),
    )


@dataclass(frozen=True, slots=True)
class Steady:
    tokens_per_s: float
    events_per_s: float
    shared_events: float


def steady(answers: Sequence[Answer], num_tokens: int) -> Steady:
    """Measure from when all streams have begun until the first ends; where that is nothing, all of it."""
    begin_s = max(answer.events[0].at_s for answer in answers)
    end_s = min(answer.events[-1].at_s for answer in answers)
    if end_s <= begin_s:
        begin_s = min(answer.reply.asked_s for answer in answers)
        end_s = max(answer.events[-1].at_s for answer in answers)
    num_events = sum(len(answer.events) for answer in answers)
    within = sum(begin_s < event.at_s <= end_s for answer in answers for event in answer.events)
    tokens_per_event = num_tokens * len(answers) / num_events
    events_per_s = within / (end_s - begin_s)
    shared = sum(is_shared(event.text) for answer in answers for event in answer.events)
    return Steady(events_per_s * tokens_per_event, events_per_s, round(shared / num_events, 5))


def is_shared(text: str) -> bool:
    """True if an event of a random model holds several tokens: a token is ` wNUMBER`, or one character."""
    if len(text) == 1:
        return False
    return not (text.startswith(" w") and text[2:].isdigit())


async def in_turn(port: int, requests: Sequence[bytes]) -> list[Answer]:
    connection = await Connection.open(port)
    try:
        return [read(await connection.ask(request)) for request in requests]
    finally:
        connection.close()


def told(answer: Answer) -> str:
    return (
        f"status {answer.reply.status}, {answer.error=}, {answer.num_tokens=}, {answer.reply.body[-300:]!r}"
    )


def good(reply: Reply) -> Answer:
    answer = read(reply)
    if answer.error is not None or answer.num_tokens is None or not answer.events:
        raise RuntimeError(f"a stream went wrong: {told(answer)}")
    return answer
