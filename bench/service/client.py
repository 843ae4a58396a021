"""Asks a service for streams with as little work as can be: bytes are kept with their times, and read later.

It shares its machine with what it measures. Knows nothing of what it asks for.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypedDict, cast

#: How the body of a stream ends: no event holds a carriage return, as JSON escapes it.
_END = b"\r\n0\r\n\r\n"
_HEAD_END = b"\r\n\r\n"
_BEGINNING = 8  #: reads of a reply


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Event:
    at_s: float  #: when its last byte came
    text: str
    finish_reason: str | None


@dataclass(slots=True)
class Reply:
    """Bytes of a reply, as they came. Mutable; written by its connection."""

    asked_s: float
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    head: bytes = b""
    is_whole: bool = False

    @property
    def status(self) -> int:
        return int(self.head.split(maxsplit=2)[1]) if self.head else 0

    @property
    def request_id(self) -> str:
        return self.header("x-hearth-request-id") or ""

    @property
    def body(self) -> bytes:
        """Return the body as it is on the wire."""
        return b"".join(data for _, data in self.reads).partition(_HEAD_END)[2]

    def header(self, name: str) -> str | None:
        for line in self.head.decode("latin-1").split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip()
        return None


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply whose events have been read."""

    reply: Reply
    events: list[Event]  #: those with text
    num_tokens: int | None  #: as the service counts them; None where it did not come to that
    error: str | None  #: its code, from the status or in mid-stream
    finish_reason: str | None

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def first_s(self) -> float:
        """Return the seconds from the question to the first text."""
        return self.events[0].at_s - self.reply.asked_s


class Connection(asyncio.Protocol):
    """A connection for questions one after the other. Mutable; used on the event loop alone."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._done: asyncio.Future[Reply] | None = None
        self._tail = b""
        self._bytes_left: int | None = None  #: None: until the end of a stream

    @staticmethod
    async def open(port: int) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        return connection

    @property
    def num_reads(self) -> int:
        """Count the reads of the reply that is coming."""
        return 0 if self._reply is None else len(self._reply.reads)

    @property
    def has_text(self) -> bool:
        """True if text of the reply that is coming has arrived."""
        if (reply := self._reply) is None:
            return False
        # As a rule the beginning says it: whoever reads all of a long one keeps others' events waiting.
        return any(
            read(replace(reply, reads=reply.reads[:most])).events for most in (_BEGINNING, len(reply.reads))
        )

    async def ask(self, question: bytes) -> Reply:
        """Return the whole reply, or what there was of it when the connection ended."""
        assert self._transport is not None, "it was opened"
        reply = self._reply = Reply(time.perf_counter())
        done = self._done = asyncio.get_running_loop().create_future()
        self._tail, self._bytes_left = b"", None
        if self._transport.is_closing():
            return reply
        self._transport.write(question)
        await done
        return reply

    def close(self) -> None:
        """End the connection, also in the middle of a reply: the service must see to it."""
        if self._transport is not None:
            self._transport.abort()

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Of this kind whatever the loop is, though uvloop's class does not say so.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        assert reply is not None, f"nobody asked for {data!r}"
        reply.reads.append((time.perf_counter(), data))
        if not reply.head:
            reply.head, end, body = b"".join(part for _, part in reply.reads).partition(_HEAD_END)
            if not end:
                reply.head = b""
                return
            length = reply.header("content-length")
            self._bytes_left = None if length is None else int(length)
            data = body
        if self._bytes_left is not None:
            self._bytes_left -= len(data)
            reply.is_whole = self._bytes_left <= 0
        else:
            self._tail = (self._tail + data)[-len(_END) :]
            reply.is_whole = self._tail == _END
        if reply.is_whole:
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if self._done is not None and not self._done.done() and self._reply is not None:
            self._done.set_result(self._reply)


def completion(model: str, prompt: list[int], max_tokens: int, **fields: object) -> bytes:
    """Return a question for a stream, greedy unless said otherwise, that does not stop by itself."""
    body: Mapping[str, object] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    return request("POST", "/v1/completions", body)


def request(method: str, path: str, body: Mapping[str, object] | None = None) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Accept: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def with_key(question: bytes, key: str | None) -> bytes:
    """Return a question that shows an API key, where there is one."""
    if key is None:
        return question
    return question.replace(b"\r\n", b"\r\nAuthorization: Bearer %b\r\n" % key.encode(), 1)


async def ask(port: int, question: bytes) -> Reply:
    """Ask on a connection of its own."""
    connection = await Connection.open(port)
    try:
        return await connection.ask(question)
    finally:
        connection.close()


async def ask_all(port: int, questions: list[bytes]) -> list[Reply]:
    """Ask all questions at once, each on its own connection; all are open before the first question."""
    connections = [await Connection.open(port) for _ in questions]
    try:
        asked = (each.ask(question) for each, question in zip(connections, questions, strict=True))
        return list(await asyncio.gather(*asked))
    finally:
        for connection in connections:
            connection.close()


@contextmanager
def uncollected() -> Iterator[None]:
    """Have this process look for no garbage meanwhile: its pauses would be taken for the service's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def metrics_of(port: int, key: str | None = None) -> dict[str, float]:
    """Return what the service counts, without histograms' buckets and the times when counters began."""
    reply = await ask(port, with_key(request("GET", "/metrics"), key))
    lines = reply.body.decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples if not ("_bucket" in name or "_created" in name)}


def read(reply: Reply) -> Answer:
    """Return what a reply says. A service sends whole lines, each in one piece of its stream."""
    if reply.status != 200:
        return Answer(reply, [], None, _code(reply), None)
    if reply.header("content-length") is not None:
        return _read_at_once(reply)
    events: list[Event] = []
    num_tokens, error, finish_reason = None, None, None
    rest = b""
    for at_s, data in reply.reads:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                error = str(event["error"]["code"])
            if event.get("usage"):
                usage: Usage = event["usage"]
                num_tokens = usage["completion_tokens"]
            for choice in event.get("choices", ()):
                finish_reason = choice["finish_reason"] or finish_reason
                if choice["text"]:
                    events.append(Event(at_s, choice["text"], choice["finish_reason"]))
    return Answer(reply, events, num_tokens, error, finish_reason)


def _read_at_once(reply: Reply) -> Answer:
    """Return the answer of a reply that was no stream."""
    if not reply.is_whole:
        return Answer(reply, [], None, None, None)
    whole = json.loads(reply.body)
    (choice,) = whole["choices"]
    event = Event(reply.reads[-1][0], choice["text"], choice["finish_reason"])
    return Answer(reply, [event], whole["usage"]["completion_tokens"], None, choice["finish_reason"])


def _code(reply: Reply) -> str:
    if not reply.status:
        return "no_answer"
    try:
        return str(json.loads(reply.body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return f"http_{reply.status}"
