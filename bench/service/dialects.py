"""The same work asked for in the words of every API that the service speaks, each as a stream.

Starts no service.
"""

from __future__ import annotations

import asyncio
import random
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

    @property
    def event(self) -> bytes:
        """The beginning or end of an event."""
        return b"}\n" if self.path.startswith("/api/") else b"\ndata: "

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
class DialectRun:
    """Streams that were asked for at once in one dialect."""

    seconds: float  #: from the first question to the last byte
    gateway_s: float  #: processor time of the gateway
    num_events: int  #: of all streams; the fewer, the more tokens came as one, which costs the gateway less
    num_reads: int  #: of all streams, by the client; the fewer, the more events came as one, with that effect
    others_cores: float  #: that processes besides the service and its client kept busy


def ask_dialect(service: Service, dialect: AskedDialect, texts: Sequence[str], num_tokens: int) -> DialectRun:
    """Ask for the continuations of all texts at once. Raises RuntimeError unless all come whole."""
    questions = [dialect.question("tiny", text, num_tokens) for text in texts]
    pids = service.pids()  # before: to ask for them costs the gateway something, too
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    machine_s, client_s, asked_s = machine_cpu_s(), time.process_time(), time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        replies = runner.run(ask_all(service.port, questions))
    machine_s, client_s = machine_cpu_s() - machine_s, time.process_time() - client_s
    took_s = time.perf_counter() - asked_s
    spent_s = {name: cpu_s(pid) - before[name] for name, pid in pids.items()}
    for reply in replies:
        dialect.check(reply, num_tokens)
    began_s, ended_s = min(reply.asked_s for reply in replies), max(reply.reads[-1][0] for reply in replies)
    others_cores = max(0.0, machine_s - client_s - sum(spent_s.values())) / took_s
    num_events = sum(reply.body.count(dialect.event) for reply in replies)
    num_reads = sum(len(reply.reads) for reply in replies)
    return DialectRun(ended_s - began_s, spent_s["gateway"], num_events, num_reads, round(others_cores, 2))


class Texts:
    """Random texts of one token per character; none comes twice. Mutable."""

    def __init__(self, num_chars: int) -> None:
        self._random, self._num_chars = random.Random(7), num_chars

    def take(self, num_texts: int) -> list[str]:
        letters = string.ascii_letters + string.digits
        return ["".join(self._random.choices(letters, k=self._num_chars)) for _ in range(num_texts)]
