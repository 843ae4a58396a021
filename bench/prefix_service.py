"""The service in `bench.prefix_routing`: conversations with a tiny model on CPU workers, over HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch

from bench.random_model import TINY, write_random
from bench.report import percentiles, step
from bench.service.client import Connection, request
from bench.service.process import deploy, serving

NAME = "tiny"
MODEL: Mapping[str, object] = {**TINY, "max_position_embeddings": 4096}
NUM_USERS, NUM_CONVERSATIONS, NUM_TURNS = 8, 3, 5
FIRST_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = (200, 600), (20, 200), 4
THINK_S = (0.05, 0.5)
WORKER_BYTES = 1 << 30


@dataclass(slots=True)
class Found:
    """What all answers said. Mutable; written by one event loop."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    answer_s: list[float] = field(default_factory=list)
    cached_blocks: list[int] = field(default_factory=list)  #: in the end, by replica

    @property
    def figures(self) -> dict[str, object]:
        share = self.num_cached_tokens / self.num_prompt_tokens
        return {
            "cached_share": share,
            "answer_s": percentiles(self.answer_s),
            "cached_blocks": self.cached_blocks,
        }


def measure_service(num_workers: int) -> dict[str, object]:
    """Return the share of prompt tokens that were cached, with one replica, several, and several unaware."""
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as place:
        folder = Path(place)
        source = write_random(folder / NAME, MODEL, "float32", 1, torch.device("cpu"))
        arms = {
            "one": _serve(folder / "one", source, 1, "hearth"),
            "several": _serve(folder / "several", source, num_workers, "hearth"),
            "several_unaware": _serve(folder / "unaware", source, num_workers, "bench.unaware"),
        }
    one, several, unaware = (arm.num_cached_tokens / arm.num_prompt_tokens for arm in arms.values())
    return {
        "num_workers": num_workers,
        "num_users": NUM_USERS,
        **{name: arm.figures for name, arm in arms.items()},
        "several_over_one": several / one,
        "several_unaware_over_one": unaware / one,
    }


def _serve(data_dir: Path, source: Path, num_replicas: int, command: str) -> Found:
    deploy(data_dir, source, NAME)
    flags = ["--device", "cpu", "--workers", str(num_replicas), "--memory", str(WORKER_BYTES)]
    flags += ["--set", f"models.{NAME}.min_replicas={num_replicas}"]
    found = Found()
    with (
        step(f"{command}, {num_replicas} replicas"),
        serving(
            data_dir, flags, num_workers=num_replicas, command=(command,), errors=subprocess.DEVNULL
        ) as service,
    ):
        while sum(one.state == "pinned" for one in service.client.ps().models) < num_replicas:
            asyncio.run(asyncio.sleep(0.05))
        asyncio.run(_converse(service.port, found))
        found.cached_blocks = [one.kv_cached_blocks for one in service.client.ps().models]
    return found


async def _converse(port: int, found: Found) -> None:
    await asyncio.gather(*(_use(port, Random(user), found) for user in range(NUM_USERS)))


async def _use(port: int, chooser: Random, found: Found) -> None:
    connection = await Connection.open(port)
    for _ in range(NUM_CONVERSATIONS):
        prompt: list[int] = []
        for turn in range(NUM_TURNS):
            num_tokens = chooser.randint(*(QUESTION_TOKENS if turn else FIRST_TOKENS))
            prompt += [chooser.randrange(512) for _ in range(num_tokens)]
            await asyncio.sleep(chooser.uniform(*THINK_S))
            body = {"model": NAME, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
            reply = await connection.ask(request("POST", "/v1/completions", body))
            usage = json.loads(reply.body)["usage"]
            found.num_prompt_tokens += usage["prompt_tokens"]
            found.num_cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            found.answer_s.append(reply.reads[-1][0] - reply.asked_s)
    connection.close()
