"""The same streams asked of two services at once: of one by /v1/completions, of the other in another dialect.

Starts no service.
"""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import uvloop

from bench.service.client import Reply, ask_all, request
from bench.service.process import Service, cpu_s, machine_cpu_s

#: Renders a conversation of one message as its text alone: the prompt has the same tokens in all dialects.
BARE_TEMPLATE = "{{ messages[0].content }}"


@dataclass(frozen=True, slots=True)
class AskedDialect:
    """One way to ask for the continuation of a text, greedy, of so many tokens."""

    path: str
    prompt: str  #: the field that holds the text: `messages` for a conversation
    max_tokens: str  #: the field of the limit; one of `options` if the path is Ollama's
    counted: str  #: the field of the last event that counts the tokens of the answer
    fields: Mapping[str, object]

    def question(self, model: str, prompt: str, num_tokens: int) -> bytes:
        text: object = [{"role": "user", "content": prompt}] if self.prompt == "messages" else prompt
        sampling: dict[str, object] = {self.max_tokens: num_tokens, "temperature": 0}
        body = {"model": model, self.prompt: text, "stream": True, **self.fields}
        is_ollama = self.path.startswith("/api/")
        return request("POST", self.path, body | ({"options": sampling} if is_ollama else sampling))

    def check(self, reply: Reply, num_tokens: int) -> None:
        """Raise RuntimeError unless the reply is whole and of so many tokens."""
        if not reply.is_whole or b'"%b":%d' % (self.counted.encode(), num_tokens) not in reply.body:
            raise RuntimeError(f"a stream of {self.path} went wrong: {reply.status} {reply.body[-300:]!r}")


_USAGE = {"stream_options": {"include_usage": True}}
#: By name; all others are compared with the first.
DIALECTS = {
    "completions": AskedDialect("/v1/completions", "prompt", "max_tokens", "completion_tokens", _USAGE),
    "chat": AskedDialect("/v1/chat/completions", "messages", "max_tokens", "completion_tokens", _USAGE),
    "responses": AskedDialect(
        "/v1/responses", "input", "max_output_tokens", "output_tokens", {"store": False}
    ),
    "messages": AskedDialect("/v1/messages", "messages", "max_tokens", "output_tokens", {}),
    "ollama chat": AskedDialect("/api/chat", "messages", "num_predict", "eval_count", {}),
    "ollama generate": AskedDialect("/api/generate", "prompt", "num_predict", "eval_count", {"raw": True}),
}


@dataclass(frozen=True, slots=True)
class DialectRound:
    """The processor time of two gateways for the same streams, of one in a dialect."""

    completions_s: float
    dialect_s: float
    completions_reads: int  #: of all streams, by the client; the fewer, the more tokens were written as one
    dialect_reads: int
    others_cores: float  #: that processes besides both services and their client kept busy


def dialect_round(
    plain: Service, other: Service, dialect: AskedDialect, texts: Sequence[str], num_tokens: int
) -> DialectRound:
    """Ask `plain` by /v1/completions and `other` in a dialect to continue the same texts, both at once.

    Raises:
        RuntimeError: a stream did not come whole.
    """
    asked = [(plain, DIALECTS["completions"]), (other, dialect)]
    questions = [[spoken.question("tiny", text, num_tokens) for text in texts] for _, spoken in asked]

    async def ask_both() -> tuple[list[Reply], list[Reply]]:
        return await asyncio.gather(ask_all(plain.port, questions[0]), ask_all(other.port, questions[1]))

    pids = [service.pids() for service, _ in asked]  # before: to ask for them costs a gateway something, too
    before = [{name: cpu_s(pid) for name, pid in each.items()} for each in pids]
    machine_s, client_s, asked_s = machine_cpu_s(), time.process_time(), time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        replies = runner.run(ask_both())
    machine_s, client_s = machine_cpu_s() - machine_s, time.process_time() - client_s
    took_s = time.perf_counter() - asked_s
    spent_s = [
        {name: cpu_s(pid) - then[name] for name, pid in each.items()}
        for each, then in zip(pids, before, strict=True)
    ]
    for (_, spoken), each_replies in zip(asked, replies, strict=True):
        for reply in each_replies:
            spoken.check(reply, num_tokens)
    plain_reads, other_reads = (sum(len(reply.reads) for reply in each) for each in replies)
    others_s = machine_s - client_s - sum(sum(each.values()) for each in spent_s)
    return DialectRound(
        *(spent_s[0]["gateway"], spent_s[1]["gateway"], plain_reads, other_reads),
        others_cores=round(max(0.0, others_s) / took_s, 2),
    )


def sum_ratio(rounds: Sequence[DialectRound]) -> float:
    """Return how many times the processor time of /v1/completions a dialect took."""
    return sum(one.dialect_s for one in rounds) / sum(one.completions_s for one in rounds)


def sum_ratio_error(rounds: Sequence[DialectRound]) -> float:
    """Return the standard error of `sum_ratio`, by how far each round is from it."""
    ratio, num_rounds = sum_ratio(rounds), len(rounds)
    squares = sum((one.dialect_s - ratio * one.completions_s) ** 2 for one in rounds)
    return sqrt(squares * num_rounds / max(1, num_rounds - 1)) / sum(one.completions_s for one in rounds)


class Texts:
    """Random texts of one token per character; none comes twice. Mutable."""

    def __init__(self, num_chars: int) -> None:
        self._random, self._num_chars = random.Random(7), num_chars

    def take(self, num_texts: int) -> list[str]:
        letters = string.ascii_letters + string.digits
        return ["".join(self._random.choices(letters, k=self._num_chars)) for _ in range(num_texts)]
