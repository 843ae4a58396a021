"""Honest clients: they ask what has one right answer, and look at every token of it. Harm nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from bench.chaos.outcome import Ending, Verdict, judge
from bench.service.client import Connection, Reply, ask, completion, read, request, with_key
from bench.soak.load import MIN_MARGIN, VOCAB_SIZE, Reference, margin_of

NUM_TOKENS = 64  #: of an answer: long enough to be met by a fault
NUM_REFERENCES = 4  #: per model
#: A question that has no end after this is lost; a health probe that has no answer has failed.
PATIENCE_S, PROBE_PATIENCE_S = 120.0, 10.0
PROBE_EVERY_S = 1.0
MAX_OPEN = 64  #: questions at a time: more would only measure a machine that is too slow for them


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and its verdict, on the clock of `time.perf_counter`."""

    model: str
    request_id: str
    asked_s: float
    ended_s: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Probe:
    """A look at /health."""

    asked_s: float
    took_s: float
    is_answered: bool
    is_cut: bool


async def learn(port: int, key: str, models: Sequence[str], seed: int) -> list[Reference]:
    """Ask for the right answers, undisturbed and one after the other.

    Where two tokens are almost equally likely another batch may choose the other one: such prompts are left
    out, and others drawn.
    """
    random = Random(seed)
    found: list[Reference] = []
    for model in models:
        num_left = NUM_REFERENCES
        while num_left:
            prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.randint(4, 40))]
            question = completion(model, prompt, NUM_TOKENS, stream=False, logprobs=2)
            reply = await ask(port, with_key(question, key))
            answer = read(reply)
            if answer.num_tokens != NUM_TOKENS:
                raise RuntimeError(f"no reference from `{model}`: {reply.status} {reply.body[-300:]!r}")
            if margin_of(reply) >= MIN_MARGIN:
                found.append(Reference(model, prompt, answer.text))
                num_left -= 1
    return found


class HonestClients:
    """Asks at random moments, and keeps the verdicts. Mutable; used on the event loop alone."""

    def __init__(
        self,
        port: int,
        key: str,
        references: Sequence[Reference],
        seed: int,
        was_absent: Callable[[float, float], bool],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`was_absent` tells whether the gateway was not there at some time between two moments."""
        self._port, self._key, self._references = port, key, references
        self._random = Random(seed)
        self._was_absent, self._patience_s = was_absent, patience_s
        self._open: set[asyncio.Task[None]] = set()
        self.num_held_back = 0  #: questions, because too many were open
        self.asked: list[Asked] = []
        self.probes: list[Probe] = []

    async def run(self, per_s: float) -> None:
        """Ask so often, by Poisson's law, and look at /health every second, until this is cancelled."""
        probing = asyncio.create_task(self._probe_on())
        try:
            while True:
                await asyncio.sleep(self._random.expovariate(per_s))
                if len(self._open) >= MAX_OPEN:
                    self.num_held_back += 1
                    continue
                task = asyncio.create_task(self.ask())
                self._open.add(task)
                task.add_done_callback(self._open.discard)
        finally:
            probing.cancel()

    async def wait_ended(self) -> None:
        """Wait for the answers that are still open."""
        await asyncio.gather(*self._open)

    async def ask(self) -> None:
        """Ask one question and keep the verdict on its answer."""
        reference = self._random.choice(self._references)
        is_stream = self._random.random() < 0.8
        question = completion(reference.model, reference.prompt, NUM_TOKENS, stream=is_stream)
        asked_s = time.perf_counter()
        reply, has_ended = await _reply_within(self._port, with_key(question, self._key), self._patience_s)
        ended_s = time.perf_counter()
        is_cut = self._was_absent(asked_s, ended_s)
        verdict = judge(reply, reference.text, NUM_TOKENS, is_cut=is_cut, has_ended=has_ended)
        self.asked.append(Asked(reference.model, reply.request_id, asked_s, ended_s, verdict))

    async def _probe_on(self) -> None:
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            asked_s = time.perf_counter()
            reply, _ = await _reply_within(self._port, request("GET", "/health"), PROBE_PATIENCE_S)
            ended_s = time.perf_counter()
            # While no worker is ready it says so by 503, which is an answer.
            is_answered = reply.is_whole and reply.status in (200, 503)
            self.probes.append(
                Probe(asked_s, ended_s - asked_s, is_answered, self._was_absent(asked_s, ended_s))
            )


def violations(asked: Sequence[Asked], probes: Sequence[Probe]) -> list[str]:
    """Return what must not be: lost and wrong answers, and probes that nobody answered."""
    found = [
        f"{each.verdict.ending}: `{each.model}` {each.request_id}: {each.verdict.detail}"
        for each in asked
        if each.verdict.ending in (Ending.LOST, Ending.WRONG)
    ]
    missed = [probe for probe in probes if not probe.is_answered and not probe.is_cut]
    return found + [f"/health: no answer after {probe.took_s:.1f} s" for probe in missed]


async def _reply_within(port: int, question: bytes, patience_s: float) -> tuple[Reply, bool]:
    """Return a reply on a connection of its own, as far as it came, and whether it ended by itself."""
    began_s = time.perf_counter()
    try:
        connection = await asyncio.wait_for(Connection.open(port), patience_s)
    except (OSError, TimeoutError):
        return Reply(began_s), True
    try:
        asking = asyncio.create_task(connection.ask(question))
        done, _ = await asyncio.wait((asking,), timeout=patience_s)
        connection.close()
        return await asking, bool(done)
    finally:
        connection.close()
