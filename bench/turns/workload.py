"""A trace as questions for a service: who is asked what, and when. Reads no clock and asks nobody."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.service.client import completion
from bench.turns.setting import BenchModel, Setting
from hearth.sim.arrivals import Lengths
from hearth.sim.trace_files import read_trace
from hearth.sim.traces import Trace, TracedRequest

NUM_CALIBRATIONS = 3  #: of each length; the median counts


@dataclass(frozen=True, slots=True)
class Question:
    """A request of a trace, as it goes to one of the models."""

    arrival_s: float
    model: str
    shape: str
    num_prompt_tokens: int
    num_output_tokens: int
    body: bytes  #: the whole HTTP request


def load_trace(path: Path, setting: Setting, window_s: float, begin_s: float = 0.0) -> Trace:
    """Read a part of a trace whose tenants are the models of a setting, by popularity in all of it."""
    # Lengths and chance are for traces that only count requests.
    lengths = Lengths.fixed(setting.max_prompt_tokens, setting.max_output_tokens)
    whole = read_trace(path, lengths, random.Random(0))
    mapped = whole.mapped([model.name for model in setting.models])
    return mapped.window(begin_s, window_s).cut(setting.max_prompt_tokens, setting.max_output_tokens)


def questions(trace: Trace, setting: Setting) -> list[Question]:
    """Return the requests of a trace in order of arrival, with random prompts."""
    models = {model.name: model for model in setting.models}
    draw = random.Random(7)
    asked = []
    for one in trace.requests:
        model = models[one.tenant]
        lengths = (max(1, one.num_input_tokens), max(1, one.num_output_tokens))
        body = completion(model.name, random_prompt(draw, model, lengths[0]), lengths[1])
        asked.append(Question(one.arrival_s, model.name, model.shape, *lengths, body))
    return asked


def warm_lengths(setting: Setting) -> list[tuple[int, int]]:
    """Return tokens of prompts and answers that a model is warmed up with at once.

    They are of different lengths, so that the batch passes through all sizes.
    """
    rows = range(1, setting.warm_rows + 1)
    return [(min(8 * row, setting.max_prompt_tokens), 2 * row) for row in rows]


def calibrated_lengths(setting: Setting) -> tuple[int, ...]:
    """Return the lengths of prompts whose first tokens are timed on a model that is there."""
    most = setting.max_prompt_tokens
    return most // 16, most // 4, most


def warm_batches(setting: Setting) -> Iterator[list[TracedRequest]]:
    """Yield the requests that warm a service up: those of a batch at once, when all before have ended."""
    calibrated = set[str]()
    for model in setting.models:
        yield [TracedRequest(0.0, model.name, *lengths) for lengths in warm_lengths(setting)]
        if model.shape not in calibrated:
            calibrated.add(model.shape)
            for num_tokens in calibrated_lengths(setting):
                yield from [[TracedRequest(0.0, model.name, num_tokens, 1)]] * NUM_CALIBRATIONS


def random_prompt(draw: random.Random, model: BenchModel, num_tokens: int) -> list[int]:
    """Return token ids that no other prompt begins with, or the prefix cache would find them."""
    return [draw.randrange(model.vocab_size) for _ in range(num_tokens)]
