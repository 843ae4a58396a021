"""A trace as questions for a service: who is asked what, and when. Reads no clock and asks nobody."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from bench.service.client import completion
from bench.turns.setting import BenchModel, Setting
from hearth.sim.arrivals import Lengths
from hearth.sim.trace_files import read_trace
from hearth.sim.traces import Trace


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


def random_prompt(draw: random.Random, model: BenchModel, num_tokens: int) -> list[int]:
    """Return token ids that no other prompt begins with, or the prefix cache would find them."""
    return [draw.randrange(model.vocab_size) for _ in range(num_tokens)]
