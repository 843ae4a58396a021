"""How long a request is on its way besides its steps: HTTP, gateway, the worker's inbox, and its token back.

A tiny model on the CPU answers one token at a time, so that next to nothing of the time is its own; the step
itself is taken off all the same, as the service explains it.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from random import Random
from statistics import median

import torch
import uvloop

from bench.random_model import TINY, write_random
from bench.service.client import Answer, ask, completion
from bench.service.process import Service, deploy, serving
from bench.service.streams import good

MODEL = "tiny"
NUM_ASKED = 40
NUM_PROMPT_TOKENS = 400  #: about as many as in a conversation


def measure_request() -> float:
    """Return the seconds that a request takes through an idle service, without the step of its token."""
    with tempfile.TemporaryDirectory(prefix="hearth-profile-") as place:
        data_dir = Path(place) / "data"
        directory = write_random(Path(place) / MODEL, TINY, "float32", 0, torch.device("cpu"))
        deploy(data_dir, directory, MODEL)
        with serving(data_dir, ["--device", "cpu", "--workers", "1"]) as service:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                answers = runner.run(_ask(service.port))
            return median(answer.first_s - _step_s(service, answer) for answer in answers)


async def _ask(port: int) -> list[Answer]:
    """Ask again and again; the first answers, for which the model is loaded, are left out."""
    draw, answers = Random(5), []
    for _ in range(NUM_ASKED):
        prompt = [draw.randrange(int(str(TINY["vocab_size"]))) for _ in range(NUM_PROMPT_TOKENS)]
        answers.append(good(await ask(port, completion(MODEL, prompt, 1))))
    return answers[NUM_ASKED // 4 :]


def _step_s(service: Service, answer: Answer) -> float:
    spans = service.client.explain(answer.reply.request_id).spans
    return sum(
        span.end_s - span.begin_s for span in spans if span.what == "prefill" and span.end_s is not None
    )
