"""Hostile clients, all at once, in a process of their own.

python -m bench.chaos.attackers --port PORT --key KEY --model MODEL --calling-model MODEL [--only NAME ...]

They attack until standard input ends, and then print, as JSON, what became of their requests. They give way
to all other processes of the machine: attackers have machines of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random

from bench.service.client import Connection, completion, request, with_key

NUM_SLOW, TRICKLE_S = 300, 5.0
NUM_DEAF, DEAF_S = 4, 10.0
NUM_STOPPING, NUM_CALLING, NUM_LEAVING = 2, 1, 2
#: The argument of a call, and tokens that are enough for it and for what makes it a call.
HTML, CALL_TOKENS = r"^(<p>\{a\}</p>){150}$", 1800
LARGE_EVERY_S = 0.5
LARGE_BYTES = 15 << 20
#: Before another try where nobody listens: the gateway may be starting again.
RETRY_S = 0.5
LOWEST_PRIORITY = 19
UNDER_WAY = "under way"  #: when an attack ended


@dataclass(slots=True)
class Target:
    """The service, and what became of the requests to it. Mutable; used on the event loop alone."""

    port: int
    key: str
    model: str
    calling_model: str
    random: Random
    counts: Counter[str] = field(default_factory=Counter)

    async def ask(self, name: str, question: bytes) -> None:
        """Ask, read all of the answer, and count how it ended."""
        try:
            connection = await Connection.open(self.port)
        except OSError:
            await asyncio.sleep(RETRY_S)
            return
        try:
            reply = await connection.ask(with_key(question, self.key))
        except asyncio.CancelledError:
            self.counts[f"{name}: {UNDER_WAY if connection.num_reads else 'waiting'}"] += 1
            raise
        finally:
            connection.close()
        self.counts[f"{name}: {reply.status}{'' if reply.is_whole else ' broken off'}"] += 1


async def send_slow_bodies(target: Target) -> None:
    """Begin hundreds of bodies and send a byte of each every few seconds; half of them show a key."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n"
    known = b"Authorization: Bearer %b\r\n" % target.key.encode()

    async def trickle(number: int) -> None:
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            try:
                writer.write(head + (known if number % 2 else b"") + b"\r\n")
                while not reader.at_eof():
                    writer.write(b" ")
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(), TRICKLE_S)
            except OSError:
                pass
            finally:
                target.counts["slow_bodies: closed"] += 1
                writer.transport.abort()

    await asyncio.gather(*(trickle(number) for number in range(NUM_SLOW)))


async def use_long_stops(target: Target) -> None:
    """Ask for long answers with as many stop strings as are allowed, which match almost everywhere."""
    stops = [(" w" * 31 + chr(ord("a") + number))[:64] for number in range(16)]

    async def stream() -> None:
        while True:
            prompt = [target.random.randrange(256) for _ in range(16)]
            question = completion(target.model, prompt, 500, stop=stops)
            await target.ask("long_stops", question)

    await asyncio.gather(*(stream() for _ in range(NUM_STOPPING)))


async def send_large_bodies(target: Target) -> None:
    """Send bodies close to the limit: token ids, lists in lists, and one long text."""
    while True:
        prompt = target.random.choice(_large_prompts())
        body = b'{"model": "%b", "max_tokens": 1, "prompt": %b}' % (target.model.encode(), prompt)
        head = request("POST", "/v1/completions", {}).partition(b"Accept: ")[0]
        await target.ask("large_bodies", b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
        await asyncio.sleep(LARGE_EVERY_S)


@cache
def _large_prompts() -> tuple[bytes, ...]:
    ids = b"[" + b"7," * (LARGE_BYTES // 2) + b"7]"
    nested = b"[" * (LARGE_BYTES // 2) + b"]" * (LARGE_BYTES // 2)
    lists = b"[" + b"[]," * (LARGE_BYTES // 3) + b"[]]"
    text = b'"' + b" w7" * (LARGE_BYTES // 3) + b'"'
    return ids, nested, lists, text


async def call_with_html(target: Target) -> None:
    """Have a model stream calls whose arguments are HTML, full of what might end a call."""
    parameters = {
        "type": "object",
        "properties": {"html": {"type": "string", "pattern": HTML}},
        "required": ["html"],
        "additionalProperties": False,
    }
    body = {
        "model": target.calling_model,
        "messages": [{"role": "user", "content": "w1 w2"}],
        "tools": [{"type": "function", "function": {"name": "show", "parameters": parameters}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "stream": True,
        "max_completion_tokens": CALL_TOKENS,
    }

    async def call() -> None:
        while True:
            await target.ask("html_calls", request("POST", "/v1/chat/completions", body))

    await asyncio.gather(*(call() for _ in range(NUM_CALLING)))


async def leave_early(target: Target) -> None:
    """Ask for long answers and hang up at any moment."""

    async def leave() -> None:
        while True:
            question = completion(target.model, [1, 2, 3], 500)
            asking = asyncio.create_task(target.ask("leavers", question))
            await asyncio.sleep(target.random.expovariate(2.0))
            asking.cancel()

    await asyncio.gather(*(leave() for _ in range(NUM_LEAVING)))


async def read_nothing(target: Target) -> None:
    """Ask for long answers and never read them."""

    async def be_deaf() -> None:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1)
            except OSError:
                await asyncio.sleep(RETRY_S)
                continue
            writer.transport.pause_reading()  # type: ignore[attr-defined] # of a socket's transport
            writer.write(with_key(completion(target.model, [4, 5, 6], 900, logprobs=5), target.key))
            await asyncio.sleep(DEAF_S)
            writer.transport.abort()
            target.counts["deaf_readers: left"] += 1

    await asyncio.gather(*(be_deaf() for _ in range(NUM_DEAF)))


ATTACKERS: dict[str, Callable[[Target], Awaitable[None]]] = {
    "slow_bodies": send_slow_bodies,
    "long_stops": use_long_stops,
    "large_bodies": send_large_bodies,
    "html_calls": call_with_html,
    "leavers": leave_early,
    "deaf_readers": read_nothing,
}
#: Attackers that do harm, if any, only while they are served.
SERVED = ("long_stops", "html_calls")


async def attack(target: Target, names: list[str]) -> None:
    """Attack in all of these ways at once, until standard input ends."""
    attacks = [asyncio.ensure_future(ATTACKERS[name](target)) for name in names]
    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    done, _ = await asyncio.wait((ended, *attacks), return_when=asyncio.FIRST_COMPLETED)
    for task in attacks:
        if task in done:
            task.result()  # an attacker that gives up is a fault of this program
        task.cancel()


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calling-model", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=ATTACKERS, default=list(ATTACKERS))
    given = parser.parse_args()
    os.nice(LOWEST_PRIORITY)
    target = Target(given.port, given.key, given.model, given.calling_model, Random(given.seed))
    asyncio.run(attack(target, given.only))
    print(json.dumps(dict(sorted(target.counts.items()))))


if __name__ == "__main__":
    main()
