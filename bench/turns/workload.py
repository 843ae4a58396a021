"""A trace as questions for a service: who is asked what, and when. Reads no clock and asks nobody."""

from __future__ import annotations

import csv
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.service.client import completion
from bench.turns.setting import BenchModel, Setting


@dataclass(frozen=True, slots=True)
class Question:
    """A request of the trace, as it goes to one of the models."""

    arrival_s: float  #: after the first one's, at the speed of the replay
    model: str
    shape: str
    num_prompt_tokens: int
    num_output_tokens: int
    body: bytes  #: the whole HTTP request


def questions(trace: Path, setting: Setting, window_s: float, speed: float) -> list[Question]:
    """Return the requests of the first `window_s` of a trace, `speed` times as fast, in order of arrival."""
    rows = [row for row in _rows(trace) if row.arrival_s < window_s]
    model_by_tenant = _mapped([row.tenant for row in _rows(trace)], setting.models)
    draw = random.Random(7)
    asked = []
    for row in rows:
        model = model_by_tenant[row.tenant]
        num_prompt_tokens = max(1, min(row.num_input_tokens, setting.max_prompt_tokens))
        num_output_tokens = max(1, min(row.num_output_tokens, setting.max_output_tokens))
        prompt = random_prompt(draw, model, num_prompt_tokens)
        body = completion(model.name, prompt, num_output_tokens)
        lengths = (num_prompt_tokens, num_output_tokens)
        asked.append(Question(row.arrival_s / speed, model.name, model.shape, *lengths, body))
    return asked


def random_prompt(draw: random.Random, model: BenchModel, num_tokens: int) -> list[int]:
    """Return token ids that no other prompt begins with, or the prefix cache would find them."""
    return [draw.randrange(model.vocab_size) for _ in range(num_tokens)]


@dataclass(frozen=True, slots=True)
class _Row:
    arrival_s: float
    tenant: str
    num_input_tokens: int
    num_output_tokens: int


def _rows(trace: Path) -> list[_Row]:
    with trace.open() as file:
        return [
            _Row(float(r["arrival_s"]), r["model"], int(r["input_tokens"]), int(r["output_tokens"]))
            for r in csv.DictReader(file)
        ]


def _mapped(tenants: Sequence[str], models: Sequence[BenchModel]) -> dict[str, BenchModel]:
    ranked = [tenant for tenant, _ in Counter(tenants).most_common()]
    return {tenant: models[rank % len(models)] for rank, tenant in enumerate(ranked)}
