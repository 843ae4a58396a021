"""The part of `bench.cluster` in which four nodes start a model for a burst: how soon are first tokens?

The head has the model in host memory and no worker, the nodes have nothing. In turns, links have `_MBIT`, so
that nodes get the model from the head and from each other, or nodes receive a tenth of that each, whatever
the others do. That is as if each read the model from a disk of its own: 400 Gbit/s are ten times 5 GB/s.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

from bench.cluster.members import SMALL, Place, members
from bench.cluster.netlab import entered, inside, shaped_links
from bench.cluster.parts import Figure
from bench.report import tell
from bench.service.client import Answer, Connection, completion
from bench.service.process import Service
from bench.service.streams import Prompts, good

_MBIT, _DISK_MBIT = 100, 10
_NUM_NODES = 4
_NUM_REQUESTS, _SPREAD_S, _PROMPT_TOKENS, _NUM_TOKENS = 32, 1.0, 64, 16
_SETTINGS = ("service.pack_replicas=true", "service.first_token_target=0.5", "cluster.encrypt_weights=false")


def burst(num_rounds: int) -> Iterator[Figure]:
    what = f"{_NUM_REQUESTS} requests within {_SPREAD_S:g} s, {_NUM_NODES} nodes: p90 of first tokens"
    peers = Figure(f"{what}, from peers", "s")
    disks = Figure(f"{what}, each from its disk", "s")
    for number in range(num_rounds):
        peers.values.append(_play(f"peers{number}", _MBIT, _MBIT))
        disks.values.append(_play(f"disks{number}", None, _DISK_MBIT))
        tell(f"burst, round {number}: {peers.values[-1]:.1f} s, own disks {disks.values[-1]:.1f} s")
    yield peers
    yield disks
    sooner = [disk_s / peer_s for disk_s, peer_s in zip(disks.values, peers.values, strict=True)]
    yield Figure(f"{what}, times sooner", "times", "at least 5 at 400 Gbit/s, simulated", sooner)


def _play(name: str, head_mbit: int | None, node_mbit: int) -> float:
    """Return the p90 of the times to the first token, in seconds."""
    head = f"{name}-{os.getpid()}"
    nodes = [f"{head}-{number}" for number in range(_NUM_NODES)]
    links = {head: head_mbit, **dict.fromkeys(nodes, node_mbit)}
    with shaped_links(links) as addresses, entered(head), ExitStack() as stack:
        first = stack.enter_context(
            members({"model": SMALL}, num_workers=0, host=addresses[head], settings=_SETTINGS)
        )
        for number, node in enumerate(nodes):
            one = replace(first, place=Place(addresses[node], inside(node)), name=f"n{number}")
            stack.callback(one.kill_node)
            one.start_node()
            one.wait_for_node()
        answers = asyncio.run(_ask(first.service))
        workers = {first.service.client.explain(one.reply.request_id).worker for one in answers}
        tell(f"{name}: answered by {len(workers)} workers")
        return sorted(one.first_s for one in answers)[int(0.9 * len(answers))]


async def _ask(service: Service) -> list[Answer]:
    async def ask(number: int, prompt: list[int]) -> Answer:
        await asyncio.sleep(number * _SPREAD_S / _NUM_REQUESTS)
        connection = await Connection.open(service.port)
        try:
            return good(await connection.ask(completion("model", prompt, _NUM_TOKENS)))
        finally:
            connection.close()

    prompts = Prompts(int(str(SMALL["vocab_size"])), _PROMPT_TOKENS).take(_NUM_REQUESTS)
    return list(await asyncio.gather(*(ask(number, prompt) for number, prompt in enumerate(prompts))))
