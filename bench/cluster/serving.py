"""Parts of `bench.cluster` in which a head serves models on a node: how soon, how safely and how fast."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bench.cluster.members import NODE, SMALL, Members, members
from bench.cluster.parts import Figure
from bench.random_model import TINY
from bench.report import tell
from bench.service.client import Answer, Connection, completion
from bench.service.streams import Prompts, good, in_turn, stream_all
from hearth.core.types import LOCAL, Rung

PROMPT_TOKENS = 16
_LOOK_S = 0.005
#: Of a stream that loses its node, and how many tokens come before.
LOST_TOKENS, BREAKS_AT = 160, 20
NUM_STREAMS = 32
_AIM = "0.95 of the bound"


@dataclass(frozen=True, slots=True)
class Joining:
    """Seconds from the start of `hearth join` to the first token, by part."""

    process_s: float  #: until the agent is about to greet the head
    welcome_s: float
    worker_s: float  #: then until a worker is linked to the head
    load_s: float  #: then until the first token
    transfer_s: float  #: of the load: bytes from disk or from the head

    @property
    def total_s(self) -> float:
        return self.process_s + self.welcome_s + self.worker_s + self.load_s


def join(num_rounds: int) -> Iterator[Figure]:
    """The head has no workers: a request waits for the node, which has joined before."""
    played: dict[Rung, list[Joining]] = {Rung.PEER: [], Rung.DISK: []}
    names = [f"m{number}" for number in range(num_rounds)]
    with members(dict.fromkeys(names, SMALL), num_workers=0) as both:
        both.start_node()
        both.wait_for_node()
        both.stop_node()
        for name in names:
            for rung, joinings in played.items():  # it keeps on its disk what it fetches
                joinings.append(_join(both, name, rung))
                tell(f"join, {rung}: {joinings[-1]}")
    wheres = {Rung.PEER: "files fetched from the head", Rung.DISK: "files on the node's disk"}
    aims = {Rung.PEER: "at most 5 s and the transfer", Rung.DISK: "at most 5 s"}
    for rung, joinings in played.items():
        measure = f"join to first token, {wheres[rung]}"
        yield Figure(measure, "s", aims[rung], [one.total_s for one in joinings])
        yield Figure(f"{measure}: process start", "s", None, [one.process_s for one in joinings])
        yield Figure(f"{measure}: welcome", "s", None, [one.welcome_s for one in joinings])
        yield Figure(f"{measure}: worker ready", "s", None, [one.worker_s for one in joinings])
        yield Figure(f"{measure}: load", "s", None, [one.load_s for one in joinings])
        yield Figure(
            f"{measure}: transfer, part of the load", "s", None, [one.transfer_s for one in joinings]
        )


def _join(both: Members, model: str, rung: Rung) -> Joining:
    began_s, epoch_s = time.perf_counter(), time.time()
    both.start_node()
    answer, greeting_s = asyncio.run(_answer_of_joining(both, model))
    explained = both.service.client.explain(answer.reply.request_id)
    if [one.rung for one in explained.rungs] != [rung]:
        raise RuntimeError(f"all chunks should have come from {rung}, came from {explained.rungs}")
    welcome_s, worker_s = (both.logged_s(f"{word} ") - epoch_s for word in ("node_joined", "worker_linked"))
    process_s, first_s = greeting_s - began_s, answer.events[0].at_s - began_s
    both.stop_node()
    return Joining(
        process_s=process_s,
        welcome_s=welcome_s - process_s,
        worker_s=worker_s - welcome_s,
        load_s=first_s - worker_s,
        transfer_s=explained.rungs[0].seconds,
    )


async def _answer_of_joining(both: Members, model: str) -> tuple[Answer, float]:
    """Return the answer, and when the agent had its socket, the last thing before it greets the head."""
    assert both.node is not None, "it was started"
    agent_socket = both.node_dir / "run" / f"sockets-{both.node.pid}" / "agent.sock"
    connection = await Connection.open(both.service.port)
    asked = asyncio.create_task(connection.ask(completion(model, [5] * PROMPT_TOKENS, 8)))
    while not agent_socket.exists():
        if both.node.poll() is not None:
            raise RuntimeError(f"`hearth join` ended with {both.node.returncode}")
        await asyncio.sleep(_LOOK_S)
    greeting_s = time.perf_counter()
    try:
        return good(await asked), greeting_s
    finally:
        connection.close()


def lost(num_rounds: int) -> Iterator[Figure]:
    """The head's own worker takes over. It has the files of the model, and does not host it yet."""
    killed = Figure("a node is killed: to the next token of its stream", "s", "at most 5 s")
    cut_off = Figure("a node is stopped: to the next token of its stream", "s", "at most 5 s")
    ways = {signal.SIGKILL: killed, signal.SIGSTOP: cut_off}
    prompts = Prompts(512, PROMPT_TOKENS)
    configs = {f"m{number}": SMALL for number in range(num_rounds * len(ways))}
    names = iter(configs)
    with members(configs, num_workers=1) as both:
        for _ in range(num_rounds):
            for number, figure in ways.items():
                both.start_node()
                both.wait_for_node()
                both.use(NODE)
                figure.values.append(asyncio.run(_lose(both, next(names), prompts.take(1)[0], number)))
                both.kill_node()
                tell(f"lost, {number.name}: {figure.values[-1]:.2f} s")
    yield from ways.values()


