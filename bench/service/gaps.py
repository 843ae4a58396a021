"""Gaps between the tokens of running streams, and windows in which another model loads. Judges nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bench.service.client import Answer, ask, completion, request
from bench.service.process import Service
from bench.service.streams import good


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two events of one stream."""

    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time in which a model was loaded."""

    begin_s: float
    end_s: float

    def meets(self, gap: Gap) -> bool:
        return gap.begin_s < self.end_s and gap.end_s > self.begin_s


async def gaps(service: Service, model: str, prompts: Sequence[list[int]], num_tokens: int) -> list[Gap]:
    """Return the gaps of one stream for each prompt, from the moment when all of them run."""
    asked = (ask(service.port, completion(model, prompt, num_tokens)) for prompt in prompts)
    answers = [good(reply) for reply in await asyncio.gather(*asked)]
    begin_s = max(answer.events[0].at_s for answer in answers)
    return [
        Gap(before.at_s, after.at_s)
        for answer in answers
        for before, after in zip(answer.events, answer.events[1:], strict=False)
        if before.at_s >= begin_s
    ]


async def load_again_and_again(
    service: Service, model: str, running: asyncio.Task[list[Gap]]
) -> list[Window]:
    """Drop a model and have it loaded, until what runs has ended."""
    answers = []
    drop = request("POST", f"/hearth/models/{model}/unload", {"free": True})
    while not running.done():
        await ask(service.port, drop)
        answers.append(good(await ask(service.port, completion(model, [1], 1))))
    return [window for answer in answers for window in load_windows(service, answer)]


def load_windows(service: Service, answer: Answer) -> list[Window]:
    """Return when a model was loaded for an answer. Not while streams run: they are not read meanwhile."""
    asked_s, explained = answer.reply.asked_s, service.client.explain(answer.reply.request_id)
    spans = [span for span in explained.spans if span.what == "load"]  # since the arrival at the gateway
    return [Window(asked_s + span.begin_s, asked_s + span.end_s) for span in spans]
