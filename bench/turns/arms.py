"""One arm of `bench.turns`: a service of its own, warmed up, and the trace at some speeds. Judges nothing."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import torch
import uvloop

from bench.load.raw_readers import to_device_bytes_per_s
from bench.report import environment, step
from bench.service.client import Reply, ask, ask_all, completion, metrics_of
from bench.service.process import Service, serving
from bench.service.streams import good
from bench.turns.first_tokens import FirstTokenParts, told_parts
from bench.turns.journal import Doings, doings, entries
from bench.turns.models import Library
from bench.turns.outcome import Heard, Outcome, hear, outcomes
from bench.turns.replay import Replayed, replay
from bench.turns.setting import Arm, BenchModel, Setting
from bench.turns.switches import Calibration, SeenRequest, Switching, summed_up, switches
from bench.turns.workload import (
    NUM_CALIBRATIONS,
    Question,
    calibrated_lengths,
    random_prompt,
    warm_lengths,
)
from hearth.cli.waterfall import waterfall
from hearth.control.datadir import DataDir
from hearth.control.observe.views import Explanation
from hearth.core.errors import HearthError
from hearth.core.types import ModelId

T = TypeVar("T")

WARM_CUTOFF_S = 10.0  #: of the traffic before anything is measured
_NUM_EXPLAINED = 2  #: of each kind
_WIDTH = 100  #: of waterfalls, in characters


@dataclass(frozen=True, slots=True)
class Traffic:
    """The part of a trace that is replayed."""

    trace: str
    window_s: float  #: from its beginning, in its own time
    speed: float
    cutoff_s: float  #: after the last arrival

    @property
    def most_s(self) -> float:
        """The longest that a replay takes."""
        return self.window_s / self.speed + self.cutoff_s


@dataclass(frozen=True, slots=True)
class Run:
    """The trace at one speed on one arm: a line of the file of runs."""

    arm: Arm
    traffic: Traffic
    seconds: float  #: from the first arrival to the last end
    outcomes: list[Outcome]
    doings: Doings
    switching: Switching | None
    calibration: Calibration
    metrics: Mapping[str, float]  #: what the service counted during the run
    explained: list[list[str]]  #: waterfalls of those who waited longest, for a first token or in between
    environment: Mapping[str, object] = field(default_factory=environment)
    #: What each request waited for; None: it had no token, or was forgotten. Older files have nothing here.
    parts: list[FirstTokenParts | None] = field(default_factory=list)


class ArmService:
    """A service that is warm and can be asked. Used by one thread."""

    def __init__(self, arm: Arm, service: Service, calibration: Calibration) -> None:
        self._arm, self._service, self._calibration = arm, service, calibration

    def run(self, traffic: Traffic, asked: Sequence[Question]) -> Run:
        """Replay a trace and return what came of it."""
        service = self._service
        service.wait_idle()
        before = _in_loop(metrics_of(service.port))
        gc.collect()
        gc.freeze()  # else a collection in the midst would look at all that torch has brought along
        replayed = _in_loop(replay(service.port, asked, self._arm, traffic.cutoff_s))
        gc.unfreeze()
        after = _in_loop(metrics_of(service.port))
        path = DataDir(service.data_dir).journal_path
        journal = entries(path, replayed.began_s, replayed.ended_s)
        heard = [hear(reply) for reply in replayed.replies]
        found = outcomes(asked, heard, replayed)
        told = [None if reply is None else self._told(reply) for reply in replayed.replies]
        return Run(
            self._arm,
            traffic,
            replayed.ended_s - replayed.began_s,
            found,
            doings(journal),
            summed_up(switches(journal, _seen(asked, heard, replayed), self._calibration)),
            self._calibration,
            {key: after[key] - before.get(key, 0.0) for key in after if after[key] != before.get(key, 0.0)},
            [list(waterfall(one, _WIDTH)) for at in _longest_waits(found) if (one := told[at]) is not None],
            parts=[
                None if one is None else told_parts(one, seen.first_s)
                for one, seen in zip(told, found, strict=True)
            ],
        )

    def _told(self, reply: Reply) -> Explanation | None:
        """Return where the time of a request went; None: the service has forgotten it."""
        with suppress(HearthError):
            return self._service.client.explain(reply.request_id)
        return None


@contextmanager
def arm_service(
    arm: Arm, library: Library, bytes_per_s: float, warm: Sequence[Question]
) -> Iterator[ArmService]:
    """Start a service for an arm and warm it up, last by traffic like that to come; it ends with the context.

    Kernels are compiled for what a step holds, and steps of real traffic hold what no list of prompts does.
    """
    with serving(library.data_dir, library.serve_flags(arm.takes_turns)) as service:
        with step(f"{arm}: warming up"):
            first_token_s = _in_loop(_warm_up(service.port, library.setting))
            _in_loop(replay(service.port, warm, Arm.TURNS, WARM_CUTOFF_S))
        yield ArmService(arm, service, Calibration(bytes_per_s, first_token_s))


def copy_rate(setting: Setting) -> float:
    """Return the bytes per second of one large copy to the device."""
    return to_device_bytes_per_s(setting.copied_bytes, torch.device(setting.kind))


async def _warm_up(port: int, setting: Setting) -> dict[str, dict[int, float]]:
    """Have every model loaded, its kernels compiled and its graphs captured.

    Returns how long a model of each shape, once it is there, takes for a first token by tokens of the prompt.
    """
    draw = random.Random(3)
    first_token_s: dict[str, dict[int, float]] = {}
    for model in setting.models:
        rows = [
            completion(model.name, random_prompt(draw, model, num_prompt), num_output)
            for num_prompt, num_output in warm_lengths(setting)
        ]
        for reply in await ask_all(port, rows):
            good(reply)
        if model.shape not in first_token_s:
            first_token_s[model.shape] = await _first_tokens(port, setting, model, draw)
    return first_token_s


async def _first_tokens(
    port: int, setting: Setting, model: BenchModel, draw: random.Random
) -> dict[int, float]:
    found = {}
    for num_tokens in calibrated_lengths(setting):
        times_s = []
        for _ in range(NUM_CALIBRATIONS):
            question = completion(model.name, random_prompt(draw, model, num_tokens), 1)
            times_s.append(good(await ask(port, question)).first_s)
        found[num_tokens] = median(times_s)
    return found


def _seen(asked: Sequence[Question], heard: Sequence[Heard], replayed: Replayed) -> list[SeenRequest]:
    return [
        SeenRequest(
            *(ModelId(question.model), question.shape, replayed.began_s + question.arrival_s),
            *(question.num_prompt_tokens, one.token_times_s),
        )
        for question, one in zip(asked, heard, strict=True)
    ]


def _longest_waits(found: Sequence[Outcome]) -> list[int]:
    """Return the numbers of those who waited longest, for a first token or in between."""
    numbers = range(len(found))
    for_first = sorted(numbers, key=lambda number: -found[number].first_s)[:_NUM_EXPLAINED]
    in_between = sorted(numbers, key=lambda number: -found[number].longest_pause_s)[:_NUM_EXPLAINED]
    return list(dict.fromkeys([*for_first, *in_between]))


def _in_loop(work: Coroutine[object, object, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
