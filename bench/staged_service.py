"""The service in `bench.pipelines`: a model that no worker can hold starts, and loses a member."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from bench.random_model import TINY, write_random
from bench.report import Row, step, tell
from bench.service.client import Answer, Connection, completion
from bench.service.process import Service, deploy, serving
from bench.service.streams import Prompts, good
from hearth.core.types import ModelId

#: 80 layers, 550 MB in float32: two workers of this memory hold it together, one of twice as much alone.
DEEP: Mapping[str, object] = {
    **TINY,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
WORKER_BYTES = 400_000_000
NAME = "deep"
PROMPT_TOKENS, NEW_TOKENS, BREAKS_AT = 16, 60, 15
_LOOK_S = 0.005


def starts_and_losses(num_rounds: int) -> tuple[list[Row], dict[str, list[float]]]:
    with tempfile.TemporaryDirectory(prefix="hearth-bench-") as place:
        folder = Path(place)
        with step("writing a random model of 80 layers"):
            source = write_random(folder / NAME, DEEP, "float32", 1, torch.device("cpu"))
        with _service(folder / "whole", source, 1, 2 * WORKER_BYTES) as service:
            whole_s = [_start(service) for _ in range(num_rounds)]
        with _service(folder / "stages", source, 2, WORKER_BYTES) as service:
            staged_s = [_start(service) for _ in range(num_rounds)]
            lost_s = [asyncio.run(_lose(service, round_)) for round_ in range(num_rounds)]
    starts, losses = "80 layers in 2 stages: start to first token", "a member is killed: to the next token"
    rows = [
        Row(f"{starts}, the bound on one worker", "s", median(staged_s), median(whole_s)),
        Row(losses, "s", median(lost_s), median(staged_s) + 1.0, "its load time + 1 s"),
    ]
    return rows, {starts: staged_s, "the same on one worker": whole_s, losses: lost_s}


@contextmanager
def _service(data_dir: Path, source: Path, num_workers: int, worker_bytes: int) -> Iterator[Service]:
    deploy(data_dir, source, NAME)
    flags = ["--device", "cpu", "--workers", str(num_workers), "--memory", str(worker_bytes)]
    with serving(data_dir, flags, num_workers=num_workers, errors=subprocess.DEVNULL) as service:
        yield service


def _start(service: Service) -> float:
    """Return how long the first token takes of a model whose bytes are on disk alone."""
    began_s = time.perf_counter()
    answer = asyncio.run(_ask(service, 1))
    first_s = answer.events[0].at_s - began_s
    service.wait_idle()
    service.client.unload(ModelId(NAME), free=True)
    tell(f"start: {first_s:.3f} s")
    return first_s


async def _ask(service: Service, num_tokens: int) -> Answer:
    connection = await Connection.open(service.port)
    try:
        return good(await connection.ask(completion(NAME, [5] * PROMPT_TOKENS, num_tokens)))
    finally:
        connection.close()


async def _lose(service: Service, round_: int) -> float:
    """Kill the first or the last member in a stream; return the seconds to its next token."""
    prompt = Prompts(512, PROMPT_TOKENS).take(1)[0]
    connection = await Connection.open(service.port)
    asked = asyncio.create_task(connection.ask(completion(NAME, prompt, NEW_TOKENS)))
    while connection.num_reads < BREAKS_AT:
        if asked.done():
            raise RuntimeError(f"the stream ended before a member was lost: {(await asked).body[-300:]!r}")
        await asyncio.sleep(_LOOK_S)
    seat, pids = f"w{round_ % 2}", service.pids()
    pid = next(pid for worker, pid in pids.items() if worker.partition(".")[0] == seat)
    lost_s = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    answer = good(await asked)
    connection.close()
    if answer.num_tokens != NEW_TOKENS:
        raise RuntimeError(f"the stream should have gone on: {answer.num_tokens=} of {NEW_TOKENS}")
    _, next_s = max((after.at_s - before.at_s, after.at_s) for before, after in pairwise(answer.events))
    tell(f"lost {seat}: {next_s - lost_s:.3f} s")
    service.wait_ready(2)
    return next_s - lost_s
