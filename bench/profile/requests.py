"""How long a request is on its way besides its steps: HTTP, gateway, the worker's inbox, and its token back.

A service is asked for one token at a time, while it rests and beside a stream of the same model. Taken off
are the steps before the token: its own, and beside a stream those that it cannot overtake.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

import torch
import uvloop

from bench.profile.scale import Scale
from bench.profile.steps import measure_steps
from bench.random_model import write_random
from bench.service.client import ask, completion
from bench.service.process import deploy, serving
from bench.service.streams import good
from bench.shape import Shape
from hearth.sim.step_times import StepTimes

MODEL = "asked"
NUM_ASKED = (
    10  #: in a row beside a stream; the first ones of all, for which the model is loaded, are left out
)
NUM_RESTED = 5  #: asked of a service at rest
REST_S = 0.2  #: before each of them: right behind an answer nothing has gone to sleep yet
NUM_ROUNDS = 4
NUM_PROMPT_TOKENS = 64
NUM_STREAMED_TOKENS = 800
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """The seconds that a request takes besides its steps."""

    request_s: float  #: through a service at work
    wake_s: float  #: that it takes longer through one that rests


def measure_request(scale: Scale, device: torch.device, known: Mapping[str, StepTimes]) -> RequestTimes:
    """Return what requests take through a service; `known`: times of steps by shape."""
    small = scale.small or scale
    shape = small.shapes[0]
    times = known.get(shape.name) or StepTimes.fitted(measure_steps(shape, small, device).steps)
    with tempfile.TemporaryDirectory(prefix="hearth-profile-", dir=scale.memory_place) as place:
        data_dir = Path(place) / "data"
        directory = write_random(Path(place) / MODEL, shape.config, shape.dtype, 0, device)
        deploy(data_dir, directory, MODEL)
        flags = ["--device", device.type, "--workers", "1"]
        if device.type == "cuda":
            flags += ["--memory", str(8 * GIB), "--host-memory", str(4 * GIB)]
        with serving(data_dir, flags) as service, _runner() as runner:
            resting, busy = runner.run(_ask(service.port, shape))
    context = NUM_PROMPT_TOKENS + NUM_STREAMED_TOKENS // 2
    # Half a step until the call that goes on has ended, the step that is launched by then, and its own.
    before_s = 1.5 * times.step_s(1, 1, context)
    own_s = times.step_s(NUM_PROMPT_TOKENS + 1, 2, context + NUM_PROMPT_TOKENS)
    request_s = max(0.0, busy - before_s - own_s)
    alone_s = times.start_s + times.step_s(NUM_PROMPT_TOKENS, 1, NUM_PROMPT_TOKENS)
    return RequestTimes(request_s, max(0.0, resting - alone_s - request_s))


async def _ask(port: int, shape: Shape) -> tuple[float, float]:
    """Return the typical seconds to a first token through a service that rests, and beside a stream."""
    draw, resting_s, busy_s = Random(5), list[float](), list[float]()

    def question(num_tokens: int) -> bytes:
        prompt = [draw.randrange(shape.arch.vocab_size) for _ in range(NUM_PROMPT_TOKENS)]
        return completion(MODEL, prompt, num_tokens)

    async def first_tokens(num_asked: int = NUM_ASKED, rest_s: float = 0.0) -> list[float]:
        found = []
        for _ in range(num_asked):
            await asyncio.sleep(rest_s)
            found.append(good(await ask(port, question(1))).first_s)
        return found

    for round_number in range(NUM_ROUNDS + 1):
        resting = await first_tokens(NUM_RESTED, REST_S)
        stream = asyncio.create_task(ask(port, question(NUM_STREAMED_TOKENS)))
        await first_tokens()  # the first one waits for the stream's own prompt
        busy = await first_tokens()
        is_beside = not stream.done()
        good(await stream)
        if round_number:
            resting_s += resting
            busy_s += busy if is_beside else []
    assert busy_s, f"{NUM_STREAMED_TOKENS} tokens came before {2 * NUM_ASKED} requests were answered"
    return median(resting_s), median(busy_s)


def _runner() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