async def _lose(both: Members, model: str, prompt: list[int], number: signal.Signals) -> float:
    connection = await Connection.open(both.service.port)
    asked = asyncio.create_task(connection.ask(completion(model, prompt, LOST_TOKENS)))
    while connection.num_reads < BREAKS_AT:
        if asked.done():
            raise RuntimeError(f"the stream ended before its node was lost: {(await asked).body[-300:]!r}")
        await asyncio.sleep(_LOOK_S)
    both.service.client.drain_node(LOCAL, undo=True)
    lost_s = time.perf_counter()
    both.signal_node(number)
    answer = good(await asked)
    connection.close()
    explained = both.service.client.explain(answer.reply.request_id)
    if answer.num_tokens != LOST_TOKENS or explained.num_resumes != 1 or explained.worker != "w0":
        raise RuntimeError(f"the stream should have gone on at the head: {answer.num_tokens=} {explained}")
    # Tokens that were on their way still come. The longest pause is that of the change.
    at_s = [event.at_s for event in answer.events]
    _, next_s = max((after - before, after) for before, after in pairwise(at_s))
    return next_s - lost_s


def tokens(num_rounds: int) -> Iterator[Figure]:
    """The same worker process on the same machine; what differs is the agent's relay and TLS."""
    num_tokens = {"tiny": 384, "small": 24}
    with members({"tiny": TINY, "small": SMALL}, num_workers=1) as both:
        both.start_node()
        both.wait_for_node()
        for model, most in num_tokens.items():
            how = f"{NUM_STREAMS} streams, {model} random model"
            speed = Figure(
                f"{how}: through a node over loopback, the bound through the head", "tokens/s", _AIM
            )
            ratio = Figure(f"{how}: through a node, times through the head", "times", "0.95")
            prompts = Prompts(512, PROMPT_TOKENS)
            for number in range(-1, num_rounds):  # the first warms up
                # Each goes first as often: the machine may slow down.
                order = (NODE, LOCAL) if number % 2 else (LOCAL, NODE)
                by_node = {node: _stream(both, node, model, prompts, most) for node in order}
                if number < 0:
                    continue
                speed.values.append(by_node[NODE])
                speed.bounds.append(by_node[LOCAL])
                ratio.values.append(by_node[NODE] / by_node[LOCAL])
                tell(f"tokens, {model}: {by_node[NODE]:.0f} of {by_node[LOCAL]:.0f} tokens/s")
            tell(f"tokens, {model}: {median(ratio.values):.3f}")
            yield from (speed, ratio)


def _stream(both: Members, node: str, model: str, prompts: Prompts, num_tokens: int) -> float:
    both.use(node)
    # The model is loaded there then, and the drain has taken effect.
    (warm,) = asyncio.run(in_turn(both.service.port, [completion(model, prompts.take(1)[0], 8)]))
    worker = both.service.client.explain(good(warm.reply).reply.request_id).worker
    if not any(one.worker == worker and one.node == node for one in both.service.client.ps().workers):
        raise RuntimeError(f"a request should have gone to {node}, went to {worker}")
    return stream_all(both.service, model, prompts.take(NUM_STREAMS), num_tokens).tokens_per_s
